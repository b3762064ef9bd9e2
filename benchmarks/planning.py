"""How long planning takes, phase by phase, and how much memory: real sizes, parameters on the meta device.

    python benchmarks/planning.py [NAME ...] [--json] [--cluster h100:8x8] [--batch 16] [--layers 32]

Each case runs in a process of its own, so what is printed is a cold start; importing torch and transformers is not counted.
``budget``: seconds that the case may take on two cores; memory may take 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model, a cluster, a global batch of sequences."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    sequence: int
    batch: int
    cluster: str
    budget: float
    pins: Mapping[str, Any]


LLAMA_8B = Case("llama", 32, 4096, 14336, 32, 8, 128256, 8192, 16, "h100:8x8", 10.0, {"pp": 1})
CASES: Mapping[str, Case] = {
    "llama-8b-2d": LLAMA_8B,
    "llama-8b": replace(LLAMA_8B, batch=128, budget=20.0, pins={}),
    "llama-405b": Case("llama", 126, 16384, 53248, 128, 8, 128256, 8192, 2048, "h100:2048x8", 60.0, {}),
    "gpt-1t": Case("gpt", 128, 25600, 102400, 160, 160, 51200, 2048, 3072, "a100:384x8", 60.0, {}),
}


def model_of(case: Case) -> Any:
    """The published sizes; no weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        if case.family == "llama":
            return LlamaForCausalLM(LlamaConfig(
                hidden_size=case.hidden, intermediate_size=case.ffn, num_hidden_layers=case.layers,
                num_attention_heads=case.heads, num_key_value_heads=case.kv_heads, vocab_size=case.vocab, rope_theta=500000.0,
                max_position_embeddings=case.sequence, use_cache=False,
            ))
        return GPT2LMHeadModel(GPT2Config(
            n_layer=case.layers, n_embd=case.hidden, n_inner=case.ffn, n_head=case.heads, vocab_size=case.vocab,
            n_positions=case.sequence, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ))


def measure(case: Case) -> dict[str, Any]:
    """Plan once, here: seconds by phase, bytes, what was found."""
    import torch

    import meshwright as mw
    from meshwright.planner import Timing

    model = model_of(case)
    tokens = torch.zeros((case.batch, case.sequence), dtype=torch.int64, device="meta")
    timing = Timing()
    wall, cpu = time.perf_counter(), time.process_time()
    plan = mw.plan(
        model, case.cluster, {"input_ids": tokens, "labels": torch.empty_like(tokens)}, precision="bf16", pins=dict(case.pins),
        timing=timing,
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    proof, predicted = plan.certificate, plan.predicted
    return {
        "phases": timing.phases, "seconds": wall, "cpu_seconds": cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "mesh": str(plan.mesh),
        "schedule": plan.pipeline.schedule if plan.pipeline else None, "microbatches": plan.schedule.microbatches,
        "step_seconds": predicted.step_seconds, "mfu": predicted.mfu, "bytes_per_rank": predicted.bytes_per_rank,
        "capacity_bytes": predicted.capacity_bytes,
        "certificate": {**replace(proof, candidates=(), planning_seconds={}).as_json(), "gap": proof.gap},
    }


def show(name: str, case: Case, found: Mapping[str, Any]) -> None:
    """One case in words."""
    pins = ", ".join(f"{pin}={value}" for pin, value in case.pins.items()) or "everything searched"
    print(f"{name}: {case.layers} layers, batch {case.batch} x {case.sequence}, on {case.cluster}, {pins}")
    for phase, seconds in found["phases"].items():
        print(f"  {phase:12s} {seconds:7.2f} s")
    print(f"  {'total':12s} {found['seconds']:7.2f} s of {case.budget:.0f} ({found['cpu_seconds']:.2f} s of CPU), peak memory "
          f"{found['peak_bytes'] / GIB:.2f} GiB")
    proof = found["certificate"]
    print(f"  {found['mesh']}, {found['schedule'] or 'no pipeline'}, {found['microbatches']} micro-batches: step "
          f"{found['step_seconds']:.3f} s, MFU {found['mfu']:.1%}, {found['bytes_per_rank'] / GIB:.1f} of "
          f"{found['capacity_bytes'] / GIB:.1f} GiB, gap {proof['gap']:.2%} ({proof['status']})")
    if proof["considered"]:
        print(f"  {proof['considered']} candidates considered, {proof['pruned']} pruned by bound, {proof['infeasible']} "
              f"impossible, {proof['solved']} solved; runner-up {proof.get('runner_up', '-')}")


def main() -> None:
    """Measure the named cases, each in a fresh process."""
    parser = argparse.ArgumentParser(description="Time the planning of real models.")
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(CASES)}; default: all of them")
    parser.add_argument("--cluster", help="instead of the case's own")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json", action="store_true", help="print one JSON value a line")
    parser.add_argument("--here", action="store_true", help="in this process: one case, as JSON")
    options = parser.parse_args()
    changes = {key: value for key in ("cluster", "batch", "layers") if (value := getattr(options, key)) is not None}
    for name in options.names or CASES:
        if name not in CASES:
            parser.error(f"no case {name!r}; there are {', '.join(CASES)}")
        case = replace(CASES[name], **changes)
        if options.here:
            print(json.dumps(measure(case), default=str))
            continue
        given = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
        done = subprocess.run([sys.executable, __file__, name, "--here", *given], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        if options.json:
            print(json.dumps({"case": name, **asdict(case), **found}))
        else:
            show(name, case, found)


if __name__ == "__main__":
    main()
