"""One position as a factor graph: the variables and edges whose choices the solver makes.

    operator      which factor every mesh axis splits; its compute, its own collectives and what it saves are its costs
    copy          per value with several readers: the sharding they share (q, k and v pay one gather)
    entry, exit   the sharding of what one position hands to the next
    shared        what several positions read, a tied weight's split at rest, how the root's parameters are kept

Edges price the reshard between what is made and what is read, forward and backward, and the bytes that autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.placement.calls import PRICED, priced, work_of
from meshwright.compiler.placement.choices import Scope, is_piece, ways
from meshwright.compiler.placement.costs import (
    GRADIENTS,
    MOMENTS,
    RESOURCES,
    SAVED,
    SEND,
    TRANSIENT,
    TRANSIENT_ROWS,
    Neighbours,
    Variant,
)
from meshwright.compiler.placement.fixed import NOTHING_FIXED
from meshwright.compiler.placement.tables import Array, ResourceTables, first_of_all, only
from meshwright.compiler.solver.chain import BlockModel, Edge
from meshwright.compiler.solver.elimination import prune
from meshwright.compiler.structure.activations import operand_shapes
from meshwright.compiler.structure.positions import Place, Position, operands, results
from meshwright.cost.compute import Fused
from meshwright.cost.memory.moments import GradientsAlive, gradients_alive
from meshwright.cost.memory.saved import saved_beside
from meshwright.cost.memory.working import beside_output, comes_aside, copied, held_outputs, run_as, space
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import STAGE, TENSOR
from meshwright.ir.plan import PlanError, Schedule
from meshwright.ir.program import JOINED
from meshwright.ir.rule import Placed
from meshwright.ir.sharding import Sharding

ROOT = ""
"""The shared variable of how the root's parameters are kept."""


@dataclass
class Model:
    """A position's variables: the operators' first (in order), then copies, states and the root's variant.

    ``copies`` and ``states``: {value: (variable, its shardings)}; ``parameter_uses``: (variable, parameter, the sharding
    that each choice reads it in); ``shared``: (name, variable); ``makers``: the operator that makes each value; ``leaving``:
    where each value is made that the next position is handed; ``asked``: of values with a copy, the shardings that readers ask
    for; ``late``: elements of the parameters whose gradients are summed together (``Costs.parameter``); ``moments``: the
    operators in whose backward each of the ``MOMENTS`` is, if those are counted (-1: none).
    """

    sizes: list[int] = field(default_factory=list)
    unary: list[Array] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    op_choices: list[list[dict[str, str]]] = field(default_factory=list)
    placed: list[list[Placed]] = field(default_factory=list)
    copies: dict[str, tuple[int, list[Sharding]]] = field(default_factory=dict)
    states: dict[str, tuple[int, list[Sharding]]] = field(default_factory=dict)
    parameter_uses: list[tuple[int, str, list[Sharding]]] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)
    exit: list[int] = field(default_factory=list)
    shared: list[tuple[str, int]] = field(default_factory=list)
    makers: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, Place] = field(default_factory=dict)
    asked: dict[str, frozenset[Sharding]] = field(default_factory=dict)
    late: float = 0.0
    moments: tuple[int, ...] = ()

    def add(self, unary: Array) -> int:
        """A new variable."""
        self.sizes.append(len(unary))
        self.unary.append(unary)
        return len(self.sizes) - 1


def read_apart(state: Sharding, roles: Mapping[str, str]) -> Sharding:
    """A tied weight at rest, read differently over every axis that does not split it and that its readers do not pay."""
    apart = frozenset(axis for axis, role in roles.items() if axis not in state.split_axes and role not in (TENSOR, STAGE))
    return Sharding(state.dims, frozenset(), apart)


class Builder:
    """Builds the models of a graph's positions.

    ``handed``: of values made of inputs alone the form in which they leave their position; ``fused``: what the fused kernel of
    an operator reads and writes.
    """

    def __init__(
        self, scope: Scope, schedule: Schedule, tables: ResourceTables, *,
        handed: Mapping[str, Sharding], fused: Mapping[str, Fused | None], root_variants: Sequence[Variant], moments: bool,
    ) -> None:
        self.scope, self.graph, self.mesh = scope, scope.graph, scope.mesh
        self.rules, self.tied = scope.structure.rules, scope.structure.tied
        self.schedule, self.tables, self.costs = schedule, tables, tables.costs
        self.handed, self.fused, self.root_variants, self.moments = handed, fused, root_variants, moments
        self.params = {param.value for param in self.graph.params}
        self.later = scope.structure.kept_later
        self._charged: set[str] = set()
        self._gathered = 0.0  # bytes of what a block gathers, at least
        self._told_apart = bool(scope.fixed != NOTHING_FIXED or scope.pins.tensors or self.costs.modules is not None)
        self._operators: dict[object, tuple[list[dict[str, str]], list[Placed]]] = {}
        self._priced: dict[object, Array] = {}
        self._free = self
        if scope.fixed != NOTHING_FIXED:  # what is summed together is priced alike whatever is held
            self._free = Builder(replace(scope, fixed=NOTHING_FIXED), schedule, tables, handed=handed, fused=fused,
                                 root_variants=root_variants, moments=moments)

    def build(self, position: Position) -> Model:
        """The model of one position. A tied weight is charged to the first position built that reads it. Raises PlanError where
        an operator or value has no choice at all: a file may hold decisions that contradict each other."""
        model = self._built(position)
        model.late = self._late(model if self._free is self else self._free._built(position))
        if position.block < 0:
            self._root_variant(model, position)
        else:
            self._gathered = float(_weights(self, model, np.min).max(initial=0.0))
        self._check_choices(position, model)
        return pruned(model)

    def _check_choices(self, position: Position, model: Model) -> None:
        empty = next((var for var, size in enumerate(model.sizes) if not size), None)
        if empty is None:
            return
        ops = position.ops(self.graph)
        what = f"{ops[empty].target} of {ops[empty].module or 'the model'}" if empty < len(ops) else "a value between blocks"
        raise PlanError(f"nothing runs on {self.mesh} with microbatches={self.schedule.microbatches}: {what} has no placement "
                        f"left")

    def _built(self, position: Position) -> Model:
        model = Model()
        ops = position.ops(self.graph)
        for op in ops:
            found, placed, unary = self._operator(op)
            model.add(unary)
            model.op_choices.append(found)
            model.placed.append(placed)
        made = results(ops)
        model.makers = {name: i for name, (i, _) in made.items()}
        for name in (*position.entry, *position.shared_in):
            self._state(model, name, position)
        for name, readers in operands(ops).items():
            if name in self.params:
                self._parameter(model, name, readers)
            elif name in made or name in model.states:
                self._value(model, name, made.get(name), readers, position)
        for name in (*position.exit, *position.shared_out):
            self._state(model, name, position)
            self._leaves_as(model, name, made[name])
            if name in position.shared_out and name not in self.tables.saved.values:  # nobody saves it, later positions read it
                var, states = model.states[name]
                model.unary[var][:, SAVED] += [self.tables.bytes(name, state) for state in states]
        model.leaving = {name: made[name] for name in position.exit}
        for name in sorted(set(self.graph.outputs) & made.keys() - model.states.keys()):
            self._output(model, name, made[name])
        if self.moments:
            self._moments(model, position)
        return model

    # operators

    def _operator(self, op: Op) -> tuple[list[dict[str, str]], list[Placed], Array]:
        """The choices of an operator, what they make of operands and results, and their resources: found once for all twins
        (``Structure.twin``) that are cut alike and handed the same forms, and priced once for those of the same kernel."""
        like: object = op.name
        time, names = self.schedule.time.get(op.name), (*op.inputs, *op.outputs)
        if not self._told_apart:
            like = (
                self.scope.structure.twin(op), time, self.schedule.times(op.name),
                self.scope.of_every_sample.isdisjoint(op.outputs),
                *(self.tables.shapes[name] for name in names), *(self.handed.get(name) for name in names),
            )
        if like not in self._operators:
            flows = [self.graph.values[name].differentiable for name in op.inputs]
            self._operators[like] = ways(op, self.rules[op.name], self.scope, time, flows, self.handed)
        kernel = like, self.fused[op.name]
        if kernel not in self._priced:
            self._priced[kernel] = self._prices(op, *self._operators[like])
        return *self._operators[like], self._priced[kernel].copy()

    def _prices(self, op: Op, found: Sequence[dict[str, str]], placed: Sequence[Placed]) -> Array:
        """Resources [choices, K] of an operator."""
        rule = self.rules[op.name]
        read = operand_shapes(op, self.graph, rule, self.schedule)
        made = [self.tables.shapes[name] for name in op.outputs]
        times = self.schedule.times(op.name)
        operators = self.rules.operators
        operator, saved = operators[op.target], self.scope.structure.kept[op.name][1]
        saved = tuple(index for index in saved if op.outputs[index] in self.tables.saved.values)
        flows = any(self.graph.values[name].differentiable for name in op.outputs)
        differentiable = [self.graph.values[name].differentiable for name in op.inputs]
        later = self.later.get(op.name, 0.0) / (self.schedule.microbatches if times > 1 else 1)
        unary, seconds = np.zeros((len(found), RESOURCES)), []
        for row, assignment, where in zip(unary, found, placed, strict=True):
            work = work_of(op, self.graph, where, self.mesh, read, made)
            seconds.append(priced(op, rule, assignment, operator, work, self.graph, self.costs, self.fused[op.name], read))
            run, work = run_as(op, rule, assignment, where, operators, self.graph, self.mesh, (read, made), work)
            row[SAVED] = sum(self.tables.bytes(op.outputs[index], where.results[index]) for index in saved) + (
                saved_beside(run, work) + copied(op, rule, where, self.graph, self.mesh, self.costs.itemsize) if flows else 0.0
            )
            if flows and (more := self.scope.structure.kept_if_split.get(op.name)):
                kept = more.intersection(run.saved(work.args).kept(differentiable, 0)[0])
                row[SAVED] += sum(self.tables.bytes(op.inputs[at], where.operands[at]) for at in kept)
            if not self.moments or operator.kind == "loss":
                row[TRANSIENT] = space(run, work, assignment, self.mesh, run is not operator, later)
        unary[:, PRICED] = np.array(seconds).reshape(-1, len(PRICED)) * times
        return unary

    def spaces(self, op: Op, found: Sequence[dict[str, str]], placed: Sequence[Placed]) -> Array:
        """Bytes [choices] beside operands, results and gradients while an operator's backward runs."""
        rule, operators = self.rules[op.name], self.rules.operators
        if not rule.algorithms and operators[op.target].cost.space is None:
            return np.zeros(len(found))
        read = operand_shapes(op, self.graph, rule, self.schedule)
        made = [self.tables.shapes[name] for name in op.outputs]
        bytes_ = []
        for assignment, where in zip(found, placed, strict=True):
            work = work_of(op, self.graph, where, self.mesh, read, made)
            run, work = run_as(op, rule, assignment, where, operators, self.graph, self.mesh, (read, made), work)
            bytes_.append(0.0 if run.cost.space is None else run.cost.space(work)[1])
        return np.array(bytes_)

    # values

    def _state(self, model: Model, name: str, position: Position) -> None:
        """The variable of a sharding that positions agree on."""
        states = self.tables.states(name)
        var = model.add(np.zeros((len(states), RESOURCES)))
        model.states[name] = (var, states)
        if name in position.entry:
            model.entry.append(var)
        elif name in position.exit:
            model.exit.append(var)
        else:
            model.shared.append((name, var))

    def _leaves_as(self, model: Model, name: str, made: Place) -> None:
        """An edge that holds a leaving value's variable to the state it is made in."""
        var, states = model.states[name]
        index = {state: number for number, state in enumerate(states)}
        rows = np.array([index.get(placed.results[made[1]], len(states)) for placed in model.placed[made[0]]])
        model.edges.append(Edge(made[0], var, self.tables.equal(len(states)), rows, np.arange(len(states))))

    def _value(self, model: Model, name: str, made: Place | None, readers: list[Place], position: Position) -> None:
        """The edges from a value to its readers, through a copy variable if there are several."""
        if made is not None:
            source, have = made[0], [placed.results[made[1]] for placed in model.placed[made[0]]]
        else:
            source, have = model.states[name]
        needs = [(i, [placed.operands[k] for placed in model.placed[i]]) for i, k in readers]
        saving = True
        if len(readers) > 1 and self.graph.values[name].differentiable:
            options = list(dict.fromkeys(state for _, states in needs for state in states if not state.partial))
            model.asked[name] = frozenset(options)
            options += [state for state in dict.fromkeys(have) if not state.partial and state not in options]
            if name in self.scope.fixed.copies:
                options = [self.scope.fixed.copies[name]]
                model.asked[name] = frozenset(options)
            copy = model.add(np.zeros((len(options), RESOURCES)))
            model.copies[name] = (copy, options)
            ops = dict.fromkeys(position.ops(self.graph)[i] for i, _ in readers)
            linears = len(ops), sum(map(self.tables.whole, [made for op in list(ops)[1:] for made in op.outputs]))
            self._edge(model, name, source, have, copy, options, saving=True, linears=linears)
            source, have, saving = copy, options, False
        for i, states in needs:
            self._edge(model, name, source, have, i, states, saving=saving)
            if self._loses(position, i) and self.graph.values[name].differentiable:
                self._gathered_back(model, name, have, i, states)

    def _edge(
        self, model: Model, name: str, i: int, have: Sequence[Sharding], j: int, want: Sequence[Sharding], saving: bool,
        takes: bool = False, linears: tuple[int, float] = (1, 0.0),
    ) -> None:
        """``takes``: readers can only take pieces of what is there; ``linears``: those behind a copy (``tables.reshard``)."""
        (sources, rows), (targets, cols) = _numbered(have), _numbered(want)
        table = self.tables.reshard(name, sources, targets, saving, linears)
        if takes:
            inside = np.array([[is_piece(target, source) for target in targets] for source in sources])
            table = np.where(inside[:, :, None], table, np.inf)
        model.edges.append(Edge(i, j, table, rows, cols))

    def _loses(self, position: Position, at: int) -> bool:
        ops = position.ops(self.graph)
        return at < len(ops) and self.rules.operators[ops[at].target].kind == "loss"

    def _gathered_back(self, model: Model, name: str, have: Sequence[Sharding], reader: int, want: Sequence[Sharding]) -> None:
        """A gradient of logits that lie more widely than a loss reads them is whole beside the piece that it is gathered from,
        when the loss has let go of its logits: bytes beyond those that the loss itself needs."""
        edge, sources, targets = model.edges[-1], tuple(dict.fromkeys(have)), tuple(dict.fromkeys(want))
        needs = [min(float(row[TRANSIENT]) for row, state in zip(model.unary[reader], want, strict=True) if state == target)
                 - self.tables.bytes(name, target) for target in targets]
        more = self.tables.gathers_back(name, sources, targets) - np.array(needs)[None, :] - edge.table[:, :, SAVED]
        more = np.where(np.isfinite(more), np.maximum(more, 0.0), 0.0)
        if more.any():
            model.edges[-1] = replace(edge, table=self.tables.more(edge.table, more[:, :, None] * TRANSIENT_ROWS[0]))

    def _output(self, model: Model, name: str, made: Place) -> None:
        """An output of the model: its pending sums are completed, and it is held for the caller, of every micro-batch."""
        saved, weights = name in self.tables.saved.values, self.params & {n for n, yes in self.tables.trainable.items() if yes}
        op = self.graph.ops[self.graph.producers[name]]
        for row, placed in zip(model.unary[made[0]], model.placed[made[0]], strict=True):
            state = placed.results[made[1]]
            seconds = self.costs.collective("all_reduce", tuple(sorted(state.partial)), self.tables.bytes(name, state))
            row[SEND] += seconds * self.schedule.microbatches
            row[SAVED] += self.tables.bytes(name, state) * held_outputs(self.schedule.microbatches, saved, state)
            row[GRADIENTS] += self.tables.bytes(name, state) * (self.schedule.microbatches == 1)  # it is there with these
            if self.moments:  # which is over when a backward begins
                meanwhile = self.tables.bytes(name, state) * comes_aside(state)
                row[SAVED], row[TRANSIENT] = row[SAVED] - meanwhile, row[TRANSIENT] + meanwhile
            else:
                row[TRANSIENT] += beside_output(op, placed, state, weights, self.graph, self.mesh, self.costs.itemsize)

    # parameters

    def _parameter(self, model: Model, name: str, readers: list[Place]) -> None:
        if name in self.tied:
            self._tied_parameter(model, name, readers)
            return
        for i, k in readers:
            model.parameter_uses.append((i, name, [placed.operands[k] for placed in model.placed[i]]))

    def _tied_parameter(self, model: Model, name: str, readers: list[Place]) -> None:
        """A weight with several readers: a shared variable says how it lies at rest, each reader pays its way from there. It
        takes its piece of what lies there, or reads it differently over tensor-parallel ranks: the program does no more, for a
        weight is split at rest as far as all its readers split it alike."""
        options = [state for state in self.tables.states(name) if not state.partial]
        if name in self.scope.fixed.rest:
            options = [self.scope.fixed.rest[name]]
        var = model.add(np.zeros((len(options), RESOURCES)))
        model.states[name] = (var, options)
        model.shared.append((name, var))
        for i, k in readers:
            needs = [self._read_from_rest(placed.operands[k]) for placed in model.placed[i]]
            self._edge(model, name, var, options, i, needs, saving=False, takes=True)
        if name not in self._charged:
            self._charged.add(name)
            model.parameter_uses.append((var, name, [read_apart(state, self.scope.roles) for state in options]))

    def _read_from_rest(self, need: Sharding) -> Sharding:
        """What a reader of a tied weight makes of it itself: FSDP2 or the root sum its gradient over the other axes."""
        return Sharding(need.dims, need.partial, frozenset(a for a in need.varying if self.scope.roles[a] == TENSOR))

    def _root_variant(self, model: Model, position: Position) -> None:
        """The root is one group over all its runs: its variant is a shared variable."""
        if not model.parameter_uses:
            return
        var = model.add(np.zeros((len(self.root_variants), RESOURCES)))
        model.shared.append((ROOT, var))
        beyond = self.tables.beyond_a_block(self.tied) if self.lasting else 1.0
        unit = Neighbours(root=True, last=self._last(position), beyond=beyond)
        for i, name, needs in model.parameter_uses:
            columns = [self.parameter(model, i, name, needs, variant, unit) for variant in self.root_variants]
            model.edges.append(Edge(i, var, np.stack(columns, axis=1)))
        known = {name for _, name, _ in model.parameter_uses}
        for name in sorted(self.tied.intersection(model.states) - known) if unit.last else ():
            at, options = model.states[name]  # it is charged elsewhere, but its gradient is made here first
            needs = [read_apart(state, self.scope.roles) for state in options]
            columns = [self.parameter(model, at, name, needs, variant, unit) for variant in self.root_variants]
            model.edges.append(Edge(at, var, only(np.stack(columns, axis=1), [SAVED, *MOMENTS])))
        if unit.last and self.schedule.microbatches == 1:  # what a forward's last gather received is there to its end
            alone = not self.graph.blocks  # of a block that ZeRO-3 gathers it is among what one block has (``Costs``)
            received = float(_weights(self, model, np.min).max(initial=0.0)) if alone else self._gathered
            model.unary[var][:, MOMENTS[-1]] += [received * (0 < one.zero < 3 + alone) for one in self.root_variants]

    def parameter(
        self, model: Model, var: int, name: str, needs: Sequence[Sharding], variant: Variant, unit: Neighbours
    ) -> Array:
        """Resources [needs, K] of a use of a parameter, by a variable, when its position is kept as ``variant``."""
        uses = dict.fromkeys(use for _, use, _ in model.parameter_uses if self.tables.trainable[use])
        group = float(sum(self.graph.values[use].numel for use in uses))
        read = _last_read(model, var)
        with_it = max(1, sum(other == var for other, _, _ in model.parameter_uses))
        made = tuple((read >= at >= 0) + (read == at >= 0) / with_it for at in model.moments)
        fused = self.scope.structure.several_in_one.get(name)
        return self.tables.parameter(name, needs, variant, group, unit, model.late, made, fused)

    def _moments(self, model: Model, position: Position) -> None:
        """What is held while the backward of those operators runs that may be a position's worst, however it is split, and at
        the end of it, when all is gone but the gradient of what it was handed."""
        ops = position.ops(self.graph)
        leaving = model.makers.keys() & {*position.exit, *position.shared_out, *([self.graph.loss] if self.graph.loss else [])}
        alive = gradients_alive(ops, self.graph, self.scope.structure.passed, self.params, leaving)
        kept = _Kept(model, ops, self.graph)
        lying = _Lying(model, ops, self.tables)
        held = [_Held(self, lying, at, one) for at, one in enumerate(alive)
                if one is not None and self.rules.operators[ops[at].target].kind != "loss"]
        found = self._worst(model, held, kept)
        model.moments = (*found, *(-1 for _ in MOMENTS[1:]))[: len(MOMENTS) - 1]
        for moment, at in zip(MOMENTS, found, strict=False):
            kept.put(moment, at)
            found[at].put(moment)
        least = max((one.bytes(0) for one in found.values()), default=0.0)
        for number, (e, until) in enumerate(zip(model.edges, kept.until, strict=True)):
            there = self.tables.held(e.table, tuple(at >= max(until, 0) for at in model.moments),
                                     tuple(at == until for at in model.moments))
            model.edges[number] = replace(e, table=self.tables.running(e.table, there, least))
        for name in position.entry:
            if self.graph.values[name].differentiable:
                var, states = model.states[name]
                model.unary[var][:, MOMENTS[-1]] += [self.tables.bytes(name, state) for state in states]
        if self._last(position):
            kept.goes_first(self.tables)
            for name in set(position.entry) - self.tables.saved.values:  # there until it has run
                var, states = model.states[name]
                model.unary[var][:, MOMENTS[-1]] += [self.tables.bytes(name, state) for state in states]

    def _worst(self, model: Model, held: Sequence[_Held], kept: _Kept) -> dict[int, _Held]:
        """Those that may be the worst: if all is split, if nothing is, and, if all is, of those where linears gather again."""
        copies = {var for var, _ in model.copies.values()}  # from which each reader may gather by itself
        gathers = [[e.table for e, until in zip(model.edges, kept.until, strict=True) if until == one.at and e.i not in copies]
                   for one in held]
        least, most = ([self.tables.again(found, fewest) for found in gathers] for fewest in (True, False))
        there = [kept.bytes(of) + _weights(self, model, np.max if of else np.min) for of in (0, -1)]
        bytes_ = [[one.bytes(of) + float(there[of][one.at]) for one in held] for of in (0, -1)]
        together = [[a + b for a, b in zip(*both, strict=True)] for both in ((bytes_[0], least), (bytes_[1], most))]
        order = [each.index(max(each)) for each in (bytes_[0], together[1]) if held]
        order += sorted((at for at, more in enumerate(least) if more), key=lambda at: -together[0][at])
        return {held[at].at: held[at] for at in [*dict.fromkeys(order)][: len(MOMENTS) - 1]}

    def _last(self, position: Position) -> bool:
        """Whether it is the root's behind all blocks, whose backward is the first."""
        return self.moments and position.block < 0 and position.stop == len(self.graph.ops)

    @cached_property
    def lasting(self) -> bool:
        """Whether what a block reduces is taken to be there until the next micro-batch's first does: unless the root, however
        it is kept, reduces last in each."""
        each = self.scope.structure.trains_root and all(one.zero >= 2 and one.data_axes for one in self.root_variants)
        return self.moments and self.schedule.microbatches > 1 and not each

    def _late(self, model: Model) -> float:
        """Elements of the small parameters of a position that no choice splits, but that some choice reads differently."""
        found = {
            name: self.graph.values[name].numel for _, name, needs in model.parameter_uses
            if self.tables.trainable[name]
            and not any(need.split_axes for need in needs) and any(need.varying for need in needs)
        }
        return float(sum(numel for numel in found.values() if numel <= JOINED))


def _numbered(states: Sequence[Sharding]) -> tuple[tuple[Sharding, ...], NDArray[np.intp]]:
    """Each of some shardings once, and which of these all are."""
    numbers = dict[Sharding, int]()
    found = np.array([numbers.setdefault(state, len(numbers)) for state in states])
    return tuple(numbers), found


class _Kept:
    """What autograd keeps of a position, by the operator whose backward is the last to read it (``until``, of its edges; -1
    where it stays to the end)."""

    def __init__(self, model: Model, ops: Sequence[Op], graph: Graph) -> None:
        self.model, self.count = model, len(ops)
        readers = dict[int, int]()
        for e in model.edges:
            readers[e.i] = min(e.j, readers.get(e.i, e.j))
        copies = {var for var, _ in model.copies.values()}
        handed = {at for at, op in enumerate(ops) if not set(graph.outputs).isdisjoint(op.outputs)}
        last = [readers.get(e.j, e.j) if e.j in copies else e.j for e in model.edges]
        as_it_lies = {at for at in handed if not any(state.mirrored for one in model.placed[at] for state in one.results)}
        self.until = [-1 if e.i in as_it_lies or at >= len(ops) else at for e, at in zip(model.edges, last, strict=True)]
        self.of = [-1 if var >= len(ops) or var in handed else var for var in range(len(model.unary))]
        known = {id(table): _ends(table[..., SAVED]) for table in (*model.unary, *(e.table for e in model.edges))}
        self._ends = [known[id(table)] for table in (*model.unary, *(e.table for e in model.edges))]

    def bytes(self, of: int) -> Array:
        """What is there while each operator's backward runs, of the fewest (0) or the most (-1) that all choices keep."""
        found = np.zeros(self.count)
        for ends, until in zip(self._ends, (*self.of, *self.until), strict=True):
            found[max(until, 0) :] += ends[of]
        return found

    def put(self, moment: int, at: int) -> None:
        """Count what variables keep as held at a moment."""
        for unary, until in zip(self.model.unary, self.of, strict=True):
            unary[:, moment] += unary[:, SAVED] if until <= at else 0.0

    def goes_first(self, tables: ResourceTables) -> None:
        """What does not stay is gone while anything else runs: it is counted at the moments alone, one of which is all."""
        for unary, until in zip(self.model.unary, self.of, strict=True):
            first_of_all(unary, until < 0)
        self.model.edges = [replace(e, table=tables.first_of_all(e.table, until < 0))
                            for e, until in zip(self.model.edges, self.until, strict=True)]


def _ends(bytes_: Array) -> tuple[float, float]:
    """The least and the most of what is finite; nothing where nothing is."""
    finite = bytes_[np.isfinite(bytes_)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


class _Part(NamedTuple):
    """Bytes [choices] by a variable, and the least and the most of them."""

    var: int
    bytes_: Array
    ends: tuple[float, float]

    @classmethod
    def of(cls, var: int, bytes_: Array) -> _Part:
        """Those of some bytes."""
        return cls(var, bytes_, (float(bytes_.min()), float(bytes_.max())))


class _Lying:
    """Bytes of a value's gradient while an operator's backward runs, by the variable whose choices say how it lies."""

    def __init__(self, model: Model, ops: Sequence[Op], tables: ResourceTables) -> None:
        self.model, self.ops, self.tables = model, ops, tables
        copies = {var for var, _ in model.copies.values()}
        self._first = {var: min(e.j for e in model.edges if e.i == var) for var in copies}
        self._known: dict[tuple[str, int], _Part] = {}

    def part(self, name: str, at: int) -> _Part | None:
        """None where nothing says how it lies. As long as some readers of a copy have not run it lies as the copy does."""
        copy, copied = self.model.copies.get(name, (-1, []))
        if copy >= 0 and self._first[copy] < at:
            return self._part(name, copy, copied)
        if name in self.model.makers:
            return self._part(name, self.model.makers[name], None)
        return self._part(name, *self.model.states[name]) if name in self.model.states else None

    def _part(self, name: str, var: int, states: Sequence[Sharding] | None) -> _Part:
        if (name, var) not in self._known:
            if states is None:
                result = self.ops[var].outputs.index(name)
                states = [one.results[result] for one in self.model.placed[var]]
            self._known[name, var] = _Part.of(var, np.array([self.tables.bytes(name, state) for state in states]))
        return self._known[name, var]


class _Held:
    """Gradients and space while the backward of one of a position's operators runs."""

    def __init__(self, builder: Builder, lying: _Lying, at: int, alive: GradientsAlive) -> None:
        self.at, self.model, op, tables = at, lying.model, lying.ops[at], builder.tables
        self.parts = [part for part in (lying.part(name, at) for name in alive.values) if part is not None]
        placed = self.model.placed[at]
        made = [sum(tables.bytes(op.inputs[k], one.operands[k]) for k in alive.makes) for one in placed]
        self.parts.append(_Part.of(at, np.array(made) + builder.spaces(op, self.model.op_choices[at], placed)))

    def bytes(self, of: int) -> float:
        """Of the fewest (0), or the most (-1), of all choices."""
        return sum(part.ends[of] for part in self.parts)

    def put(self, moment: int) -> None:
        """Count it as what is held at a moment."""
        for part in self.parts:
            self.model.unary[part.var][:, moment] += part.bytes_


def _weights(builder: Builder, model: Model, of: Callable[[Array], float]) -> Array:
    """Bytes of the gradients of weights that are made when each operator's backward has run."""
    found = np.zeros(len(model.op_choices))
    for var, name, needs in model.parameter_uses:
        if builder.tables.trainable[name]:
            parts = np.array([builder.mesh.size(need.split_axes) for need in needs])
            found[: _last_read(model, var) + 1] += float(of(builder.graph.values[name].numel / parts)) * builder.costs.itemsize
    return found


def _last_read(model: Model, var: int) -> int:
    """The last operator that reads a parameter, whose variable may be an operator's or its own."""
    count = len(model.op_choices)
    return var if var < count else max((e.j for e in model.edges if e.i == var and e.j < count), default=-1)


def pruned(model: Model, fewer: Collection[int] | None = None) -> Model:
    """The model without the operators' choices that another choice equals or beats in every resource, in all variants.

    What positions agree on keeps all its choices, as does what reads a parameter: how that is kept is not in the model yet.
    ``fewer``: of a model that was pruned before, the variables that have fewer choices since.
    """
    protected = {*model.entry, *model.exit, *(var for _, var in model.shared), *(var for var, _, _ in model.parameter_uses)}
    block, kept = prune(BlockModel(tuple(model.sizes), tuple(model.unary), tuple(model.edges)), sorted(protected), fewer)
    operators = kept[: len(model.op_choices)]
    return replace(
        model, sizes=list(block.sizes), unary=list(block.unary), edges=list(block.edges),
        op_choices=[[found[n] for n in rows] for found, rows in zip(model.op_choices, operators, strict=True)],
        placed=[[found[n] for n in rows] for found, rows in zip(model.placed, operators, strict=True)],
        copies={name: (var, [options[n] for n in kept[var]]) for name, (var, options) in model.copies.items()},
    )
