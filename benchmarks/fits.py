"""Does it fit: what published configurations hold by prediction, those that ran and those that ran out of memory.

    python benchmarks/fits.py [FILE.csv ...] [--source TEXT] [--every N] [--cache FOLDER] [--json]

A row of ``data/out_of_memory.csv`` ran out of memory, one of any other file ran (default: ``data/steps.csv`` beside it, as far
as it has the sources of the former). A row is predicted not to fit where every way in which it may have run
(``rows.completions_of``) makes torch's allocator (``cost.memory.allocator``) run out of its room: the device's memory without
the context and NCCL's buffers (``room_of``). What is alive at the worst moment is judged beside it, as plans are: without the
allocator, by what they may use of the device (``headroom``).
``--every``: each so-many-th row of a file. With ``--cache`` what a row holds is kept as well, for as long as its plan, its
software and the package stay what they are, so that a run that was ended goes on where it was.

Goal: of those that ran out of memory 95 in 100 are predicted not to fit, of those that ran at most 5 in 100.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from published import DATA, graph_of, programs, rows_of
from rich.console import Console
from rich.table import Table
from room import room_of
from rows import (
    Row,
    cluster_of,
    completions_of,
    kernel_of,
    kernels_of,
    normed,
    pins_of,
    precision_of,
    recompute_of,
    shape_of,
    text_of,
)

from meshwright.footprint import footprints
from meshwright.planner import OPTIMIZERS, make_plan, rules_of

OUT = DATA / "out_of_memory.csv"
UNBOUNDED = 2**50  # bytes
KEYS = ("n_gpus", "tp", "pp", "sp", "micro_batch", "seq_len")


@dataclass(frozen=True)
class Outcome:
    """A row, the GiB that are alive and that are reserved by prediction (of the way that needs least), that the allocator has
    room for and that a plan may use; how it ran."""

    row: str
    ran: bool
    gib: float
    reserved_gib: float
    room_gib: float
    usable_gib: float
    recompute: str
    kernel: str
    config: str
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is predicted to."""
        return self.reserved_gib <= self.room_gib


class Fits:
    """Judges rows; ways that differ in what memory does not depend on share a plan."""

    def __init__(self, cache: Path | None) -> None:
        self.cache = cache
        self.held: dict[str, tuple[float, float]] = {}

    def judge(self, row: Row, ran: bool) -> Outcome:
        """A row; one that cannot be planned has the reason."""
        config = " ".join(f"{key}={text_of(row, key).removesuffix('.0')}" for key in KEYS if text_of(row, key))
        found = Outcome(row.get("row_id") or "", ran, 0.0, 0.0, 0.0, 0.0, text_of(row, "recompute"), "", config)
        try:
            kernel = " or ".join(kernels_of(row)) + ("" if normed(row) else ", norms in several kernels")
            held = [self._held(completion) for completion in completions_of(row)]
        except Exception as error:
            return replace(found, reason=" ".join(str(error).split())[:200] or type(error).__name__)
        gib, reserved = (min(values) / 2**30 for values in zip(*held, strict=True))
        usable = cluster_of(row).with_headroom().capacity_bytes / 2**30
        return replace(found, gib=gib, reserved_gib=reserved, room_gib=room_of(row) / 2**30, usable_gib=usable,
                       recompute=recompute_of(row), kernel=kernel)

    def _held(self, row: Row) -> tuple[float, float]:
        cluster = cluster_of(row)
        kernel = kernel_of(row)
        software = replace(cluster.device, attention_kernel="", name="", sources={})
        alike = kernel if kernel in ("torch", "scores") else "flash"
        pinned = pins_of(row, cluster.world), text_of(row, "cuts")
        key = repr((shape_of(row), alike, normed(row), pinned, cluster.per_node, software))
        if key not in self.held:
            self.held[key] = self._kept(key, lambda: self._replayed(row))
        return self.held[key]

    def _kept(self, key: str, replay: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        if self.cache is None:
            return replay()
        kept = self.cache / f"{hashlib.sha256((key + programs()).encode()).hexdigest()[:24]}.held.json"
        if not kept.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(replay()))
        alive, reserved = json.loads(kept.read_text())
        return alive, reserved

    def _replayed(self, row: Row) -> tuple[float, float]:
        cluster, graph = cluster_of(row), graph_of(row, self.cache)
        pins = replace(pins_of(row, cluster.world, [block.path for block in graph.blocks]), loss_rows=0)
        plan = make_plan(graph, cluster.with_memory(UNBOUNDED), pins, precision=precision_of(row))
        ranks = footprints(plan, rules_of(plan.graph)[0], OPTIMIZERS["adamw"], device=cluster.device, room=room_of(row))
        return max(one.bytes for one in ranks.values()), max(one.reserved or 0.0 for one in ranks.values())


def rows_to_judge(files: Sequence[Path], source: str, every: int) -> list[tuple[Row, bool]]:
    """Rows and whether they ran. Without ``source`` those of the sources that have a row out of memory."""
    out = rows_of([file for file in files if file.name == OUT.name], source, "ABCD")
    ran = rows_of([file for file in files if file.name != OUT.name], source, "ABCD")
    known = {text_of(row, "source") for row in out}
    ran = [row for row in ran if source or not known or text_of(row, "source") in known]
    both = [*((row, False) for row in out[::every]), *((row, True) for row in ran[::every])]
    return sorted(both, key=lambda one: [text_of(one[0], key).removesuffix(".0") for key in ("seq_len", "global_batch_seqs")])


def counts(judged: Iterable[Outcome]) -> list[tuple[str, int, int, int]]:
    """By outcome, recomputation and kernels: rows, those predicted not to fit, and those of which as much is alive."""
    groups: dict[str, list[Outcome]] = {}
    for item in judged:
        if not item.reason:
            outcome = "ran" if item.ran else "out of memory"
            for name in (outcome, f"{outcome}, recomputation {item.recompute}", f"{outcome}, {item.kernel}"):
                groups.setdefault(name, []).append(item)
    return [
        (name, len(items), sum(not item.fits for item in items), sum(item.gib > item.usable_gib for item in items))
        for name, items in sorted(groups.items(), reverse=True)
    ]


def show(judged: Sequence[Outcome], console: Console) -> None:
    """Print the rows that are predicted wrongly, then the counts."""
    table = Table("row", "outcome", "recomputation", "kernels", "configuration", "GiB alive", "reserved", "room")
    for item in sorted(judged, key=lambda item: -item.gib):
        if item.fits != item.ran or item.reason:
            outcome = "ran" if item.ran else "out of memory"
            table.add_row(item.row, outcome, item.recompute, item.kernel, item.config, item.reason or f"{item.gib:.1f}",
                          f"{item.reserved_gib:.1f}", f"{item.room_gib:.1f}")
    console.print(table)
    lines = Table("outcome", "rows", "predicted not to fit", "", "without the allocator", "")
    for name, rows, over, alive in counts(judged):
        lines.add_row(name, str(rows), str(over), f"{over / rows:.1%}", str(alive), f"{alive / rows:.1%}")
    console.print(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="which published configurations are predicted to fit")
    parser.add_argument("files", nargs="*", type=Path, default=[DATA / "steps.csv", OUT])
    parser.add_argument("--source", default="", help="only sources that hold this text")
    parser.add_argument("--every", type=int, default=1, help="each so-many-th row of those that ran, and of those that did not")
    parser.add_argument("--cache", type=Path, default=None, help="a folder that keeps captured graphs")
    parser.add_argument("--json", action="store_true", help="a line of JSON per row as it comes, then one with the counts")
    options = parser.parse_args(arguments)
    fits, judged = Fits(options.cache), []
    rows = rows_to_judge(options.files, options.source, options.every)
    for number, (row, ran) in enumerate(rows, 1):
        judged.append(fits.judge(row, ran))
        if options.json:
            print(json.dumps(asdict(judged[-1]) | {"fits": judged[-1].fits}), flush=True)
        print(f"\r{number}/{len(rows)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if options.json:
        print(json.dumps({"counts": counts(judged)}))
    else:
        show(judged, Console(width=None if sys.stdout.isatty() else 200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
