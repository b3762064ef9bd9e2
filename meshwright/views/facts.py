"""What a plan means for every operator, parameter and block: derived, never decided here.

    Facts       the rule and the shardings of every operator, the parameters at rest, the collectives between operators
    Section     one distinct block (equal blocks together), or what runs between blocks: rows in the order of execution
    TableRow    one module's turn: its weights, its result, the collectives around it
    parted      a section whose names leave no room beside them, in parts whose names are shorter

The collectives are read off the lowered program of rank 0, so what is shown is what runs: a step belongs to the operator that
produced its value, or, where that lies outside the segment (parameters, what another block hands on), to the one that reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.ir.graph import Op
from meshwright.ir.plan import Plan
from meshwright.ir.program import Program, Stored
from meshwright.ir.reshard import STEPS
from meshwright.ir.rule import OpRule, Placed, Rules, neighbourhood, place
from meshwright.ir.sharding import format_sharding
from meshwright.ir.writing.paths import fold_paths
from meshwright.passes.lower import lower
from meshwright.rules import rules_of_plan

LATE = "late"
"""The kind of a sum of gradients that is done together with others' (``Stored.late_axes``)."""


@dataclass(frozen=True)
class Collective:
    """A step between operators. ``op``: the operator it belongs to; ``after``: it handles its result, else an operand;
    ``value``: the graph value it moves; ``forward``, ``backward``: collectives, "" for local work."""

    op: str
    after: bool
    value: str
    kind: str
    axis: str
    dim: int | None
    forward: str
    backward: str

    def __str__(self) -> str:
        words = [f"{pass_} {name.replace('_', '-')}@{self.axis}" for pass_, name in
                 (("fwd", self.forward), ("bwd", self.backward)) if name]
        where = f" (dim {self.dim})" if self.dim is not None else ""
        return " / ".join(words) + where if words else f"{self.kind}@{self.axis}"


@dataclass(frozen=True)
class Facts:
    """A plan with everything that follows from it, by operator name and by parameter value."""

    plan: Plan
    rules: Rules
    placed: Mapping[str, Placed]
    stored: Mapping[str, Stored]
    collectives: tuple[Collective, ...]

    def around(self, op: str) -> tuple[Collective, ...]:
        """The collectives that belong to an operator, those on its operands first."""
        return tuple(sorted((c for c in self.collectives if c.op == op), key=lambda c: c.after))

    def type_of(self, name: str) -> str:
        """A value in the notation: as its producer leaves it, or as it is stored."""
        graph = self.plan.graph
        value = graph.values[name]
        if name in self.stored:
            return format_sharding(self.stored[name].tensor, value.shape, value.dtype)
        maker = graph.producers.get(name)
        if maker is None:
            sharding = self.plan.copies.get(name)
            return format_sharding(sharding, value.shape, value.dtype) if sharding else str(value).split(": ", 1)[1]
        op = graph.ops[maker]
        return format_sharding(self.placed[op.name].results[op.outputs.index(name)], value.shape, value.dtype)


@dataclass(frozen=True)
class TableRow:
    """Consecutive operators of one module.

    ``module``: from the section's, "." is the block itself. ``weights``: named from the module; from the section's module with
    "./" or "../" before them where they are another's; else from the model, with "/". ``steps``: its collectives, where the
    rows of equal blocks stand first.
    """

    module: str
    weights: tuple[str, ...]
    result: str
    collectives: tuple[str, ...]
    steps: tuple[Collective, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Section:
    """Equal blocks (``paths``), or, without a path, what runs between blocks; of them the module ``inside``."""

    paths: tuple[str, ...]
    rows: tuple[TableRow, ...]
    inside: str = ""

    @property
    def title(self) -> str:
        """ "model.layers.0..31 (32 equal blocks)", "outside the blocks", "model.encoder (outside the blocks)" """
        if not self.paths:
            return f"{self.inside} (outside the blocks)" if self.inside else "outside the blocks"
        folded = fold_paths([_below(self.inside, path) for path in self.paths])
        return folded + (f" ({len(self.paths)} equal blocks)" if len(self.paths) > 1 else "")

    def fits(self, room: int) -> bool:
        """Whether the longest name and the longest weight are no longer than so many columns."""
        weights = (len(weight) for row in self.rows for weight in row.weights)
        return max((len(row.module) for row in self.rows), default=0) + max(weights, default=0) <= room


def facts_of(plan: Plan) -> Facts:
    """Derive everything. Raises PlanError if the plan does not fit the rules of its operators."""
    graph, mesh = plan.graph, plan.mesh
    rules = rules_of_plan(plan)
    placed = {}
    for op in graph.ops:
        differentiable = [graph.values[name].differentiable for name in op.inputs]
        placed[op.name] = place(rules[op.name], plan.assignments.get(op.name, {}), mesh, differentiable)
    program = lower(plan, rules, 0)
    steps = tuple(_steps(plan, program))
    steps = (*steps, *_late(program))
    inside = tuple(step for op in graph.ops for step in _internal(plan, op, rules[op.name]))
    moving = tuple(step for step in (*inside, *steps) if step.axis not in mesh.axes or mesh.size(step.axis) > 1)
    return Facts(plan, rules, placed, {item.value: item for item in program.stored}, moving)  # over one rank nothing moves


def _steps(plan: Plan, program: Program) -> Iterator[Collective]:
    """The steps that lowering inserted, each with the operator it belongs to."""
    graph = plan.graph
    originals = {op.name for op in graph.ops}
    readers: dict[str, Op] = {}
    for segment in program.segments:
        for op in segment.graph.ops:
            for name in op.inputs:
                readers.setdefault(name, op)
    base: dict[str, str] = {}
    for segment in program.segments:
        makers = {out: op.name for op in segment.graph.ops if op.name in originals for out in op.outputs}
        for op in segment.graph.ops:
            if op.name in originals:
                continue
            value = base[op.outputs[0]] = base.get(op.inputs[0], op.inputs[0])
            axis = dict(op.kwargs).get("axis")
            if axis is None:
                continue
            reader: Op | None = op
            while reader is not None and reader.name not in originals:
                reader = readers.get(reader.outputs[0])
            owner = makers.get(value) or (reader.name if reader is not None else "")
            kind = op.target.removeprefix("mw.")
            forward, backward = STEPS.get(kind, ("", ""))
            dim = op.args[1] if len(op.args) > 1 and isinstance(op.args[1], int) else None
            differentiable = value in graph.values and graph.values[value].differentiable
            yield Collective(owner, value in makers, value, kind, str(axis), dim, forward, backward if differentiable else "")


def _late(program: Program) -> Iterator[Collective]:
    """The gradients that the runtime sums together, each with the operator that reads the parameter."""
    for item in program.stored:
        for axis in item.late_axes:
            reader = next((op.name for s in program.segments for op in s.graph.ops if item.value in op.inputs), "")
            yield Collective(reader, False, item.value, LATE, axis, None, "", "all_reduce")


def _internal(plan: Plan, op: Op, rule: OpRule) -> Iterator[Collective]:
    """The collectives that an operator runs inside itself under its assignment."""
    assignment = plan.assignments.get(op.name, {})
    for factor, traffic in rule.internal.items():
        for axis in (axis for axis in plan.mesh.axes if neighbourhood(assignment.get(axis, ""))[0] == factor):
            for item in traffic:
                sides = ("", item.kind) if item.backward else (item.kind, "")
                yield Collective(op.name, True, op.outputs[0], "inside", axis, None, *sides)
    for axis in plan.mesh.axes:
        algorithm = rule.algorithms.get(assignment.get(axis, ""))
        if algorithm is not None and (algorithm.passing or algorithm.fetching) and plan.mesh.size(axis) > 1:
            yield Collective(op.name, True, op.outputs[0], "inside", axis, None, "p2p", "p2p")
        if algorithm is not None and algorithm.dealt and plan.mesh.size(axis) > 1:
            yield Collective(op.name, True, op.outputs[0], "inside", axis, None, "all_to_all", "all_to_all")


def sections(facts: Facts) -> list[Section]:
    """The whole model in the order of execution; equal blocks with equal placements once, where the first of them stands."""
    graph = facts.plan.graph
    by_op: dict[str, list[Collective]] = {}
    for step in facts.collectives:
        by_op.setdefault(step.op, []).append(step)
    found: dict[object, Section] = {}
    at = 0
    for block in (*graph.blocks, None):
        start = block.start if block else len(graph.ops)
        if start > at:
            rows = _rows(facts, graph.ops[at:start], "", by_op)
            if rows:
                found[("outside", at)] = Section((), rows)
        if block is not None:
            rows = _rows(facts, graph.ops[block.start : block.stop], block.path, by_op)
            key = (block.kind, rows)
            found[key] = Section((*found[key].paths, block.path) if key in found else (block.path,), rows)
            at = block.stop
    return list(found.values())


def parted(section: Section, room: int) -> Iterator[Section]:
    """The section, or where its names and weights are longer than ``room`` the modules inside whose names are too long each for
    itself, and the rows between them."""
    if section.fits(room):
        yield section
        return
    pending: list[TableRow] = []
    for head, run in itertools.groupby(section.rows, key=lambda row: row.module.partition(".")[0]):
        rows = list(run)
        if replace(section, rows=(*pending, *rows)).fits(room) or (not head and not pending):
            pending += rows
            continue
        if pending:
            yield replace(section, rows=tuple(pending))
        alone = replace(section, rows=tuple(rows))
        pending = rows if alone.fits(room) or not head else []
        if not pending:
            inner = tuple(replace(row, module=_relative(row.module, head), weights=_weights_below(row, head)) for row in rows)
            yield from parted(Section(section.paths, inner, _below(head, section.inside)), room)
    if pending:
        yield replace(section, rows=tuple(pending))


def _rows(facts: Facts, ops: Sequence[Op], path: str, by_op: Mapping[str, list[Collective]]) -> tuple[TableRow, ...]:
    """One row per run of operators of a module that has weights, collectives, or a result that gradients flow through."""
    graph = facts.plan.graph
    names = {param.value: param for param in graph.params}
    rows = []
    for module, run in itertools.groupby(ops, key=lambda op: op.module):
        turn = list(run)
        owned = dict.fromkeys(name for op in turn for name in op.inputs if name in names and names[name].trainable)
        moved = tuple(step for op in turn for step in by_op.get(op.name, ()))
        steps = dict.fromkeys(map(str, moved))
        last = next((out for op in reversed(turn) for out in op.outputs if graph.values[out].differentiable), None)
        if not owned and not steps and last is None:
            continue
        weights = tuple(f"{_weight(names[name].fqns, module, path)} {facts.type_of(name)}" for name in owned)
        result = facts.type_of(last or turn[-1].outputs[0])
        rows.append(TableRow(_relative(module, path), weights, result, tuple(steps), moved))
    return tuple(rows)


def _relative(module: str, path: str) -> str:
    if module == path:
        return "."
    return module.removeprefix(f"{path}.") if path else module


def _below(name: str, path: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _weights_below(row: TableRow, head: str) -> tuple[str, ...]:
    """The weights of a row as they are named from the module ``head`` of its section."""
    found = []
    for weight in row.weights:
        if weight.startswith(f"./{head}."):
            weight = "./" + weight.removeprefix(f"./{head}.")
        elif weight.startswith("."):
            weight = "../" + weight.removeprefix("./")
        found.append(weight)
    return tuple(found)


def _weight(fqns: Sequence[str], module: str, path: str) -> str:
    """A parameter's name from the module that reads it, from the block's path ("./") or from the model's ("/")."""
    for mark, of in (("", module), ("./", path)):
        found = [fqn.removeprefix(f"{of}.") if of else fqn for fqn in fqns if not of or fqn.startswith(f"{of}.")]
        if found and (of or not mark):
            return mark + min(found, key=lambda name: name.count("."))
    return f"/{fqns[0]}"
