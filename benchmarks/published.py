"""Published runs through the planner: predicted against measured, row by row.

    python benchmarks/published.py [FILE.csv ...] [--json] [--source TEXT] [--limit N] [--trust AB] [--cache FOLDER]

A file has the columns of ``data/steps.csv`` (a row is a timed configuration) or of ``data/memory.csv`` (a row is a memory
figure); default is both. Each row goes the way that plans go: the model is built from its dimensions on the meta device,
captured at the published global batch, and planned with the published degrees as pins. A row that cannot be priced is
printed with the reason.

What a row says about its hardware and software is read from its own columns, by tables that any source shares: the node
(NICs) from ``interconnect`` (``NODES``), the attention kernel from ``notes`` or, where nothing is said, from what there was
when it was published (``KERNELS``, ``FLASH_PUBLISHED``), fusion and overlap from ``notes`` (``FUSED``, ``NORMED``,
``OVERLAPPED``), what recomputation runs again from the columns that name the software (``CHECKPOINTED``). There is no factor
for a row, a model or a source.

Measured step time is ``step_time_s``, or else tokens over throughput (``step_time_s_derived``), or model FLOPs over TFLOP/s,
which the output marks with a tilde.

``--cache``: a folder that keeps captured graphs from run to run (of one version of the package: empty it after a change of
the capture).
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from meshwright.architectures import Architecture, build
from meshwright.cost.cluster import Cluster
from meshwright.graph import Graph
from meshwright.pins import Pins
from meshwright.plan import Plan
from meshwright.planner import OutOfMemoryError, capture_model, make_plan

DATA = Path(__file__).parent / "data"
FILES = (DATA / "steps.csv", DATA / "memory.csv")
Row = Mapping[str, str]

NODES: Sequence[tuple[str, str, str]] = (
    # words in "interconnect", device they are on ("" any), node of the catalogue
    ("1600Gbps RoCE", "", "roce1600"),
    ("4 x 100 Gb/s", "a100", "p4d"),
    ("EFA", "a100", "p4d"),
    ("(playbook)", "h100", "playbook"),
    ("EFA", "h100", "p5"),
    ("A800-like", "", "hgx-a800"),
)
"""Where none matches, the device's own node: the vendor's reference design."""

KERNELS: Sequence[tuple[str, str]] = (
    # words in "notes", attention kernel
    ("kernel=flash_attention2", "flash2"),
    ("kernel=flash_attentionv1", "flash1"),
    ("kernel=torch", "torch"),  # scores, mask and softmax, each an operator of its own
    ("kernel=", "scores"),  # any other kernel that a row names forms the matrix of scores, scaled and masked in its softmax
    ("NeMo", "flash3"),  # its Transformer Engine runs cuDNN's
    ("flash attention", "flash"),  # of no version
)
FLASH_PUBLISHED = (2022, 5)
"""Dao et al. 2022. What was published before ran on scores; where nothing else is known, the device's default."""

FUSED: Sequence[str] = ("NeMo", "compile")
"""Words in "notes" of software that fuses norms and what is around them."""

NORMED: Sequence[str] = ("RMS kernel",)
"""Words in "notes" of software whose RMS norm alone is one kernel (FlashAttention's)."""

OVERLAPPED: Sequence[str] = ("TP comm overlap", "NeMo")
"""Words in "notes" of software whose products run their collectives in pieces and add up gradients (Transformer Engine)."""

CHECKPOINTED: Sequence[str] = ("FSDP",)
"""Words in "schedule", "dtype" or "notes" of software that recomputes with torch's checkpoint, which stops at the last value
that the backward needs; Megatron-LM's and its kin's run the whole block again."""

GPUS: Sequence[tuple[str, str]] = (
    ("A100-40GB", "a100-40g"), ("A100", "a100-80g"), ("A800", "a800"), ("H100", "h100"), ("H800", "h800"), ("H200", "h200"),
    ("V100", "v100"), ("GB200", "gb200"), ("B200", "b200"),
)


_UNBOUNDED = 2**50  # bytes


class Unpriced(ValueError):  # noqa: N818 - a reason, not a failure
    """Why a row has no prediction."""


@dataclass(frozen=True)
class Result:
    """One row's outcome. Seconds, GB (10^9 bytes), TFLOP/s per device by the row's own count of FLOPs. ``device_seconds``: what
    a token takes of the devices per second of the step, which is what configurations are ranked by."""

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


def number(row: Row, key: str, default: float | None = None) -> float | None:
    """A column as a number, ``default`` where it is blank or missing."""
    try:
        return float(row.get(key) or "")
    except ValueError:
        return default


def integer(row: Row, key: str, default: int | None = None) -> int:
    """A column as an integer. Raises Unpriced where it is blank and has no default."""
    value = number(row, key, default)
    if value is None:
        raise Unpriced(f"the source does not state {key}")
    return int(value)


def word_of(text: str, table: Sequence[tuple[str, str]]) -> str | None:
    """The entry of the first words that the text holds."""
    return next((value for words, value in table if words.lower() in text.lower()), None)


def published_in(row: Row) -> tuple[int, int] | None:
    """(year, month) that a source bears: an arXiv number or a year in words; None where it bears none."""
    text = row.get("source", "")
    found = re.search(r"\b(\d\d)(0[1-9]|1[0-2])\.\d{4,5}\b", text)
    if found:
        return 2000 + int(found[1]), int(found[2])
    year = re.search(r"\b(20[12]\d)\b", text)
    return (int(year[1]), 12) if year else None


def kernel_of(row: Row) -> str | None:
    """Attention kernel that the row names, or the only one there was when it was published."""
    named = word_of(row.get("notes", ""), KERNELS)
    date = published_in(row)
    return named or ("scores" if date is not None and date < FLASH_PUBLISHED else None)


def fused(row: Row) -> bool:
    """Whether chains of pointwise operators run as one kernel; PyTorch runs them one by one unless a row says otherwise."""
    return any(words in row.get("notes", "") for words in FUSED)


def cluster_of(row: Row) -> Cluster:
    """The devices, nodes and software of a row."""
    device = word_of(row["gpu"], GPUS)
    if device is None:
        raise Unpriced(f"no device of the catalogue for {row['gpu']!r}")
    world = integer(row, "n_gpus")
    per_node = min(world, integer(row, "gpus_per_node", 8))
    wires = row.get("interconnect", "").lower()
    node = next((name for words, on, name in NODES if words.lower() in wires and device.startswith(on)), None)
    cluster = Cluster.parse(f"{device}{'@' + node if node else ''}:{world // per_node}x{per_node}")
    kernel = kernel_of(row)
    known = kernel if kernel in cluster.device.attention else None
    overlapped = any(words in row.get("notes", "") for words in OVERLAPPED)
    said = " ".join(row.get(key, "") for key in ("schedule", "dtype", "notes"))
    repeats = not any(words in said for words in CHECKPOINTED)
    return cluster.with_kernels(known, fused=fused(row), overlapped=overlapped, repeats=repeats)


@lru_cache(maxsize=4)
def captured(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, experts: int, top_k: int,
    batch: int, seq: int, attention: str, precision: str, norms: str = "",
) -> Graph:
    """The graph of a model of these dimensions at this global batch. ``attention``: "torch", "scores", else flash; ``norms``:
    "kernel" where an RMS norm is one operator."""
    known = {"dense-gpt": "gpt" if kv_heads == heads else "nemotron", "llama": "llama", "moe": "moe"}
    if family not in known:
        raise Unpriced(f"no architecture for family {family!r}")
    architecture = Architecture(known[family], layers, hidden, heads, ffn, vocab, kv_heads, 0, experts, top_k)
    model = build(architecture, seq, {"torch": "eager", "scores": "scores"}.get(attention, "sdpa"))
    if norms == "kernel":
        _norms(model)
    ids = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    return capture_model(model, (), {"input_ids": ids, "labels": ids.clone()}, (), None, precision)


def _norms(model: nn.Module) -> None:
    """Every RMS norm of a model of ``transformers`` as one operator."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, nn.RMSNorm(child.weight.shape[0], child.variance_epsilon, device="meta"))


def batch_of(row: Row) -> float:
    """Sequences of a step: one micro-batch on every data rank where the row says no more; 0 where it says nothing."""
    return number(row, "global_batch_seqs") or (number(row, "micro_batch") or 0.0) * (number(row, "dp") or 1.0)


def measured_seconds(row: Row) -> float | None:
    """Seconds of a step, or tokens over throughput."""
    seconds = number(row, "step_time_s") or number(row, "step_time_s_derived")
    speed = (number(row, "tokens_per_s_per_gpu") or 0.0) * (number(row, "n_gpus") or 0.0)
    return seconds or (_tokens(row) / speed if speed and batch_of(row) else None)


def graph_of(row: Row, cache: Path | None = None) -> Graph:
    """The row's model at its global batch; ``cache``: a folder that keeps it."""
    heads = integer(row, "n_heads")
    batch = batch_of(row)
    if not batch:
        raise Unpriced("the source does not state the global batch")
    kernel = kernel_of(row)
    attention = kernel if kernel in ("torch", "scores") else "flash"
    shape = (
        row.get("family", ""), integer(row, "n_layers"), integer(row, "hidden"), heads, integer(row, "n_kv_heads", heads),
        integer(row, "ffn_hidden"), integer(row, "vocab"), integer(row, "n_experts", 0), integer(row, "top_k", 0),
        int(batch), integer(row, "seq_len"), attention, precision_of(row),
        *(["kernel"] if any(words in row.get("notes", "") for words in NORMED) else []),
    )
    if cache is None:
        return captured(*shape)
    kept = cache / f"{hashlib.sha256(repr(shape).encode()).hexdigest()[:24]}.pickle"
    if kept.exists():
        graph: Graph = pickle.loads(kept.read_bytes())  # written below, by this program
        return graph
    graph = captured(*shape)
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps(graph))
    return graph


def precision_of(row: Row) -> str:
    """The planner's name of a dtype column."""
    dtype = row.get("dtype", "")
    if dtype.startswith(("bf16", "fp16")):
        return "bf16"
    if dtype.startswith("fp32"):
        return "fp32"
    raise Unpriced(f"no price for dtype {dtype!r}")


def pins_of(row: Row, world: int, blocks: Sequence[str] = ()) -> Pins:
    """The published degrees. What the source leaves open is searched, but for recomputation: programs do it where they are told
    to. ``blocks``: the layers' names."""
    tp, pp, cp = (integer(row, key, 1) for key in ("tp", "pp", "cp"))
    ep, vpp = integer(row, "ep", 1), number(row, "vpp")
    interleaved = (vpp or 1) > 1 or "interleaved" in row.get("schedule", "")
    dp = world // (tp * pp * cp)
    batch, micro = number(row, "global_batch_seqs"), number(row, "micro_batch")
    zero = number(row, "zero/fsdp")
    return Pins(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=None if zero is None else int(zero),
        sequence_parallel=row.get("sp") == "yes" and tp > 1,
        schedule=None if pp == 1 else "interleaved1f1b" if interleaved else "1f1b",
        stage_cuts=_stage_cuts(pp * int(vpp or not interleaved), blocks),
        virtual_stages=None if pp == 1 else int(vpp) if vpp else None if interleaved else 1,
        microbatches=max(1, round(batch / (dp * micro))) if batch and micro else None,
        recompute=row.get("recompute") or "none",
    )


def _stage_cuts(stages: int, blocks: Sequence[str]) -> tuple[str, ...] | None:
    """The layers at which stages start: as many to each, where they divide; else it is left to the search."""
    if stages < 2 or not blocks or len(blocks) % stages:
        return None
    return tuple(blocks[len(blocks) // stages :: len(blocks) // stages])


def planned(graph: Graph, cluster: Cluster, pins: Pins, precision: str) -> tuple[Plan, bool]:
    """The plan of a published run, and whether it is predicted to fit. It ran, so it is priced all the same, with memory
    unlimited; only what the row leaves open (ZeRO, micro-batches) is chosen so that it fits, if it can."""
    plan = make_plan(graph, cluster.with_memory(_UNBOUNDED), pins, precision=precision)
    if plan.predicted["bytes_per_rank"] <= cluster.memory_bytes - cluster.device.reserve_bytes:
        return plan, True
    if None in (pins.zero, pins.microbatches):
        with suppress(OutOfMemoryError):
            return make_plan(graph, cluster, pins, precision=precision), True
    return plan, False


def price(row: Row, cache: Path | None = None) -> Result:
    """Plan one row; every failure becomes its reason."""
    start = time.perf_counter()
    seconds = measured_seconds(row)
    tflops = number(row, "measured_tflops_per_gpu")
    gib = "GiB" in (row.get("mem_kind", "") + row.get("unit", ""))
    peak = number(row, "peak_mem_GB")
    result = Result(
        row=row.get("row_id") or row.get("name", ""), source=row.get("source", ""), model=row.get("model_name", ""),
        device=row.get("gpu", ""), config=_describe(row), measured_seconds=seconds, derived=not row.get("step_time_s"),
        predicted_seconds=None, measured_tflops=tflops, predicted_tflops=None,
        measured_gb=peak * 2**30 / 1e9 if peak and gib else peak, predicted_gb=None, reason="", planning_seconds=0.0,
        device_seconds=(number(row, "n_gpus") or 1.0) / _tokens(row),
    )
    try:
        if not (seconds or peak or tflops):
            raise Unpriced("the row states neither a step time nor a rate nor a peak memory")
        cluster = cluster_of(row)
        graph, precision = graph_of(row, cache), precision_of(row)
        pins = pins_of(row, cluster.world, [block.path for block in graph.blocks])
        plan, fits = planned(graph, cluster, pins, precision)
        if not fits:
            result = replace(result, reason="predicted not to fit")
        predicted = float(plan.predicted["step_seconds"])
        if tflops and not (seconds or peak):  # model FLOPs over the rate
            seconds = predicted * float(plan.predicted["tflops_per_device"]) / tflops
            result = replace(result, measured_seconds=seconds)
        result = replace(
            result, predicted_seconds=predicted, predicted_gb=float(plan.predicted["bytes_per_rank"]) / 1e9,
            predicted_tflops=tflops * seconds / predicted if tflops and seconds else None,
        )
    except Exception as error:
        result = replace(result, reason=" ".join(str(error).split())[:300] or type(error).__name__)
    return replace(result, planning_seconds=time.perf_counter() - start)


def _tokens(row: Row) -> float:
    """Tokens of a step, 1 where the row does not say."""
    return (batch_of(row) or 1.0) * (number(row, "seq_len") or 1.0)


def _describe(row: Row) -> str:
    words = [f"{key}{integer(row, key, 1)}" for key in ("tp", "cp", "pp", "vpp", "ep", "dp") if integer(row, key, 1) > 1]
    words += [f"zero{int(value)}" for value in [number(row, "zero/fsdp")] if value is not None]
    words += ["sp"] if row.get("sp") == "yes" else []
    words += [f"mb{int(value)}" for value in [number(row, "micro_batch")] if value]
    return " ".join([*words, row.get("recompute") or ""]).strip()


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
    return [
        row for row in rows
        if source.lower() in row.get("source", "").lower() and (row.get("trust") or "A") in trust
    ]


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="predicted against measured for published runs")
    parser.add_argument("files", nargs="*", type=Path, default=list(FILES), help="CSV files with the columns of the data")
    parser.add_argument("--json", action="store_true", help="a line of JSON per row as it comes, then one with the sources")
    parser.add_argument("--source", default="", help="only sources that hold this text")
    parser.add_argument("--trust", default="ABCD", help="only rows of these grades")
    parser.add_argument("--limit", type=int, default=None, help="at most this many rows")
    parser.add_argument("--cache", type=Path, default=None, help="a folder that keeps captured graphs")
    options = parser.parse_args(arguments)
    rows = rows_of(options.files, options.source, options.trust)[: options.limit]
    # rows of one captured graph follow each other
    rows.sort(key=lambda row: [row.get(key, "") for key in ("source", "model_name", "seq_len", "global_batch_seqs", "notes")])
    results = []
    for count, row in enumerate(rows, 1):
        results.append(price(row, options.cache))
        if options.json:
            print(json.dumps(asdict(results[-1]) | {"error": results[-1].error}), flush=True)
        print(f"\r{count}/{len(rows)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if options.json:
        print(json.dumps({"sources": summary(results), "models": ranks(results)}))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
