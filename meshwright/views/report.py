"""The plan as tables: header, one table per distinct block, stages, how blocks keep their parameters, candidates, notes.

``render(plan)`` is the report as text, always at the same width, so that it can be compared; ``page(plan)`` is the same as a
rich renderable for a terminal's own width. ``show`` prints it, or writes the page with the graph (``views.page``).

A collective stands with what it moves: bytes of its buffer on one rank, how often in a step, and the seconds of them all.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.compiler.search.plans import beside_schedule, simulation_of
from meshwright.cost.cluster import ClusterError
from meshwright.cost.timeline import chrome_trace
from meshwright.cost.timeline import render as clock
from meshwright.errors import InputError
from meshwright.ir.plan import GroupChoice, Plan
from meshwright.ir.prediction import SeenCandidate
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.ir.writing.paths import fold_parts, fold_paths, unfold_paths
from meshwright.views.facts import Facts, Section, TableRow, facts_of, parted, sections
from meshwright.views.prices import Prices
from meshwright.views.words import as_read, header, not_told_apart

WIDTH = 120
_SHOWN = 8
"""Candidates listed; the rest are counted."""
_TICKS = 34
"""Columns of the predicted clock."""
_PREFACE = 16
"""Stages listed one by one; of more, the first and the last half of as many."""


def render(plan: Plan, width: int = WIDTH) -> str:
    """The plan as plain text of at most ``width`` columns."""
    target = io.StringIO()
    console = Console(file=target, width=width, color_system=None, force_terminal=False, emoji=False, highlight=False)
    console.print(page(plan, width))
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())


def show(plan: Plan, path: str | Path | None = None, *, against: Plan | None = None) -> None:
    """Print the plan's tables at the terminal's width; or write ``path``, one HTML file that needs nothing else, with the model
    as a graph of modules, memory, time and the pipeline's clock. ``against``: a second plan to compare with in that page."""
    if path is not None:
        from meshwright.views.page.write import write

        write(plan, path, against)
    elif against is not None:
        raise InputError("against= is for a page: give a path for it, or print diff(plan, other)")
    elif sys.stdout.isatty():
        console = Console(emoji=False)
        console.print(page(plan, console.width))
    else:
        print(render(plan))


def timeline(plan: Plan, path: str | Path) -> None:
    """Write the predicted step of a pipeline as a trace for Perfetto or chrome://tracing: a thread per pipeline rank. What the
    step takes beside the schedule (gathers before it, reductions left after it, the optimizer) stands behind it.

    Raises PlanError for a plan without a pipeline.
    """
    Path(path).write_text(json.dumps(chrome_trace(simulation_of(plan), beside_schedule(plan))), encoding="utf-8")


def page(plan: Plan, width: int = WIDTH) -> RenderableType:
    """The plan as a rich renderable, for so many columns."""
    plan = as_read(plan)
    facts = facts_of(plan)
    try:
        prices: Prices | None = Prices(facts)
    except ClusterError:
        prices = None
    parts: list[RenderableType] = [_header(facts)]
    for section in sections(facts):
        for part in parted(section, width - _REST):
            parts += [_title(part.title), _section(part, prices, width)]
    if plan.pipeline is not None:
        parts += _stages(plan)
    parts.append(_groups(plan, prices))
    if plan.certificate is not None and plan.certificate.candidates:
        parts.append(_candidates(plan.certificate.candidates))
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Group(*parts)


def _header(facts: Facts) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for what, text in header(facts):
        _add(table, what, text)
    return table


def _add(table: Table, *cells: str) -> None:
    """A row of plain text: brackets in the notation are no markup, and what is longer than its column is folded, not cut."""
    table.add_row(*(Text(cell, overflow="fold") for cell in cells))


_REST = 36
"""Columns left for results and collectives where modules and weights stand in a line each, which can be pasted as a pin."""


def _title(text: str) -> Text:
    """Of a table: where it is too long for a line it goes on after a comma."""
    return Text(text, style="bold", overflow="fold")


def _section(section: Section, prices: Prices | None, width: int) -> Table:
    table = Table("module", "weights", "result", "collectives", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = table.columns[1].no_wrap = section.fits(width - _REST)
    for row in section.rows:
        _add(table, row.module, "\n".join(row.weights), row.result, "\n".join(_priced(row, prices)))
    return table


def _priced(row: TableRow, prices: Prices | None) -> list[str]:
    """The collectives of a row, equal ones once, each with what it moves and takes."""
    if prices is None:
        return list(row.collectives)
    found: dict[str, None] = {}
    for step in row.steps:
        known = prices.step(step)
        if known is None or not known.seconds:  # local work
            found[str(step)] = None
            continue
        often = f"{known.times:.0f} x " if known.times > 1.5 else ""
        found[f"{step}  {often}{bytes_text(known.bytes_)}, {seconds_text(known.seconds)}"] = None
    return list(found)


def _groups(plan: Plan, prices: Prices | None) -> Table:
    title = Text("parameters and gradients by block; seconds are of a step and one block, beside compute")
    table = Table("block", "ZeRO", "gradients summed over", "state split over", "recompute", box=box.SIMPLE_HEAD, title=title,
                  title_justify="left", title_style="bold")
    if prices is not None:
        table.add_column("gathered")
        table.add_column("reduced")
    stages = plan.pipeline is not None
    if stages:
        table.add_column("stage")
    table.columns[0].no_wrap = True
    kinds = (*(block.kind for block in plan.graph.blocks), None)
    rows = [(replace(group, path="", stage=0), kind, group) for kind, group in zip(kinds, plan.groups, strict=True)]
    for _, run in itertools.groupby(rows, key=lambda row: row[:2]):
        groups = {group.path or "outside the blocks": group for *_, group in run}
        first = next(iter(groups.values()))
        cells = [str(first.zero), ", ".join(first.data_axes) or "-",
                 ", ".join(first.shard_axes) if first.zero else "-", first.recompute]
        if prices is not None:
            cells += [seconds_text(seconds) if seconds else "-" for seconds in _kept_seconds(plan, first, prices)]
        for part in fold_parts(list(groups)):
            numbers = [groups[path].stage for path in ([part] if part in groups else unfold_paths(part)) if groups[path].path]
            shown = "-" if not numbers else str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}..{numbers[-1]}"
            _add(table, part, *cells, *([shown] if stages else []))
    return table


def _kept_seconds(plan: Plan, group: GroupChoice, prices: Prices) -> tuple[float, float]:
    """Of gathering and of reducing the parameters of a group."""
    work = [prices.op(op) for number, op in enumerate(plan.graph.ops) if plan.group_of(number).path == group.path]
    return sum(one.gather_seconds for one in work), sum(one.reduce_seconds for one in work)


def _stages(plan: Plan) -> list[RenderableType]:
    """Every stage with its blocks and seconds, then the predicted clock."""
    pipeline, seconds_ = plan.pipeline, None if plan.predicted is None else plan.predicted.stages
    assert pipeline is not None
    table = Table("stage", "rank", "operators", "blocks", "forward", "backward", box=box.SIMPLE_HEAD, title_justify="left",
                  title=Text(f"stages under {pipeline.schedule}, seconds of one micro-batch"), title_style="bold")
    left_out = range(_PREFACE // 2, pipeline.stages - _PREFACE // 2) if pipeline.stages > _PREFACE else range(0)
    for stage, (start, stop) in enumerate(itertools.pairwise(pipeline.cuts)):
        if stage in left_out:
            if stage == left_out[0]:
                _add(table, "...", "", "", f"{len(left_out)} stages between", "", "")
            continue
        inside = [block.path for block in plan.graph.blocks if start <= block.start < stop]
        spent = ["", ""]
        if seconds_ is not None:
            back = seconds_.backward_input[stage] + seconds_.backward_weight[stage]
            spent = [seconds_text(seconds_.forward[stage]), seconds_text(back)]
        _add(table, str(stage), str(pipeline.stage_rank[stage]), f"{start}..{stop - 1}", fold_paths(inside) if inside else "-",
             *spent)
    if seconds_ is None:
        return [table]
    run = simulation_of(plan)
    if pipeline.stages > _PREFACE:  # a row per stage: no picture of so many
        words = f"predicted clock: {seconds_text(run.makespan)}, bubbles {run.bubble_fraction:.1%}"
        return [table, Text(f"{words}; show(plan, 'plan.html') draws it", style="bold")]
    title = Text(f"predicted clock, a column for {seconds_text(run.makespan / _TICKS)}, bubbles {run.bubble_fraction:.1%}",
                 style="bold")
    return [table, title, Text(clock(run, tick=run.makespan / _TICKS), no_wrap=True, overflow="ellipsis")]


def _candidates(seen: Sequence[SeenCandidate]) -> Table:
    table = Table("candidate", "micro-batches", "step", "", box=box.SIMPLE_HEAD, title=Text("candidates seen, best first"),
                  title_justify="left", title_style="bold")
    best_first = sorted(seen, key=lambda one: math.inf if one.step_seconds is None else one.step_seconds)
    for one, close in list(zip(best_first, not_told_apart(best_first), strict=True))[:_SHOWN]:
        result = one.outcome if one.step_seconds is None else seconds_text(one.step_seconds)
        _add(table, one.layout, str(one.microbatches), result, "not told apart from the best" if close else "")
    if len(seen) > _SHOWN:
        _add(table, f"and {len(seen) - _SHOWN} more", "", "", "")
    return table
