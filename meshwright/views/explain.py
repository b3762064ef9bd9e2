"""Why a plan is as it is, and how two plans differ, in words and in the one notation.

``explain(plan, name)``: an operator, a value, a parameter or a module. For an operator the price of its choice stands beside
those of the alternatives, each with everything around it as planned:

    compute      forward and backward, on local shapes
    moving       collectives inside it, from its operands' producers and to its results' readers
    parameters   gathering its weights and reducing their gradients (overlaps compute: the solver counts what stays exposed)

so an alternative that needs its neighbours to change as well looks dearer here than it was to the solver.

``diff(old, new)``: what changed, equal blocks together.
"""

from __future__ import annotations

import difflib
import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.compiler.placement.blockmodel import priced
from meshwright.compiler.placement.costs import BACKWARD, GATHER, REDUCE, SEND_BACK, Costs, Variant
from meshwright.compiler.structure.activations import operand_shapes
from meshwright.cost.cluster import Cluster, ClusterError
from meshwright.cost.compute import Fused, fusion
from meshwright.ir.declared.operator import Work
from meshwright.ir.graph import Op
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import TIME, Plan, PlanError
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.ir.rule import APART, Placed, place
from meshwright.ir.sharding import Sharding, format_sharding
from meshwright.planner import OPTIMIZERS
from meshwright.views.facts import Facts, facts_of, fold_paths
from meshwright.views.report import WIDTH

_SHOWN = 8
_MOST = 4096


def explain(plan: Plan, name: str) -> str:
    """What was chosen for ``name`` and what the alternatives would cost. Raises PlanError for an unknown name."""
    facts, graph = facts_of(plan), plan.graph
    for op in graph.ops:
        if name == op.name or name in op.outputs:
            return _operator(facts, op)
    for param in graph.params:
        if name in (*param.fqns, param.value):
            return _parameter(facts, param.value)
    inside = [op for op in graph.ops if op.module == name or op.module.startswith(f"{name}.")]
    if inside:
        return _module(facts, name, inside)
    known = {*(op.name for op in graph.ops), *(fqn for p in graph.params for fqn in p.fqns), *(op.module for op in graph.ops)}
    near = difflib.get_close_matches(name, sorted(known - {""}), n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise PlanError(f"the plan has no operator, parameter or module {name!r}{hint}")


def _operator(facts: Facts, op: Op) -> str:
    graph, placed = facts.plan.graph, facts.placed[op.name]
    lines = [f"operator {op.name}: {op.target}", f"  module   {op.module or '(the model)'}"]
    if op.source:
        lines.append(f"  source   {op.source}")
    rule = facts.rules[op.name]
    lines.append(f"  rule     {rule}" if rule.known else "  rule     none: replicated")
    lines.append(f"  choice   {_choice(facts.plan.assignments.get(op.name, {}))}")
    for name, need in zip(op.inputs, placed.operands, strict=True):
        value = graph.values[name]
        have, want = facts.type_of(name), format_sharding(need, value.shape, value.dtype)
        lines.append(f"  operand  %{name}: {have}" + (f", read as {want}" if want != have else ""))
    lines += [f"  result   %{name}: {facts.type_of(name)}" for name in op.outputs]
    lines += [f"  moves    %{step.value}: {step}" for step in facts.around(op.name)]
    return "\n".join(lines) + "\n" + _alternatives(facts, op)


def _choice(assignment: Mapping[str, str]) -> str:
    words = [
        f"every rank of {axis} for itself, gradients summed later" if factor == APART
        else f"{axis} sums linear group {factor[1:] or 0} later" if factor.startswith("+") else f"{axis} splits {factor}"
        for axis, factor in assignment.items()
    ]
    return ", ".join(words) or "every rank does all of it"


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
    readers = [op for op in graph.ops if value in op.inputs]
    lines += [f"  read by  {op.name} ({op.target}) of {op.module or 'the model'}" for op in readers]
    lines += ["  read by  no operator"] if not readers else []
    return "\n".join(lines) + "".join("\n\n" + _operator(facts, op) for op in readers)


def _module(facts: Facts, name: str, ops: list[Op]) -> str:
    lines = [f"module {name}: {len(ops)} operators"]
    params = [p for p in facts.plan.graph.params if any(fqn.startswith(f"{name}.") for fqn in p.fqns)]
    lines += [f"  {'buffer' if p.buffer else 'weight'}  {p.fqn}: {facts.type_of(p.value)}" for p in params]
    for op in ops:
        results = ", ".join(f"%{out}: {facts.type_of(out)}" for out in op.outputs)
        moves = "; ".join(str(step) for step in facts.around(op.name))
        lines.append(f"  {op.target:40s} {results}" + (f"   [{moves}]" if moves else ""))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------------ prices
@dataclass(frozen=True)
class Price:
    """Seconds of one operator under one assignment, everything around it as planned."""

    assignment: Mapping[str, str]
    compute: float
    moving: float
    parameters: float

    @property
    def total(self) -> float:
        return self.compute + self.moving + self.parameters


def prices(facts: Facts, op: Op) -> list[Price]:
    """Every legal assignment of ``op`` that fits its surroundings, cheapest first. Raises ClusterError if the plan's cluster is
    not in the catalogue."""
    plan, rule = facts.plan, facts.rules[op.name]
    index = plan.graph.ops.index(op)
    fused = fusion(plan.graph, facts.rules.operators)[index]
    costs = _costs(plan)
    time = plan.schedule.time.get(op.name)
    timed = Mesh((*plan.mesh.axes, TIME), (*plan.mesh.sizes, plan.schedule.microbatches))
    options = [[None, *rule.splittable, *rule.ways] if plan.mesh.size(axis) > 1 else [None] for axis in plan.mesh.axes]
    found = []
    for combination in itertools.islice(itertools.product(*options), _MOST):
        assignment = {axis: factor for axis, factor in zip(plan.mesh.axes, combination, strict=True) if factor is not None}
        if rule.legal({**assignment, **({TIME: time} if time else {})}, timed):
            price = _price(facts, op, index, assignment, timed, costs, fused)
            if price is not None:
                found.append(price)
    return sorted(found, key=lambda price: (price.total, sorted(price.assignment.items())))


def _costs(plan: Plan) -> Costs:
    itemsize = 2 if plan.precision == "bf16" else 4
    state = OPTIMIZERS[plan.optimizer] if plan.optimizer in OPTIMIZERS else float(plan.optimizer.split()[0])
    cluster = Cluster.parse(plan.cluster)
    return Costs(cluster, plan.mesh, microbatches=plan.schedule.microbatches, itemsize=itemsize, state_bytes=state)


def _price(
    facts: Facts, op: Op, index: int, assignment: Mapping[str, str], timed: Mesh, costs: Costs, fused: Fused | None
) -> Price | None:
    plan, graph, rule = facts.plan, facts.plan.graph, facts.rules[op.name]
    differentiable = [graph.values[name].differentiable for name in op.inputs]
    placed = place(rule, assignment, plan.mesh, differentiable)
    time = plan.schedule.time.get(op.name)
    body = place(rule, {**assignment, **({TIME: time} if time else {})}, timed, differentiable)
    times = 1 if op.name in plan.schedule.prologue else plan.schedule.microbatches
    operands = [s.local_shape(graph.values[n].shape, timed) for s, n in zip(body.operands, op.inputs, strict=True)]
    results = [s.local_shape(graph.values[n].shape, timed) for s, n in zip(body.results, op.outputs, strict=True)]
    whole = operand_shapes(op, graph, rule, plan.schedule)
    work = Work.of(op, graph, operands, results)
    *compute_, ahead, back = priced(
        op, rule, assignment, facts.rules.operators[op.target], work, graph, costs, fused, whole
    )
    compute, moving = sum(compute_), ahead + back
    for source, target, name in _reshards(facts, op, placed):
        value = graph.values[name]
        share = times if name not in graph.inputs else 1
        move = costs.reshard(source, target, value.bytes_ / share, value.differentiable)
        if move is None:
            return None
        moving += sum(move)
    group = plan.group_of(index)
    variant = Variant(group.zero, group.data_axes, group.shard_axes, group.recompute)
    own = {p.value: p for p in graph.params}
    parameters = 0.0
    for name, need in zip(op.inputs, placed.operands, strict=True):
        if name in own:
            vector = costs.parameter(graph.values[name], need, own[name].trainable, variant, float(graph.values[name].numel))
            if vector is None:
                return None
            parameters += float(vector[GATHER] + vector[REDUCE] + vector[BACKWARD])
            moving += float(vector[SEND_BACK]) / times
    return Price(assignment, compute * times, moving * times, parameters)


def _reshards(facts: Facts, op: Op, placed: Placed) -> Iterator[tuple[Sharding, Sharding, str]]:
    """(from, to, value): from where the operands are to what the operator needs, and from its results to their readers."""
    plan, graph = facts.plan, facts.plan.graph
    for name, need in dict(zip(op.inputs, placed.operands, strict=True)).items():
        if name in facts.stored:
            continue
        maker = graph.producers.get(name)
        shared = plan.copies.get(name)
        if maker is None:
            yield shared or Sharding.whole(len(graph.values[name].shape)), need, name
            continue
        made = graph.ops[maker]
        yield shared or facts.placed[made.name].results[made.outputs.index(name)], need, name
    readers = graph.consumers()
    for name, have in zip(op.outputs, placed.results, strict=True):
        if name in plan.copies:
            yield have, plan.copies[name], name
            continue
        needs = [need for i in readers[name] for operand, need in
                 zip(graph.ops[i].inputs, facts.placed[graph.ops[i].name].operands, strict=True) if operand == name]
        for need in dict.fromkeys(needs):
            yield have, need, name


def _alternatives(facts: Facts, op: Op) -> str:
    try:
        found = prices(facts, op)
    except ClusterError:
        return f"  no prices: cluster {facts.plan.cluster or '(unnamed)'} is not in the catalogue"
    chosen = dict(facts.plan.assignments.get(op.name, {}))
    table = Table("", "choice", "compute", "moving", "parameters", "total", box=box.SIMPLE_HEAD)
    mine = [price for price in found if price.assignment == chosen]
    for price in [*found[:_SHOWN], *(price for price in mine if price not in found[:_SHOWN])]:
        cells = ["->" if price in mine else "", _choice(price.assignment),
                 *map(seconds_text, (price.compute, price.moving, price.parameters, price.total))]
        table.add_row(*(Text(cell) for cell in cells))
    target = io.StringIO()
    Console(file=target, width=WIDTH, color_system=None, emoji=False).print(table)
    head = f"  seconds per step of {len(found)} choices that fit, everything else as planned"
    return head + "\n" + "\n".join(line.rstrip() for line in target.getvalue().rstrip().splitlines())


# -------------------------------------------------------------------------------------------------------------- differences
def diff(old: Plan, new: Plan) -> str:
    """What is different in ``new``; "no differences" if nothing a run depends on is."""
    before, after = facts_of(old), facts_of(new)
    lines = [f"{what}: {a} -> {b}" for what, a, b in _heads(old, new) if a != b]
    theirs = {op.name: (op.target, op.args) for op in old.graph.ops}
    ours = {op.name: (op.target, op.args) for op in new.graph.ops}
    if theirs != ours or {n: v.shape for n, v in old.graph.values.items()} != {n: v.shape for n, v in new.graph.values.items()}:
        changed = sum(theirs.get(name) != ours.get(name) for name in {**theirs, **ours})
        lines.append(f"the plans are for different models or inputs: {changed} of {len({**theirs, **ours})} operators differ")
    for change, paths in _grouped(_group_changes(old, new)).items():
        blocks = [path for path in paths if path]
        lines += [f"block {fold_paths(blocks)}: {change}"] if blocks else []
        lines += [f"outside the blocks: {change}"] if "" in paths else []
    for change, fqns in _grouped(_parameter_changes(before, after)).items():
        lines.append(f"parameter {fold_paths(fqns)}: {change}")
    for change, modules in _grouped(_result_changes(before, after)).items():
        lines.append(f"result of {fold_paths(list(dict.fromkeys(modules)))}: {change}")
    return "\n".join(lines) or "no differences"


def _heads(old: Plan, new: Plan) -> list[tuple[str, str, str]]:
    def head(plan: Plan) -> dict[str, str]:
        known = plan.predicted
        return {
            "mesh": str(plan.mesh), "cluster": plan.cluster, "precision": plan.precision, "optimizer": plan.optimizer,
            "micro-batches": str(plan.schedule.microbatches),
            "predicted step": "unknown" if known is None else seconds_text(known.step_seconds),
            "predicted memory": "unknown" if known is None else bytes_text(known.bytes_per_rank),
        }

    return [(what, a, b) for (what, a), b in zip(head(old).items(), head(new).values(), strict=True)]


def _grouped(changes: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """{change: where}, so that equal changes of equal blocks become one line."""
    result: dict[str, list[str]] = {}
    for where, change in changes:
        result.setdefault(change, []).append(where)
    return result


def _group_changes(old: Plan, new: Plan) -> Iterator[tuple[str, str]]:
    theirs = {group.path: group for group in old.groups}
    for group in new.groups:
        before = theirs.get(group.path)
        if before is None:
            yield group.path, "new"
            continue
        words = [f"{name} {_show(getattr(before, name))} -> {_show(getattr(group, name))}"
                 for name in ("zero", "data_axes", "shard_axes", "recompute", "stage")
                 if getattr(before, name) != getattr(group, name)]
        if words:
            yield group.path, ", ".join(words)


def _show(value: object) -> str:
    return (",".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _parameter_changes(old: Facts, new: Facts) -> Iterator[tuple[str, str]]:
    theirs = {stored.fqns[0]: old.type_of(value) for value, stored in old.stored.items()}
    for value, stored in new.stored.items():
        before, after = theirs.get(stored.fqns[0]), new.type_of(value)
        if before is not None and before != after:
            yield stored.fqns[0], f"{before} -> {after}"


def _result_changes(old: Facts, new: Facts) -> Iterator[tuple[str, str]]:
    for op in new.plan.graph.ops:
        for name in op.outputs:
            if name in old.plan.graph.values and new.plan.graph.values[name].differentiable and op.name in old.placed:
                before, after = old.type_of(name), new.type_of(name)
                if before != after:
                    yield op.module or "the model", f"{before} -> {after}"
