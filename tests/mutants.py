"""Plan files with something altered, of kinds that ``test_plan_files`` has not: refused by an error of our own, or the given
model's own graph on programs that are verified; nothing else, and nothing that takes long. And checkpoints whose index or whose
files' heads were altered, with sums that are right: refused by every rank, or loaded by every rank into a module that runs.
And exported programs of which a file was altered, with sums that are right: likewise.

    python -m tests.mutants                              100 mutants of every kind, a line for each kind and for each fault
    python -m tests.mutants --count 400 --seed 7 ring    of the kinds whose names hold a word; "checkpoint" is one, "export"
                                                         another
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ir.writing.plans import plan_to_file
from meshwright.planner import capture_model
from tests import mixtures
from tests.models import make
from tests.pool import Pool, WorkerError
from tests.test_exported import PINS, SOURCE, batches, exporting, seal
from tests.test_plan_files import mutant, outcome
from tests.test_runtime import PLAIN
from tests.test_storage import TWO, forged
from tests.test_storage import forge as forge_checkpoint
from tests.trials import parser_of

Case = tuple[nn.Module, Mapping[str, Any]]
Found = tuple[Counter[str], list[str]]
"""How many came out how, and the faults."""
SECONDS = 30
"""That one mutant may take."""


def _experts() -> Case:
    return mixtures.make("mixtral")


KINDS: Mapping[str, tuple[Callable[[], Case], str, Mapping[str, Any]]] = {
    "interleaved": (lambda: make("llama"), "cpu:1x2", {"pp": 2, "microbatches": 4, "schedule": "interleaved1f1b"}),
    "zbv x tp": (lambda: make("llama"), "cpu:1x4", {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "zbv"}),
    "ring": (lambda: make("llama"), "cpu:1x2", {"cp": 2, "attention": "ring"}),
    "ulysses": (lambda: make("llama"), "cpu:1x2", {"cp": 2, "attention": "ulysses"}),
    "recomputed": (lambda: make("bert"), "cpu:1x2", {"dp": 2, "zero": 3, "microbatches": 2, "recompute": "full"}),
    "sequences": (lambda: make("gpt2"), "cpu:1x2", {"tp": 2, "sequence_parallel": True, "microbatches": 2}),
    "queue": (lambda: make("towers"), "cpu:1x2", {"dp": 2}),
    "experts": (_experts, "cpu:1x2", {"ep": 2}),
    "experts x pp": (_experts, "cpu:1x4", {"pp": 2, "ep": 2, "microbatches": 2}),
}
"""{name: (the model and its batch, the cluster, the pins)}."""
CHECKPOINTS: Mapping[str, Any] = {"checkpoint": PLAIN, "checkpoint zero": TWO}
"""{name: (axes, options) of the program that writes them}."""
EXPORTS: Mapping[str, str] = {f"export {name}": name for name in PINS}
"""{name: of the program in ``test_exported``}."""
TRIED = (*KINDS, *CHECKPOINTS, *EXPORTS)


def tried(name: str, count: int, seed: int) -> Found:
    """How many mutants came out how, and the faults."""
    case, cluster, pins = KINDS[name]
    model, given = case()
    data = json.loads(json.dumps(plan_to_file(mw.plan(model, cluster, ((), given), pins=dict(pins)))))
    graph = capture_model(model, (), given, (), None, "fp32")
    assert outcome(data, graph) == "legal", name
    generator, found, faults = random.Random(f"{name} {seed}"), Counter[str](), []
    for number in range(count):
        altered = mutant(data, generator)
        signal.alarm(SECONDS)
        try:
            what = outcome(altered, graph)
        except Exception as error:
            what, where = type(error).__name__, traceback.extract_tb(error.__traceback__)[-1]
            faults.append(f"{name} {number}: {what}: {str(error)[:150]} ({where.filename}:{where.lineno})")
        finally:
            signal.alarm(0)
        found[what] += 1
    return found, faults


def forged_checkpoints(name: str, count: int, seed: int) -> Found:
    """As ``tried``, of checkpoints that two ranks load."""
    def run(pool: Pool, folder: str) -> list[Found]:
        return [(found, []) for found in pool.run(2, forged, folder, count, seed, CHECKPOINTS[name], timeout=5 * count + 60)]

    return _by_two_ranks(name, run)


def _by_two_ranks(name: str, run: Callable[[Pool, str], list[Found]]) -> Found:
    """What two ranks found, alike."""
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            (first, faults), (second, others) = run(pool, folder)
        return first, faults + others + ([] if first == second else [f"{name}: rank 0 {dict(first)}, rank 1 {dict(second)}"])
    except WorkerError as error:
        return Counter(), [f"{name}: {str(error)[-1000:]}"]
    finally:
        pool.close()


def forge(folder: Path, generator: random.Random) -> None:
    """Alter a file of an exported program, and make its sums right."""
    kind = generator.choice(("export.json", "plan.json", "plan.json", "programs", "state"))
    index = folder / "export.json"
    if kind == "state":
        forge_checkpoint(folder / "state", generator)
    elif kind == "programs":
        program = generator.choice(sorted((folder / "programs").iterdir()))
        text = json.dumps(mutant(json.loads(program.read_text()), generator))
        name = hashlib.sha256(text.encode()).hexdigest()
        (folder / "programs" / f"{name}.json").write_text(text)
        data = json.loads(index.read_text())
        index.write_text(json.dumps({**data, "programs": [name if one == program.stem else one for one in data["programs"]]}))
    else:
        path = folder / kind
        path.write_text(json.dumps(mutant(json.loads(path.read_text()), generator)))
    if isinstance(json.loads(index.read_text()), dict):
        seal(folder, state=kind == "state", plan=kind == "plan.json")


def forged_programs(rank: int, folder: str, name: str, count: int, seed: int) -> Found:
    """How many altered exports of the program came out how, on this rank, and the faults."""
    mesh, bad = init_device_mesh("cpu", (2,)), Path(folder) / "bad"
    generator, found, faults = random.Random(f"{name} {seed}"), Counter[str](), []
    example = next(batches(name))
    for number in range(count):
        if rank == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(Path(folder) / name, bad)
            forge(bad, generator)
        torch.distributed.barrier()
        what = "loaded"
        try:
            parallel = mw.load(bad, mesh)
            output = parallel(**example)
            if parallel.training:
                (output["loss"] if isinstance(output, dict) else output.loss).backward()
        except MeshwrightError:
            what = "refused"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = type(error).__name__
            faults.append(f"{name} {number}: {what}: {str(error)[:150]} ({where.filename}:{where.lineno})")
        found[what] += 1
    return found, faults


def forged_exports(name: str, count: int, seed: int) -> Found:
    """As ``tried``, of exported programs that two ranks load and run."""
    def run(pool: Pool, folder: str) -> list[Found]:
        (Path(folder) / "secret_model.py").write_text(SOURCE)
        pool.run(2, exporting, folder, [EXPORTS[name]])
        return pool.run(2, forged_programs, folder, EXPORTS[name], count, seed, timeout=5 * count + 60)

    return _by_two_ranks(name, run)


def _late(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main(arguments: Sequence[str]) -> int:
    """Print what came out."""
    parser = parser_of(__doc__, f"parts of names of kinds: {', '.join(TRIED)}")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    if unknown := [word for word in asked.words if not any(word in name for name in TRIED)]:
        parser.error(f"{unknown[0]!r} is in the name of no kind")
    signal.signal(signal.SIGALRM, _late)
    bad = 0
    for name in TRIED:
        if not asked.words or any(word in name for word in asked.words):
            by = tried if name in KINDS else forged_checkpoints if name in CHECKPOINTS else forged_exports
            found, faults = by(name, asked.count, asked.seed)
            bad += len(faults)
            print(f"{name:14} {dict(found)}", *faults, sep="\n  ", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
