"""Predicted against measured step time and peak allocated memory of single-device runs on this machine's GPU.

    python benchmarks/device.py [--json FILE] [--steps 10] [--by-hand] [--measured SECONDS] [--only REGEX] [--small]

GPT-2, Llama and a mixture of 0.1 to 2.4 billion parameters in bf16: with and without micro-batches, recomputation and a padding
mask, long and short. Goal: 5% on both. Peak bytes are those allocated; what the allocator reserved and what
the device held beside it (its context) stand behind. With ``--measured`` each model's operators are profiled for so long first
(``meshwright profile``), and what these tables predict is printed too. With ``--by-hand`` runs without recomputation are
measured under FSDP2 with bf16 parameters as one writes it by hand, too. Without a GPU it says so and exits 0. ``--small`` runs
tiny models on whatever there is, to see that the script works. Record a run under ``benchmarks/results/`` with ``--json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import meshwright as mw
from meshwright.commands.profiling import as_toml, profile
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


def mixtral(layers: int, hidden: int, heads: int, vocab: int) -> nn.Module:
    """A mixture of eight experts, two of which compute a token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        hidden_size=hidden, intermediate_size=hidden * 2, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), vocab_size=vocab, max_position_embeddings=4096, use_cache=False,
        num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
    ))


@dataclass(frozen=True)
class Run:
    """A model by its dims (layers, hidden, heads, vocabulary), its batch (samples, length), and how it runs; ``padded``: the
    last eighth of every other sample is padding, and a mask says so."""

    name: str
    model: Callable[[int, int, int, int], nn.Module]
    dims: tuple[int, int, int, int]
    batch: tuple[int, int]
    microbatches: int = 1
    recompute: str = "none"
    padded: bool = False

    def batch_of(self) -> dict[str, torch.Tensor]:
        """Tokens, labels and perhaps a mask, on the CPU."""
        ids = torch.randint(1, self.dims[-1], self.batch)
        made = {"input_ids": ids, "labels": ids.clone()}
        if self.padded:
            seen = torch.ones(self.batch, dtype=torch.int64)
            seen[::2, -self.batch[1] // 8 :] = 0
            made["attention_mask"] = seen
        return made


RUNS = (
    Run("gpt2 124M", gpt2, (12, 768, 12, 50257), (16, 1024)),
    Run("gpt2 774M recomputed", gpt2, (36, 1280, 20, 50257), (16, 1024), recompute="full"),
    Run("gpt2 1.5B x4", gpt2, (48, 1600, 25, 50257), (16, 1024), microbatches=4),
    Run("llama 1.2B", llama, (16, 2048, 32, 128256), (4, 2048)),
    Run("llama 1.2B padded", llama, (16, 2048, 32, 128256), (4, 2048), padded=True),
    Run("llama 1.2B long", llama, (16, 2048, 32, 128256), (1, 16384), recompute="selective"),
    Run("llama 2.4B recomputed x2", llama, (12, 3072, 24, 128256), (8, 2048), microbatches=2, recompute="full"),
    Run("mixtral 0.9B", mixtral, (12, 1024, 16, 32000), (8, 1024)),
)
SMALL = (
    Run("gpt2 tiny", gpt2, (2, 64, 4, 128), (4, 32)),
    Run("llama tiny recomputed x2", llama, (2, 64, 4, 128), (4, 32), microbatches=2, recompute="full"),
)


def measure(run: Run, kind: str, cluster: Cluster, steps: int, profiling: float) -> dict[str, Any]:
    """One run: seconds per step (median) and peak bytes, predicted and measured; ``profiling``: seconds for tables."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = run.model(*run.dims).train()
    batch = run.batch_of()
    pins = {"microbatches": run.microbatches, "recompute": run.recompute}
    plan = mw.plan(model, cluster, batch, precision="bf16", pins=pins)
    row: dict[str, Any] = {"name": run.name}
    if profiling:
        again = mw.plan(model, tabled(plan, cluster.device.name, kind, profiling), batch, precision="bf16", pins=pins)
        row["seconds by tables"] = again.predicted.step_seconds
    parallel = mw.autoparallel(model, init_device_mesh(kind, (1,)), plan=plan, progress=False)
    batch = {name: tensor.to(kind) for name, tensor in batch.items()}
    elsewhere = held_elsewhere() if kind == "cuda" else 0.0
    taken = median_step(parallel, lambda: parallel(**batch)["loss"].backward(), kind, steps)
    row |= {
        "predicted seconds": plan.predicted.step_seconds, "seconds": taken,
        "predicted bytes": plan.predicted.bytes_per_rank, "bytes": None,
    }
    if kind == "cuda":
        row |= {"bytes": float(torch.cuda.max_memory_allocated()), "reserved": float(torch.cuda.max_memory_reserved()),
                "elsewhere": held_elsewhere(), "elsewhere before": elsewhere}
    return row


def median_step(model: nn.Module, backward: Callable[[], None], kind: str, steps: int) -> float:
    """Seconds of the median step of AdamW after three others; ``backward``: forward and backward of the whole batch."""
    optimizer, seconds = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    for step in range(3 + steps):
        if step == 3 and kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[3:])[steps // 2]


def by_hand(run: Run, kind: str, steps: int) -> float:
    """Seconds of a step under FSDP2, a unit for each block, bf16 parameters and fp32 gradients, micro-batches by slices."""
    torch.manual_seed(0)
    with torch.device(kind):
        model = run.model(*run.dims).train()
    policy, mesh = MixedPrecisionPolicy(torch.bfloat16, torch.float32), init_device_mesh(kind, (1,))
    blocks = max((one for one in model.modules() if isinstance(one, nn.ModuleList)), key=len)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    batch = {name: tensor.to(kind) for name, tensor in run.batch_of().items()}
    pieces = [dict(zip(batch, piece, strict=True))
              for piece in zip(*(tensor.chunk(run.microbatches) for tensor in batch.values()), strict=True)]

    def backward() -> None:
        for piece in pieces:
            (model(**piece).loss / len(pieces)).backward()

    return median_step(model, backward, kind, steps)


def held_elsewhere() -> float:
    """Bytes of the device that are neither free nor the allocator's: its context, libraries and other processes."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


def tabled(plan: mw.Plan, like: str, kind: str, seconds: float) -> Cluster:
    """One device with tables of the operators of a plan's graph, measured here, and the rest of the catalogue's ``like``."""
    found = profile(plan.graph, like, torch.device(kind), seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "here.toml")
        path.write_text(as_toml(found, "here", "measured"), encoding="utf-8")
        return Cluster.from_toml(path)


def cleared(kind: str) -> None:
    """Leave nothing of a run on the device."""
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    error = row["predicted seconds"] / row["seconds"] - 1
    seconds = f"{row['predicted seconds'] * 1e3:9.1f} ms, measured {row['seconds'] * 1e3:9.1f} ({error:+.1%})"
    text = f"{row['name']:26s} step {seconds}"
    if "seconds by hand" in row:
        text += f" by hand {row['seconds by hand'] * 1e3:9.1f} ({row['seconds by hand'] / row['seconds']:.2f} of it)"
    if "seconds by tables" in row:
        text += f" by tables {row['seconds by tables'] * 1e3:9.1f} ({row['seconds by tables'] / row['seconds'] - 1:+.1%})"
    if row["bytes"] is None:
        return text
    ratio = row["predicted bytes"] / row["bytes"] - 1
    text += f"   peak {row['predicted bytes'] / 2**30:7.2f} GiB, measured {row['bytes'] / 2**30:7.2f} ({ratio:+.1%})"
    return f"{text}, reserved {row['reserved'] / 2**30:7.2f}, beside it {row['elsewhere'] / 2**30:5.2f}"


def main() -> int:
    """Run everything in turn; 0 also where there is no GPU."""
    parser = argparse.ArgumentParser(description="Predicted against measured runs on one GPU.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--by-hand", action="store_true", help="measure FSDP2 as one writes it, too")
    parser.add_argument("--measured", type=float, default=0.0, help="seconds for which operators are profiled")
    parser.add_argument("--only", default="", help="a regular expression that names of runs match")
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
        if not re.search(options.only, run.name):
            continue
        rows.append(measure(run, kind, cluster, options.steps, options.measured))
        cleared(kind)
        if options.by_hand and run.recompute == "none":
            rows[-1]["seconds by hand"] = by_hand(run, kind, options.steps)
            cleared(kind)
        print(line(rows[-1]), flush=True)
    dist.destroy_process_group()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": name, "torch": torch.__version__, "command": " ".join(sys.argv), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
