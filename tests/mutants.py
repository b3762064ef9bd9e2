"""Plan files with something altered, of kinds that ``test_plan_files`` has not: refused by an error of our own, or the given
model's own graph on programs that are verified; nothing else, and nothing that takes long. And checkpoints whose index or whose
files' heads were altered, with sums that are right: refused by every rank, or loaded by every rank into a module that runs.

    python -m tests.mutants                              100 mutants of every kind, a line for each kind and for each fault
    python -m tests.mutants --count 400 --seed 7 ring    of the kinds whose names hold a word; "checkpoint" is one
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

import meshwright as mw
from meshwright.ir.writing.plans import plan_to_file
from meshwright.planner import capture_model
from tests import mixtures
from tests.models import make
from tests.pool import Pool, WorkerError
from tests.test_plan_files import mutant, outcome
from tests.test_runtime import PLAIN
from tests.test_storage import TWO, forged
from tests.trials import parser_of

Case = tuple[nn.Module, Mapping[str, Any]]
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


def tried(name: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
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


def forged_checkpoints(name: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """As ``tried``, of checkpoints that two ranks load."""
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            first, second = pool.run(2, forged, folder, count, seed, CHECKPOINTS[name], timeout=5 * count + 60)
        return first, [] if first == second else [f"{name}: rank 0 {dict(first)}, rank 1 {dict(second)}"]
    except WorkerError as error:
        return Counter(), [f"{name}: {str(error)[-1000:]}"]
    finally:
        pool.close()


def _late(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main(arguments: Sequence[str]) -> int:
    """Print what came out."""
    parser = parser_of(__doc__, f"parts of names of kinds: {', '.join((*KINDS, *CHECKPOINTS))}")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    if unknown := [word for word in asked.words if not any(word in name for name in (*KINDS, *CHECKPOINTS))]:
        parser.error(f"{unknown[0]!r} is in the name of no kind")
    signal.signal(signal.SIGALRM, _late)
    bad = 0
    for name in (*KINDS, *CHECKPOINTS):
        if not asked.words or any(word in name for word in asked.words):
            found, faults = (tried if name in KINDS else forged_checkpoints)(name, asked.count, asked.seed)
            bad += len(faults)
            print(f"{name:14} {dict(found)}", *faults, sep="\n  ", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
