"""Published runs through the planner: predicted against measured, row by row.

    python benchmarks/published.py [FILE.csv ...] [--json] [--source TEXT] [--limit N] [--trust AB] [--peaks] [--cache FOLDER]

A file has the columns of ``data/steps.csv`` (a row is a timed configuration) or of ``data/memory.csv`` (a row is a memory
figure); default is both. Each row goes the way that plans go: the model is built from its dimensions on the meta device,
captured at the published global batch, and planned with the published degrees as pins. A row that cannot be priced is
printed with the reason. What a row says about its hardware and software, ``rows.py`` reads from its own columns by tables that
any source shares. There is no factor for a row, a model or a source.

Measured step time is ``step_time_s``, or else tokens over throughput (``step_time_s_derived``), or model FLOPs over TFLOP/s,
which the output marks with a tilde.

``--peaks``: only rows that state a peak memory. ``--cache``: a folder that keeps captured graphs, of one version of the package
(empty it after a change of the capture), and what rows took, for as long as the package stays what it is.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import pickle
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import room
import torch
import words
from rich.console import Console
from rich.table import Table
from rows import (
    DATA,
    YES,
    Row,
    Shape,
    Unpriced,
    assumed,
    cluster_of,
    completions_of,
    counted,
    degree,
    imbalance_of,
    kernel_of,
    measured_seconds,
    measured_tflops,
    normed,
    number,
    pins_of,
    precision_of,
    recompute_of,
    shape_of,
    text_of,
    tokens_of,
    world_of,
    zero_of,
)
from torch import nn

import meshwright
from meshwright.cost.cluster import Cluster
from meshwright.footprint import footprints
from meshwright.ir.declared.experts import with_imbalance
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.planner import OPTIMIZERS, OutOfMemoryError, capture_model, make_plan, rules_of
from meshwright.published.architectures import Gpt, build
from meshwright.published.zoo import Trained
from meshwright.resized import of_batch

FILES = (DATA / "steps.csv", DATA / "memory.csv")

_UNBOUNDED = 2**50  # bytes
_BATCH = 8
"""Sequences at which a model is captured."""


@dataclass(frozen=True)
class Result:
    """One row's outcome. Seconds, GB (10^9 bytes), TFLOP/s per device by the row's own count of FLOPs. ``device_seconds``: what
    a token takes of the devices per second of the step, which is what configurations are ranked by. ``low_seconds``,
    ``high_seconds``: of what the row leaves open, the fastest way and the slowest; the prediction is their geometric mean.
    ``profile``: whether it is no training run, but a profile of a few layers (the "kind" that a row of memory states)."""

    row: str
    source: str
    model: str
    device: str
    config: str
    measured_seconds: float | None
    derived: bool
    predicted_seconds: float | None
    measured_tflops: float | None
    predicted_tflops: float | None
    measured_gb: float | None
    predicted_gb: float | None
    reason: str
    planning_seconds: float
    device_seconds: float = 1.0
    low_seconds: float | None = None
    high_seconds: float | None = None
    profile: bool = False

    @property
    def error(self) -> float | None:
        """Relative error of the step time."""
        if self.predicted_seconds is None or not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory."""
        return None if self.predicted_gb is None or not self.measured_gb else self.predicted_gb / self.measured_gb - 1


@lru_cache(maxsize=4)
def captured(shape: Shape, attention: str, precision: str, norms: bool = False) -> Graph:
    """The graph of a model of these dimensions at its global batch. ``attention``: "torch", "scores", else flash; ``norms``:
    whether an RMS norm is one operator."""
    model = build(shape.architecture, shape.seq, {"torch": "eager", "scores": "scores"}.get(attention, "sdpa"))
    if norms:
        _norms(model)
    ids = torch.zeros(shape.batch, shape.seq, dtype=torch.int64, device="meta")
    step = model if isinstance(model, Gpt) else Trained(model)  # a Gpt has no other result than its loss
    return capture_model(step, (), {"input_ids": ids, "labels": ids.clone()}, (), None, precision)


def _norms(model: nn.Module) -> None:
    """Every RMS norm of a model of ``transformers`` as one operator."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, nn.RMSNorm(child.weight.shape[0], child.variance_epsilon, device="meta"))


def graph_of(row: Row, cache: Path | None = None) -> Graph:
    """The row's model at its global batch; ``cache``: a folder that keeps it."""
    kernel = kernel_of(row)
    what = (kernel if kernel in ("torch", "scores") else "flash", precision_of(row), normed(row))
    return _kept_graph(shape_of(row), what, cache)


def _kept_graph(shape: Shape, what: tuple[str, str, bool], cache: Path | None) -> Graph:
    """A graph, kept where there is a folder: a model is captured at one batch, and that of another follows from it, but of a
    mixture, which is captured at each."""
    kept = None if cache is None else cache / f"{hashlib.sha256(repr((shape, *what)).encode()).hexdigest()[:24]}.pickle"
    if kept is not None and kept.exists():
        return _read(kept)
    at_once = shape.experts or shape.batch == _BATCH
    first = None if at_once else _kept_graph(shape._replace(batch=_BATCH), what, cache)
    graph = captured(shape, *what) if first is None else of_batch(first, Fraction(shape.batch, _BATCH))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(graph))
    return graph


@lru_cache(maxsize=4)
def _read(path: Path) -> Graph:
    """A kept graph: written above, by this program."""
    graph: Graph = pickle.loads(path.read_bytes())
    return graph


def planned(graph: Graph, cluster: Cluster, pins: Pins, precision: str) -> tuple[Plan, bool]:
    """The plan of a published run, and whether it is predicted to fit, with as much left free as plans leave. It ran, so it is
    priced all the same, with memory unlimited; only what the row leaves open (ZeRO, micro-batches) is chosen so that it fits,
    if it can. All of them made all logits at once."""
    pins = replace(pins, loss_rows=0)
    plan = make_plan(graph, cluster.with_memory(_UNBOUNDED), pins, precision=precision)
    if plan.predicted.bytes_per_rank <= cluster.with_headroom().capacity_bytes:
        return plan, True
    if None in (pins.zero, pins.microbatches):
        with suppress(OutOfMemoryError):
            return make_plan(graph, cluster, pins, precision=precision), True
    return plan, False


@lru_cache(maxsize=1)
def programs() -> str:
    """A digest of the package, and of what reads the rows."""
    folder = Path(meshwright.__file__).parent
    readers = map(Path, (pins_of.__code__.co_filename, words.__file__, room.__file__))
    files = [*readers, *sorted(folder.rglob("*.py")), *sorted(folder.rglob("*.toml"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kept(row: Row, cache: Path | None) -> Result:
    """A row planned, or as it was by the same package: a run that was ended goes on where it was."""
    if cache is None:
        return price(row)
    key = hashlib.sha256((repr(sorted(row.items())) + programs()).encode()).hexdigest()[:24]
    file = cache / f"{key}.priced.json"
    if not file.exists():
        result = price(row, cache)
        cache.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(result)))
    return Result(**json.loads(file.read_text()))


def price(row: Row, cache: Path | None = None) -> Result:
    """Plan one row; every failure becomes its reason."""
    start = time.perf_counter()
    gib = "gib" in text_of(row, "mem_kind", "unit")
    peak = number(row, "peak_mem_GB")
    result = Result(
        row=row.get("row_id") or row.get("name") or "", source=row.get("source") or "", model=row.get("model_name") or "",
        device=row.get("gpu") or "", config="", measured_seconds=None, derived=not row.get("step_time_s"),
        predicted_seconds=None, measured_tflops=number(row, "measured_tflops_per_gpu"), predicted_tflops=None,
        measured_gb=peak * 2**30 / 1e9 if peak and gib else peak, predicted_gb=None, reason="", planning_seconds=0.0,
        profile="profile" in text_of(row, "kind"),
    )
    try:
        result = replace(
            result, config=_describe(row), measured_seconds=measured_seconds(row),
            device_seconds=world_of(row) / tokens_of(row),
        )
        result = _priced(row, result, cache)
    except Exception as error:
        result = replace(result, reason=" ".join(str(error).split())[:300] or type(error).__name__)
    return replace(result, planning_seconds=time.perf_counter() - start)


def _priced(row: Row, result: Result, cache: Path | None) -> Result:
    """The result with its predictions, over all ways in which the row may have run that fit, if any does. Raises whatever
    stands in their way."""
    completions = [_completed(completion, result, cache) for completion in completions_of(row)]
    completions = [found for found, fits in completions if fits] or [found for found, _ in completions]
    seconds = sorted(found.predicted_seconds or 0.0 for found in completions)
    first = min(completions, key=lambda found: found.predicted_seconds or 0.0)
    middle = math.sqrt(seconds[0] * seconds[-1])
    held = [found.predicted_gb or 0.0 for found in completions]
    scale = middle / seconds[0] if seconds[0] else 1.0
    return replace(
        first, predicted_gb=math.sqrt(min(held) * max(held)), predicted_seconds=middle, low_seconds=seconds[0],
        high_seconds=seconds[-1],
        predicted_tflops=first.predicted_tflops / scale if first.predicted_tflops else None,
        reason="; ".join(words for words in (assumed(row), first.reason) if words),
    )


def _completed(row: Row, result: Result, cache: Path | None) -> tuple[Result, bool]:
    """The result of one way in which the row may have run, and whether that is predicted to fit."""
    cluster, precision = cluster_of(row), precision_of(row)
    seconds, tflops = result.measured_seconds, measured_tflops(row, cluster.device.flops(torch.bfloat16))
    if not (seconds or tflops or result.measured_gb):
        raise Unpriced("the row states neither a step time nor a rate nor a peak memory")
    pins_of(row, cluster.world)  # before the capture: what is wrong with them is known at once
    graph = with_imbalance(graph_of(row, cache), imbalance_of(row))
    pins = pins_of(row, cluster.world, [block.path for block in graph.blocks])
    plan, fits = planned(graph, cluster, pins, precision)
    predicted = plan.predicted.step_seconds
    if tflops and not (seconds or result.measured_gb):  # FLOPs over the rate
        seconds = predicted * plan.predicted.tflops_per_device * counted(row) / tflops
    return replace(
        result, measured_seconds=seconds, predicted_seconds=predicted,
        predicted_gb=_held(row, plan, cluster) / 1e9, reason="" if fits else "predicted not to fit",
        predicted_tflops=result.measured_tflops * seconds / predicted if result.measured_tflops and seconds else None,
    ), fits


def _held(row: Row, plan: Plan, cluster: Cluster) -> float:
    """Bytes of the rank that a row is of, where it names one ("rank7"), of the fullest elsewhere: what is alive at the worst
    moment, or, where the row's figure is that (``mem_kind``), what torch's allocator reserves for it."""
    named = re.search(r"\brank ?(\d+)", text_of(row, "condition", "mem_kind"))
    rank = None if named is None or plan.pipeline is None else int(named[1]) * plan.pipeline.degree // plan.mesh.world
    if "reserved" in text_of(row, "mem_kind"):
        ranks = footprints(plan, rules_of(plan.graph)[0], OPTIMIZERS["adamw"], None if rank is None else [rank],
                           cluster.device, room.room_of(row))
        return max(one.reserved or one.bytes for one in ranks.values())
    return plan.predicted.bytes_per_rank if rank is None else plan.predicted.bytes_per_pipeline_rank[rank]


def _describe(row: Row) -> str:
    words = [f"{key}{degree(row, key)}" for key in ("tp", "cp", "pp", "vpp", "ep", "dp") if degree(row, key) > 1]
    words += [f"zero{level}" for level in [zero_of(row)] if level is not None]
    words += ["sp"] if text_of(row, "sp") in YES else []
    words += [f"mb{int(value)}" for value in [number(row, "micro_batch")] if value]
    return " ".join([*words, recompute_of(row) if text_of(row, "recompute") else ""]).strip()


def summary(results: Iterable[Result]) -> list[dict[str, Any]]:
    """By source and device: rows, mean absolute and worst error of step time and memory, rank correlation per model."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result.source, result.device].append(result)
    lines = []
    for (source, device), items in groups.items():
        errors = [abs(item.error) for item in items if item.error is not None]
        memory = [abs(item.memory_error) for item in items if item.memory_error is not None]
        lines.append({
            "source": source, "device": device, "rows": len(items),
            "priced": sum(item.predicted_seconds is not None for item in items),
            "mean_error": mean(errors) if errors else None, "worst_error": max(errors) if errors else None,
            "rank_correlation": rank_correlation(items), "memory_error": mean(memory) if memory else None,
        })
    return lines


def peaks(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Of peak memory, of all rows that state one, of training runs and of profiles, and by source: rows, mean absolute error,
    bias, the worst. Nothing of it is fitted, so no source is left out."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result.memory_error is not None:
            for name in ("all", "profiles" if result.profile else "training runs", result.source):
                groups[name].append(result.memory_error)
    return [
        {"source": name, "rows": len(errors), "mean": mean(map(abs, errors)), "bias": mean(errors),
         "worst": max(errors, key=abs)}
        for name, errors in groups.items()
    ]


def rank_correlation(results: Iterable[Result]) -> float | None:
    """Spearman's coefficient between predicted and measured seconds of a token: the mean over models with at least four priced
    configurations; None where there is none."""
    found = [value for line in ranks(results) if (value := line["rank_correlation"]) is not None]
    return mean(found) if found else None


def ranks(results: Iterable[Result]) -> list[dict[str, Any]]:
    """By source, model and device: configurations priced, and Spearman's coefficient (None below four of them)."""
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.error is not None:
            groups[result.source, result.model, result.device].append(result)
    return [
        {"source": source, "model": model, "device": device, "rows": len(items), "rank_correlation": _spearman(items)}
        for (source, model, device), items in groups.items()
    ]


def regrets(results: Iterable[Result]) -> list[dict[str, Any]]:
    """By source, model, device and batch: how much longer the configuration that is predicted fastest took than the measured
    best, and the best of the three predicted fastest. Configurations that keep as many devices for a token share a group."""
    groups: dict[tuple[str, str, str, float], list[Result]] = defaultdict(list)
    for result in results:
        if result.error is not None:
            groups[result.source, result.model, result.device, result.device_seconds].append(result)
    lines = []
    for (source, model, device, _), items in groups.items():
        if len(items) > 1:
            best = min(item.measured_seconds or 0.0 for item in items)
            first = sorted(items, key=lambda item: item.predicted_seconds or 0.0)[:3]
            taken = [(item.measured_seconds or 0.0) / best - 1 for item in first]
            lines.append({"source": source, "model": model, "device": device, "rows": len(items), "regret": taken[0],
                          "regret_of_three": min(taken)})
    return lines


def _spearman(items: Sequence[Result]) -> float | None:
    if len(items) < 4:
        return None
    one = _ranks([(item.predicted_seconds or 0.0) * item.device_seconds for item in items])
    two = _ranks([(item.measured_seconds or 0.0) * item.device_seconds for item in items])
    a, b = mean(one), mean(two)
    spread = math.sqrt(sum((x - a) ** 2 for x in one) * sum((y - b) ** 2 for y in two))
    return sum((x - a) * (y - b) for x, y in zip(one, two, strict=True)) / spread if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks, equal values sharing their mean."""
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]


def rows_of(paths: Sequence[Path], source: str, trust: str) -> list[Row]:
    """The rows to price. Formulas of memory.csv are no runs: they are tested in tests/test_memory.py."""
    rows: list[Row] = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            rows += [row for row in csv.DictReader(file) if row.get("kind") not in ("formula", "published-estimate")]
    return [row for row in rows if source.lower() in text_of(row, "source") and (row.get("trust") or "A") in trust]


def show(results: Sequence[Result], console: Console) -> None:
    """Print the rows, then the sources."""
    table = Table("row", "model", "device", "configuration", "measured", "predicted", "error", "TFLOP/s", "GB", "reason")
    for item in results:
        table.add_row(
            item.row, item.model, item.device, item.config,
            f"{'~' if item.derived else ''}{item.measured_seconds:.3g} s" if item.measured_seconds else "",
            f"{item.predicted_seconds:.3g} s" if item.predicted_seconds else "",
            f"{item.error:+.1%}" if item.error is not None else "",
            f"{item.predicted_tflops:.0f} / {item.measured_tflops:.0f}" if item.predicted_tflops else "",
            f"{item.predicted_gb:.1f} / {item.measured_gb:.1f}" if item.predicted_gb and item.measured_gb else "", item.reason,
        )
    console.print(table)
    lines = Table("source", "device", "rows", "priced", "mean error", "worst", "rank correlation", "memory error")
    for line in summary(results):
        percent = [line["mean_error"], line["worst_error"], line["memory_error"]]
        words = ["" if value is None else f"{value:.1%}" for value in percent]
        rank = "" if line["rank_correlation"] is None else f"{line['rank_correlation']:.2f}"
        lines.add_row(line["source"], line["device"], str(line["rows"]), str(line["priced"]), *words[:2], rank, words[2])
    console.print(lines)
    order = Table("source", "model", "device", "priced", "rank correlation")
    for line in ranks(results):
        if line["rank_correlation"] is not None:
            order.add_row(line["source"], line["model"], line["device"], str(line["rows"]), f"{line['rank_correlation']:.2f}")
    console.print(order)
    for line in peaks(results):
        words = f"mean error {line['mean']:.1%}, bias {line['bias']:+.1%}, worst {line['worst']:+.0%}"
        console.print(f"peak memory, {line['source']}: {line['rows']} rows, {words}")
    lost = regrets(results)
    if lost:
        good, three = (sum(line[key] <= 0.05 for line in lost) for key in ("regret", "regret_of_three"))
        worst = max(line["regret"] for line in lost)
        console.print(f"regret: in {good} of {len(lost)} groups the configuration predicted fastest is within 5% of the best, "
                      f"in {three} one of the three; at worst {worst:.0%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="predicted against measured for published runs")
    parser.add_argument("files", nargs="*", type=Path, default=list(FILES), help="CSV files with the columns of the data")
    parser.add_argument("--json", action="store_true", help="a line of JSON per row as it comes, then one with the sources")
    parser.add_argument("--source", default="", help="only sources that hold this text")
    parser.add_argument("--trust", default="ABCD", help="only rows of these grades")
    parser.add_argument("--peaks", action="store_true", help="only rows that state a peak memory")
    parser.add_argument("--axis", choices=("cp", "ep", "pp", "tp"), help="only rows that split over this axis")
    parser.add_argument("--limit", type=int, default=None, help="at most this many rows")
    parser.add_argument("--cache", type=Path, default=None, help="a folder that keeps captured graphs")
    options = parser.parse_args(arguments)
    rows = rows_of(options.files, options.source, options.trust)
    rows = [row for row in rows if not options.axis or (number(row, options.axis) or 1) > 1]
    rows = [row for row in rows if not options.peaks or number(row, "peak_mem_GB")][: options.limit]
    # rows of one captured graph follow each other
    rows.sort(key=lambda row: [text_of(row, key) for key in ("source", "model_name", "seq_len", "global_batch_seqs", "notes")])
    results = []
    for count, row in enumerate(rows, 1):
        results.append(kept(row, options.cache))
        if options.json:
            print(json.dumps(asdict(results[-1]) | {"error": results[-1].error}), flush=True)
        print(f"\r{count}/{len(rows)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if options.json:
        print(json.dumps({"sources": summary(results), "models": ranks(results), "regrets": regrets(results),
                          "peaks": peaks(results)}))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
