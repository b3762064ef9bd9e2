"""How long planning takes, phase by phase, and how much memory: Llama-3-8B on 64 H100, parameters on the meta device.

    python benchmarks/planning.py [--cluster h100:8x8] [--batch 16] [--sequence 8192] [--layers 32] [--json]

The budget is 10 s and 2 GiB for trace, build and solve together; importing torch and transformers is not counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.planner import Timing


def llama3_8b(layers: int) -> LlamaForCausalLM:
    """The published sizes; no weights."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, rope_theta=500000.0, max_position_embeddings=8192, use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def main() -> None:
    """Plan once and print the split of the time."""
    parser = argparse.ArgumentParser(description="Time the planning of Llama-3-8B.")
    parser.add_argument("--cluster", default="h100:8x8")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    options = parser.parse_args()
    model = llama3_8b(options.layers)
    tokens = torch.zeros((options.batch, options.sequence), dtype=torch.int64, device="meta")
    timing = Timing()
    wall, cpu = time.perf_counter(), time.process_time()
    plan = mw.plan(model, options.cluster, {"input_ids": tokens, "labels": torch.empty_like(tokens)}, precision="bf16",
                   timing=timing)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.json:
        print(json.dumps({"phases": timing.phases, "seconds": wall, "cpu_seconds": cpu, "peak_bytes": peak,
                          "predicted": dict(plan.predicted), "certificate": dict(plan.certificate)}, default=str))
        return
    print(f"Llama-3-8B, {options.layers} layers, batch {options.batch} x {options.sequence}, on {options.cluster}: {plan.mesh}")
    for phase, seconds in timing.phases.items():
        print(f"  {phase:10s} {seconds:7.2f} s")
    print(f"  {'total':10s} {wall:7.2f} s ({cpu:.2f} s of CPU)   peak memory {peak / 2**30:.2f} GiB")
    print(f"  step {plan.predicted['step_seconds']:.3f} s predicted, gap {plan.certificate['gap']:.3%}")


if __name__ == "__main__":
    main()
