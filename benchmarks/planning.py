"""How long planning takes, phase by phase, and how much memory: real sizes, parameters on the meta device.

    python benchmarks/planning.py [NAME ...] [--json] [--again] [--cluster h100:8x8] [--batch 16] [--layers 32]
    python benchmarks/planning.py --grid [--only REGEX] [--log FILE] [--list]
    python benchmarks/planning.py --drawn 40 --seed 1 [--only REGEX] [--log FILE] [--list]

Each case runs in a process of its own, so what is printed is a cold start; importing torch and transformers is not counted.
``budget``: seconds that the case may take on two cores; memory may take 2 GiB. A case is one of ``CASES``, or
MODEL/CLUSTER/BATCH[/LENGTH] such as ``bart-large/a100:1x8/64``, everything searched. ``--again``: is it the same plan if it is
made from its own pins (``to_pins()``), and how large is its file?

The grid (``grid.py``) is models x numbers of devices x kinds of devices, everything searched, one line a point. A point is
named MODEL/DEVICES/KIND; ``--only`` takes those whose name matches. With ``--log`` every point is written to a file of JSON
lines as it is done, and those that stand there are printed from it, so that a run can be continued. ``--drawn`` takes points
that are not on the grid: other models, numbers and kinds of devices, batches and lengths, drawn by the seed.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script: find benchmarks/

from benchmarks import grid
from benchmarks.models import MIXTURES, MODELS, OTHERS, Model, build, inputs

GIB = 2**30
ALL = {**MODELS, **MIXTURES, **OTHERS}


@dataclass(frozen=True)
class Case:
    """A model, a cluster, a global batch of samples. ``layers`` and ``sequence``: instead of the model's own."""

    model: str
    batch: int
    cluster: str
    budget: float
    pins: Mapping[str, Any] = field(default_factory=dict)
    layers: int | None = None
    sequence: int | None = None

    @property
    def size(self) -> Model:
        """The model, at the length that is asked for."""
        size = ALL[self.model]
        if self.sequence is None:
            return size
        return replace(size, sequence=self.sequence, config={**size.config, "max_position_embeddings": self.sequence})


CASES: Mapping[str, Case] = {
    "llama-8b-2d": Case("llama-8b", 16, "h100:8x8", 10.0, {"pp": 1}),
    "llama-8b": Case("llama-8b", 128, "h100:8x8", 20.0),
    "llama-405b": Case("llama-405b", 2048, "h100:2048x8", 60.0),
    "gpt-1t": Case("gpt-1t", 3072, "a100:384x8", 60.0),
    "llama-8b-131k": Case("llama-8b", 8, "h100:8x8", 20.0, sequence=131072),
    "llama-8b-1m": Case("llama-8b", 8, "h100:8x8", 20.0, sequence=1048576),
    "llama-405b-131k": Case("llama-405b", 128, "h100:2048x8", 60.0, sequence=131072),
    "llama-405b-131k-published": Case(
        "llama-405b", 128, "h100:2048x8", 60.0, {"dp": 8, "cp": 16, "tp": 8, "pp": 16}, sequence=131072,
    ),
    "mixtral-8x7b": Case("mixtral-8x7b", 256, "h100:8x8", 30.0),
    "deepseek-v3": Case("deepseek-v3", 15360, "h800:256x8", 90.0),
    "deepseek-v3-published": Case("deepseek-v3", 15360, "h800:256x8", 90.0, {
        "dp": 128, "tp": 1, "pp": 16, "ep": 64, "zero": 1, "schedule": "1f1b",
    }),
    "deepseek-v3-gb200": Case("deepseek-v3", 4096, "gb200:4x64", 90.0, {
        "dp": 32, "tp": 1, "pp": 8, "ep": 32, "zero": 1, "schedule": "interleaved1f1b", "virtual_stages": 4,
        "microbatches": 128,
    }),
    "kimi-k2": Case("kimi-k2", 16384, "h800:128x8", 90.0),
    "kimi-k2-published": Case("kimi-k2", 16384, "h800:128x8", 90.0, {
        "dp": 64, "tp": 1, "pp": 16, "ep": 16, "zero": 1, "schedule": "interleaved1f1b",
    }),
}
"""``deepseek-v3-gb200`` is Megatron-Core's layout on 256 GB200."""


def case_of(name: str) -> Case:
    """A case by its name. Raises KeyError, ValueError for what is none."""
    if name in CASES:
        return CASES[name]
    model, cluster, batch, *length = name.split("/")
    if model not in ALL:
        raise KeyError(model)
    return Case(model, int(batch), cluster, grid.BUDGET, sequence=int(length[0]) if length else None)


def measure(case: Case, again: bool = False) -> dict[str, Any]:
    """Plan once, here: seconds by phase, bytes, what was found; ``again``: and once more from its own pins."""
    import meshwright as mw
    from meshwright.ir.serialize import plan_hash
    from meshwright.ir.writing.plans import plan_text
    from meshwright.planner import Timing
    from meshwright.published.zoo import Trained

    size = case.size
    model = build(size, case.layers)
    model = Trained(model) if case.model in MIXTURES else model
    timing = Timing()
    wall, cpu = time.perf_counter(), time.process_time()
    where, batch = grid.cluster_of(case.cluster), inputs(size, case.batch)
    plan = mw.plan(model, where, batch, precision="bf16", pins=dict(case.pins), timing=timing)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    proof, predicted, held = plan.certificate, plan.predicted, {}
    if again:
        began = time.process_time()
        then = mw.plan(model, where, batch, precision="bf16", pins=plan.to_pins())
        held = {
            "same": plan_hash(then) == plan_hash(plan) and math.isclose(then.predicted.step_seconds, predicted.step_seconds)
            and then.predicted.bytes_per_rank == predicted.bytes_per_rank,
            "again_seconds": time.process_time() - began, "file_bytes": len(plan_text(plan)),
        }
    return {
        "phases": timing.phases, "seconds": wall, "cpu_seconds": cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "mesh": str(plan.mesh),
        "schedule": plan.pipeline.schedule if plan.pipeline else None, "microbatches": plan.schedule.microbatches,
        "step_seconds": predicted.step_seconds, "mfu": predicted.mfu, "bytes_per_rank": predicted.bytes_per_rank,
        "capacity_bytes": predicted.capacity_bytes,
        "certificate": {**replace(proof, candidates=(), planning_seconds={}).as_json(), "gap": proof.gap},
        **held,
    }


def show(name: str, case: Case, found: Mapping[str, Any]) -> None:
    """One case in words."""
    pins = ", ".join(f"{pin}={value}" for pin, value in case.pins.items()) or "everything searched"
    layers = "" if case.layers is None else f"{case.layers} layers, "
    print(f"{name}: {layers}batch {case.batch} x {case.size.sequence}, on {case.cluster}, {pins}")
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
    if "same" in found:
        print(f"  from its pins {'the same plan' if found['same'] else 'ANOTHER PLAN'}, {found['again_seconds']:.2f} s of CPU; "
              f"its file {found['file_bytes'] / 1e3:.0f} kB")


def run(name: str, case: Case, again: bool = False) -> dict[str, Any]:
    """A case in a process of its own; what went wrong as {"error": its last line}."""
    words = [sys.executable, "-W", "ignore", __file__, "--here", json.dumps(asdict(case)), *(["--again"] if again else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"{name} ended with {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure the named cases or the grid, each in a fresh process."""
    parser = argparse.ArgumentParser(description="Time the planning of real models.")
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(CASES)}; default: all of them")
    parser.add_argument("--cluster", help="instead of the case's own")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json", action="store_true", help="print one JSON value a line")
    parser.add_argument("--again", action="store_true", help="plan a case once more, from its own pins")
    parser.add_argument("--grid", action="store_true", help="the grid instead of the cases")
    parser.add_argument("--drawn", type=int, default=0, help="as many points as this that are not on the grid")
    parser.add_argument("--seed", type=int, default=0, help="of the points drawn")
    parser.add_argument("--only", default="", help="points of the grid whose name matches this regular expression")
    parser.add_argument("--log", type=Path, help="a file of JSON lines that the grid is continued from")
    parser.add_argument("--list", action="store_true", help="the names of the grid's points, nothing else")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # a case as JSON, measured in this process
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(Case(**json.loads(options.here)), options.again), default=str))
        return
    if options.grid or options.drawn or options.list:
        found = grid.drawn(options.drawn, options.seed, options.only) if options.drawn else grid.points(options.only)
        points = {name: Case(*point[:4], sequence=point[4]) for name, point in found.items()}
        grid.show(points, run, options.log) if not options.list else print("\n".join(points))
        return
    changes = {key: value for key in ("cluster", "batch", "layers") if (value := getattr(options, key)) is not None}
    for name in options.names or CASES:
        try:
            case = replace(case_of(name), **changes)
        except (KeyError, ValueError):
            parser.error(f"no case {name!r}; there are {', '.join(CASES)} and MODEL/CLUSTER/BATCH of {', '.join(ALL)}")
        found = run(name, case, options.again)
        if "error" in found:
            sys.exit(f"{name} failed: {found['error']}")
        if options.json:
            print(json.dumps({"case": name, **asdict(case), **found}))
        else:
            show(name, case, found)


if __name__ == "__main__":
    main()
