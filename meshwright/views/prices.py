"""What every operator and every edge of a plan takes in one step, on one rank of its stage.

    operator      compute forward and backward, FLOPs, the collectives inside it, what gathers and reduces its parameters
    edge          from a value's producer to one reader: the steps between the two shardings, with their bytes and seconds

The numbers are those that the search adds up (``compiler.placement.costs``), micro-batches counted in. A value that several
operators read in one sharding is moved once; its seconds are split evenly between those edges, so that sums are right.
Parameter communication runs beside compute, so what a step waits for is less than the sum; and where the host starts kernels
more slowly than the device runs them, it is more: ``Prediction`` has the whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.compiler.placement.blockmodel import read_apart
from meshwright.compiler.placement.calls import priced
from meshwright.compiler.placement.costs import (
    BACKWARD,
    GATHER,
    GATHER_ONCE,
    HOST_BACK,
    REDUCE,
    REDUCE_ONCE,
    SEND_BACK,
    Costs,
    Variant,
)
from meshwright.compiler.structure.activations import Saved, body_shapes, operand_shapes, saved_values, shares_of
from meshwright.compiler.structure.activations import local_shapes as pieces
from meshwright.compiler.structure.measured import ModuleTimes
from meshwright.compiler.structure.positions import positions_of, several_readers
from meshwright.cost import compute
from meshwright.cost.compute import Fused, fusion
from meshwright.cost.memory.saved import not_repeated, saved_for_backward
from meshwright.ir.declared.operator import Work
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.graph import Op
from meshwright.ir.mesh import Mesh, role_of
from meshwright.ir.plan import GroupChoice, Plan
from meshwright.ir.reshard import STEPS, reshard
from meshwright.ir.rule import Placed
from meshwright.ir.sharding import Sharding, ShardingError
from meshwright.planner import cluster_in, state_bytes
from meshwright.views.facts import Collective, Facts


@dataclass(frozen=True)
class Move:
    """One step between two shardings, or a collective inside an operator. ``forward``, ``backward``: the collectives, "" for
    local work; ``bytes_``: the group's full buffer on one rank, each time; ``times``: how often in a step; seconds are those of
    a step, ``again_seconds`` those of a forward that runs once more where its block is recomputed."""

    axis: str
    forward: str
    backward: str
    bytes_: float
    times: float
    forward_seconds: float
    backward_seconds: float
    again_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Both ways, and what runs again."""
        return self.forward_seconds + self.backward_seconds + self.again_seconds

    def __str__(self) -> str:
        words = [f"{way} {name.replace('_', '-')}@{self.axis}" for way, name in
                 (("fwd", self.forward), ("bwd", self.backward)) if name]
        return " / ".join(words) or f"slice@{self.axis}"


@dataclass(frozen=True)
class EdgePrice:
    """The way of a value to one reader. ``source``: the operator that makes it, or the input's or parameter's own name;
    ``have``, ``need``: as it is made and as it is read."""

    value: str
    source: str
    target: str
    operand: int
    have: Sharding
    need: Sharding
    moves: tuple[Move, ...]

    @property
    def seconds(self) -> float:
        """Of a step, both ways, and what runs again."""
        return sum(move.seconds for move in self.moves)

    @property
    def bytes_(self) -> float:
        """Of the buffers of a step's collectives on one rank, each as often as it runs."""
        return sum(move.bytes_ * move.times * (bool(move.forward) + bool(move.backward)) for move in self.moves)


@dataclass(frozen=True)
class OpPrice:
    """One operator.

    ``flops``: of one rank and step, backward included. ``bytes_``: of its results on one rank, of one micro-batch.
    ``backward_seconds``: with what adds up its parameters' gradients. ``recompute_seconds``: its forward once more where its
    block is recomputed. ``inside``: its own collectives. ``gather_seconds``, ``reduce_seconds``: of its parameters, beside
    compute. ``optimizer_seconds``: of their update. ``host``: seconds that the host takes to start the kernels of forward,
    backward and recomputation. What a parameter takes stands with the first operator that reads it.
    """

    flops: float
    bytes_: float
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    inside: tuple[Move, ...]
    gather_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    host: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def compute_seconds(self) -> float:
        """Of a step, recomputation included."""
        return self.forward_seconds + self.backward_seconds + self.recompute_seconds


def costs_of(plan: Plan, mesh: Mesh | None = None, modules: ModuleTimes | None = None) -> Costs:
    """The prices that a plan was made with, of its mesh or of a part of it. Raises ClusterError if its cluster is not in the
    catalogue."""
    precision = PRECISIONS[plan.precision]
    cluster = cluster_in(plan).with_products(precision.products)
    return Costs(cluster, mesh or plan.mesh, microbatches=plan.schedule.microbatches, itemsize=precision.itemsize,
                 state_bytes=state_bytes(plan), modules=modules)


class Prices:
    """The prices of one plan. Raises ClusterError if its cluster is not in the catalogue."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.plan, self.graph = facts, facts.plan, facts.plan.graph
        self.cluster = cluster_in(facts.plan)
        modules = ModuleTimes.of(self.graph, facts.rules, self.cluster.device)
        self.costs = costs_of(facts.plan, modules=modules)
        self._index = {op.name: number for number, op in enumerate(self.graph.ops)}
        self._params = {param.value: param for param in self.graph.params}
        self._readers = self._shared()

    @cached_property
    def _fused(self) -> tuple[Fused | None, ...]:
        return fusion(self.graph, self.facts.rules.operators)

    @cached_property
    def _ends(self) -> Mapping[str, str]:
        """{operator at the end of a block, to which recomputation does not come: the last one there that keeps anything}."""
        if self.cluster.device.repeats:
            return {}
        found = dict[str, str]()
        for block in self.graph.blocks:
            ops = self.graph.ops[block.start : block.stop]
            last, at_end = not_repeated([saved_for_backward(op, self.graph, self.facts.rules.operators) for op in ops])
            found |= {ops[at].name: ops[last].name for at in at_end}
        return found

    def _runs_again(self, op: Op) -> bool:
        """Whether an operator's forward runs again in the backward."""
        kind, path = self.group(op).recompute, self.group(op).path
        keeps = self.facts.rules.operators[op.target].keeps_results(kind) or op.name in self.plan.schedule.prologue
        return kind != "none" and bool(path) and not keeps and op.name not in self._ends

    def _moved_again(self, name: str, reader: Op, shared: bool) -> bool:
        """Whether the way of a value to a reader, or to the copy that its readers share, is gone again in the backward."""
        group, maker = self.group(reader), self.graph.producers.get(name)
        if group.recompute == "none" or not group.path:
            return False
        if maker is not None and self.plan.group_of(maker) is group and not self._runs_again(self.graph.ops[maker]):
            return False
        return shared or self._ends.get(reader.name, reader.name) == reader.name

    @cached_property
    def _saved(self) -> Saved:
        return saved_values(self.graph, self.facts.rules.operators)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return body_shapes(self.graph, self.facts.rules, self.plan.schedule)

    @cached_property
    def _elements(self) -> dict[str, float]:
        """Trainable elements of every group of parameters, by its path."""
        found: Counter[str] = Counter()
        seen: set[tuple[str, str]] = set()
        for number, op in enumerate(self.graph.ops):
            path = self.plan.group_of(number).path
            for name in op.inputs:
                if name in self._params and self._params[name].trainable and (path, name) not in seen:
                    seen.add((path, name))
                    found[path] += self.graph.values[name].numel
        return {path: float(count) for path, count in found.items()}

    @cached_property
    def _late(self) -> dict[str, float]:
        """Elements of every group whose gradients are summed together over axes that are no data axes."""
        found: dict[str, dict[str, int]] = {}
        for number, op in enumerate(self.graph.ops):
            for name in op.inputs:
                if name in self.facts.stored and self.facts.stored[name].late_axes:
                    found.setdefault(self.plan.group_of(number).path, {})[name] = self.graph.values[name].numel
        return {path: float(sum(each.values())) for path, each in found.items()}

    def _shared(self) -> Counter[tuple[str, Sharding]]:
        """How many operators read a value in one sharding."""
        found: Counter[tuple[str, Sharding]] = Counter()
        for op in self.graph.ops:
            found.update(set(zip(op.inputs, self.facts.placed[op.name].operands, strict=True)))
        return found

    def times(self, op: Op) -> int:
        """How often an operator runs in a step."""
        return self.plan.schedule.times(op.name)

    def group(self, op: Op) -> GroupChoice:
        """How the parameters are kept that it reads."""
        return self.plan.group_of(self._index[op.name])

    def op(self, op: Op, assignment: Mapping[str, str] | None = None, placed: Placed | None = None) -> OpPrice:
        """Of an operator as it is planned, or under another assignment. Prices of what cannot be kept so are infinite."""
        graph, operator = self.graph, self.facts.rules.operators[op.target]
        assignment = self.plan.assignments.get(op.name, {}) if assignment is None else assignment
        placed = placed or self.facts.placed[op.name]
        read = operand_shapes(op, graph, self.facts.rules[op.name], self.plan.schedule)
        made = [self._shapes[name] for name in op.outputs]
        work = Work.of(op, graph, pieces(placed, read, self.plan.mesh, False), pieces(placed, made, self.plan.mesh, True))
        times, group = self.times(op), self.group(op)
        rule, fused = self.facts.rules[op.name], self._fused[self._index[op.name]]
        *each, sent_ahead, sent_back = priced(op, rule, assignment, operator, work, graph, self.costs, fused, read)
        forward, backward, start, start_back = (seconds * times for seconds in each)
        passes = 3 if any(graph.values[name].differentiable for name in op.outputs) else 1
        ahead = op.name in self.plan.schedule.ahead
        recomputed = self._runs_again(op)
        gather, reduce_, optimizer, added = self._parameters(op, placed, group)
        return OpPrice(
            flops=(passes + ahead) * compute.flops(operator, work) * times,
            bytes_=sum(self.local_bytes(name, where) for name, where in zip(op.outputs, placed.results, strict=True)),
            forward_seconds=forward * (1 + ahead), backward_seconds=backward + added,
            recompute_seconds=forward if recomputed else 0.0,
            inside=tuple(
                replace(move, again_seconds=move.forward_seconds * recomputed) for move in
                self._inside(op, assignment, placed, times, work, (sent_ahead, sent_back), shares_of(op, graph, read))
            ),
            gather_seconds=gather, reduce_seconds=reduce_, optimizer_seconds=optimizer,
            host=(start * (1 + ahead), start_back, start if recomputed else 0.0),
        )

    def waiting(self) -> float:
        """Seconds of a step, summed over stages, by which the host takes longer to start kernels than the device to run them:
        it runs ahead, so the sums of a block are compared, of the forward and of the backward with what is recomputed; in a
        pipeline without what runs before its schedule."""
        found, apart = 0.0, self.plan.schedule.prologue if self.plan.pipeline is not None else ()
        for position in positions_of(self.graph)[0]:
            work = [self.op(op) for op in position.ops(self.graph) if op.name not in apart]
            found += max(0.0, sum(one.host[0] - one.forward_seconds for one in work))
            found += max(0.0, sum(sum(one.host[1:]) - one.backward_seconds - one.recompute_seconds for one in work))
        return found

    def local_bytes(self, name: str, sharding: Sharding) -> float:
        """Bytes of a value on one rank within one micro-batch."""
        size = self.graph.values[name].dtype.itemsize
        for length in self._shapes[name]:
            size *= length
        return size / self.plan.mesh.size(sharding.split_axes)

    def _inside(
        self, op: Op, assignment: Mapping[str, str], placed: Placed, times: int, work: Work, sent: Sequence[float],
        shares: Sequence[float],
    ) -> Iterator[Move]:
        """The collectives within an operator, what attention along a split sequence passes on, and what completes the model's
        results. ``sent``: seconds of all within, both ways; ``shares``: the part of every operand in a micro-batch."""
        rule = self.facts.rules[op.name]
        known = self.costs.internal(rule, assignment, shares)
        waits = [max(0.0, all_ - one) * times for all_, one in zip(sent, known, strict=True)]
        for axis, factor in assignment.items():
            algorithm = rule.algorithms.get(factor)
            if algorithm is not None and algorithm.passing and self.plan.mesh.size(axis) > 1:
                passed = sum(math.prod(work.operands[at]) for at in algorithm.passing) * work.reads.itemsize
                yield Move(axis, "p2p", "p2p", passed, times * (self.plan.mesh.size(axis) - 1), waits[0], waits[1])
            if algorithm is not None and algorithm.dealt and self.plan.mesh.size(axis) > 1:
                dealt = algorithm.deals(work.operands, self.plan.mesh.size(axis)) * work.reads.itemsize
                yield Move(axis, "all_to_all", "all_to_all", dealt, times, waits[0], waits[1])
            if algorithm is not None and algorithm.fetching and self.plan.mesh.size(axis) > 1:
                mirrored = rule.mirrors(factor, axis, self.plan.mesh)
                fetched = algorithm.fetched(work.operands, self.plan.mesh.size(axis), mirrored) * work.reads.itemsize
                yield Move(axis, "p2p", "p2p", fetched, times, waits[0], waits[1])
        for kind, axes, bytes_, back in self.costs.inside(rule, assignment, shares):
            seconds = self.costs.collective(kind, axes, bytes_) * times
            if back:
                yield Move(",".join(axes), "", kind, bytes_, times, 0.0, seconds)
            else:
                yield Move(",".join(axes), kind, "", bytes_, times, seconds, 0.0)
        outputs = self.graph.outputs
        for name, where in zip(op.outputs, placed.results, strict=True):
            for axis in sorted(where.partial) if name in outputs and name not in self.plan.copies else ():
                size = self.local_bytes(name, where)
                yield Move(axis, "all_reduce", "", size, times, self.costs.collective("all_reduce", (axis,), size) * times, 0.0)

    @cached_property
    def _bearers(self) -> dict[str, str]:
        """{parameter: the first operator that reads it}, which bears what it takes."""
        found: dict[str, str] = {}
        for op in self.graph.ops:
            for name in op.inputs:
                if name in self._params:
                    found.setdefault(name, op.name)
        return found

    @cached_property
    def _tied(self) -> frozenset[str]:
        return several_readers(self.graph)

    def _parameters(self, op: Op, placed: Placed, group: GroupChoice) -> tuple[float, float, float, float]:
        """Seconds of a step: (gather, reduce, optimizer, adding up gradients)."""
        variant = Variant(group.zero, group.data_axes, group.shard_axes, group.recompute)
        gather = reduce_ = optimizer = added = 0.0
        for name, need in dict(zip(op.inputs, placed.operands, strict=True)).items():
            if self._bearers.get(name) != op.name:
                continue
            if name in self._tied:
                roles = {axis: role_of(axis) for axis in self.plan.mesh.axes}
                need = read_apart(self.facts.stored[name].tensor, roles)  # whatever its first reader does
            trainable = self._params[name].trainable
            elements, late = self._elements.get(group.path, 1.0), self._late.get(group.path, 0.0)
            vector = self.costs.parameter(self.graph.values[name], need, trainable, variant, elements, late=late)
            if vector is None:
                return (math.inf,) * 4
            gather += float(vector[[GATHER, GATHER_ONCE]].sum())
            reduce_ += float(vector[[REDUCE, REDUCE_ONCE, SEND_BACK]].sum())
            optimizer += float(vector[HOST_BACK])
            added += float(vector[BACKWARD] - vector[HOST_BACK])
        return gather, reduce_, optimizer, added

    def step(self, step: Collective) -> Move | None:
        """What a collective of the program moves and takes, on all the edges that share it; None if no edge has it."""
        op = self.graph.ops[self._index[step.op]] if step.op in self._index else None
        if op is not None and step.kind == "inside":
            near: list[Move] = list(self.op(op).inside)
        else:
            readers = [self.graph.ops[number] for number in self._consumers.get(step.value, ())]
            edges = [edge for reader in readers for edge in self.edges(reader) if edge.value == step.value]
            near = [move for edge in edges for move in edge.moves]
        same = [m for m in near if (m.axis, m.forward, m.backward) == (step.axis, step.forward, step.backward)]
        if not same:
            return None
        return Move(step.axis, step.forward, step.backward, same[0].bytes_, sum(m.times for m in same),
                    *(sum(getattr(m, f"{way}_seconds") for m in same) for way in ("forward", "backward", "again")))

    @cached_property
    def _consumers(self) -> dict[str, list[int]]:
        return self.graph.consumers()

    def edges(self, op: Op) -> tuple[EdgePrice, ...]:
        """The ways of an operator's operands to it; of parameters without a price, which stands with the operator."""
        found = []
        for position, (name, need) in enumerate(zip(op.inputs, self.facts.placed[op.name].operands, strict=True)):
            maker = self.graph.producers.get(name)
            source = self.graph.ops[maker].name if maker is not None else name
            have = self.made(name)
            moves = () if name in self._params else self._moves(name, need, op)
            found.append(EdgePrice(name, source, op.name, position, have, need, moves))
        return tuple(found)

    def made(self, name: str) -> Sharding:
        """A value as its producer leaves it, an input whole, a parameter as it is read."""
        maker = self.graph.producers.get(name)
        if maker is not None:
            op = self.graph.ops[maker]
            return self.facts.placed[op.name].results[op.outputs.index(name)]
        if name in self.facts.stored:
            return self.facts.stored[name].tensor
        return Sharding.whole(len(self.graph.values[name].shape))

    def _moves(self, name: str, need: Sharding, reader: Op) -> tuple[Move, ...]:
        copy = self.plan.copies.get(name)
        equal, again = self._readers[name, need], self._moved_again(name, reader, False)
        if copy is None:
            return tuple(self._between(name, self.made(name), need, 1.0 / equal, again))
        count = sum(number for (value, _), number in self._readers.items() if value == name) if copy != self.made(name) else 1
        first = self._between(name, self.made(name), copy, 1.0 / count, self._moved_again(name, reader, True))
        return (*first, *self._between(name, copy, need, 1.0 / equal, again))

    def _between(self, name: str, source: Sharding, target: Sharding, share: float, again: bool) -> Iterator[Move]:
        """The steps between two shardings of a value with their prices, of which this edge bears ``share``; ``again``: they are
        gone once more in the backward."""
        value = self.graph.values[name]
        maker = self.graph.producers.get(name)
        schedule, made = self.plan.schedule, "" if maker is None else self.graph.ops[maker].name
        times, ahead = schedule.times(made), 1 + (made in schedule.ahead)
        try:
            steps = reshard(source, target)
        except ShardingError:
            return
        whole = self.local_bytes(name, Sharding.whole(len(value.shape)))
        for step in steps:
            one = self.costs.reshard(step.before, step.after, whole, value.differentiable, name in self._saved.by_linears)
            forward, backward = STEPS[step.kind]
            if one is not None:
                there, back = one[0] * times * share, one[1] * times * share
                yield Move(step.axis, forward, backward if value.differentiable else "", step.scale(self.plan.mesh) * whole,
                           times * share, there * ahead, back, there * again)

