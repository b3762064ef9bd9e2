"""Pins drawn at random, many of which cannot be: what a refusal names as the nearest legal setting is planned.

    python benchmarks/refusals.py [--count 100] [--seed 0] [--models REGEX] [--all]

Nothing runs and nothing is trained: small models of ``tests.sequences`` and mixtures of ``tests.mixtures`` are planned on 2
to 8 devices. Each drawn setting that is refused is one line (``--all``: the others too):

    named      every setting that the refusal names is planned
    unnamed    it names none that this program can read (words such as "pin pp=2 or more, or drop it" are such)
    WRONG      a setting that it names is refused too
    RAW        any other error than a MeshwrightError

The last line counts them. The exit status is 1 where one is WRONG or RAW.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script: find tests/

from meshwright.cost.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.pins import ATTENTION, RECOMPUTE, Pins
from meshwright.ir.schedules.builtin import BUILTIN
from meshwright.planner import capture_model, make_plan
from tests import mixtures, sequences

MODELS = ("Llama", "GPT2", "t5", "bert", "Mistral", "vit", "mixtral", "einsum", "deepseek", "llama4")
DEGREES = (1, 2, 3, 4, 8)
VALUES: Mapping[str, Sequence[Any]] = {
    "dp": DEGREES, "tp": DEGREES, "cp": DEGREES, "pp": DEGREES, "ep": DEGREES, "ulysses": (2, 4), "attention": ATTENTION,
    "schedule": tuple(schedule.name for schedule in BUILTIN), "virtual_stages": (1, 2, 3), "microbatches": DEGREES,
    "zero": (0, 1, 2, 3), "shard": (1, 2, 3, 4), "sequence_parallel": (True,), "recompute": RECOMPUTE,
    "micro_batch": (1, 2, 3), "stages": (2, 3, 4), "loss_rows": (8,), "mlp_rows": (8,),
}
OFTEN: Mapping[str, int] = {"dp": 5, "tp": 5, "cp": 6, "pp": 5, "ep": 5, "attention": 3, "schedule": 3}
"""Pins that are drawn more often than others, so many times."""


@cache
def graph_of(name: str, length: int) -> Graph:
    """A small model, captured."""
    model, batch = sequences.make(name, length) if name in sequences.MODELS else mixtures.make(name)
    return capture_model(model, (), batch, (), None, "fp32")


def named(words: str) -> list[dict[str, Any]]:
    """What to change, of each setting that a refusal names; None: a pin to drop.

    >>> named("pin ep=3 is no divisor; nearest legal setting: ep=1, or dp=2 with no pin cp")
    [{'ep': 1}, {'dp': 2, 'cp': None}]
    """
    found = re.search(r"nearest legal setting: (.*)$", words)
    settings = found[1].split(", or ") if found else []
    settings += re.findall(r"nearest legal: (\w+=[^,; ]+)", words) + [f"cp={n}" for n in re.findall(r"take cp=(\d+)", words)]
    return [dict(_change(part) for part in setting.split(" with ")) for setting in settings]


def _change(words: str) -> tuple[str, Any]:
    name, _, value = words.removeprefix("no pin ").partition("=")
    return name, ast.literal_eval(value) if value else None


def drawn(dice: random.Random, models: Sequence[str]) -> tuple[str, int, str, dict[str, Any]]:
    """(model, tokens, cluster, pins)."""
    world = dice.choice((2, 3, 4, 4, 6, 8, 8))
    names: set[str] = set()
    for _ in range(dice.choice((1, 2, 3, 3, 4))):
        names.update(dice.choices([*VALUES], [OFTEN.get(name, 1) for name in VALUES]))
    nodes = dice.choice([1, 1, *([2] if world % 2 == 0 else [])])
    pins = {name: dice.choice(VALUES[name]) for name in sorted(names)}
    return dice.choice(models), dice.choice((8, 11, 12, 13, 16)), f"h100:{nodes}x{world // nodes}", pins


def outcome(graph: Graph, cluster: str, pins: Mapping[str, Any]) -> tuple[str, str]:
    """(what came of some pins, in words)."""
    try:
        return "planned", str(make_plan(graph, Cluster.parse(cluster), Pins.of(pins)).mesh)
    except MeshwrightError as error:
        words = str(error)
    except Exception as error:
        return "RAW", f"{type(error).__name__}: {error}"
    settings = named(words)
    for changes in settings:
        new = {name: value for name, value in {**pins, **changes}.items() if value is not None}
        try:
            make_plan(graph, Cluster.parse(cluster), Pins.of(new))
        except Exception as error:
            return "WRONG", f"{words}; {changes}: {type(error).__name__}: {error}"
    return "named" if settings else "unnamed", words


def main() -> int:
    """Draw settings; 1 if what a refusal names cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default="", help="a regular expression")
    parser.add_argument("--all", action="store_true", help="print settings that are planned too")
    asked = parser.parse_args()
    dice, counts = random.Random(asked.seed), Counter[str]()
    models = [name for name in MODELS if re.search(asked.models, name)]
    for _ in range(asked.count):
        name, length, cluster, pins = drawn(dice, models)
        what, words = outcome(graph_of(name, length), cluster, pins)
        counts[what] += 1
        if asked.all or what != "planned":
            print(f"{what:8s} {name} x {length} on {cluster}, {pins}: {words}", flush=True)
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return int(counts["WRONG"] + counts["RAW"] > 0)


if __name__ == "__main__":
    sys.exit(main())
