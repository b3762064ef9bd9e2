"""From a graph to numbers: the chain of blocks the solver chooses placements for, and back from its solution to the plan.

    positions.py     the graph cut into blocks and the root's runs between them
    blockmodel.py    each position as a factor graph                       tables.py: what its edges cost
    problem.py       equal blocks as one kind, their variants, the chain   (``Problem.chain``)
                     assignments, copies and groups                        (``Problem.decode``)

How a block's parameters are kept and whether it is recomputed are its variants; under full recomputation its forward runs
again in the backward, only what it reads is saved, and what it would have saved comes back while it runs (``_recomputed``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.compiler.activations import body_shapes, saved_values
from meshwright.compiler.blockmodel import ROOT, Builder, Model
from meshwright.compiler.chain import BlockModel, Chain, Edge, Kind, Solution
from meshwright.compiler.choices import Scope
from meshwright.compiler.costs import (
    BACKWARD,
    BYTES_ROW,
    FORWARD,
    RESOURCES,
    SAVED,
    SEND,
    SEND_BACK,
    TIME_ROWS,
    TRANSIENT,
    TRANSIENT_ROW,
    Costs,
    Variant,
)
from meshwright.compiler.positions import Position, alike, cut, renaming, several_readers
from meshwright.compiler.tables import Array, ResourceTables
from meshwright.cost.compute import fusion
from meshwright.plan import GroupChoice, Schedule
from meshwright.rule import OpRule
from meshwright.sharding import Sharding


class Problem:
    """Builds the chain and reads its solution back.

    ``block_variants`` and ``root_variants``: the ways to keep parameters that are open to the blocks and to the root.
    """

    def __init__(
        self, scope: Scope, rules: Mapping[str, OpRule], schedule: Schedule, costs: Costs,
        block_variants: Sequence[Variant], root_variants: Sequence[Variant],
    ) -> None:
        self.graph = scope.graph
        self.block_variants, self.root_variants = tuple(block_variants), tuple(root_variants)
        shapes = body_shapes(self.graph, rules, schedule)
        self.tables = ResourceTables(self.graph, scope.mesh, schedule, costs, shapes, saved_values(self.graph))
        self.positions, whole = cut(self.graph)
        self.tied = several_readers(self.graph)
        self.builder = Builder(
            scope, rules, schedule, self.tables, whole=whole, tied=self.tied, root_variants=self.root_variants,
            fused=dict(zip((op.name for op in self.graph.ops), fusion(self.graph), strict=True)),
        )
        self._serves: list[int] = []  # position -> the first position like it
        self._models: dict[int, Model] = {}
        keys: dict[object, int] = {}
        for number, position in enumerate(self.positions):
            key = number if position.block < 0 else alike(position, self.graph, self.tied)
            first = keys.setdefault(key, number)
            self._serves.append(first)
            if first == number:
                self._models[number] = self.builder.build(position)

    def model(self, number: int) -> Model:
        """The model of a position; positions that are alike have the same."""
        return self._models[self._serves[number]]

    # the chain

    def chain(self, capacity: float, fixed_bytes: float) -> Chain:
        """The whole problem under ``capacity`` bytes of which ``fixed_bytes`` are taken whatever is chosen."""
        shared: dict[str, int] = {}
        for model in self._models.values():
            for name, _ in model.shared:
                shared.setdefault(name, len(shared))
        sizes = [1] * len(shared)
        for model in self._models.values():
            for name, var in model.shared:
                sizes[shared[name]] = model.sizes[var]
        kinds = {number: self._kind(model, self.positions[number], shared) for number, model in self._models.items()}
        order = {number: index for index, number in enumerate(kinds)}
        return Chain(
            kinds=tuple(kinds.values()), sequence=tuple(order[first] for first in self._serves), shared_sizes=tuple(sizes),
            time_rows=TIME_ROWS, bytes_row=BYTES_ROW, transient_row=TRANSIENT_ROW, capacity=capacity, fixed_bytes=fixed_bytes,
            fixed_time=0.0,
        )

    def _kind(self, model: Model, position: Position, shared: Mapping[str, int]) -> Kind:
        coupling = (tuple(model.entry), tuple(model.exit), tuple((shared[name], var) for name, var in model.shared))
        if position.block < 0:
            block = BlockModel(tuple(model.sizes), tuple(model.unary), tuple(model.edges))
            return Kind((block,), (np.zeros(RESOURCES),), *coupling)
        blocks = []
        for variant in self.block_variants:
            unary = [array.copy() for array in model.unary]
            for var, name, needs in model.parameter_uses:
                unary[var] += self.builder.parameter(model, name, needs, variant)
            edges = model.edges
            if variant.recompute == "full":
                unary, edges = self._recomputed(model, unary)
            blocks.append(BlockModel(tuple(model.sizes), tuple(unary), tuple(edges)))
        return Kind(tuple(blocks), tuple(np.zeros(RESOURCES) for _ in blocks), *coupling)

    def _recomputed(self, model: Model, unary: Sequence[Array]) -> tuple[list[Array], list[Edge]]:
        """The block under full recomputation."""
        again = np.eye(RESOURCES)
        again[FORWARD, BACKWARD] = again[SEND, SEND_BACK] = 1.0
        again[SAVED, SAVED], again[SAVED, TRANSIENT] = 0.0, 1.0
        seen: dict[int, Array] = {}

        def through(table: Array) -> Array:
            if id(table) not in seen:
                seen[id(table)] = np.where(np.isinf(table), np.inf, np.where(np.isinf(table), 0.0, table) @ again)
            return seen[id(table)]

        changed = [through(array) for array in unary]
        for name, (var, states) in model.states.items():
            if var in model.entry:
                held = [self.tables.bytes(name, state) for state in states]
                changed[var] = changed[var] + np.outer(held, np.eye(RESOURCES)[SAVED])
        return changed, [Edge(e.i, e.j, through(e.table), e.rows, e.cols) for e in model.edges]

    # reading the solution

    def decode(self, solution: Solution) -> tuple[dict[str, dict[str, str]], dict[str, Sharding], tuple[GroupChoice, ...]]:
        """(assignments by op, copies by value, groups: one per block, then the root's)."""
        assignments: dict[str, dict[str, str]] = {}
        copies: dict[str, Sharding] = {}
        groups: dict[int, GroupChoice] = {}
        root = self.root_variants[0]
        elsewhere = {name for position in self.positions for name in position.shared_in}
        for number, position in enumerate(self.positions):
            model, chosen = self.model(number), solution.choices[number]
            names = renaming(self.positions[self._serves[number]], position, self.graph)
            for i, op in enumerate(position.ops(self.graph)):
                assignments[op.name] = model.op_choices[i][chosen[i]]
            for name, (var, options) in model.copies.items():
                if names[name] not in elsewhere:
                    copies[names[name]] = options[chosen[var]]
            for name, var in model.shared:
                if name == ROOT:
                    root = self.root_variants[chosen[var]]
            if position.block >= 0:
                path = self.graph.blocks[position.block].path
                groups[position.block] = _group(path, self.block_variants[solution.variants[number]])
        ordered = tuple(groups[i] for i in range(len(self.graph.blocks)))
        return assignments, copies, (*ordered, _group("", root))


def totals(chain: Chain, solution: Solution) -> Array:
    """Resources [positions, K] of a solution."""
    rows = []
    for kind, variant, choices in zip(chain.sequence, solution.variants, solution.choices, strict=True):
        rows.append(chain.kinds[kind].variants[variant].cost(choices))
    return np.array(rows)


def _group(path: str, variant: Variant) -> GroupChoice:
    return GroupChoice(path, variant.zero, variant.data_axes, variant.shard_axes, variant.recompute)
