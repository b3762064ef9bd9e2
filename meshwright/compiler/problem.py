"""From a graph to numbers: the chain of blocks the solver chooses placements for.

The graph is cut into *positions*: its blocks, and the runs of operators between them (the root's). Each position is a
factor graph:

* a variable per operator: which factor every mesh axis splits;
* a *copy* variable per value with several readers: the sharding they share (q, k and v pay one gather);
* *entry* and *exit* variables: the sharding of what one position hands to the next;
* a variable per parameter with several readers (tied weights): how it is split at rest;
* *shared* variables for what several positions read (an encoder's output, a tied weight) and for how the root's parameters
  are kept.

Edges price the reshard between what is produced and what is read, forward and backward, and the bytes that autograd saves.
Blocks of one kind are one ``Kind``; how a block's parameters are kept and whether it is recomputed are its variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.compiler.chain import BlockModel, Chain, Edge, Kind, Solution
from meshwright.compiler.choices import Scope, choices
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
    local_shapes,
)
from meshwright.cost.compute import fusion
from meshwright.cost.operators import operator
from meshwright.graph import Graph, Op
from meshwright.plan import GroupChoice, Schedule
from meshwright.rule import OpRule, Placed, place
from meshwright.sharding import Sharding, ceil_div


@dataclass
class _Position:
    """One position of the chain while it is built."""

    start: int
    stop: int
    block: int  # index of the block, -1 for a root run
    entry: list[str] = field(default_factory=list)
    exit: list[str] = field(default_factory=list)
    shared_in: list[str] = field(default_factory=list)
    shared_out: list[str] = field(default_factory=list)


@dataclass
class _Model:
    """A position's variables: operator choices first, then copies, entries, exits, parameters and the root's variant."""

    sizes: list[int] = field(default_factory=list)
    unary: list[np.ndarray] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    op_choices: list[list[dict[str, str]]] = field(default_factory=list)
    placed: list[list[Placed]] = field(default_factory=list)
    copies: dict[str, tuple[int, list[Sharding]]] = field(default_factory=dict)
    states: dict[str, tuple[int, list[Sharding]]] = field(default_factory=dict)
    parameter_uses: list[tuple[int, str, list[Sharding]]] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)
    exit: list[int] = field(default_factory=list)
    shared: list[tuple[str, int]] = field(default_factory=list)

    def add(self, unary: np.ndarray) -> int:
        """A new variable."""
        self.sizes.append(len(unary))
        self.unary.append(unary)
        return len(self.sizes) - 1


class Problem:
    """Builds the chain and reads its solution back.

    ``block_variants`` and ``root_variants``: the ways to keep parameters that are open to the blocks and to the root.
    """

    def __init__(
        self, scope: Scope, rules: Mapping[str, OpRule], schedule: Schedule, costs: Costs,
        block_variants: Sequence[Variant], root_variants: Sequence[Variant],
    ) -> None:
        self.scope, self.graph, self.rules, self.schedule, self.costs = scope, scope.graph, rules, schedule, costs
        self.mesh = scope.mesh
        self.block_variants, self.root_variants = tuple(block_variants), tuple(root_variants)
        self.params = {param.value: param for param in self.graph.params}
        self.shapes = self._body_shapes()
        self.saved, self.linear_only = self._saved_values()
        self.tables: dict[object, np.ndarray] = {}
        self.kept_whole: set[str] = set()
        self.positions = self._cut()
        self.models: list[_Model] = []
        self.shared_names: dict[str, int] = {}
        self.tied = self._tied()
        self.fused = dict(zip((op.name for op in self.graph.ops), fusion(self.graph), strict=True))

    # what is fixed before any choice

    def _body_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: value.shape for name, value in self.graph.values.items()}
        count = self.schedule.microbatches
        for op in self.graph.ops:
            factor = self.schedule.time.get(op.name)
            if factor is None or factor.startswith("+"):
                continue
            for name, dims in zip(op.outputs, self.rules[op.name].results, strict=True):
                if factor in dims:
                    dim = dims.index(factor)
                    shape = shapes[name]
                    shapes[name] = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
        return shapes

    def _operand_shape(self, op: Op, position: int) -> tuple[int, ...]:
        """Shape of an operand within one micro-batch (a prologue value is cut where it enters)."""
        name = op.inputs[position]
        factor = self.schedule.time.get(op.name)
        dims = self.rules[op.name].operands[position]
        shape = self.graph.values[name].shape
        if factor is not None and factor in dims:
            dim = dims.index(factor)
            return (*shape[:dim], shape[dim] // self.schedule.microbatches, *shape[dim + 1 :])
        return shape

    def _saved_values(self) -> tuple[set[str], set[str]]:
        """Values autograd keeps for the backward, through views; and those of them that only linears keep."""
        root: dict[str, str] = {}
        for op in self.graph.ops:
            if operator(op.target).kind == "view" and op.inputs:
                root.update({name: root.get(op.inputs[0], op.inputs[0]) for name in op.outputs})
        saved: set[str] = set()
        other: set[str] = set()
        for op in self.graph.ops:
            if not any(self.graph.values[name].differentiable for name in op.outputs):
                continue
            operands, results = _saved(op, self.graph)
            names = [op.inputs[i] for i in operands] + [op.outputs[i] for i in results]
            for name in names:
                if name in self.params or name in self.graph.inputs:
                    continue
                saved.add(root.get(name, name))
                if op.target != "aten.linear.default" or name in root:
                    other.add(root.get(name, name))
        return saved, saved - other

    # positions and what passes between them

    def _cut(self) -> list[_Position]:
        positions, at = [], 0
        for index, block in enumerate(self.graph.blocks):
            if block.start > at:
                positions.append(_Position(at, block.start, -1))
            positions.append(_Position(block.start, block.stop, index))
            at = block.stop
        if at < len(self.graph.ops) or not positions:
            positions.append(_Position(at, len(self.graph.ops), -1))
        where = {}
        for number, position in enumerate(positions):
            for op in self.graph.ops[position.start : position.stop]:
                where.update(dict.fromkeys(op.outputs, number))
        readers: dict[str, list[int]] = {}
        for number, position in enumerate(positions):
            for op in self.graph.ops[position.start : position.stop]:
                for name in dict.fromkeys(op.inputs):
                    if where.get(name, number) == number:
                        continue
                    if not self.graph.values[name].differentiable:
                        self.kept_whole.add(name)
                    else:
                        numbers = readers.setdefault(name, [])
                        if number not in numbers:
                            numbers.append(number)
        for name, numbers in readers.items():
            maker = where[name]
            if numbers == [maker + 1]:
                positions[maker].exit.append(name)
                positions[maker + 1].entry.append(name)
            else:
                positions[maker].shared_out.append(name)
                for number in numbers:
                    positions[number].shared_in.append(name)
        return positions

    def _tied(self) -> set[str]:
        """Parameters that several operators read."""
        count: dict[str, int] = {}
        for op in self.graph.ops:
            for name in dict.fromkeys(op.inputs):
                if name in self.params and self.params[name].trainable:
                    count[name] = count.get(name, 0) + 1
        return {name for name, number in count.items() if number > 1}

    # the chain

    def chain(self, capacity: float, fixed_bytes: float) -> Chain:
        """The whole problem under ``capacity`` bytes of which ``fixed_bytes`` are taken whatever is chosen."""
        charged: set[str] = set()
        kinds: list[Kind] = []
        keys: dict[object, int] = {}
        sequence, models = [], []
        built: dict[int, _Model] = {}
        for position in self.positions:
            key = self._key(position, len(kinds))
            if key not in keys:
                model = self._build(position, charged)
                keys[key] = len(kinds)
                built[len(kinds)] = model
                kinds.append(self._kind(model, position))
            sequence.append(keys[key])
            models.append(built[keys[key]])
        self.models = models
        sizes = self._shared_sizes(built)
        return Chain(
            kinds=tuple(kinds), sequence=tuple(sequence), shared_sizes=sizes, time_rows=TIME_ROWS, bytes_row=BYTES_ROW,
            transient_row=TRANSIENT_ROW, capacity=capacity, fixed_bytes=fixed_bytes, fixed_time=0.0,
        )

    def _key(self, position: _Position, fresh: int) -> object:
        if position.block < 0:
            return ("root", fresh)
        made = {name: (i, j) for i, op in enumerate(self.graph.ops[position.start : position.stop])
                for j, name in enumerate(op.outputs)}
        first: dict[str, tuple[int, int]] = {}
        for i, op in enumerate(self.graph.ops[position.start : position.stop]):
            for j, name in enumerate(op.inputs):
                first.setdefault(name, (i, j))
        tied = [name for name in first if name in self.tied]
        return (
            self.graph.blocks[position.block].kind, tuple(made[n] for n in position.exit),
            tuple(first[n] for n in position.entry), tuple((n, first[n]) for n in position.shared_in),
            tuple((n, made[n]) for n in position.shared_out), tuple(tied),
        )

    def _shared(self, name: str) -> int:
        return self.shared_names.setdefault(name, len(self.shared_names))

    def _shared_sizes(self, built: Mapping[int, _Model]) -> tuple[int, ...]:
        sizes = [1] * len(self.shared_names)
        for model in built.values():
            for name, var in model.shared:
                sizes[self.shared_names[name]] = model.sizes[var]
        return tuple(sizes)

    def _kind(self, model: _Model, position: _Position) -> Kind:
        shared = tuple((self._shared(name), var) for name, var in model.shared)
        if position.block < 0:
            block = BlockModel(tuple(model.sizes), tuple(model.unary), tuple(model.edges))
            return Kind((block,), (np.zeros(RESOURCES),), tuple(model.entry), tuple(model.exit), shared)
        blocks = []
        for variant in self.block_variants:
            unary = [array.copy() for array in model.unary]
            for var, name, needs in model.parameter_uses:
                unary[var] += self._parameter_costs(name, needs, variant, model)
            edges = model.edges
            if variant.recompute == "full":
                unary, edges = self._recomputed(model, unary)
            blocks.append(BlockModel(tuple(model.sizes), tuple(unary), tuple(edges)))
        zeros = tuple(np.zeros(RESOURCES) for _ in blocks)
        return Kind(tuple(blocks), zeros, tuple(model.entry), tuple(model.exit), shared)

    def _recomputed(self, model: _Model, unary: list[np.ndarray]) -> tuple[list[np.ndarray], list[Edge]]:
        """The block under full recomputation: its forward runs again, only what it reads is saved."""
        again = np.eye(RESOURCES)
        again[FORWARD, BACKWARD] = again[SEND, SEND_BACK] = 1.0
        again[SAVED, SAVED], again[SAVED, TRANSIENT] = 0.0, 1.0
        cache: dict[int, np.ndarray] = {}

        def through(table: np.ndarray) -> np.ndarray:
            if id(table) not in cache:
                cache[id(table)] = np.where(np.isinf(table), np.inf, np.where(np.isinf(table), 0.0, table) @ again)
            return cache[id(table)]

        unary = [through(array) for array in unary]
        for name, (var, states) in model.states.items():
            if var in model.entry:
                held = [self._bytes(name, state) for state in states]
                unary[var] = unary[var] + np.outer(held, np.eye(RESOURCES)[SAVED])
        return unary, [Edge(e.i, e.j, through(e.table), e.rows, e.cols) for e in model.edges]

    def _parameter_costs(self, name: str, needs: Sequence[Sharding], variant: Variant, model: _Model) -> np.ndarray:
        trainable = dict.fromkeys(use for _, use, _ in model.parameter_uses if self.params[use].trainable)
        group = float(sum(self.graph.values[use].numel for use in trainable))
        key = ("param", self.graph.values[name].shape, tuple(needs), self.params[name].trainable, variant, group)
        if key not in self.tables:
            rows = []
            seen: dict[Sharding, np.ndarray] = {}
            for need in needs:
                if need not in seen:
                    cost = self.costs.parameter(
                        self.graph.values[name], need, self.params[name].trainable, variant, group
                    )
                    seen[need] = np.full(RESOURCES, np.inf) if cost is None else cost
                rows.append(seen[need])
            self.tables[key] = np.array(rows)
        return self.tables[key]

    # one position

    def _build(self, position: _Position, charged: set[str]) -> _Model:
        model = _Model()
        ops = self.graph.ops[position.start : position.stop]
        for op in ops:
            self._operator(op, model)
        produced = {name: (i, k) for i, op in enumerate(ops) for k, name in enumerate(op.outputs)}
        uses: dict[str, list[tuple[int, int]]] = {}
        for i, op in enumerate(ops):
            for k, name in enumerate(op.inputs):
                uses.setdefault(name, []).append((i, k))
        for name in (*position.entry, *position.shared_in):
            self._state_variable(model, name, position)
        for name, readers in uses.items():
            if name in self.params:
                self._parameter(model, name, readers, position, charged)
            elif name in produced or name in model.states:
                self._value(model, name, produced.get(name), readers)
        for name in (*position.exit, *position.shared_out):
            var = self._state_variable(model, name, position, leaving=True)
            i, k = produced[name]
            self._equal(model, i, [placed.results[k] for placed in model.placed[i]], var, model.states[name][1], name)
        outputs = {name for name in self.graph.outputs if name in produced and name not in model.states}
        for name in sorted(outputs):
            self._leaving(model, name, produced[name])
        if position.block < 0:
            self._root_variant(model)
        return model

    def _operator(self, op: Op, model: _Model) -> None:
        rule = self.rules[op.name]
        time = self.schedule.time.get(op.name)
        found = choices(op, rule, self.scope, time)
        differentiable = [self.graph.values[name].differentiable for name in op.inputs]
        placed = [place(rule, assignment, self.mesh, differentiable) for assignment in found]
        if self.kept_whole.intersection(op.outputs):
            found, placed = self._whole_results(op, found, placed)
        operand_shapes = [self._operand_shape(op, i) for i in range(len(op.inputs))]
        result_shapes = [self.shapes[name] for name in op.outputs]
        times = 1 if op.name in self.schedule.prologue else self.schedule.microbatches
        _, kept = _saved(op, self.graph)
        unary = np.zeros((len(found), RESOURCES))
        for row, assignment, where in zip(unary, found, placed, strict=True):
            operands = local_shapes(where, operand_shapes, self.mesh, False)
            results = local_shapes(where, result_shapes, self.mesh, True)
            forward, backward = self.costs.op(op, operands, results, self.graph, self.fused[op.name])
            send, back = self.costs.internal(rule, assignment)
            row[[FORWARD, BACKWARD, SEND, SEND_BACK]] = np.array([forward, backward, send, back]) * times
            for index in kept:
                if op.outputs[index] in self.saved:
                    row[SAVED] += self._bytes(op.outputs[index], where.results[index])
        var = model.add(unary)
        assert var == len(model.op_choices)
        model.op_choices.append(found)
        model.placed.append(placed)

    def _whole_results(
        self, op: Op, found: list[dict[str, str]], placed: list[Placed]
    ) -> tuple[list[dict[str, str]], list[Placed]]:
        """Only the choices that leave masks and tables for other positions whole: each reader then slices its part freely."""
        kept = [
            (assignment, where) for assignment, where in zip(found, placed, strict=True)
            if all(not result.split_axes and not result.partial for name, result in zip(op.outputs, where.results, strict=True)
                   if name in self.kept_whole)
        ]
        return [assignment for assignment, _ in kept], [where for _, where in kept]

    def _bytes(self, name: str, sharding: Sharding) -> float:
        """Local bytes of a value within one micro-batch."""
        value = self.graph.values[name]
        return float(np.prod(self.shapes[name], dtype=float)) * value.dtype.itemsize / self.mesh.size(sharding.split_axes)

    def _all_states(self, name: str) -> list[Sharding]:
        """Every sharding in which an operator could leave a value, in a fixed order."""
        shape = self.shapes[name]
        states = [Sharding.whole(len(shape))]
        for axis in self.mesh.axes:
            size = self.mesh.size(axis)
            more = []
            for state in states:
                if size == 1:
                    continue
                for dim in range(len(shape)):
                    parts = self.mesh.size(state.dims[dim]) * size
                    uneven = not state.dims[dim] and shape[dim] > (size - 1) * ceil_div(shape[dim], size)
                    if shape[dim] > 1 and (shape[dim] % parts == 0 or uneven):
                        dims = (*state.dims[:dim], (*state.dims[dim], axis), *state.dims[dim + 1 :])
                        more.append(Sharding(dims, state.partial))
                more.append(Sharding(state.dims, state.partial | {axis}))
            states = states + more
        return states

    def _state_variable(self, model: _Model, name: str, position: _Position, leaving: bool = False) -> int:
        states = self._all_states(name)
        var = model.add(np.zeros((len(states), RESOURCES)))
        model.states[name] = (var, states)
        if name in position.entry:
            model.entry.append(var)
        elif name in position.exit:
            model.exit.append(var)
        else:
            model.shared.append((name, var))
        return var

    def _equal(
        self, model: _Model, i: int, have: list[Sharding], j: int, states: list[Sharding], name: str
    ) -> None:
        """An edge that holds variable ``j`` to the state that ``i`` produces."""
        size = len(states)
        key = ("equal", size)
        if key not in self.tables:
            table = np.full((size + 1, size, RESOURCES), np.inf)
            table[np.arange(size), np.arange(size)] = 0.0
            self.tables[key] = table
        index = {state: number for number, state in enumerate(states)}
        rows = np.array([index.get(state, size) for state in have])
        model.edges.append(Edge(i, j, self.tables[key], rows, np.arange(size)))

    def _value(self, model: _Model, name: str, made: tuple[int, int] | None, readers: list[tuple[int, int]]) -> None:
        """The edges from a value to its readers, through a copy variable if there are several."""
        if made is not None:
            source, have = made[0], [placed.results[made[1]] for placed in model.placed[made[0]]]
        else:
            source, have = model.states[name]
        needs = [(i, [placed.operands[k] for placed in model.placed[i]]) for i, k in readers]
        if len(readers) > 1 and self.graph.values[name].differentiable:
            options = list(dict.fromkeys(state for _, states in needs for state in states if not state.partial))
            options += [state for state in dict.fromkeys(have) if not state.partial and state not in options]
            copy = model.add(np.zeros((len(options), RESOURCES)))
            model.copies[name] = (copy, options)
            self._edge(model, name, source, have, copy, options, saving=True)
            source, have, saving = copy, options, False
        else:
            saving = True
        for i, states in needs:
            self._edge(model, name, source, have, i, states, saving=saving)

    def _edge(
        self, model: _Model, name: str, i: int, have: Sequence[Sharding], j: int, want: Sequence[Sharding], saving: bool
    ) -> None:
        sources, targets = tuple(dict.fromkeys(have)), tuple(dict.fromkeys(want))
        rows = {state: number for number, state in enumerate(sources)}
        cols = {state: number for number, state in enumerate(targets)}
        table = self._table(name, sources, targets, saving)
        model.edges.append(
            Edge(i, j, table, np.array([rows[s] for s in have]), np.array([cols[s] for s in want]))
        )

    def _table(self, name: str, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], saving: bool) -> np.ndarray:
        """Resources of every reshard of a value.

        ``saving``: charge what readers keep of it for the backward; otherwise only what a further copy would add.
        """
        value = self.graph.values[name]
        kept = name in self.saved
        shard = name in self.linear_only
        maker = self.graph.producers.get(name)
        by_maker = maker is not None and name in [
            self.graph.ops[maker].outputs[k] for k in _saved(self.graph.ops[maker], self.graph)[1]
        ]
        times = self.schedule.microbatches
        if maker is not None and self.graph.ops[maker].name in self.schedule.prologue:
            times = 1
        key = (self.shapes[name], value.dtype, value.differentiable, kept, shard, by_maker, times, saving, sources, targets)
        if key in self.tables:
            return self.tables[key]
        whole = float(np.prod(self.shapes[name], dtype=float)) * value.dtype.itemsize
        table = np.zeros((len(sources), len(targets), RESOURCES))
        for a, source in enumerate(sources):
            for b, target in enumerate(targets):
                seconds = self.costs.reshard(source, target, whole, value.differentiable)
                if seconds is None:
                    table[a, b] = np.inf
                    continue
                table[a, b, SEND], table[a, b, SEND_BACK] = seconds[0] * times, seconds[1] * times
                same = source.at_rest() == target.at_rest()
                if kept and (not same or (saving and not by_maker)):
                    gathered = shard and not same and target.varying and not source.partial
                    table[a, b, SAVED] = whole / self.mesh.size((source if gathered else target).split_axes)
        self.tables[key] = table
        return table

    def _leaving(self, model: _Model, name: str, made: tuple[int, int]) -> None:
        """An output of the model: its pending sums are completed, a scalar is made whole."""
        i, k = made
        have = [placed.results[k] for placed in model.placed[i]]
        whole = self._bytes(name, Sharding.whole(len(self.graph.values[name].shape)))
        for row, state in zip(model.unary[i], have, strict=True):
            local = whole / self.mesh.size(state.split_axes)
            row[SEND] += self.costs.collective("all_reduce", tuple(sorted(state.partial)), local)

    # parameters

    def _parameter(
        self, model: _Model, name: str, readers: list[tuple[int, int]], position: _Position, charged: set[str]
    ) -> None:
        if name in self.tied:
            self._tied_parameter(model, name, readers, charged)
            return
        for i, k in readers:
            needs = [placed.operands[k] for placed in model.placed[i]]
            model.parameter_uses.append((i, name, needs))

    def _tied_parameter(self, model: _Model, name: str, readers: list[tuple[int, int]], charged: set[str]) -> None:
        """A weight with several readers: a shared variable says how it lies at rest, each reader pays its way from there."""
        options = [state for state in self._all_states(name) if not state.partial]
        var = model.add(np.zeros((len(options), RESOURCES)))
        model.states[name] = (var, options)
        model.shared.append((name, var))
        for i, k in readers:
            needs = [placed.operands[k] for placed in model.placed[i]]
            self._edge(model, name, var, options, i, [need.at_rest() for need in needs], saving=False)
        if name not in charged:
            charged.add(name)
            model.parameter_uses.append((var, name, [self._read_apart(state) for state in options]))

    def _read_apart(self, state: Sharding) -> Sharding:
        """A tied weight's at-rest state, read differently over every axis that does not split it."""
        rest = frozenset(axis for axis in self.mesh.axes if axis not in state.split_axes)
        return Sharding(state.dims, frozenset(), rest)

    def _root_variant(self, model: _Model) -> None:
        """The root is one group over all its runs: its variant is a shared variable."""
        if not model.parameter_uses:
            return
        var = model.add(np.zeros((len(self.root_variants), RESOURCES)))
        model.shared.append(("", var))
        for i, name, needs in model.parameter_uses:
            columns = [self._parameter_costs(name, needs, variant, model) for variant in self.root_variants]
            model.edges.append(Edge(i, var, np.stack(columns, axis=1)))

    # reading the solution

    def decode(self, solution: Solution) -> tuple[dict[str, dict[str, str]], dict[str, Sharding], tuple[GroupChoice, ...]]:
        """(assignments by op, copies by value, groups: one per block, then the root's)."""
        assignments: dict[str, dict[str, str]] = {}
        copies: dict[str, Sharding] = {}
        groups: dict[int, GroupChoice] = {}
        root = self.root_variants[0]
        for number, position in enumerate(self.positions):
            model, chosen = self.models[number], solution.choices[number]
            first = next(p for p, m in zip(self.positions, self.models, strict=True) if m is model)
            names = self._renaming(first, position)
            for i, op in enumerate(self.graph.ops[position.start : position.stop]):
                assignments[op.name] = model.op_choices[i][chosen[i]]
            for name, (var, options) in model.copies.items():
                if names[name] not in self._shared_values():
                    copies[names[name]] = options[chosen[var]]
            for name, var in model.shared:
                if name == "":
                    root = self.root_variants[chosen[var]]
            if position.block >= 0:
                variant = self.block_variants[solution.variants[number]]
                path = self.graph.blocks[position.block].path
                groups[position.block] = _group(path, variant)
        ordered = tuple(groups[i] for i in range(len(self.graph.blocks)))
        return assignments, copies, (*ordered, _group("", root))

    def totals(self, chain: Chain, solution: Solution) -> np.ndarray:
        """Resources [positions, K] of a solution."""
        rows = []
        for number, kind in enumerate(chain.sequence):
            variant = solution.variants[number]
            rows.append(chain.kinds[kind].variants[variant].cost(solution.choices[number]))
        return np.array(rows)

    def _shared_values(self) -> set[str]:
        return {name for position in self.positions for name in position.shared_in}

    def _renaming(self, first: _Position, other: _Position) -> dict[str, str]:
        """Values of the first copy of a block -> those of another copy."""
        names: dict[str, str] = {}
        pairs = zip(
            self.graph.ops[first.start : first.stop], self.graph.ops[other.start : other.stop], strict=True
        )
        for a, b in pairs:
            names.update(zip(a.inputs, b.inputs, strict=True))
            names.update(zip(a.outputs, b.outputs, strict=True))
        return names


def _saved(op: Op, graph: Graph) -> tuple[list[int], list[int]]:
    """Positions of the (operands, results) that autograd saves for an operator."""
    needs = [graph.values[name].differentiable for name in op.inputs]
    if not any(needs):
        return [], []
    declared = operator(op.target)
    operands = [
        at for at, others in declared.operands
        if at < len(needs) and (not others or any(needs[other] for other in others if other < len(needs)))
    ]
    return operands, [at for at in declared.results if at < len(op.outputs)]


def _group(path: str, variant: Variant) -> GroupChoice:
    return GroupChoice(path, variant.zero, variant.data_axes, variant.shard_axes, variant.recompute)
