"""The plan as a page: header, one table per distinct block, groups, candidates, notes.

``render(plan)`` is the page as text, always at the same width, so that it can be compared; ``page(plan)`` is the same as a
rich renderable for a terminal's own width. ``show`` prints it or writes it as a file that needs nothing else.
Predictions are printed by the unit in their names (``..._seconds``, ``..._per_second``).
"""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.compiler.search.plans import simulation_of
from meshwright.cost.timeline import chrome_trace
from meshwright.cost.timeline import render as clock
from meshwright.ir.mesh import PP, SEQUENCE, role_of
from meshwright.ir.pins import ULYSSES
from meshwright.ir.plan import GroupChoice, Plan
from meshwright.ir.prediction import Prediction, SeenCandidate
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.views.facts import Facts, Section, facts_of, fold_paths, sections

WIDTH = 140
_SHOWN = 8
"""Candidates listed; the rest are counted."""
_TICKS = 30
"""Columns of the predicted clock."""


def render(plan: Plan, width: int = WIDTH) -> str:
    """The plan as plain text of at most ``width`` columns."""
    target = io.StringIO()
    Console(file=target, width=width, color_system=None, force_terminal=False, emoji=False, highlight=False).print(page(plan))
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())


def show(plan: Plan, path: str | Path | None = None) -> None:
    """Print the plan's page at the terminal's width, or write it to ``path`` as one self-contained HTML file."""
    if path is None:
        if sys.stdout.isatty():
            Console(emoji=False).print(page(plan))
        else:
            print(render(plan))
        return
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", emoji=False)
    console.print(page(plan))
    Path(path).write_text(console.export_html(inline_styles=True), encoding="utf-8")


def timeline(plan: Plan, path: str | Path) -> None:
    """Write the predicted step of a pipeline as a trace for Perfetto or chrome://tracing: a thread per pipeline rank.

    Raises PlanError for a plan without a pipeline.
    """
    Path(path).write_text(json.dumps(chrome_trace(simulation_of(plan))), encoding="utf-8")


def page(plan: Plan) -> RenderableType:
    """The plan as a rich renderable."""
    facts = facts_of(plan)
    parts: list[RenderableType] = [_header(facts)]
    parts += [_section(section) for section in sections(facts)]
    if plan.pipeline is not None:
        parts += _stages(plan)
    parts.append(_groups(plan))
    if plan.certificate is not None and plan.certificate.candidates:
        parts.append(_candidates(plan.certificate.candidates))
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Group(*parts)


def axis_roles(facts: Facts) -> dict[str, list[str]]:
    """{axis: what it does}: "stages" (of the pipeline), "sequence" (it splits that; how attention runs), "data" (gradients are
    summed over it), "tensor" (it splits parameters), "zero" (it splits their state at rest)."""
    staged = facts.plan.pipeline is not None
    roles: dict[str, list[str]] = {axis: ["stages"] if staged and axis == PP else [] for axis in facts.plan.mesh.axes}
    for axis, found in roles.items():
        if role_of(axis) == SEQUENCE:
            forms = sorted(_attention_forms(facts, axis))
            found.append(f"sequence, attention by {' and '.join(forms)}" if forms else "sequence")
        if any(axis in group.data_axes for group in facts.plan.groups):
            found.append("data")
        if any(axis in stored.tensor.split_axes for stored in facts.stored.values()):
            found.append("tensor")
        if any(group.zero and axis in group.shard_axes for group in facts.plan.groups):
            found.append("zero")
    return roles


def _attention_forms(facts: Facts, axis: str) -> set[str]:
    """How attention runs that an axis splits along the sequence: by ways of its rule, or by heads."""
    found = set()
    for op in facts.plan.graph.ops:
        factor = facts.plan.assignments.get(op.name, {}).get(axis)
        if factor is not None and facts.rules[op.name].ways:
            found.add(factor if factor in facts.rules[op.name].ways else ULYSSES)
    return found


def _header(facts: Facts) -> Table:
    plan = facts.plan
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    roles = axis_roles(facts)
    axes = ", ".join(f"{axis}={plan.mesh.size(axis)} ({' + '.join(roles[axis]) or 'replicas'})" for axis in plan.mesh.axes)
    _add(table, "plan", f"{plan.mesh} on {plan.cluster or 'an unnamed cluster'}, {plan.mesh.world} devices")
    _add(table, "axes", axes or "none")
    count = sum(not p.buffer for p in plan.graph.params)
    _add(table, "model", f"{_parameters(plan):,} parameters in {count} tensors, {len(plan.graph.ops)} operators, "
         f"{len(plan.graph.blocks)} blocks")
    _add(table, "step", f"micro-batches {plan.schedule.microbatches}, ZeRO {_levels(plan)}, precision {plan.precision}, "
         f"optimizer {plan.optimizer}")
    _add(table, "predicted", _predicted(plan.predicted))
    _add(table, "memory", _memory(plan.predicted))
    proof = plan.certificate
    if proof is not None:
        if proof.considered:
            _add(table, "search", f"{proof.considered:,} candidates considered, {proof.pruned:,} pruned by bound, "
                 f"{proof.infeasible:,} impossible, {proof.solved:,} solved")
        if proof.runner_up:
            _add(table, "runner-up", proof.runner_up)
        _add(table, "certificate", f"gap {proof.gap:.2%} (objective {seconds_text(proof.objective_seconds)}, lower bound "
             f"{seconds_text(proof.bound_seconds)}, {proof.status})")
        if proof.assumes:
            _add(table, "", f"an estimate, which assumes: {'; '.join(proof.assumes)}")
    return table


def _add(table: Table, *cells: str) -> None:
    """A row of plain text: brackets in the notation are no markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _parameters(plan: Plan) -> int:
    return sum(plan.graph.values[param.value].numel for param in plan.graph.params if not param.buffer)


def _levels(plan: Plan) -> str:
    return "/".join(map(str, sorted({group.zero for group in plan.groups})))


def _predicted(predicted: Prediction | None) -> str:
    """Everything but bytes, in the order of the fields."""
    words = []
    for name, value in predicted.as_json().items() if predicted is not None else ():
        if not isinstance(value, int | float) or "bytes" in name:
            continue
        label = name.removesuffix("_seconds").removesuffix("_per_second").removesuffix("_fraction").replace("_", " ")
        if name.endswith("_per_second"):
            words.append(f"{value:,.0f} {label}/s")
        elif name.endswith("seconds"):
            words.append(f"{label} {seconds_text(value)}")
        else:
            words.append(f"{label} {value:.3g}")
    return ", ".join(words) or "unknown"


def _memory(predicted: Prediction | None) -> str:
    if predicted is None:
        return "unknown"
    total, capacity = predicted.bytes_per_rank, predicted.capacity_bytes
    kinds = " + ".join(f"{name} {bytes_text(value)}" for name, value in predicted.bytes_by_kind.items())
    text = f"{bytes_text(total)} per device of {bytes_text(capacity)} ({total / capacity:.1%})"
    return text + (f" = {kinds}" if kinds else "")


def _section(section: Section) -> Table:
    table = Table(
        "module", "weights", "result", "collectives", box=box.SIMPLE_HEAD, title=Text(section.title), title_justify="left",
        title_style="bold",
    )
    for row in section.rows:
        _add(table, row.module, "\n".join(row.weights), row.result, "\n".join(row.collectives))
    return table


def _groups(plan: Plan) -> Table:
    title = Text("parameters and gradients by block")
    table = Table("block", "ZeRO", "gradients summed over", "state split over", "recompute", box=box.SIMPLE_HEAD, title=title,
                  title_justify="left", title_style="bold")
    stages = len({group.stage for group in plan.groups}) > 1
    if stages:
        table.add_column("stage")
    for key, run in itertools.groupby(plan.groups, key=lambda group: (_group_key(group), bool(group.path))):
        paths = [group.path or "outside the blocks" for group in run]
        zero, data, shard, recompute, stage = key[0]
        cells = [fold_paths(paths), str(zero), ", ".join(data) or "-", ", ".join(shard) if zero else "-", recompute]
        _add(table, *cells, *([str(stage)] if stages else []))
    return table


def _stages(plan: Plan) -> list[RenderableType]:
    """Every stage with its blocks and seconds, then the predicted clock."""
    pipeline, seconds_ = plan.pipeline, None if plan.predicted is None else plan.predicted.stages
    assert pipeline is not None
    table = Table("stage", "rank", "operators", "blocks", "forward", "backward", box=box.SIMPLE_HEAD, title_justify="left",
                  title=Text(f"stages under {pipeline.schedule}"), title_style="bold")
    for stage, (start, stop) in enumerate(itertools.pairwise(pipeline.cuts)):
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
    title = Text(f"predicted clock, a column for {seconds_text(run.makespan / _TICKS)}", style="bold")
    return [table, title, Text(clock(run, tick=run.makespan / _TICKS), no_wrap=True, overflow="ellipsis")]


def _group_key(group: GroupChoice) -> tuple[int, tuple[str, ...], tuple[str, ...], str, int]:
    return group.zero, group.data_axes, group.shard_axes, group.recompute, group.stage


def _candidates(seen: Sequence[SeenCandidate]) -> Table:
    table = Table("candidate", "micro-batches", "step", box=box.SIMPLE_HEAD, title=Text("candidates seen, best first"),
                  title_justify="left", title_style="bold")
    best_first = sorted(seen, key=lambda one: math.inf if one.step_seconds is None else one.step_seconds)
    for one in best_first[:_SHOWN]:
        result = one.outcome if one.step_seconds is None else seconds_text(one.step_seconds)
        _add(table, one.layout, str(one.microbatches), result)
    if len(seen) > _SHOWN:
        _add(table, f"and {len(seen) - _SHOWN} more", "", "")
    return table
