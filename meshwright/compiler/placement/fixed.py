"""Fixed decisions: what a plan that is priced again, or pins that name operators, values and blocks, leave no choice about.

The placement problem is built as for a search; an operator, value or block whose decision is fixed has one choice in it where
others have several (``choices``, ``blockmodel``, ``problem``). Two equal blocks with different fixed decisions become different
kinds of positions, so they may come out differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.compiler.placement.costs import Variant
from meshwright.compiler.structure.positions import Position, operands, several_readers
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import GroupChoice, Plan, PlanError
from meshwright.ir.rule import OpRule, folded, place
from meshwright.ir.sharding import Sharding, shared_split

_HYBRID = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class FixedDecisions:
    """What is decided before the search.

    assignments: for every operator the factor that each axis splits
    copies: for every value the sharding that its readers share
    kept: how parameters are kept, by the first operator of the block; "" is the root
    rest: for every parameter with several readers, its sharding at rest
    data: the number of data ranks, None if that is open
    mirrored: whether ranks that split the sequence have two chunks each, None if that is open
    """

    assignments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    copies: Mapping[str, Sharding] = field(default_factory=dict)
    kept: Mapping[str, Variant] = field(default_factory=dict)
    rest: Mapping[str, Sharding] = field(default_factory=dict)
    data: int | None = None
    mirrored: bool | None = None

    @classmethod
    def of(cls, plan: Plan, rules: Mapping[str, OpRule]) -> FixedDecisions:
        """Everything that a plan decides. Raises PlanError for what no search decides."""
        starts = [plan.graph.ops[block.start].name for block in plan.graph.blocks]
        return cls(
            {op.name: plan.assignments.get(op.name, {}) for op in plan.graph.ops}, plan.copies,
            {name: variant_of(group) for name, group in zip((*starts, ""), plan.groups, strict=True)},
            rest=_at_rest(plan, rules), mirrored=bool(plan.mesh.mirrored),
        )

    @property
    def folded(self) -> bool:
        """Whether ranks of the sequence split experts."""
        return folded(self.assignments.values())

    @property
    def axes(self) -> frozenset[str]:
        """The axes over which operators and values are split."""
        split = {axis for one in self.assignments.values() for axis in one}
        return frozenset(split.union(*((*one.split_axes, *one.partial, *one.varying) for one in self.copies.values())))

    def __bool__(self) -> bool:
        return bool(self.assignments or self.copies or self.kept)

    def assignment(self, op: str, mesh: Mesh) -> dict[str, str] | None:
        """The choice of an operator over the axes of a mesh that have several ranks; None if none is fixed."""
        if op not in self.assignments:
            return None
        return {axis: one for axis, one in self.assignments[op].items() if axis in mesh.axes and mesh.size(axis) > 1}

    def like(self, choice: Mapping[str, str], want: Mapping[str, str]) -> bool:
        """Whether a choice is the fixed one: placements are solved on more data ranks than one where there is one."""
        alone = self.data == 1 and "dp" not in want
        return {axis: one for axis, one in choice.items() if not (alone and axis == "dp")} == dict(want)

    def told_apart(self, position: Position, graph: Graph) -> object:
        """Equal for positions with the same fixed decisions."""
        if not self:
            return None
        ops = position.ops(graph)
        values = dict.fromkeys((*operands(ops), *(name for op in ops for name in op.outputs)))
        choices = tuple(tuple(sorted(self.assignments[op.name].items())) if op.name in self.assignments else None for op in ops)
        return choices, tuple(self.copies.get(name) for name in values), self.kept.get(ops[0].name if ops else "")

    def collapsed(self, data: int | None = None) -> FixedDecisions:
        """The same over one data axis, as placements know it (``placement.placement``), on so many data ranks; how parameters
        are kept is no part of a placement."""
        if not self:
            return self
        return replace(
            self, data=data, assignments={name: _one_axis(one, name) for name, one in self.assignments.items()},
            copies={name: _one_data(one) for name, one in self.copies.items()}, kept={},
            rest={name: _one_data(one) for name, one in self.rest.items()},
        )

    def under(self, renamed: Mapping[str, str]) -> FixedDecisions:
        """The same of a folded graph, in which some values stand for others: {value: what stands for it}."""
        stand = set(renamed.values())
        copies = {name: one for name, one in self.copies.items() if name not in stand}
        return replace(self, copies={**copies, **{ours: self.copies[n] for n, ours in renamed.items() if n in self.copies}})


def _at_rest(plan: Plan, rules: Mapping[str, OpRule]) -> dict[str, Sharding]:
    """How parameters with several readers lie: split as all of these read them, as lowering has it."""
    graph, needs = plan.graph, dict[str, list[Sharding]]()
    tied = several_readers(graph)
    for op in graph.ops:
        if tied.isdisjoint(op.inputs):
            continue
        flows = [graph.values[name].differentiable for name in op.inputs]
        placed = place(rules[op.name], plan.assignments.get(op.name, {}), plan.mesh, flows)
        for name, need in zip(op.inputs, placed.operands, strict=True):
            if name in tied:
                needs.setdefault(name, []).append(need)
    return {name: shared_split(found) for name, found in needs.items()}


def variant_of(group: GroupChoice) -> Variant:
    """How a block's parameters are kept, as the problem has it. Raises PlanError for what it does not have."""
    if group.keep:
        raise PlanError(f"the weights of {group.path or 'the root'} stay gathered over the step, which no search decides")
    return Variant(group.zero, group.data_axes, group.shard_axes, group.recompute)


def _one_axis(assignment: Mapping[str, str], op: str) -> dict[str, str]:
    found = {"dp" if axis in _HYBRID else axis: factor for axis, factor in assignment.items()}
    if any(found["dp" if axis in _HYBRID else axis] != factor for axis, factor in assignment.items()):
        raise PlanError(f"operator {op} is split otherwise over {_HYBRID[0]} than over {_HYBRID[1]}, which no search decides")
    return found


def _one_data(sharding: Sharding) -> Sharding:
    def one(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys("dp" if axis in _HYBRID else axis for axis in axes))

    return replace(sharding, dims=tuple(map(one, sharding.dims)), partial=frozenset(one(tuple(sorted(sharding.partial)))),
                   varying=frozenset(one(tuple(sorted(sharding.varying)))))


NOTHING_FIXED = FixedDecisions()
