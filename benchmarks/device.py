"""Predicted against measured step time and peak allocated memory of single-device runs on this machine's GPU.

    python benchmarks/device.py [--json FILE] [--steps 10] [--small]

GPT-2 and Llama of 0.1 to 3 billion parameters in bf16: with and without micro-batches and recomputation, eager and compiled.
Goal: 5% on both. Without a GPU it says so and exits 0. ``--small`` runs tiny models on whatever there is, to see that the
script works. A compiled run compiles the parallel module; its prediction has pointwise operators fused. Record a run under
``benchmarks/results/`` with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.cost.cluster import Cluster, ClusterError, device_for


def gpt2(layers: int, hidden: int, heads: int, vocab: int) -> nn.Module:
    """GPT-2 of any size, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=vocab, n_positions=2048, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    ))


def llama(layers: int, hidden: int, heads: int, vocab: int) -> nn.Module:
    """Llama with a quarter of the heads for keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 4, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), vocab_size=vocab, max_position_embeddings=4096, use_cache=False,
    ))


@dataclass(frozen=True)
class Run:
    """A model by its dims (layers, hidden, heads, vocabulary), its batch (samples, length), and how it runs."""

    name: str
    model: Callable[[int, int, int, int], nn.Module]
    dims: tuple[int, int, int, int]
    batch: tuple[int, int]
    microbatches: int = 1
    recompute: str = "none"
    compiled: bool = False


RUNS = (
    Run("gpt2 124M", gpt2, (12, 768, 12, 50257), (16, 1024)),
    Run("gpt2 124M compiled", gpt2, (12, 768, 12, 50257), (16, 1024), compiled=True),
    Run("gpt2 774M recomputed", gpt2, (36, 1280, 20, 50257), (16, 1024), recompute="full"),
    Run("gpt2 1.5B x4", gpt2, (48, 1600, 25, 50257), (16, 1024), microbatches=4),
    Run("llama 1.2B", llama, (16, 2048, 32, 128256), (4, 2048)),
    Run("llama 1.2B compiled", llama, (16, 2048, 32, 128256), (4, 2048), compiled=True),
    Run("llama 3B recomputed x2", llama, (28, 3072, 24, 128256), (8, 2048), microbatches=2, recompute="full"),
)
SMALL = (
    Run("gpt2 tiny", gpt2, (2, 64, 4, 128), (4, 32)),
    Run("llama tiny recomputed x2", llama, (2, 64, 4, 128), (4, 32), microbatches=2, recompute="full"),
)


def measure(run: Run, kind: str, cluster: Cluster, steps: int) -> dict[str, Any]:
    """One run: seconds per step (median) and peak allocated bytes, predicted and measured."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = run.model(*run.dims).train()
    ids = torch.randint(1, run.dims[-1], run.batch)
    batch = {"input_ids": ids, "labels": ids.clone()}
    pins = {"microbatches": run.microbatches, "recompute": run.recompute}
    plan = mw.plan(model, cluster.with_kernels(fused=run.compiled), batch, precision="bf16", pins=pins)
    parallel = mw.autoparallel(model, init_device_mesh(kind, (1,)), plan=plan, progress=False)
    if run.compiled:
        parallel.compile()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    batch = {name: tensor.to(kind) for name, tensor in batch.items()}
    seconds = []
    for step in range(3 + steps):
        if step == 3 and kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        output = parallel(**batch)
        output["loss"].backward()
        del output
        optimizer.step()
        optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = float(torch.cuda.max_memory_allocated()) if kind == "cuda" else None
    return {
        "name": run.name, "predicted seconds": plan.predicted.step_seconds, "seconds": sorted(seconds[3:])[steps // 2],
        "predicted bytes": plan.predicted.bytes_per_rank, "bytes": peak,
    }


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    error = row["predicted seconds"] / row["seconds"] - 1
    seconds = f"{row['predicted seconds'] * 1e3:9.1f} ms, measured {row['seconds'] * 1e3:9.1f} ({error:+.1%})"
    text = f"{row['name']:26s} step {seconds}"
    if row["bytes"] is None:
        return text
    ratio = row["predicted bytes"] / row["bytes"] - 1
    return f"{text}   peak {row['predicted bytes'] / 2**30:7.2f} GiB, measured {row['bytes'] / 2**30:7.2f} ({ratio:+.1%})"


def main() -> int:
    """Run everything in turn; 0 also where there is no GPU."""
    parser = argparse.ArgumentParser(description="Predicted against measured runs on one GPU.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="tiny models on whatever device there is")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.small:
        print("no CUDA device here: nothing measured (run this on a machine with one, or --small to try the script)")
        return 0
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        name = "cpu"
        if kind == "cuda":
            name = device_for(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    except ClusterError as error:
        print(f"{error}: nothing to predict with")
        return 0
    cluster = Cluster.parse(f"{name}:1x1")
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    rows = []
    for run in SMALL if options.small else RUNS:
        rows.append(measure(run, kind, cluster, options.steps))
        print(line(rows[-1]), flush=True)
        if kind == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": name, "torch": torch.__version__, "command": " ".join(sys.argv), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
