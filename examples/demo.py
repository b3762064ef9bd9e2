"""Train a small Llama on four CPU processes, and on one, and print both losses side by side.

The model comes from ``transformers`` as it is, randomly initialized. Each process builds it from the same seed and calls
``autoparallel(model, mesh)``; from there on the training loop is an ordinary one. The reference is the same loop on the model
itself, in one process. Both run the same batches, so the losses agree up to the order of floating-point sums.

    python examples/demo.py                      the searched plan
    python examples/demo.py --pins dp=2,tp=2     a plan of your own

``train_gpt2_pipeline.py`` runs the same on a pipeline.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

WORLD = 4
BATCH, SEQUENCE, VOCABULARY = 16, 64, 1024


def make_model() -> LlamaForCausalLM:
    """Four layers, eight heads that share four key/value heads; the same weights on every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=VOCABULARY, use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batch(step: int) -> dict[str, torch.Tensor]:
    """Token ids that a model can learn (each is the one before plus 1 or 2), labels partly masked, as in fine-tuning."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    ids = (start + torch.randint(1, 3, (BATCH, SEQUENCE), generator=generator).cumsum(1)) % VOCABULARY
    labels = ids.masked_fill(torch.arange(SEQUENCE) < 4 * torch.arange(BATCH)[:, None], -100)
    return {"input_ids": ids, "labels": labels}


def train(model: torch.nn.Module, steps: int, report: Any = None) -> list[float]:
    """An ordinary training loop; the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(**make_batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if report is not None:
            report(step, losses[-1])
    return losses


def worker(
    rank: int, store: str, out: Path, steps: int, make: Callable[[], torch.nn.Module], pins: dict[str, Any],
    reference: list[float],
) -> None:
    """One of the four processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    parallel = mw.autoparallel(make(), mesh, ((), make_batch(0)), pins=pins)

    def report(step: int, loss: float) -> None:
        if rank == 0:
            single = reference[step]
            print(f"{step:4d}   {single:14.7f}   {loss:14.7f}   {abs(loss - single) / single:10.1e}", flush=True)

    if rank == 0:
        mw.show(parallel.plan)
        parallel.plan.save(out)
        if parallel.plan.pipeline is not None:
            mw.timeline(parallel.plan, _trace(out))
        print(f"\n{'step':>4s}   {'one process':>14s}   {f'{WORLD} processes':>14s}   {'relative':>10s}", flush=True)
    losses = train(parallel, steps, report)
    worst = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
    dist.destroy_process_group()
    if worst > 1e-4:
        raise SystemExit(f"rank {rank}: the losses differ by {worst:.1e}, more than rounding explains")


def run(make: Callable[[], torch.nn.Module], what: str, pins: str, out: str) -> None:
    """Parse the command line, train on one process, then on four. ``pins``, ``out``: what is pinned and written by default."""
    parser = argparse.ArgumentParser(description=f"Train {what} on four CPU processes and on one.")
    parser.add_argument("--out", default=out, help="where the plan is written")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pins", default=pins, help="such as dp=2,tp=2 or pp=2,schedule=1f1b; nothing: search")
    options = parser.parse_args()
    words = dict(word.split("=") for word in options.pins.split(",") if word)
    pinned = {name: int(value) if value.isdigit() else value for name, value in words.items()}
    started = time.perf_counter()
    torch.set_num_threads(1)
    reference = train(make(), options.steps)
    path = Path(options.out).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (f"{folder}/store", path, options.steps, make, pinned, reference), nprocs=WORLD)
    print(f"\n{time.perf_counter() - started:.0f} s; the plan is in {options.out}: meshwright show {options.out}")
    if _trace(path).exists():
        print(f"the predicted step is in {_trace(path)}: open it in https://ui.perfetto.dev")


def _trace(out: Path) -> Path:
    """Where the timeline goes: beside the plan."""
    return out.with_suffix(".trace.json")


def main() -> None:
    """With the plan that is searched, or one of your own."""
    run(make_model, "a small Llama", "", "demo.plan.json")


if __name__ == "__main__":
    main()
