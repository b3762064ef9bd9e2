"""How long a start of an exported program takes beside the planning that it spares: real sizes, parameters on the meta device.

    python benchmarks/export.py [NAME ...] [--json] [--rank 0]

Each case (those of ``planning.py``) is planned and exported, and is then read again in a process of its own, which does what
``meshwright.load`` does before contents come: the folder is read and checked, the plan lowered for one rank, verified,
compared with the exported program, cut into its stages, and the module is made, its parameters empty and its
process groups torch's that send nothing. Then the same again with ``cache=folder``: a second start captures the model, and
searches nothing. Seconds are of CPU, with the imports that each part comes to need (a load: the checks, a tenth of a second).
"""

from __future__ import annotations

import argparse
import compileall
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script: find benchmarks/

from benchmarks import grid
from benchmarks.models import build, inputs
from benchmarks.planning import CASES

GOAL_SECONDS, GOAL_SHARE = 3.0, 0.05


def plan_of(name: str, cache: Path) -> tuple[Any, float]:
    """A plan, kept in a cache, and the seconds of CPU that it took."""
    import meshwright as mw

    case = CASES[name]
    model, before = build(case.size, case.layers), time.process_time()
    plan = mw.plan(model, grid.cluster_of(case.cluster), inputs(case.size, case.batch), precision="bf16", pins=dict(case.pins),
                   cache=cache)
    return plan, time.process_time() - before


def planned(name: str, folder: Path) -> dict[str, Any]:
    """Plan and export, here."""
    from meshwright.exported import export

    plan, seconds = plan_of(name, folder / "cache")
    before = time.process_time()
    export(plan, folder / "program")
    return {"planning": seconds, "exporting": time.process_time() - before, "devices": plan.mesh.world, "mesh": str(plan.mesh),
            "roles": len(list((folder / "program" / "programs").iterdir())),
            "bytes": sum(file.stat().st_size for file in (folder / "program").rglob("*") if file.is_file())}


def again(name: str, folder: Path) -> dict[str, Any]:
    """The second start with a cache, here."""
    plan, seconds = plan_of(name, folder / "cache")
    return {"second": seconds, "said": [note for note in plan.notes if "nothing was searched" in note]}


def loaded(folder: Path, rank: int) -> dict[str, Any]:
    """Read and lower, here."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from meshwright.exported import prepared
    from meshwright.ir.graph import collector_paused
    from meshwright.ir.plan import Plan
    from meshwright.runtime.module import build as module

    world = Plan.load(folder / "program" / "plan.json").mesh.world
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    before = time.process_time()
    with collector_paused():
        found, program = prepared(folder / "program", rank)
        module(program, None, device=torch.device("cpu"))
    return {"loading": time.process_time() - before, "operators": len(found.plan.graph.ops)}


def elsewhere(*words: str) -> dict[str, Any]:
    """What one part prints in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Every case that is named; the exit status is 1 where a start takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["llama-8b"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        part, folder = options.here[0], Path(options.here[1])
        (name,) = options.names
        found = loaded(folder, options.rank) if part == "load" else {"plan": planned, "again": again}[part](name, folder)
        print(json.dumps(found))
        return 0
    missed = False
    compileall.compile_dir(Path(__file__).parent.parent / "meshwright", quiet=1)  # as it is where it is installed
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for part in ("plan", "load", "again"):
                found.update(elsewhere(name, "--rank", str(options.rank), "--here", part, folder))
        share = found["loading"] / found["planning"]
        missed |= found["loading"] > GOAL_SECONDS or share > GOAL_SHARE or not found["said"]
        if options.json:
            print(json.dumps({"name": name, **found, "share": share}))
            continue
        print(f"{name}: {found['mesh']}, {found['devices']} devices, {found['operators']} operators, {found['roles']} roles, "
              f"{found['bytes'] / 1e6:.2f} MB")
        print(f"  planned in {found['planning']:.2f} s, exported in {found['exporting']:.2f} s")
        print(f"  loaded in {found['loading']:.2f} s, {share:.1%} of planning")
        print(f"  second start with a cache {found['second']:.2f} s, searched: {'no' if found['said'] else 'YES'}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
