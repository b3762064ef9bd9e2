"""Train a small Llama on long sequences with the sequence split over four CPU processes, and print what each process holds.

Every process has a quarter of the tokens, in two chunks of which one is early and one late, so that under causal attention all
have the same work. Keys and values pass by in a ring. The model and the loop are those of one process; the losses are equal.

    python examples/train_long_context.py                              4096 tokens over 4 processes, and the same on one
    python examples/train_long_context.py --length 8192 --attention all-gather
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw


def make_model(length: int) -> LlamaForCausalLM:
    """Two layers, eight heads on two of keys and values; the same weights on every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=length, use_cache=False,
    ))


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor], steps: int = 2) -> tuple[list[float], float]:
    """(the losses, MiB by which the steps raised the highest memory that the process ever held)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def worker(rank: int, world: int, length: int, attention: str, folder: str) -> None:
    """One of ``world`` processes; what it found is in a file of the folder."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    model, ids = make_model(length), torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    pins = {"cp": world, "attention": attention} if world > 1 else {}
    parallel = mw.autoparallel(copy.deepcopy(model), init_device_mesh("cpu", (world,)), ((), batch), pins=pins, progress=False)
    if rank == 0:
        print(parallel.plan, flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(train(parallel, batch)))
    dist.destroy_process_group()


def run(world: int, length: int, attention: str) -> tuple[list[float], float]:
    """(losses, MiB of the fullest process)."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, length, attention, folder), nprocs=world)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return found[0][0], max(held for _, held in found)


def main() -> None:
    """Both runs, side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--attention", choices=("all-gather", "ulysses", "ring"), default="ring")
    parser.add_argument("--processes", type=int, default=4)
    arguments = parser.parse_args()
    length, processes = arguments.length, arguments.processes
    (one, alone), (many, each) = (run(world, length, arguments.attention) for world in (1, processes))
    print(f"{length} tokens      one process   {processes} processes")
    for step, (a, b) in enumerate(zip(one, many, strict=True)):
        print(f"loss, step {step}     {a:11.6f}   {b:11.6f}")
    print(f"memory            {alone:7.0f} MiB   {each:7.0f} MiB each")
    assert all(abs(a - b) <= 1e-4 * abs(a) for a, b in zip(one, many, strict=True)), "the losses differ"


if __name__ == "__main__":
    main()
