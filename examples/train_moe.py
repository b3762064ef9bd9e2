"""A small mixture of experts (Mixtral), unmodified, with its experts split over data ranks, beside the single process.

    python examples/train_moe.py [processes]

Prints the losses of a few optimizer steps on one process and on four, where every token travels to the ranks of its experts.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import meshwright as mw

STEPS = 4


def data() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The same model and batch in every process."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64, use_cache=False,
    ))
    ids = torch.randint(0, 128, (8, 16))
    return model, {"input_ids": ids, "labels": ids}


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Losses of an ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def worker(rank: int, world: int, store: str) -> None:
    """One process of the parallel run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model, batch = data()
    mesh = init_device_mesh("cpu", (world,))
    parallel = mw.autoparallel(model, mesh, ((), batch), pins={"dp": world, "ep": 2, "zero": 2}, progress=False)
    losses = train(parallel, batch)
    if rank == 0:
        print(parallel.plan)
        print(f"{world} processes:", " ".join(f"{loss:.6f}" for loss in losses), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", nargs="?", type=int, default=4)
    world = parser.parse_args().processes
    torch.set_num_threads(1)
    print("one process: ", " ".join(f"{loss:.6f}" for loss in train(*data())), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, os.path.join(folder, "store")), world)


if __name__ == "__main__":
    main()
