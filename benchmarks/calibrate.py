"""Calibration: constants in, published rows in, constants out; and how far off they are on sources that were left out.

    python benchmarks/calibrate.py [FILE.csv ...] [--most N] [--rounds N] [--linear] [--cache FOLDER] [--json] [--write]

Free are the numbers of ``meshwright/cost/catalogue.toml`` whose source is "fit", as far as the rows' devices and nodes use
them. With x their logarithms (of what a contention has above 1, of what a bandwidth beside compute lacks) and r a row's
log(predicted / measured), it minimizes

    sum over rows  w h(r / s)  +  sum over constants ((x - x0) / d)^2          s = 0.06

h is Huber's function, so that anomalous rows do not pull; w gives a source of n rows the weight of sqrt(n); x0 and d
(``PRIORS``) say where such a constant is at all, whatever the input holds, so that calibrating again from the output gives the
output. Each round prices the rows at the constants, and their plans as they stand a little beside each, and solves the linear
problem (Gauss-Newton).

``LEFT OUT``: for every source (``source_of``: the repository or paper, not its tables) the linear problem is solved again
without its rows, and they are priced by constants that have not seen them. That error is the one to expect; the fitted one
stands beside it. ``--most``: fit on at most so many rows of every model of a source, evenly spread; ``--judged``: judge at most
so many; ``--linear``: judge those that are fitted, by the linear problem alone; ``--rounds 0``: at the constants as they are.
``--write`` puts the constants into the catalogue and the left-out spread into ``spread.toml``, with a digest of the rows and
constants that it is of. With ``--cache`` what a row took is kept as well, so that a run that was ended goes on where it was. A
row that leaves something open counts with the middle of its range.
There is no constant of a row, a model or a source.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import words
from published import DATA, graph_of, rows_of
from rich.console import Console
from rich.table import Table
from rows import (
    Row,
    Unpriced,
    batch_of,
    cluster_of,
    completions_of,
    counted,
    kernels_of,
    measured_seconds,
    measured_tflops,
    normed,
    pins_of,
    precision_of,
    text_of,
    world_of,
)

from meshwright.compiler.search.prediction import step_flops
from meshwright.compiler.search.search import SECONDS, best_plan
from meshwright.compiler.search.settled import settled
from meshwright.compiler.search.task import Task, Timing
from meshwright.compiler.structure.units import split_at
from meshwright.cost import spread
from meshwright.cost.catalogue import catalogue, lookup, read_device, read_node
from meshwright.cost.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.ir.prediction import Prediction
from meshwright.ir.rule import Rules
from meshwright.planner import GAP, OPTIMIZERS, rules_of

NOISE = 0.06
HUBER = 1.5
STEP = 0.05
FAR = 0.4
"""Differences of x: of the derivatives, and the most of a round."""
UNBOUNDED = 2**50  # bytes
FILES = (DATA / "steps.csv", DATA / "scale.csv")
CONFIGURATION = ("seq_len", "dtype", "tp", "sp", "cp", "pp", "vpp", "dp", "zero/fsdp", "micro_batch", "recompute", "schedule")
COST = Path(spread.__file__).parent
Path_ = tuple[str, str, str]  # (device or node, its name, the number)


@dataclass(frozen=True)
class Prior:
    """Where a constant is at all: its middle and what its x may be off."""

    middle: float
    width: float
    offset: float = 0.0  # x = log(|value - offset|)

    def x(self, value: float) -> float:
        return math.log(max(abs(value - self.offset), 1e-6))

    def value(self, x: float) -> float:
        return self.offset + math.copysign(math.exp(x), self.middle - self.offset)


PRIORS: Mapping[str, Prior] = {
    "matmul_efficiency": Prior(0.72, 0.15), "memory_efficiency": Prior(0.7, 0.25), "depth": Prior(130, 0.7),
    "kernel": Prior(40, 0.7), "contention": Prior(1.15, 0.7, 1.0), "congestion": Prior(0.06, 1.0),
    "overlapped_bandwidth": Prior(0.85, 0.7, 1.0), "nic_latency": Prior(20, 0.7), "link_latency": Prior(4, 0.7),
}


@dataclass(frozen=True)
class Case:
    """A row to fit or to judge, in every way in which it may have run."""

    row: Row
    completions: tuple[Row, ...]
    source: str
    group: tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """A row's log(predicted / measured) by the fitted constants and by those that have not seen its source."""

    case: Case
    regime: str
    fitted: float
    left_out: float


def source_of(row: Row) -> str:
    """Who measured: the repository or paper that a row comes from. Tables and versions of one are one."""
    text = text_of(row, "source_ref") or text_of(row, "source")
    found = re.search(r"[\w.-]*nanotron[\w.-]*|[\w.-]+/[\w.-]+", text)
    named = re.split(r"[@:]", found[0] if found else text_of(row, "source"))[0]
    return "nanotron" if "nanotron" in named else named if found else " ".join(text_of(row, "source").split()[:4])


def cases_of(rows: Sequence[Row]) -> list[Case]:
    """The rows that have a time and can be planned."""
    found = []
    for row in rows:
        with suppress(Unpriced, MeshwrightError, ValueError):
            world = cluster_of(row).world
            pins = pins_of(row, world)
            open_ = measured_seconds(row) or measured_tflops(row, 1.0)
            if open_ and (pins.cp or 1) * (pins.ep or 1) == 1:
                precision_of(row)
                group = (source_of(row), text_of(row, "model_name"), text_of(row, "gpu"))
                found.append(Case(row, completions_of(row), group[0], group))
    return found


def thinned(cases: Sequence[Case], most: int) -> list[Case]:
    """At most so many cases of every model of a source, evenly spread over its configurations in their order of size."""
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.group].append(case)
    found = []
    for items in groups.values():
        items.sort(key=lambda case: (world_of(case.row), float(case.row.get("seq_len") or 0), case.row.get("row_id") or ""))
        step = (len(items) - 1) / max(1, most - 1)
        at = range(len(items)) if len(items) <= most else sorted({round(i * step) for i in range(most)})
        found += [items[i] for i in at]
    return found


# ---------------------------------------------------------------------------------------------------------- constants


def free(tables: Mapping[str, Any], cases: Sequence[Case]) -> dict[Path_, float]:
    """The numbers to fit, as the tables have them: those of source "fit" that the cases' devices and nodes use."""
    found: dict[Path_, float] = {}
    for case in cases:
        cluster = cluster_of(case.row)
        for kind, name in (("device", cluster.device.name), ("node", cluster.node.name)):
            for key, prior in PRIORS.items():
                owner = _owner(tables, kind, name, key)
                if owner and tables[kind][owner][key]["source"] == "fit":
                    assert prior
                    found[kind, owner, key] = float(tables[kind][owner][key]["value"])
    return dict(sorted(found.items()))


def _owner(tables: Mapping[str, Any], kind: str, name: str, key: str) -> str | None:
    """The table that a device's or node's number comes from."""
    while key not in tables[kind][name]:
        if "like" not in tables[kind][name]:
            return None
        name = tables[kind][name]["like"]
    return name


def patched(tables: Mapping[str, Any], values: Mapping[Path_, float]) -> dict[str, Any]:
    """The tables with other numbers."""
    found = copy.deepcopy(dict(tables))
    for (kind, name, key), value in values.items():
        found[kind][name][key]["value"] = value
    return found


def recast(cluster: Cluster, tables: Mapping[str, Any]) -> Cluster:
    """A row's cluster by the numbers of other tables; what the row says of its nodes and software stays."""
    island = cluster.island
    device = read_device(*lookup(island.device.name, tables, "device"), tables["sources"])
    node = read_node(*lookup(island.node.name, tables, "node"), tables["sources"])
    same = {name: getattr(device, name) for name in (
        "matmul_efficiency", "memory_efficiency", "kernel_seconds", "depth", "contention", "attention")}
    wires = {name: getattr(node, name) for name in ("congestion", "overlapped_bandwidth", "nic_latency", "link_latency")}
    return Cluster((replace(island, device=replace(island.device, **same), node=replace(island.node, **wires)),))


def uses(cluster: Cluster, tables: Mapping[str, Any], path: Path_) -> bool:
    """Whether a cluster's prices depend on a number."""
    kind, owner, key = path
    if (key == "congestion" and cluster.nodes <= 2) or (key in ("overlapped_bandwidth", "contention") and cluster.world == 1):
        return False
    return _owner(tables, kind, cluster.device.name if kind == "device" else cluster.node.name, key) == owner


# -------------------------------------------------------------------------------------------------------------- prices


@dataclass
class Way:
    """One way in which a row may have run, at any constants. ``again`` prices a plan as it stands, without a search: where
    constants move a little, what another plan would gain is of second order."""

    row: Row
    graph: Graph
    rules: Rules

    @classmethod
    def of(cls, row: Row, cache: Path | None) -> Way:
        graph = graph_of(row, cache)
        pins = pins_of(row, cluster_of(row).world, [block.path for block in graph.blocks])
        graph = split_at(graph, pins.stage_cuts or ())
        return cls(row, graph, rules_of(graph)[0])

    def plan(self, tables: Mapping[str, Any]) -> Plan:
        """The plan of least time, memory aside."""
        pins = pins_of(self.row, cluster_of(self.row).world, [block.path for block in self.graph.blocks])
        return best_plan(self._task(self.graph, self.rules, pins, tables), _predicted, SECONDS, timing=Timing())

    def again(self, plan: Plan, tables: Mapping[str, Any]) -> Plan:
        """The same plan at other constants."""
        rules = self.rules if plan.graph is self.graph else rules_of(plan.graph)[0]
        return settled(self._task(plan.graph, rules, Pins(), tables), plan, _predicted)

    def error(self, plan: Plan) -> float:
        """log(predicted / measured)."""
        seconds = measured_seconds(self.row)
        if not seconds:
            cluster = cluster_of(self.row)
            tflops = measured_tflops(self.row, cluster.device.flops(torch.bfloat16)) or 1.0
            seconds = step_flops(self.graph, self.rules.operators) * counted(self.row) / cluster.world / tflops / 1e12
        return math.log(_predicted(plan).step_seconds / seconds)

    def _task(self, graph: Graph, rules: Rules, pins: Pins, tables: Mapping[str, Any]) -> Task:
        wide = recast(cluster_of(self.row), tables).with_memory(UNBOUNDED)
        return Task.of(
            graph, wide, rules, pins, precision=precision_of(self.row), state_bytes=OPTIMIZERS["adamw"], gap=GAP
        )


@dataclass
class Pricer:
    """Seconds of rows at any constants. Degrees are pinned, so little is open. ``cache`` keeps graphs, and the slopes of a case
    for as long as its row, the constants and the package stay what they are."""

    tables: Mapping[str, Any]
    cache: Path | None

    def errors(self, case: Case, sets: Sequence[Mapping[Path_, float]]) -> list[float]:
        """log(predicted / measured) of a case at each set of constants; the middle of its ways."""
        ways = [Way.of(completion, self.cache) for completion in case.completions]
        every = [[way.error(way.plan(patched(self.tables, values))) for way in ways] for values in sets]
        return [(min(errors) + max(errors)) / 2 for errors in every]

    def slopes(
        self, case: Case, base: Mapping[Path_, float], moved: Sequence[Mapping[Path_, float]]
    ) -> tuple[float, list[float]]:
        """The error of a case, and by how much each other set changes that of its first way."""
        if self.cache is None:
            return self._slopes(case, base, moved)
        own = [sorted(values.items()) for values in (base, *moved)]
        key = repr((case.completions, own, self.tables, _programs()))
        kept = self.cache / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.slopes.json"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(self._slopes(case, base, moved)))
        error, changes = json.loads(kept.read_text())
        return error, changes

    def _slopes(
        self, case: Case, base: Mapping[Path_, float], moved: Sequence[Mapping[Path_, float]]
    ) -> tuple[float, list[float]]:
        tables = patched(self.tables, base)
        ways = [Way.of(completion, self.cache) for completion in case.completions]
        first = ways[0].plan(tables)
        own = ways[0].error(first)
        errors = [own, *(way.error(way.plan(tables)) for way in ways[1:])]
        changes = [ways[0].error(ways[0].again(first, patched(self.tables, values))) - own for values in moved]
        return (min(errors) + max(errors)) / 2, changes


@lru_cache(maxsize=1)
def _programs() -> str:
    """A digest of all that seconds are made by, the catalogue aside; memory is unlimited."""
    files = [*map(Path, (pins_of.__code__.co_filename, words.__file__))]
    files += sorted(file for folder in ("compiler", "cost", "ir") for file in (COST.parent / folder).rglob("*.py")
                    if file.parent.name != "memory")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _predicted(plan: Plan) -> Prediction:
    """What a plan is predicted to take; no program is made, for the row ran."""
    assert plan.predicted is not None
    return plan.predicted


# ----------------------------------------------------------------------------------------------------------------- fit


def solve(errors: np.ndarray, slopes: np.ndarray, weights: np.ndarray, x: np.ndarray, priors: Sequence[Prior]) -> np.ndarray:
    """The change of x that is best for errors that are linear in it."""
    widths = np.array([prior.width for prior in priors])
    middles = np.array([prior.x(prior.middle) for prior in priors])
    change = np.zeros(len(x))
    for _ in range(60):
        left = np.abs(errors + slopes @ change) / NOISE
        pull = weights * np.minimum(1.0, HUBER / np.maximum(left, 1e-9)) / NOISE**2
        matrix = (slopes.T * pull) @ slopes + np.diag(1 / widths**2)
        right = -(slopes.T * pull) @ errors - (x - middles) / widths**2
        change = np.linalg.solve(matrix, right)
    return np.asarray(change)


def weights_of(cases: Sequence[Case]) -> np.ndarray:
    """Of n rows of a source each has 1 / sqrt(n)."""
    counts: dict[str, int] = defaultdict(int)
    for case in cases:
        counts[case.source] += 1
    return np.array([counts[case.source] ** -0.5 for case in cases])


@dataclass
class Calibration:
    """One calibration: what is free, where it is, and the slopes at that place."""

    pricer: Pricer
    cases: Sequence[Case]
    paths: tuple[Path_, ...]
    x: np.ndarray

    @property
    def priors(self) -> list[Prior]:
        return [PRIORS[key] for _, _, key in self.paths]

    def values(self, x: np.ndarray) -> dict[Path_, float]:
        """The constants at x."""
        return {path: prior.value(at) for path, prior, at in zip(self.paths, self.priors, x, strict=True)}

    def slopes(self, say: Callable[[str], None]) -> tuple[np.ndarray, np.ndarray]:
        """Errors of the cases and their derivatives."""
        errors, slopes = np.zeros(len(self.cases)), np.zeros((len(self.cases), len(self.x)))
        for number, case in enumerate(self.cases):
            say(f"{number + 1}/{len(self.cases)}")
            own = [i for i, path in enumerate(self.paths) if uses(cluster_of(case.row), self.pricer.tables, path)]
            sets = [self.values(self.x + STEP * np.eye(len(self.x))[i]) for i in own]
            errors[number], changes = self.pricer.slopes(case, self.values(self.x), sets)
            slopes[number, own] = np.array(changes) / STEP
        return errors, slopes

    def run(self, rounds: int, say: Callable[[str], None]) -> tuple[np.ndarray, np.ndarray]:
        """Fit; the errors at the last place, and slopes where they were taken last. Without ``rounds`` nothing moves."""
        if not rounds:
            return self.slopes(say)
        for number in range(rounds):
            errors, slopes = self.slopes(lambda text, number=number: say(f"round {number + 1}: {text}"))  # type: ignore[misc]
            change = solve(errors, slopes, weights_of(self.cases), self.x, self.priors)
            self.x = self.x + np.clip(change, -FAR, FAR)
            say(f"round {number + 1}: mean {np.abs(errors).mean():.3f}, largest change {np.abs(change).max():.3f}\n")
        return errors + slopes @ np.clip(change, -FAR, FAR), slopes

    def without(self, source: str, errors: np.ndarray, slopes: np.ndarray) -> dict[Path_, float]:
        """The constants that the other sources' rows give."""
        return self.values(self.x + self._change_without(source, errors, slopes))

    def linear(self, errors: np.ndarray, slopes: np.ndarray) -> list[Judged]:
        """The cases that were fitted, judged by the linear problem: no row is priced again."""
        left_out = {source: errors + slopes @ self._change_without(source, errors, slopes)
                    for source in {case.source for case in self.cases}}
        return [Judged(case, regime_of(case.row), float(errors[i]), float(left_out[case.source][i]))
                for i, case in enumerate(self.cases)]

    def _change_without(self, source: str, errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        kept = [i for i, case in enumerate(self.cases) if case.source != source]
        cases = [self.cases[i] for i in kept]
        return solve(errors[kept], slopes[kept], weights_of(cases), self.x, self.priors)


def judge(
    cases: Sequence[Case], pricer: Pricer, fitted: Mapping[Path_, float], left_out: Mapping[str, Mapping[Path_, float]],
    say: Callable[[str], None],
) -> list[Judged]:
    """Every case by the fitted constants and by those of the other sources."""
    found = []
    for number, case in enumerate(cases):
        say(f"judged {number + 1}/{len(cases)}")
        both = pricer.errors(case, [fitted, left_out.get(case.source, fitted)])
        found.append(Judged(case, regime_of(case.row), *both))
    return found


def regime_of(row: Row) -> str:
    """The regime of a row, as its plan will have it."""
    cluster = cluster_of(row)
    pins = pins_of(row, cluster.world)
    sizes = {"pp": pins.pp or 1, "dp": pins.dp or 1, "tp": pins.tp or 1}
    return spread.regime(spread.Mesh(tuple(sizes), tuple(sizes.values())), cluster.per_node)


# -------------------------------------------------------------------------------------------------------------- report


def numbers(errors: Sequence[float]) -> dict[str, float]:
    """Of logs: mean absolute error, the error below which 90 in 100 are, bias, the worst."""
    relative = np.exp(np.array(errors)) - 1
    size = np.abs(relative)
    return {
        "rows": len(size), "mean": float(size.mean()), "p90": float(np.quantile(size, 0.9)), "bias": float(relative.mean()),
        "worst": float(size.max()),
    }


def report(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Fitted and left out: all, by device, by regime, by source."""
    groups: dict[str, list[Judged]] = {"all rows": list(judged)}
    for item in judged:
        family = lookup(cluster_of(item.case.row).device.name, catalogue(), "device")[0].partition("-")[0]
        for name in (family, f"regime: {item.regime}", f"source: {item.case.source}"):
            groups.setdefault(name, []).append(item)
    return [
        {"what": name, "fitted": numbers([i.fitted for i in items]), "left out": numbers([i.left_out for i in items])}
        for name, items in groups.items()
    ]


def spreads_of(judged: Sequence[Judged]) -> dict[str, spread.Spread]:
    """By regime, 5 and 95 in 100 of measured / predicted where the source was left out; a regime of few rows has none."""
    groups: dict[str, list[float]] = {spread.ALL: []}
    for item in judged:
        groups[spread.ALL].append(item.left_out)
        groups.setdefault(item.regime, []).append(item.left_out)
    found = {}
    for name, errors in groups.items():
        if len(errors) >= 10:
            low, high = np.quantile(-np.array(errors), [0.05, 0.95])
            found[name] = spread.Spread(round(min(1.0, math.exp(low)), 3), round(max(1.0, math.exp(high)), 3), len(errors))
    return found


def _groups(judged: Sequence[Judged]) -> list[list[Judged]]:
    """Configurations of one model on the same devices with the same batch, as far as there are several."""
    groups: dict[tuple[Any, ...], list[Judged]] = defaultdict(list)
    for item in judged:
        groups[*item.case.group, world_of(item.case.row), batch_of(item.case.row)].append(item)
    return [items for items in groups.values() if len(items) > 1]


def _configuration(row: Row) -> str:
    """What a row says of how it ran, but for the version of its software."""
    return repr([[text_of(row, key).removesuffix(".0") for key in CONFIGURATION], kernels_of(row), normed(row)])


def apart_of(judged: Sequence[Judged]) -> float:
    """What half of the pairs of configurations of one model differ by less than from what is predicted of the two."""
    pairs = [abs(a.left_out - b.left_out) for items in _groups(judged) for a, b in itertools.combinations(items, 2)]
    return round(math.exp(float(np.median(pairs))) - 1, 3) if pairs else 0.0


def regret_of(judged: Sequence[Judged]) -> dict[str, float]:
    """Of groups of configurations of one model: how much longer the one predicted fastest took than the best (the part of
    groups within 5%), and the best of the three predicted fastest; sources left out. A configuration that was measured several
    times, as with two versions of a framework, is one, of the mean of its times."""
    one, three = [], []
    for items in _groups(judged):
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for item in items:
            measured = measured_seconds(item.case.row) or math.inf
            times[_configuration(item.case.row)].append((measured, measured * math.exp(item.left_out)))
        if len(times) < 2:
            continue
        seconds = [float(np.mean([measured for measured, _ in both])) for both in times.values()]
        predicted = [float(np.mean([seconds_ for _, seconds_ in both])) for both in times.values()]
        order = sorted(range(len(seconds)), key=predicted.__getitem__)
        one.append(seconds[order[0]] / min(seconds) - 1)
        three.append(min(seconds[i] for i in order[:3]) / min(seconds) - 1)
    if not one:
        return {"groups": 0}
    within = [float(np.mean([value <= 0.05 for value in values])) for values in (one, three)]
    return {"groups": len(one), "first within 5%": within[0], "first three within 5%": within[1], "worst": max(one)}


def origin(files: Sequence[Path] = FILES, tables: Mapping[str, Any] | None = None) -> str:
    """A digest of rows and of the constants that may be fitted: what a spread is of."""
    found = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    tables = catalogue() if tables is None else tables
    numbers_ = [(kind, name, key, number["value"]) for kind in ("device", "node") for name, table in tables[kind].items()
                for key, number in table.items() if isinstance(number, Mapping) and number.get("source") == "fit"]
    found.update(repr(sorted(numbers_)).encode())
    return found.hexdigest()[:16]


def write(values: Mapping[Path_, float], folder: Path = COST) -> None:
    """Put constants into the catalogue's text."""
    text = (folder / "catalogue.toml").read_text(encoding="utf-8")
    for (kind, name, key), value in values.items():
        pattern = re.compile(rf"(\[{kind}\.{re.escape(name)}\]\n(?:(?!\n\[)[\s\S])*?\n{key} = {{value = )[\d.e-]+")
        text, count = pattern.subn(lambda found, value=value: f"{found[1]}{value:.4g}", text)  # type: ignore[misc]
        assert count == 1, (kind, name, key)
    (folder / "catalogue.toml").write_text(text, encoding="utf-8")


def write_spread(spreads: Mapping[str, spread.Spread], apart: float, of: str, folder: Path = COST) -> None:
    """Put spreads into their file. ``of``: their ``origin``."""
    lines = [f'"{name}" = {{low = {s.low:g}, high = {s.high:g}, rows = {s.rows}}}' for name, s in sorted(spreads.items())]
    head = (folder / "spread.toml").read_text(encoding="utf-8").partition("[")[0]
    text = f'{head}[made]\nof = "{of}"\n\n[order]\napart = {apart:g}\n\n[regime]\n' + "\n".join(lines) + "\n"
    (folder / "spread.toml").write_text(text, encoding="utf-8")


def show(
    lines: Sequence[Mapping[str, Any]], before: Mapping[Path_, float], after: Mapping[Path_, float], console: Console
) -> None:
    """Print constants and errors."""
    constants = Table("constant", "in", "out")
    for path, value in after.items():
        constants.add_row(".".join(path), f"{before[path]:.4g}", f"{value:.4g}")
    console.print(constants)
    table = Table("", "rows", "LEFT OUT mean", "90 in 100", "bias", "worst", "fitted mean", "90 in 100")
    for line in lines:
        out, own = line["left out"], line["fitted"]
        table.add_row(
            line["what"], str(out["rows"]), f"{out['mean']:.1%}", f"{out['p90']:.1%}", f"{out['bias']:+.1%}",
            f"{out['worst']:.0%}", f"{own['mean']:.1%}", f"{own['p90']:.1%}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="fit the catalogue's constants to published rows")
    parser.add_argument("files", nargs="*", type=Path, default=list(FILES))
    parser.add_argument("--most", type=int, default=6, help="rows of every model of a source to fit on")
    parser.add_argument("--judged", type=int, default=10**6, help="rows of every model of a source to judge")
    parser.add_argument("--rounds", type=int, default=3, help="of the fit; 0 leaves the constants as they are")
    parser.add_argument("--linear", action="store_true",
                        help="judge the rows that are fitted, by the linear problem alone: no row is priced again")
    parser.add_argument("--cache", type=Path, default=None, help="a folder that keeps captured graphs and what rows took")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true",
                        help="put constants (if there were rounds) and the spread into the package")
    options = parser.parse_args(arguments)
    if options.linear and options.write and options.rounds:
        parser.error("with --linear no row is priced at the constants that a fit ends at: --write takes --rounds 0 beside it")

    def say(text: str) -> None:
        print(f"\r{text}", end="", file=sys.stderr, flush=True)

    cases = cases_of(rows_of(options.files, "", "ABCD"))
    alike = ("source", "model_name", "seq_len", "global_batch_seqs", "notes")  # rows of one captured graph follow each other
    cases.sort(key=lambda case: [text_of(case.row, key) for key in alike])
    fitted, tables = thinned(cases, options.most), catalogue()
    before = free(tables, fitted)
    pricer = Pricer(tables, options.cache)
    x = np.array([PRIORS[key].x(value) for (_, _, key), value in before.items()])
    calibration = Calibration(pricer, fitted, tuple(before), x)
    errors, slopes = calibration.run(options.rounds, say)
    after = calibration.values(calibration.x)
    left_out = {source: calibration.without(source, errors, slopes) for source in sorted({case.source for case in fitted})}
    if options.linear:
        judged = calibration.linear(errors, slopes)
    else:
        judged = judge(thinned(cases, options.judged), pricer, after, left_out, say)
    lines, found = report(judged), spreads_of(judged)
    if options.json:
        print(json.dumps({
            "constants": {".".join(path): value for path, value in after.items()}, "errors": lines,
            "left_out": {name: {".".join(path): value for path, value in values.items()} for name, values in left_out.items()},
            "spread": {name: s._asdict() for name, s in found.items()}, "apart": apart_of(judged), "regret": regret_of(judged),
            "rows": [{"row": j.case.row.get("row_id"), "source": j.case.source, "regime": j.regime, "fitted": j.fitted,
                      "left_out": j.left_out} for j in judged],
        }))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        show(lines, before, after, console)
        console.print(f"regret, sources left out: {regret_of(judged)}")
    if options.write:
        write(after if options.rounds else {})
        write_spread(found, apart_of(judged), origin(options.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
