"""What the checks of a call and of an optimizer step cost: ``python benchmarks/overhead.py [layers ...]``.

On two CPU processes, for models of so many layers (three modules each). One line per model: microseconds that looking at the
model, at the inputs and at the parameters takes, all of it with the agreement of ranks, and a whole call; and milliseconds of
an AdamW step on the parallel module beside plain FSDP2's of the same model.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshwright as mw
from meshwright.runtime.checks.calls import check_bounds

WIDTH, CALLS = 16, 50


class Net(nn.Module):
    """Layers of three modules with small parameters, on ids."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(layers))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": nn.functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), labels.flatten())}


def seconds(step: Callable[[], Any], count: int = CALLS) -> float:
    """Of one call, the fastest of so many."""
    best = float("inf")
    for _ in range(count):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def measure(rank: int, layers: int) -> None:
    """One model; rank 0 prints."""
    torch.manual_seed(0)
    model = Net(layers)
    batch = {"ids": torch.randint(0, 64, (8, 128)), "labels": torch.randint(0, 64, (8, 128))}
    mesh = init_device_mesh("cpu", (2,))
    plain = copy.deepcopy(model)
    parallel: Any = mw.autoparallel(model, mesh, ((), batch), pins={"dp": 2, "zero": 3}, progress=False)
    for layer in plain.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    for _ in range(2):
        parallel(**batch)["loss"].backward()
        plain(**batch)["loss"].backward()
    given = parallel._ports.given(parallel._program, (), batch)

    def step(module: nn.Module) -> float:
        optimizer = torch.optim.AdamW(module.parameters())
        return seconds(optimizer.step, 10)

    parts = {
        "model": seconds(lambda: parallel._watched((), batch)), "all checks": seconds(lambda: parallel._agreed((), batch)),
        "bounds": seconds(lambda: check_bounds(parallel._program.bounds, given)),
        "parameters": seconds(parallel._check),
        "call": seconds(lambda: parallel(**batch)["loss"].backward(), 10),
        "plain call": seconds(lambda: plain(**batch)["loss"].backward(), 10),
    }
    steps = step(parallel), step(plain)
    if rank == 0:
        told = ", ".join(f"{name} {1e6 * value:.0f} us" for name, value in parts.items())
        print(f"{layers} layers: {told}; AdamW on {len(list(parallel.parameters()))} parameters {1e3 * steps[0]:.2f} ms, plain "
              f"FSDP2 {1e3 * steps[1]:.2f} ms", flush=True)


def worker(rank: int, port: int, sizes: list[int]) -> None:
    """A process of the two."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for layers in sizes:
        measure(rank, layers)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, default=[2, 100])
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (port, asked.layers), nprocs=2)
