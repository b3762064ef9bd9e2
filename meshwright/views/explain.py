"""Why a plan is as it is, in words and in the one notation.

``explain(plan, name)``: an operator, a value, a parameter, an input or a module, by any name that a plan, its file or an
explanation gives it; of a module with one operator that counts, such as a linear layer, that operator too. For an operator
every other choice that the plan could have had stands beside the planned one with what the step would take, everything else at
its best for it (``alternatives``), and with the part that decided; what it cannot have, with the reason. Collectives and what
is kept for the backward are written as closed forms with their numbers in (``formulas``).

``explain(plan)``: what bounds the step, where its time and memory go, and which changes of the cluster or the batch would help
most, each planned or priced (``changes``).
"""

from __future__ import annotations

import difflib
import io
import math
import textwrap
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.cost.cluster import ClusterError
from meshwright.ir.graph import Op
from meshwright.ir.mesh import PP, SAMPLED, SEQUENCE, role_of
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.quantities import bytes_text, count_text, seconds_text
from meshwright.ir.rule import factors_of
from meshwright.ir.sharding import format_sharding
from meshwright.ir.writing.names import choice_text, names_of
from meshwright.views.alternatives import Alternative, Alternatives
from meshwright.views.bounds import whole
from meshwright.views.facts import Facts, facts_of
from meshwright.views.formulas import formulas
from meshwright.views.prices import Prices
from meshwright.views.report import WIDTH
from meshwright.views.words import assignment_words

_SHOWN = 8


def explain(plan: Plan, name: str | None = None, *, changes: bool = True) -> str:
    """What was chosen for ``name`` and what the alternatives would cost; without a name what bounds the step, and, unless
    ``changes`` is false, what would help most: that plans a few times, so it takes as long. Raises PlanError for an unknown
    name."""
    facts, graph = facts_of(plan), plan.graph
    if name is None:
        return whole(facts, changes)
    called = names_of(graph)
    asked = {name, name.removeprefix("%")}  # as an explanation prints values
    asked |= {names[one] for names in (called.op_of, called.value_of) for one in list(asked) if one in names}
    for op in graph.ops:
        if op.name in asked or not asked.isdisjoint(op.outputs):
            return _operator(facts, op)
    for param in graph.params:
        if not asked.isdisjoint((*param.fqns, param.value)):
            return _parameter(facts, param.value)
    for given in graph.inputs:
        if given in asked:
            return _input(facts, given)
    inside = [op for op in graph.ops if op.module == name or op.module.startswith(f"{name}.")]
    if inside or any(fqn.startswith(f"{name}.") for param in graph.params for fqn in param.fqns):
        return _module(facts, name, inside)
    known = {*(op.name for op in graph.ops), *(fqn for p in graph.params for fqn in p.fqns), *(op.module for op in graph.ops),
             *graph.inputs}
    near = difflib.get_close_matches(name, sorted(known - {""}), n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(near)}?" if near else "; the tables of the plan (show) have the names that it knows"
    raise PlanError(f"the plan has no operator, parameter, input or module {name!r:.200}{hint}")


def _operator(facts: Facts, op: Op) -> str:
    graph, placed = facts.plan.graph, facts.placed[op.name]
    lines = [f"operator {op.name}: {op.target}", f"  module   {op.module or '(the model)'}"]
    if op.source:
        lines.append(f"  source   {op.source}")
    rule = facts.rules[op.name]
    lines.append(f"  rule     {rule}" if rule.known else "  rule     none: replicated")
    assignment = facts.plan.assignments.get(op.name, {})
    lines.append(f"  choice   {assignment_words(assignment)}")
    lines.append(f"  as a pin {{{names_of(graph).ops[op.name]!r}: {choice_text(assignment)!r}}}")
    for name, need in zip(op.inputs, placed.operands, strict=True):
        value = graph.values[name]
        have, want = facts.type_of(name), format_sharding(need, value.shape, value.dtype)
        lines.append(f"  operand  %{name}: {have}" + (f", read as {want}" if want != have else ""))
    lines += [f"  result   %{name}: {facts.type_of(name)}" for name in op.outputs]
    lines += [f"  moves    %{step.value}: {step}" for step in facts.around(op.name)]
    try:
        prices = Prices(facts)
    except ClusterError:
        cluster = facts.plan.cluster or "(unnamed)"
        lines.append(f"  no prices: neither the catalogue nor the plan has the numbers of cluster {cluster}")
        return _wrapped(lines)
    cost = prices.op(op)
    parts = [("forward", cost.forward_seconds), ("backward", cost.backward_seconds), ("recomputed", cost.recompute_seconds),
             ("weights gathered", cost.gather_seconds), ("gradients reduced", cost.reduce_seconds),
             ("optimizer", cost.optimizer_seconds)]
    lines.append("  seconds  " + ", ".join(f"{what} {seconds_text(seconds)}" for what, seconds in parts if seconds))
    lines += [f"  formula  {line}" for line in formulas(prices, op)]
    return _wrapped(lines) + "\n" + _alternatives(facts, op)


def _wrapped(lines: list[str]) -> str:
    """Lines within the width, continued under their text; only names that are longer than a line are broken."""
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    return "\n".join(line if len(line) <= WIDTH else wrapper.fill(line) for line in lines)


def _parameter(facts: Facts, value: str) -> str:
    plan, graph, stored = facts.plan, facts.plan.graph, facts.stored[value]
    tensor = graph.values[value]
    lines = [f"{'buffer' if stored.buffer else 'parameter'} {' = '.join(stored.fqns)}",
             f"  placed   {facts.type_of(value)}"]
    if stored.data_axes:
        lines.append(f"  gradient summed over {', '.join(stored.data_axes)}")
    if stored.shard_axes:
        lines.append(f"  at rest  state split over {', '.join(stored.shard_axes)} (ZeRO)")
    parts = plan.mesh.size(stored.tensor.split_axes)
    lines.append(f"  bytes    {bytes_text(tensor.bytes_ / parts)} per rank in a block, {bytes_text(tensor.bytes_)} whole")
    if not stored.buffer:
        pin = format_sharding(stored.tensor.at_rest(), tensor.shape, tensor.dtype)
        lines.append(f"  as a pin {{{stored.fqns[0]!r}: {pin!r}}}")
    lines += _readers(facts, value)
    readers = [op for op in graph.ops if value in op.inputs]
    return _wrapped(lines) + "".join("\n\n" + _operator(facts, op) for op in readers[:_SHOWN])


def _input(facts: Facts, name: str) -> str:
    tensor = facts.plan.graph.values[name]
    lines = [f"input {name}", f"  placed   {facts.type_of(name)}", f"  bytes    {bytes_text(tensor.bytes_)} whole"]
    return _wrapped([*lines, *_readers(facts, name)])


def _readers(facts: Facts, value: str) -> list[str]:
    readers = [op for op in facts.plan.graph.ops if value in op.inputs]
    return [f"  read by  {op.name} ({op.target}) of {op.module or 'the model'}" for op in readers] or ["  read by  no operator"]


def _module(facts: Facts, name: str, ops: list[Op]) -> str:
    lines = [f"module {name or '(the model)'}: {count_text(len(ops), 'operator')}"]
    params = [p for p in facts.plan.graph.params if any(fqn.startswith(f"{name}.") for fqn in p.fqns)]
    lines += [f"  {'buffer' if p.buffer else 'weight'}  {p.fqn}: {facts.type_of(p.value)}" for p in params]
    for op in ops:
        results = ", ".join(f"%{out}: {facts.type_of(out)}" for out in op.outputs)
        moves = "; ".join(str(step) for step in facts.around(op.name))
        lines.append(f"  {op.target:40s} {results}" + (f"   [{moves}]" if moves else ""))
    if not ops:  # another module reads its weights
        lines += [line for p in params for line in _readers(facts, p.value)]
    products = [op for op in ops if facts.rules.operators[op.target].kind in ("matmul", "attention")] or ops
    return _wrapped(lines) + ("\n\n" + _operator(facts, products[0]) if len(products) == 1 else "")


def _alternatives(facts: Facts, op: Op) -> str:
    try:
        found = Alternatives(facts).of(op)
    except PlanError as error:
        return _wrapped([f"  no alternatives are priced: {error}"])
    if found is None:
        return "  no alternatives are priced: too many combinations of shardings reach this operator"
    chosen = next((one for one in found if one.chosen), None)
    if found and chosen is None:
        text = "the planned choice is not among those that this layout is searched for: it was pinned, or written by hand"
        return f"  {text}\n{_table(found, found[0])}"
    if chosen is None or len(found) == 1:
        lines = ["  no other choice can run in this layout"]
    else:
        lines = ["  alternatives, everything else at its best for them: seconds of a step's operators, mean rank; how many",
                 "  stages, micro-batches and ranks there are stays as planned", *_ends(found), _table(found, chosen)]
    return "\n".join([*lines, *(_wrapped([f"  not open: {reason}"]) for reason in _closed(facts, op, found))])


def _ends(found: list[Alternative]) -> list[str]:
    """What two numbers of one price say, and why it has two."""
    return [line for why in sorted({one.unproven for one in found} - {""})
            for line in textwrap.wrap(f"{why}: where a price has two ends, the best lies between them", WIDTH,
                                      initial_indent="  ", subsequent_indent="  ")]


def _table(found: list[Alternative], chosen: Alternative) -> str:
    table = Table("", box=box.SIMPLE_HEAD)
    table.add_column("choice", min_width=30)
    for name in ("seconds", "against it", "memory", "what decides"):
        table.add_column(name)
    shown = [*found[:_SHOWN], *([chosen] if chosen in found[_SHOWN:] else [])]
    for one in shown:
        bytes_ = one.bytes_ - chosen.bytes_
        cells = ["->" if one.chosen else "", assignment_words(one.assignment), _price(one),
                 "" if one is chosen else _against(one, chosen),
                 "" if one is chosen else _signed(bytes_, bytes_text(abs(bytes_))), one.why]
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    target = io.StringIO()
    Console(file=target, width=WIDTH, color_system=None, emoji=False).print(table)
    rest = [f"  and {len(found) - len(shown)} more that take longer"] if len(found) > len(shown) else []
    return "\n".join([*(line.rstrip() for line in target.getvalue().rstrip().splitlines()), *rest])


def _price(one: Alternative) -> str:
    """Seconds, or the two ends between which they lie."""
    least, most = seconds_text(one.least), seconds_text(one.seconds)
    if math.isinf(one.seconds):
        return f"at least {least}"
    if one.least <= 0 < one.seconds:
        return f"at most {most}"
    return most if least == most else f"{least} to {most}"


def _against(one: Alternative, chosen: Alternative) -> str:
    """What it takes more than the planned choice, or the two ends between which that lies."""
    ends = [one.least - chosen.seconds, one.seconds - chosen.least]
    texts = [_signed(end, seconds_text(abs(end))) for end in ends]
    if math.isinf(one.seconds):
        return f"at least {texts[0]}" if one.least > 0 else ""
    if one.least <= 0 or chosen.least <= 0:
        return f"at most {texts[1]}" if chosen.least > 0 else ""
    return texts[1] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _signed(value: float, text: str) -> str:
    return "0" if abs(value) < 1e-12 else f"{'+' if value > 0 else '-'}{text}"


def _closed(facts: Facts, op: Op, found: list[Alternative]) -> Iterator[str]:
    """Why the axes do not split the operator's other factors."""
    plan, rule = facts.plan, facts.rules[op.name]
    factors = sorted(set(rule.sizes))
    for axis in (axis for axis in plan.mesh.axes if axis != PP and plan.mesh.size(axis) > 1):
        choices = [one.assignment for one in found] + [plan.assignments.get(op.name, {})]
        open_ = {factor for choice in choices if axis in choice for factor in factors_of(choice[axis])}
        for factor in (factor for factor in factors if factor not in open_):
            size, ranks = rule.sizes[factor], plan.mesh.size(axis)
            if factor not in rule.splittable:
                why = "the operator needs it whole"
            elif size % ranks:
                why = f"its size {size} does not divide by {ranks}"
            elif role_of(axis) in SAMPLED:
                why = "a data axis splits the batch and nothing else"
            elif role_of(axis) == SEQUENCE:
                why = "an axis of the sequence splits the sequence, and heads where attention exchanges one for the other"
            else:
                why = "the axis's role, or a choice that is as good in every way, leaves it out"
            yield f"{axis} splits {factor}: {why}"
