"""From a graph to numbers: the chain of blocks the solver chooses placements for, and back from its solution to the plan.

    positions.py     the graph cut into blocks and the root's runs between them
    blockmodel.py    each position as a factor graph                       tables.py: what its edges cost
    problem.py       equal blocks as one kind, their variants, the chain   (``Problem.chain``)
                     assignments, copies and groups                        (``Problem.decode``)

How a block's parameters are kept and whether it is recomputed are its variants. Under recomputation its forward runs again
in the backward, what it reads is saved, and what it would have saved comes back while it runs (``_recomputed``); what an
operator's declaration keeps (``Operator.keeps_results``) does not run again. It stops where torch's checkpoint does, at the
last operator that keeps anything, before it if that keeps operands only (``_skipped``), unless the software ``repeats`` it all.

What runs ahead of all micro-batches (``Schedule.ahead``) runs forward twice, a block whole (``_with_ahead``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.compiler.placement.blockmodel import ROOT, Builder, Model
from meshwright.compiler.placement.choices import Scope, handed_out
from meshwright.compiler.placement.costs import (
    BACKWARD,
    FORWARD,
    GATHER,
    HOST,
    HOST_BACK,
    MOMENTS,
    RESOURCES,
    SAVED,
    SEND,
    SEND_BACK,
    TRANSIENT,
    TRANSIENT_ROWS,
    Costs,
    Neighbours,
    Variant,
    bytes_row,
    time_rows,
)
from meshwright.compiler.placement.pinned import told_apart
from meshwright.compiler.placement.reachable import reachable
from meshwright.compiler.placement.tables import Array, ResourceTables
from meshwright.compiler.solver.chain import BlockModel, Chain, Edge, Kind, Solution
from meshwright.compiler.structure.positions import alike, renaming, results
from meshwright.cost.memory.working import held_outputs
from meshwright.ir.mesh import TENSOR
from meshwright.ir.plan import GroupChoice, PlanError, Schedule
from meshwright.ir.reshard import STEPS
from meshwright.ir.sharding import Sharding


def _later(runs: bool) -> Array:
    """Resources of a part of the block -> those of the same part when what it saves comes back in the backward; ``runs``: it
    runs again there."""
    matrix = np.eye(RESOURCES)
    matrix[FORWARD, BACKWARD] = matrix[SEND, SEND_BACK] = matrix[HOST, HOST_BACK] = float(runs)
    matrix[SAVED, SAVED], matrix[SAVED, TRANSIENT] = 0.0, 1.0
    return matrix


WIDEST = 1 << 24
"""Entries that the tables between a position's entry and exit may have, over all variants: 128 MiB."""
RECOMPUTED, SKIPPED = _later(True), _later(False)


UNIT = np.eye(RESOURCES)
AHEAD = np.zeros((RESOURCES, RESOURCES))
"""Resources of a part of a position -> those of its forward alone."""
AHEAD[[FORWARD, SEND, HOST, GATHER], [FORWARD, SEND, HOST, GATHER]] = 1.0


def _again(table: Array, skip: bool, comes_back: bool = True) -> Array:
    """Resources [..., K] of what runs again in the backward, or (``skip``) of what only keeps nothing there; without
    ``comes_back`` what is saved stays: gathered parameters are no activations."""
    forbidden = np.isinf(table)
    found = np.where(forbidden, np.inf, np.where(forbidden, 0.0, table) @ (SKIPPED if skip else RECOMPUTED))
    if not comes_back:
        found[..., [SAVED, TRANSIENT]] = table[..., [SAVED, TRANSIENT]]
    return found


def _changed(table: Array, more: Array) -> Array:
    """Resources with what changes in them. What is taken away is a part of them, added up in another order: less than nothing
    is left by rounding alone."""
    return np.maximum(table + more, 0.0)


class Repeats(NamedTuple):
    """What of a block does not run again in the backward when it is recomputed: of its variables and of its edges each, and the
    steps of reshards (``ways``) whose results are kept; of its edges, whether what they begin with is (``held``); resources
    [choices, K] of some variables ``beside``."""

    variables: list[bool]
    edges: list[bool]
    held: list[bool]
    ways: frozenset[str]
    beside: dict[int, Array]


class Problem:
    """Builds the chain and reads its solution back.

    ``block_variants`` and ``root_variants``: the ways to keep parameters that are open to the blocks and to the root;
    ``moments``: whether what is held at each of some moments of a backward is counted (``costs``).
    """

    def __init__(
        self, scope: Scope, schedule: Schedule, costs: Costs,
        block_variants: Sequence[Variant], root_variants: Sequence[Variant], moments: bool = True,
    ) -> None:
        structure = self.structure = scope.structure
        self.graph, self.mesh, self.schedule, self.fixed = scope.graph, scope.mesh, schedule, scope.fixed
        self.block_variants = tuple(block_variants)
        self.root_variants = (self.fixed.kept[""],) if "" in self.fixed.kept else tuple(root_variants)
        shapes = structure.shapes(schedule.microbatches)
        self.tables = ResourceTables(
            self.graph, scope.mesh, schedule, costs, shapes, structure.saved, structure.of_parameters, scope.splits
        )
        self.positions, self.tied, fused = structure.positions, structure.tied, structure.fused
        apart = told_apart(scope.pins, scope.fixed, self.graph, costs.modules)
        self.builder = Builder(
            scope, schedule, self.tables, handed=handed_out(structure.leaving_alone, scope, schedule),
            root_variants=self.root_variants, fused=dict(zip((op.name for op in self.graph.ops), fused, strict=True)),
            moments=moments,
        )
        self._serves: list[int] = []  # position -> the first position like it
        self._alike: list[int] = []  # the same, whatever is held
        models: dict[int, Model] = {}
        keys: dict[object, int] = {}
        plain: dict[object, int] = {}
        for number, position in enumerate(self.positions):
            key = number if position.block < 0 else alike(position, self.graph, self.tied)
            self._alike.append(plain.setdefault(key, number))
            kernels = fused[position.start : position.stop]  # the sum that ends a last block is in the final norm's
            late = tuple(op.name in schedule.epilogue for op in position.ops(self.graph)) if schedule.epilogue else ()
            key = key, kernels, apart(position, self.graph), bool(self._ahead(number)), late
            first = keys.setdefault(key, number)
            self._serves.append(first)
            if first == number:
                models[number] = self.builder.build(position)
        self._models = reachable(models, self._serves)
        self._known_repeats: dict[tuple[int, str], Repeats] = {}
        self._known_uses: dict[tuple[int, Variant], list[Array]] = {}

    def model(self, number: int) -> Model:
        """The model of a position; positions that are alike have the same."""
        return self._models[self._serves[number]]

    def serves(self, number: int) -> int:
        """The position whose model a position has."""
        return self._serves[number]

    @property
    def choices(self) -> int:
        """Of operators, in the models that were built: what building goes by."""
        return sum(len(choices) for model in self._models.values() for choices in model.op_choices)

    @property
    def kept(self) -> tuple[tuple[Variant, ...], ...]:
        """Per kind of the chain its variants; what lies outside of the blocks has one."""
        return tuple(self.open(n) if self.positions[n].block >= 0 else self.root_variants[:1] for n in self._models)

    def with_variants(self, block_variants: Sequence[Variant]) -> Problem:
        """The same problem with other ways to keep the blocks; models and tables are shared."""
        other = copy(self)
        other.block_variants = tuple(block_variants)
        return other

    @cached_property
    def alone_bytes(self) -> float:
        """Bytes of a rank, all step long, of what is made of inputs alone for other operators to read (masks, positions). What
        does not leave its position is taken to be split as far as its operator may over ranks that do not split tensors."""
        handed, roles = self.builder.handed, self.builder.scope.roles
        stays = self.structure.made_alone - self.structure.stored
        parts = {name: self.mesh.size(handed[name].split_axes) for name in stays & handed.keys()}
        for number, position in enumerate(self.positions):
            for name, (i, k) in results(position.ops(self.graph)).items() if not stays <= parts.keys() else ():
                if name in stays and name not in parts:
                    placed = self.model(number).placed[i]
                    split = [one.results[k].split_axes for one in placed]
                    parts[name] = max(self.mesh.size([axis for axis in axes if len(placed) == 1 or roles[axis] != TENSOR])
                                      for axes in split)
        return float(sum(self.graph.values[name].bytes_ / parts[name] for name in sorted(stays)))

    # the chain

    def chain(self, capacity: float, fixed_bytes: float) -> Chain:
        """The whole problem under ``capacity`` bytes of which ``fixed_bytes`` are taken whatever is chosen. Raises PlanError
        where too much crosses between blocks."""
        for number, model in self._models.items():
            self._check_width(number, model)
        shared: dict[str, int] = {}
        for model in self._models.values():
            for name, _ in model.shared:
                shared.setdefault(name, len(shared))
        sizes = [1] * len(shared)
        for model in self._models.values():
            for name, var in model.shared:
                sizes[shared[name]] = model.sizes[var]
        kinds = {number: self._kind(model, number, shared) for number, model in self._models.items()}
        order = {number: index for index, number in enumerate(kinds)}
        return Chain(
            kinds=tuple(kinds.values()), sequence=tuple(order[first] for first in self._serves), shared_sizes=tuple(sizes),
            time_rows=self._time_rows(), bytes_row=bytes_row(self.schedule.microbatches), transient_rows=TRANSIENT_ROWS,
            capacity=capacity, fixed_bytes=fixed_bytes, fixed_time=0.0,
        )

    def _check_width(self, number: int, model: Model) -> None:
        """Raise PlanError if the table between a position's ends, in all its variants, had more than ``WIDEST`` entries."""
        ends = [math.prod(model.sizes[var] for var in at) for at in (model.entry, model.exit)]
        if math.prod(ends) * len(self.block_variants) > WIDEST:
            block = self.positions[number].block
            where = self.graph.blocks[block].path if block >= 0 else "the model's root"
            values = max(len(model.entry), len(model.exit))
            raise PlanError(
                f"{values} values cross into or out of {where}, in {max(ends):,} combinations of their shardings on "
                f"{self.mesh}: more than the solver can count; pin fewer axes (dp or tp alone), or hand them "
                "on stacked in one tensor"
            )

    def _time_rows(self) -> Array:
        """Rows for the ways that are open to the blocks."""
        levels = {variant.zero for variant in (*self.block_variants, *self.fixed.kept.values())}
        return time_rows(
            self.tables.costs.device.contention, self.schedule.microbatches, each=max(levels) >= 2, once=min(levels) < 3
        )

    def _kind(self, model: Model, number: int, shared: Mapping[str, int]) -> Kind:
        coupling = (tuple(model.entry), tuple(model.exit), tuple((shared[name], var) for name, var in model.shared))
        if self.positions[number].block < 0:
            unary, edges = self._with_ahead(number, model, model.unary, model.edges, None)
            block = BlockModel(tuple(model.sizes), tuple(unary), tuple(edges))
            return Kind((block,), (np.zeros(RESOURCES),), *coupling)
        known: dict[str, tuple[list[Array], list[Edge]]] = {}
        blocks = []
        for variant in self.open(number):
            if variant.recompute == "none":
                unary, edges = self._kept(model, number, variant, model.unary), model.edges
            else:
                if variant.recompute not in known:
                    known[variant.recompute] = self._recomputed(number, model, variant.recompute)
                again, edges = known[variant.recompute]
                unary = self._kept(model, number, variant, again, self._repeats(number, variant.recompute).variables)
            unary, edges = self._with_ahead(number, model, unary, edges, variant)
            blocks.append(BlockModel(tuple(model.sizes), tuple(unary), tuple(edges)))
        return Kind(tuple(blocks), tuple(np.zeros(RESOURCES) for _ in blocks), *coupling)

    def costs(self, number: int, variants: Sequence[Variant], chosen: Sequence[int]) -> list[Array]:
        """Resources [K] of a position's block kept in each of some ways, if its variables have these choices: what its models
        in a chain say of them, without the tables of all others."""
        first = self._serves[number]
        model = self.model(first)
        rows = [table[at] for table, at in zip(model.unary, chosen, strict=True)]
        rows += [e.cost(chosen[e.i], chosen[e.j]) for e in model.edges]
        found = []
        for variant in variants:
            uses = [(var, self.builder.parameter(model, var, name, [needs[chosen[var]]], variant, self._unit(first))[0])
                    for var, name, needs in model.parameter_uses]
            whole = total = np.array([*rows, *(row for _, row in uses)]).sum(axis=0)
            if variant.recompute != "none":
                repeats = self._repeats(first, variant.recompute)
                once, parts = np.array([*repeats.variables, *repeats.edges]), np.array(rows)
                total = _again(parts[~once].sum(axis=0), False) + _again(parts[once].sum(axis=0), True)
                total = sum((_again(row, repeats.variables[var], comes_back=False) for var, row in uses), total)
                for e, skip, held in zip(model.edges, repeats.edges, repeats.held, strict=True):
                    more = self.tables.kept_ways(e.table, repeats.ways, not skip, held)
                    if more is not None:
                        total = _changed(total, Edge(e.i, e.j, more, e.rows, e.cols).cost(chosen[e.i], chosen[e.j]))
                total = _changed(total, sum((table[chosen[var]] for var, table in repeats.beside.items()), np.zeros(RESOURCES)))
            found.append(total + np.where(np.isinf(whole), 0.0, whole) @ AHEAD if self._ahead(first) else total)
        return found

    def _ahead(self, number: int) -> frozenset[int]:
        """The operators of a position that run ahead of all micro-batches; of a block all or none."""
        position = self.positions[number]
        found = {i for i, op in enumerate(position.ops(self.graph)) if op.name in self.schedule.ahead}
        return frozenset(range(position.stop - position.start) if found and position.block >= 0 else found)

    def ahead(self, number: int, chosen: Sequence[int]) -> float:
        """The part of a position's forward that runs ahead, by the seconds of its operators."""
        model, which = self.model(number), self._ahead(self._serves[number])
        seconds = [float(model.unary[i][chosen[i]][[FORWARD, HOST]].max()) for i in range(len(model.op_choices))]
        return sum(seconds[i] for i in which) / sum(seconds) if sum(seconds) else float(bool(which))

    def _with_ahead(
        self, number: int, model: Model, unary: Sequence[Array], edges: Sequence[Edge], variant: Variant | None
    ) -> tuple[list[Array], list[Edge]]:
        """The tables of a position with what runs ahead. ``variant``: how a block keeps its parameters."""
        which, block = self._ahead(number), self.positions[number].block >= 0
        if not which:
            return list(unary), list(edges)
        plain = model.unary if variant is None else self._kept(model, number, variant, model.unary)
        roots = {var for name, var in model.shared if name == ROOT}
        seen: dict[tuple[int, int], Array] = {}

        def more(table: Array, once: Array) -> Array:
            key = id(table), id(once)
            if key not in seen:
                seen[key] = table + np.where(np.isinf(once), 0.0, once) @ AHEAD
            return seen[key]

        variables = [more(table, once) if block or var in which else table
                     for var, (table, once) in enumerate(zip(unary, plain, strict=True))]
        ways = [replace(e, table=more(e.table, once.table)) if block or (e.i in which and e.j not in roots) else e
                for e, once in zip(edges, model.edges, strict=True)]
        return variables, ways

    def _kept(
        self, model: Model, number: int, variant: Variant, unary: Sequence[Array], skipped: Sequence[bool] | None = None
    ) -> list[Array]:
        """What every operator of a block costs, with its parameters kept as ``variant`` says; what reads none has the table of
        ``unary``. ``skipped``: where the forward runs again, whether each operator does not."""
        found = list(unary)
        for (var, _, _), costs in zip(model.parameter_uses, self._of_uses(model, number, variant), strict=True):
            found[var] = found[var] + (costs if skipped is None else _again(costs, skipped[var], comes_back=False))
        return found

    def _of_uses(self, model: Model, number: int, variant: Variant) -> list[Array]:
        """What each use of a parameter of a block costs that keeps them so."""
        key = number, variant
        if key not in self._known_uses:
            unit = self._unit(number)
            self._known_uses[key] = [self.builder.parameter(model, var, name, needs, variant, unit)
                                     for var, name, needs in model.parameter_uses]
        return self._known_uses[key]

    def open(self, number: int) -> tuple[Variant, ...]:
        """The ways to keep a position's block: recomputation only where something is saved."""
        first = self.positions[self._serves[number]].ops(self.graph)[0].name
        if first in self.fixed.kept:
            return (self.fixed.kept[first],)
        model = self.model(number)
        if any(table[..., SAVED].any() for table in (*model.unary, *(edge.table for edge in model.edges))):
            return self.block_variants
        return tuple(v for v in self.block_variants if v.recompute == "none") or self.block_variants

    def _unit(self, number: int) -> Neighbours:
        """What stands around every position that this one's model serves; the backward comes from the last block."""
        served = [self.positions[n].block for n, first in enumerate(self._alike) if first == self._alike[number]]
        last = len(self.graph.blocks) - 1
        return Neighbours(ahead=max(served) > 0, behind=min(served) < last, beyond=self._beyond(number),
                          lasting=self.builder.lasting, blocks=max(1, len(self.graph.blocks)))

    def _beyond(self, number: int) -> float:
        """What part of what a block reduces is beyond what the root reduced last in the micro-batch before, if that reduces in
        each; root and block are taken to be split as far as their choices go."""
        if self.schedule.microbatches == 1 or self.builder.lasting:
            return 1.0
        own = self._least_trained(self._models[number])
        return max(0.0, 1.0 - self._least_of_root / own) if own else 1.0

    @cached_property
    def _least_of_root(self) -> float:
        """Elements of the root's parameters that take a gradient, split as far as their choices go."""
        return sum(self._least_trained(model) for n, model in self._models.items() if self.positions[n].block < 0)

    def _least_trained(self, model: Model) -> float:
        """The same of the parameters that a position is charged with."""
        found = {name: self.graph.values[name].numel / max(self.mesh.size(need.split_axes) for need in needs)
                 for _, name, needs in model.parameter_uses if self.tables.trainable[name]}
        return sum(found.values())

    def _recomputed(self, number: int, model: Model, recompute: str) -> tuple[list[Array], list[Edge]]:
        """The block whose forward runs again in the backward, as far as it does (``_repeats``)."""
        seen: dict[tuple[int, bool, bool | None], Array] = {}
        repeats = self._repeats(number, recompute)

        def through(table: Array, skip: bool, held: bool | None = None) -> Array:
            key = (id(table), skip, held)
            if key not in seen:
                more = None if held is None else self.tables.kept_ways(table, repeats.ways, not skip, held)
                seen[key] = _again(table, skip) if more is None else _changed(_again(table, skip), more)
            return seen[key]

        changed = [through(table, skip) for table, skip in zip(model.unary, repeats.variables, strict=True)]
        for var, table in repeats.beside.items():
            changed[var] = _changed(changed[var], table)
        edges = [replace(e, table=through(e.table, skip, held))
                 for e, skip, held in zip(model.edges, repeats.edges, repeats.held, strict=True)]
        return changed, edges

    def _repeats(self, number: int, recompute: str) -> Repeats:
        """What of a block does not run again under a recomputation: the operators whose results it keeps, those that run once a
        step, and those at its end that nothing in the backward waits for. Its inputs are kept, and so is what the caller is
        handed."""
        key = number, recompute
        if key not in self._known_repeats:
            model, (last, at_end) = self._models[number], self._skipped(number)
            lasting, once = self._lasting(number, recompute), self._once(number)
            skipped = lasting | at_end
            makers = {var: model.makers.get(name, -1) for name, (var, _) in model.copies.items()}
            beside = self._for_the_caller(number, model)
            held = {var: self._results(number, model, var) for var in lasting}
            entering = {var: name for name, (var, _) in model.states.items() if var in model.entry}
            held |= {var: [self.tables.bytes(name, state) for state in model.states[name][1]]
                     for var, name in entering.items()}
            for var, bytes_ in held.items():
                stays = UNIT[SAVED]
                if entering.get(var, "") not in self.tables.saved.values and var in entering:  # to the end of the backward
                    stays = stays + UNIT[list(MOMENTS[:-1])].sum(axis=0) * bool(model.moments)
                beside[var] = beside.get(var, 0.0) + np.outer(bytes_, stays)
                if var in lasting:  # what its own maker keeps does not come back
                    beside[var] -= np.outer(self._results(number, model, var, self.tables.saved.by_makers), UNIT[TRANSIENT])
            self._known_repeats[key] = Repeats(
                [var in skipped or var in once for var in range(len(model.unary))],
                [makers.get(e.i, e.i) in skipped or (e.j in at_end and e.j != last) for e in model.edges],
                [e.i in lasting for e in model.edges], self._lasting_ways(recompute), beside,
            )
        return self._known_repeats[key]

    def recomputed(self, number: int, var: int, recompute: str, reader: int = -1) -> Array:
        """What becomes of the resources of a block's operator under a recomputation, as a matrix; with a ``reader``, of the way
        from what the operator makes (-1: what the block is handed) to that one."""
        if recompute == "none":
            return np.eye(RESOURCES)
        last, skipped = self._skipped(number)
        stays = var in self._lasting(number, recompute) | self._once(number) or var in skipped
        stays = stays or (reader in skipped and reader != last)
        return SKIPPED if stays else RECOMPUTED

    def _for_the_caller(self, number: int, model: Model) -> dict[int, Array]:
        """{operator: what changes [choices, K] where it runs again}: outputs of the model are held for the caller (``_output``
        of the builder), all of them if the backward keeps none."""
        ops, found = self.positions[number].ops(self.graph), dict[int, Array]()
        for name in model.makers.keys() & set(self.graph.outputs) - model.states.keys():
            var, saved = model.makers[name], name in self.tables.saved.values
            states = [placed.results[ops[var].outputs.index(name)] for placed in model.placed[var]]
            times = np.array([[held_outputs(self.schedule.microbatches, kept, state) for state in states]
                              for kept in (False, saved)])
            bytes_ = np.array([self.tables.bytes(name, state) for state in states])
            changes = np.outer(times[0] * bytes_, UNIT[SAVED]) - np.outer(times[1] * bytes_, UNIT[TRANSIENT])
            found[var] = found.get(var, np.zeros((len(states), RESOURCES))) + changes
        return found

    def _results(self, number: int, model: Model, var: int, among: Collection[str] | None = None) -> list[float]:
        """Bytes of what an operator makes under each of its choices, all of it or ``among`` some values."""
        op = self.positions[number].ops(self.graph)[var]
        return [
            sum(self.tables.bytes(name, state) for name, state in zip(op.outputs, placed.results, strict=True)
                if among is None or name in among)
            for placed in model.placed[var]
        ]

    def _lasting_ways(self, recompute: str) -> frozenset[str]:
        """Steps of reshards whose results are kept under a recomputation."""
        operators = self.builder.rules.operators
        return frozenset(kind for kind in STEPS if operators[f"mw.{kind}"].keeps_results(recompute))

    def _skipped(self, number: int) -> tuple[int, frozenset[int]]:
        """The last operator that keeps anything, and those that recomputation does not come to: what follows it, and itself
        where it keeps operands only (they are there before it runs)."""
        return (-1, frozenset()) if self.tables.costs.device.repeats else self.structure.not_repeated[number]

    def _lasting(self, number: int, recompute: str) -> frozenset[int]:
        """Operators whose results are kept under a recomputation instead of being made again."""
        ops, operators = self.positions[number].ops(self.graph), self.builder.rules.operators
        return frozenset(i for i, op in enumerate(ops) if operators[op.target].keeps_results(recompute))

    def _once(self, number: int) -> frozenset[int]:
        """Operators that run once a step, before the first micro-batch."""
        ops = self.positions[number].ops(self.graph)
        return frozenset(i for i, op in enumerate(ops) if op.name in self.schedule.prologue)

    # reading the solution

    def released_again(self, number: int, recompute: str, chosen: Sequence[int]) -> float:
        """Bytes of results that a recomputation keeps in place of running their operators, and lets go of when it has come by
        them: of those that it comes to, what no backward needs."""
        model, (_, at_end) = self._models[number], self._skipped(number)
        total = 0.0
        for var in self._lasting(number, recompute) - at_end - self._once(number):
            needed = float(model.unary[var][chosen[var]][SAVED])
            needed += sum(float(e.cost(chosen[e.i], chosen[e.j])[SAVED]) for e in model.edges if e.i == var)
            total += max(0.0, self._results(number, model, var)[chosen[var]] - needed)
        return total

    def without_recomputation(self, chain: Chain, solution: Solution) -> Array:
        """Resources [positions, K] of a solution (``totals``) if nothing ran its forward again, all else as it is."""
        found, known = totals(chain, solution), {}
        for number, (first, variant, chosen) in enumerate(zip(self._serves, solution.variants, solution.choices, strict=True)):
            block = self.positions[number].block >= 0
            if not self._ahead(first) and (not block or self.open(number)[variant].recompute == "none"):
                continue
            key = first, variant, tuple(chosen)
            if key not in known:
                model = self.model(first)
                unary = self._kept(model, first, self.open(first)[variant], model.unary) if block else model.unary
                known[key] = BlockModel(tuple(model.sizes), tuple(unary), tuple(model.edges)).cost(tuple(chosen))
            found[number] = known[key]
        return found

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
                groups[position.block] = _group(path, self.open(number)[solution.variants[number]])
        ordered = tuple(groups[i] for i in range(len(self.graph.blocks)))
        return assignments, copies, (*ordered, _group("", root))


def totals(chain: Chain, solution: Solution) -> Array:
    """Resources [positions, K] of a solution; positions of one kind with the same choices are added up once."""
    known: dict[object, Array] = {}
    rows = []
    for key in zip(chain.sequence, solution.variants, map(tuple, solution.choices), strict=True):
        if key not in known:
            kind, variant, choices = key
            known[key] = chain.kinds[kind].variants[variant].cost(choices) + chain.kinds[kind].variant_costs[variant]
        rows.append(known[key])
    return np.array(rows)


def price(chain: Chain, solution: Solution) -> tuple[float, float]:
    """(seconds, bytes) of one layout of a graph whose chain is built, in the solver's own measure."""
    resources = totals(chain, solution)
    seconds = chain.fixed_time + float((resources @ chain.time_rows.T).max(axis=1).sum())
    bytes_ = chain.fixed_bytes + float((resources @ chain.bytes_row).sum()) + max(map(chain.transient, resources))
    return seconds, bytes_


def _group(path: str, variant: Variant) -> GroupChoice:
    return GroupChoice(path, variant.zero, variant.data_axes, variant.shard_axes, variant.recompute)
