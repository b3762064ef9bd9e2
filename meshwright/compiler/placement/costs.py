"""Prices of one graph on one mesh, as resource vectors.

Every choice of the problem is priced in the same resources:

    FORWARD, BACKWARD      seconds of compute
    SEND, SEND_BACK        seconds of communication on the critical path (activations, and gradients the program reduces)
    GATHER, REDUCE         seconds of communication that every micro-batch repeats beside its compute (parameters gathered
                           forward; gathered and reduced backward)
    GATHER_ONCE, REDUCE_ONCE  the same of what happens once a step, where there are several micro-batches
    HOST, HOST_BACK        seconds that the host takes to start the kernels
    PARAMETERS, GRADIENTS, OPTIMIZER     bytes held over the step (buffers and copies in the compute dtype count as parameters)
    SAVED                  bytes of activations held from forward to backward
    TRANSIENT              bytes held while a block runs: gathered parameters, what recomputation brings back
    MOMENTS                bytes held, in place of SAVED too, at some moments of a position's backward: those that may be its
                           worst, and its end; the worst of them and of SAVED + TRANSIENT counts
    BEHIND                 bytes that the block behind it is still reducing meanwhile, where that has let go of what it saved,
                           which is taken to be as much as this one's (``TRANSIENT_ROWS``)

The time of a block is SEND + max(GATHER, FORWARD + GATHER (1 - 1/k)) + the same of the backward: communication of parameters
runs beside the compute and slows it down by the device's contention k (``time_rows``, ``cost.overlap``). What happens once a
step hides behind one of its m micro-batches only, gathers behind the first one's forward and reductions behind the last one's
backward: there it is max(GATHER_ONCE + (1 - 1/m) FORWARD, FORWARD + GATHER_ONCE (1 - 1/k)). Where the host is slower than the
device HOST stands in FORWARD's place: it runs ahead, so the sums over a block are compared, not each kernel with its start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.structure.measured import ModuleTimes
from meshwright.cost import compute, overlap
from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import ACROSS, WITHIN, Network
from meshwright.ir.declared.operator import Operator, Work
from meshwright.ir.graph import Op, Value
from meshwright.ir.mesh import ROUTED, Mesh, role_of
from meshwright.ir.program import JOINED
from meshwright.ir.reshard import STEPS, reshard
from meshwright.ir.rule import OpRule, factors_of, neighbourhood
from meshwright.ir.sharding import Sharding, ShardingError

FORWARD, BACKWARD, SEND, SEND_BACK, GATHER, REDUCE, GATHER_ONCE, REDUCE_ONCE, HOST, HOST_BACK = range(10)
PARAMETERS, GRADIENTS, OPTIMIZER, SAVED, TRANSIENT = range(10, 15)
MOMENTS = (15, 16, 17, 18)
"""The last of them is the end."""
BEHIND = 19
RESOURCES = 20
SECONDS = 10
"""The first of them are seconds."""
MEMORY: Mapping[str, int] = {"parameters": PARAMETERS, "gradients": GRADIENTS, "optimizer": OPTIMIZER, "activations": SAVED}


def time_rows(contention: float, microbatches: int = 1, each: bool = True, once: bool = True) -> NDArray[np.float64]:
    """[rows, RESOURCES]: a block's seconds are the largest of these sums of its resources: ``cost.overlap.overlapped`` of the
    forward plus that of the backward.

    ``each``, ``once``: whether anything is gathered or reduced in every micro-batch, and once a step; no block does both.
    """
    slowed, rest = 1.0 - 1.0 / contention, 1.0 - 1.0 / microbatches
    # of the compute, of what every micro-batch repeats, of what happens once, of the host
    sums = [(1.0, slowed, slowed, 0.0), (0.0, slowed, slowed, 1.0)]
    sums += [(0.0, 1.0, 0.0, 0.0)] if each or (once and microbatches == 1) else []
    sums += [(rest, 0.0, 1.0, 0.0)] if once and microbatches > 1 else []
    rows = np.zeros((len(sums) ** 2, RESOURCES))
    rows[:, [SEND, SEND_BACK]] = 1.0
    for row, (ahead, back) in zip(rows, itertools.product(sums, sums), strict=True):
        row[[FORWARD, GATHER, GATHER_ONCE, HOST]] = ahead
        row[[BACKWARD, REDUCE, REDUCE_ONCE, HOST_BACK]] = back
    return rows


Vector = NDArray[np.float64]

TRANSIENT_ROWS = np.eye(RESOURCES)[[TRANSIENT, *MOMENTS, TRANSIENT, *MOMENTS[:-1]]]
TRANSIENT_ROWS[1 : 1 + len(MOMENTS), SAVED] = -1.0
TRANSIENT_ROWS[1 + len(MOMENTS) :, BEHIND] = 1.0
TRANSIENT_ROWS[1 + len(MOMENTS) :, SAVED] = -1.0, *(-2.0 for _ in MOMENTS[:-1])
"""[moments, RESOURCES]: what a position holds beside what is saved at each moment, of the last block and of the one before."""


@cache
def bytes_row(microbatches: int) -> Vector:
    """[RESOURCES]: what is held at the worst moment, which is when the last micro-batch's backward begins: all activations, and
    the gradients of the micro-batches before, if there are any."""
    row = np.zeros(RESOURCES)
    row[[PARAMETERS, OPTIMIZER, SAVED]] = 1.0
    row[GRADIENTS] = float(microbatches > 1)
    return row


def most_bytes(resources: Vector, microbatches: int, blocks: Collection[int]) -> float:
    """Bytes of positions [n, RESOURCES] at the worst moment: that of ``bytes_row``, of any position with the gradients that the
    ``blocks`` behind it left in place of what they saved, or the end of a backward, when all gradients are there and no
    activations. What is ahead of all blocks runs when these have let go of all that they saved."""
    total, left = resources.sum(axis=0), np.zeros(len(resources))
    made = resources[:, GRADIENTS] * (microbatches == 1)
    change = np.where(np.isin(np.arange(len(resources)), list(blocks)), made - resources[:, SAVED], 0.0)
    if microbatches == 1:
        left[:-2] = np.cumsum(change[:1:-1])[::-1]  # that of the one behind is among its own (BEHIND)
    left[: min(blocks, default=0)] = change.sum()
    begun = float(total @ bytes_row(microbatches) + (worst(resources) + left).max())
    return max(begun, float(total[[PARAMETERS, GRADIENTS, OPTIMIZER]].sum()))


def worst(resources: Vector) -> Vector:
    """Bytes of every position [n, RESOURCES] at its worst moment, beside what is saved of it."""
    return np.asarray(np.maximum((resources @ TRANSIENT_ROWS.T).max(axis=1), 0.0))


_CAST_BYTES = 4
"""Of an element of a gradient or a master weight, which are fp32."""


@dataclass(frozen=True)
class Variant:
    """How the parameters of a block are kept, and whether its activations are recomputed."""

    zero: int = 0
    data_axes: tuple[str, ...] = ()
    shard_axes: tuple[str, ...] = ()
    recompute: str = "none"

    def of(self, split: Collection[str]) -> Variant:
        """How it keeps a parameter that is split over these axes: over one that may split experts, every rank has others,
        which share neither gradients nor state."""
        own = {axis for axis in split if role_of(axis) in ROUTED}
        if not own.intersection(self.data_axes):
            return self
        data, shard = (tuple(a for a in axes if a not in own) for axes in (self.data_axes, self.shard_axes))
        return replace(self, zero=self.zero if shard else 0, data_axes=data, shard_axes=shard)


@dataclass(frozen=True)
class Neighbours:
    """What stands beside the parameters of a block, which are gathered and freed together (an FSDP2 unit).

    ahead: whether another block follows in the order of the backward, whose parameters are gathered early
    behind: whether another block ran before in that order, whose gradients are still being reduced
    beyond: what part of a block's gradients that are being reduced is more than the root's of the micro-batch before, in whose
        place they are; of the root's, what part is more than a block's
    lasting: whether what a block reduces counts as there all step long, for what the last block reduces in one micro-batch
        stays until the next one's first does, while that runs forward and loses
    root: whether these are the root's parameters, which are there while every block runs
    last: whether they are the root's behind all blocks
    blocks: of the model
    """

    ahead: bool = True
    behind: bool = True
    beyond: float = 1.0
    lasting: bool = False
    root: bool = False
    last: bool = False
    blocks: int = 1


MIDDLE = Neighbours()


class Costs:
    """Memoized prices. ``itemsize``: bytes per element of what the compute reads (2 under bf16); ``state_bytes``: optimizer
    state per parameter in bytes; ``modules``: what was measured of the graph's modules."""

    def __init__(
        self, cluster: Cluster, mesh: Mesh, *, microbatches: int, itemsize: int, state_bytes: float,
        modules: ModuleTimes | None = None,
    ) -> None:
        self.mesh, self.device, self.modules = mesh, cluster.device, modules
        self.network = Network(cluster, mesh)
        self.microbatches, self.itemsize, self.state_bytes = microbatches, itemsize, state_bytes
        self._collective: dict[tuple[str, tuple[str, ...], float], float] = {}
        self._parameter: dict[object, Vector | None] = {}
        self._op: dict[object, tuple[float, float, float, float]] = {}
        self._pair: dict[tuple[Sharding, Sharding], tuple[tuple[str, str, float], ...] | None] = {}

    def collective(self, kind: str, axes: Sequence[str], bytes_: float) -> float:
        """Seconds of one collective over ``axes``; ``bytes_`` is its full buffer on one rank."""
        axes = tuple(axis for axis in axes if self.mesh.size(axis) > 1)
        if not axes or not bytes_:
            return 0.0
        key = (kind, axes, bytes_)
        if key not in self._collective:
            self._collective[key] = float(self.network.seconds(kind, axes, bytes_))
        return self._collective[key]

    def op(
        self, target: str, operator: Operator, work: Work, fused: compute.Fused | None
    ) -> tuple[float, float, float, float]:
        """Seconds (forward, backward) of one call on LOCAL shapes, and what the host takes to start it; ``fused``: what its
        fused kernel reads and writes."""
        literals = tuple((at, arg) for at, arg in (*enumerate(work.args), *work.kwargs) if isinstance(arg, bool | int | float))
        key = (target, work.operands, work.results, work.reads, work.makes, literals, work.needs, fused)
        if key not in self._op:
            self._op[key] = (
                *compute.seconds(operator, work, self.device, fused), *compute.started(operator, work, self.device, fused),
            )
        return self._op[key]

    def measured(self, op: str, assignment: Mapping[str, str]) -> tuple[float, float]:
        """What a measured module takes over its operators' formulas, forward and backward; 1 where none was."""
        return (1.0, 1.0) if self.modules is None else self.modules.ratio(op, assignment, self.mesh, self.microbatches)

    def waited_for(
        self, op: Op, operator: Operator, assignment: Mapping[str, str], work: Work, weights: Collection[str]
    ) -> float:
        """Seconds of the backward of a call on LOCAL shapes that nothing but the gradients of ``weights`` waits for."""
        needs = tuple(need and name not in weights for need, name in zip(work.gradients, op.inputs, strict=True))
        whole, without = (compute.seconds(operator, one, self.device)[1] for one in (work, replace(work, needs=needs)))
        return (whole - without) * self.measured(op.name, assignment)[1]

    def algorithm(
        self, rule: OpRule, assignment: Mapping[str, str], local: Sequence[tuple[int, ...]], itemsize: int,
        seconds: tuple[float, float],
    ) -> tuple[float, float, float, float]:
        """Seconds (forward, backward) of an operator's own work, and those in which it waits for what passes by, is fetched
        or dealt.

        ``local``: shapes of the operands; ``seconds``: of the work if all ranks had the same. Behind the pieces come, in the
        backward, their gradients in fp32.
        """
        forward, backward = seconds
        waits = [0.0, 0.0]
        for axis, name in assignment.items():
            found, ranks = rule.algorithms.get(name), self.mesh.size(axis)
            if found is None or ranks == 1:
                continue
            slowest = 1.0 if rule.mirrors(name, axis, self.mesh) else found.slowest(ranks)
            forward, backward = forward * slowest, backward * slowest
            fetched, dealt = found.fetched(local, ranks, rule.mirrors(name, axis, self.mesh)), found.deals(local, ranks)
            for at, widths in enumerate(((itemsize, itemsize), (itemsize + _CAST_BYTES, _CAST_BYTES))):
                moved = ("p2p", fetched * widths[0]), ("all_to_all", dealt * widths[1])
                if (forward, backward)[at]:
                    waits[at] += sum(self.collective(kind, (axis,), bytes_) for kind, bytes_ in moved)
            passing = sum(math.prod(local[position]) for position in found.passing)
            for at, (work, width) in enumerate(((forward, itemsize), (backward, itemsize + _CAST_BYTES))):
                if passing and work:
                    send = self.collective("p2p", (axis,), float(passing * width))
                    waits[at] += overlap.ring(work / ranks, send, ranks, self.device.contention) - work
        return forward, backward, waits[0], waits[1]

    def internal(self, rule: OpRule, assignment: Mapping[str, str], shares: Sequence[float] = ()) -> tuple[float, float]:
        """Seconds (forward, backward) of the collectives inside an operator; ``shares``: see ``inside``."""
        seconds = [0.0, 0.0]
        for kind, axes, bytes_, backward in self.inside(rule, assignment, shares):
            seconds[backward] += self.collective(kind, axes, bytes_)
        return seconds[0], seconds[1]

    def inside(
        self, rule: OpRule, assignment: Mapping[str, str], shares: Sequence[float] = ()
    ) -> Iterator[tuple[str, tuple[str, ...], float, bool]]:
        """The collectives inside an operator: (kind, axes, bytes of the full buffer on one rank, whether in the backward).
        ``shares``: the part of every operand that a micro-batch has, if not all of it."""
        moving = rule.moving(assignment)
        for factor, traffic in rule.internal.items():
            axes = tuple(axis for axis in self.mesh.axes if neighbourhood(assignment.get(axis, ""))[0] == factor)
            if factor in rule.together and axes:  # all that move are one group, priced with the first
                axes = tuple(axis for axis in self.mesh.axes if axis in moving) if moving[0] in axes else ()
            if axes:
                cutting = [axis for axis, other in assignment.items() if axis not in axes and factors_of(other)]
                near = neighbourhood(assignment[axes[0]])[1]
                others = self.mesh.size(cutting)
                for item in traffic:
                    cut = others
                    if item.operand is not None:
                        dims = rule.operands[item.operand]
                        cut = self.mesh.size([axis for axis, other in assignment.items() if set(factors_of(other)) & set(dims)])
                    share = shares[item.operand or 0] if shares else 1.0
                    bytes_ = item.elements * share / cut * item.itemsize
                    if near is None or item.routing is None:
                        yield item.kind, axes, bytes_, item.backward
                        continue
                    each, ranks = bytes_ / item.routing.chosen, self.mesh.size(axes)
                    hops = ((f"{ACROSS}{near}", ranks // near), (f"{WITHIN}{near}", ranks)) if near > 1 else (("", ranks),)
                    for hop, parts in hops:
                        if parts > 1:
                            yield f"{item.kind}{hop}", axes, each * item.routing.reached(parts), item.backward

    def reshard(
        self, source: Sharding, target: Sharding, bytes_: float, differentiable: bool, by_linears: bool = False
    ) -> tuple[float, float] | None:
        """Seconds (forward, backward) of turning ``source`` into ``target``; None if that cannot be.

        ``bytes_``: of the GLOBAL value. ``by_linears``: linears alone read it; what they gather they gather again in the
        backward, and they reduce-scatter its gradient, both beside the products (``mw.gather_linear``; Korthikanti et al.
        2022).
        """
        key = (source, target)
        if key not in self._pair:
            try:
                steps = reshard(source, target)
            except ShardingError:
                self._pair[key] = None
            else:
                self._pair[key] = tuple((step.kind, step.axis, step.scale(self.mesh)) for step in steps)
        steps_ = self._pair[key]
        if steps_ is None:
            return None
        forward = backward = 0.0
        for kind, axis, scale in steps_:
            ahead, back = self.step(kind, axis, scale * bytes_, differentiable, by_linears)
            forward, backward = forward + ahead, backward + back
        return forward, backward

    def step(
        self, kind: str, axis: str, bytes_: float, differentiable: bool, by_linears: bool = False
    ) -> tuple[float, float]:
        """Seconds (forward, backward) of one step of a reshard; ``bytes_``: of its full buffer on one rank."""
        ahead, back = STEPS[kind]
        forward = self._moved(ahead, axis, bytes_) if ahead else 0.0
        if differentiable and kind == "gather_vary" and by_linears:
            again = 0.0 if self.device.keeps_gathered else self.collective(ahead, (axis,), bytes_)
            return forward, (again + self.collective(back, (axis,), bytes_)) * (1.0 - 1.0 / self.device.contention)
        return forward, self._moved(back, axis, bytes_) if differentiable and back else 0.0

    def _moved(self, kind: str, axis: str, bytes_: float) -> float:
        """Seconds of a collective on activations that stay exposed."""
        seconds = self.collective(kind, (axis,), bytes_)
        if self.device.overlapped and kind in ("all_gather", "reduce_scatter"):
            size = self.mesh.size(axis)
            added = (size + 1) / size * bytes_ if kind == "reduce_scatter" and size > 1 else 0.0
            return overlap.in_pieces(seconds, added / compute.memory_speed(self.device), self.device.contention)
        return seconds

    def parameter(
        self, value: Value, need: Sharding, trainable: bool | None, variant: Variant, group: float, unit: Neighbours = MIDDLE,
        late: float = 0.0, made: tuple[float, ...] = (), pieces: bool = False,
    ) -> Vector | None:
        """What one use of a parameter or buffer (``trainable``: None) costs a block kept as ``variant``; None if the variant
        cannot hold it so.

        FSDP2 moves all parameters of a block in one collective, so a parameter pays its share of one over ``group``, the
        number of the block's trainable elements; software that moves each ``alone`` pays every latency. Over axes that are no
        data axes a small parameter's gradient is summed once a step, together with those of the ``late`` elements of the block
        (``runtime.state.late``; of all blocks, if there are several micro-batches: that is priced as one sum a block).
        ``made``: at which of the ``MOMENTS`` its gradient is there (1), or being made with those of n others
        that are as large (1 + 1 / n), where those count; ``pieces``: whether the call that reads it has a copy of its own.

        Follows FSDP2: with ZeRO the parameter lives split over ``shard_axes``, is gathered in the compute dtype (3: before
        every forward and backward of a micro-batch; 1, 2: once per step) and its gradient reduce-scattered (1: once per
        step; 2, 3: every micro-batch), then all-reduced over the other data axes; without, gradients are all-reduced once.
        """
        key = (value.shape, value.dtype, need, trainable, variant, group, unit, late, made, pieces)
        if key not in self._parameter:
            self._parameter[key] = self._of_parameter(value, need, trainable, variant, group, unit, late, made, pieces)
        return self._parameter[key]

    def _of_parameter(
        self, value: Value, need: Sharding, trainable: bool | None, variant: Variant, group: float, unit: Neighbours,
        late: float, made: tuple[float, ...], pieces: bool,
    ) -> Vector | None:
        """``parameter``, priced."""
        vector = np.zeros(RESOURCES)
        numel = value.numel / self.mesh.size(need.split_axes)
        if not trainable:
            floats = value.dtype.is_floating_point  # which lie in fp32
            vector[PARAMETERS] = numel * (max(_CAST_BYTES, value.dtype.itemsize) if floats else value.dtype.itemsize)
            if floats and trainable is not None and self.itemsize < _CAST_BYTES:
                vector[PARAMETERS] += numel * self.itemsize
                self._copied(vector, numel, variant, bool(made) and not unit.root, pieces)
            return vector
        variant = variant.of(need.split_axes)
        if set(variant.data_axes) & set(need.split_axes):
            return None
        if variant.zero and any(size % self.mesh.size(axes) for size, axes in zip(value.shape, need.dims, strict=True)):
            return None  # FSDP2 splits what every rank has the same length of
        master, count = numel * _CAST_BYTES, self.microbatches
        own = tuple(axis for axis in self.mesh.axes if axis in need.varying and axis not in variant.data_axes)
        if own and numel <= JOINED:
            joined = max(late, numel, 1)  # a parameter may have no elements
            vector[SEND_BACK] += self.collective("all_reduce", own, joined * _CAST_BYTES) * numel / joined
        else:
            vector[SEND_BACK] += count * sum(self.collective("all_reduce", (axis,), master) for axis in sorted(own))

        def share(kind: str, axes: tuple[str, ...], itemsize: float) -> float:
            if self.device.alone:
                return self.collective(kind, axes, numel * itemsize)
            return self.collective(kind, axes, group * itemsize) * numel / max(group, 1)

        parts = self.mesh.size(variant.shard_axes) if variant.zero else 1
        replicas = tuple(axis for axis in variant.data_axes if axis not in (variant.shard_axes if variant.zero else ()))
        gather_at, reduce_at, gathers, reductions = GATHER, REDUCE, count, count
        if variant.zero < 3 and count > 1:
            gather_at, gathers = GATHER_ONCE, 1
        if variant.zero < 2 and count > 1:
            reduce_at, reductions = REDUCE_ONCE, 1
        vector[reduce_at] += reductions * share("all_reduce", replicas, _CAST_BYTES / parts)
        if variant.zero:
            vector[reduce_at] += reductions * share("reduce_scatter", variant.shard_axes, _CAST_BYTES)
            gather = gathers * share("all_gather", variant.shard_axes, self.itemsize)
            vector[gather_at] += gather
            vector[REDUCE] += gather if variant.zero == 3 else 0.0
        if unit.root or self.device.alone:  # before the first operator and after the last, or where they are called for
            vector[SEND] = vector[GATHER] + vector[GATHER_ONCE]
            vector[SEND_BACK] += vector[REDUCE] + vector[REDUCE_ONCE]
            vector[GATHER : REDUCE_ONCE + 1] = 0.0
        else:  # beside compute, which takes multiprocessors and memory from it
            vector[GATHER : REDUCE_ONCE + 1] /= self.network.cluster.node.overlapped_bandwidth
        self._kept(vector, numel, variant, parts, unit)
        if made:
            self._moments(vector, numel, numel < value.numel, variant, unit, made, pieces)
        speed = self.device.memory_bandwidth * self.device.memory_efficiency
        optimizer = self.updated(numel / parts)
        vector[BACKWARD] += optimizer + count * self._accumulated(numel, variant, parts) / speed
        vector[HOST_BACK] += optimizer  # no host runs ahead of it
        return vector

    def updated(self, elements: float) -> float:
        """Seconds of the optimizer's step on so many elements of a rank: parameters and state are read and written, gradients
        read."""
        speed = self.device.memory_bandwidth * self.device.memory_efficiency
        return 3 * elements * (2 * _CAST_BYTES + self.state_bytes) / speed

    def _accumulated(self, numel: float, variant: Variant, parts: int) -> float:
        """Bytes that a micro-batch's gradient of ``numel`` local elements moves until it is in the fp32 sum.

        Made in the compute dtype, it is added to a whole sum (or becomes it), or it is cast for the reduce-scatter whose result
        is added (levels 2 and 3). A sum in the compute dtype (``Device.narrow_sums``) is read and written with it. Products
        that add to a whole sum of either kind themselves (``Device.accumulates``) do it beside their work.
        """
        cast, master = numel * self.itemsize, numel * _CAST_BYTES
        if variant.zero >= 2:
            return cast + master + (3 * master / parts if self.microbatches > 1 else 0.0)
        if self.device.accumulates:
            return 0.0
        if self.device.narrow_sums:
            return 3 * cast if self.microbatches > 1 else 0.0
        return cast + master * (2 if self.microbatches > 1 else 1)

    def _kept(self, vector: Vector, numel: float, variant: Variant, parts: int, unit: Neighbours) -> None:
        """Bytes of a trainable parameter of ``numel`` local elements, as FSDP2 holds it.

        While a block's backward runs there are its gradient in the compute dtype and the fp32 buffer that the block behind it
        is still reducing (or its own, once the gradient is in it), but below ZeRO-2 of several micro-batches, whose gradients
        are added to a sum one by one, or, if that is wider, when the block's are all there; under ZeRO-3 also its gathered
        parameters, until they are freed, and those of the block ahead. The root's are whole while any block runs, and its
        gradients are still being reduced when the next backward begins, where each reduces. With one micro-batch gradients are
        all there when no activations are (``bytes_row``): those at rest take the place of the gathered parameters that are
        freed with them, the root's are being reduced.
        """
        master, cast = numel * _CAST_BYTES, numel * self.itemsize
        vector[PARAMETERS] = vector[GRADIENTS] = master / parts
        vector[OPTIMIZER] = numel * self.state_bytes / parts
        if variant.zero == 1 and self.microbatches > 1:  # whole until the last one's are reduced, and split behind that
            vector[GRADIENTS] = cast if self.device.narrow_sums else master
        if variant.zero < 2 and variant.data_axes and self.device.buckets:
            vector[GRADIENTS] += cast
        if variant.zero == 3 and not unit.root:
            running = cast + cast * unit.ahead + cast + master * unit.behind
            vector[TRANSIENT] = max(running, cast * unit.ahead + cast + master)
            return
        if variant.data_axes or self.itemsize < _CAST_BYTES:  # FSDP2 gathers a copy whatever the level
            vector[PARAMETERS] += cast
        if unit.root and variant.data_axes:
            if self.microbatches == 1:
                vector[GRADIENTS] = cast + master
            elif variant.zero >= 2:  # of the micro-batch before
                vector[GRADIENTS] += master * unit.beyond
        elif variant.data_axes:
            vector[GRADIENTS] = max(0.0, vector[GRADIENTS] - cast * (self.microbatches == 1))
            summed = variant.zero < 2 and self.microbatches > 1
            vector[TRANSIENT] = cast * (self.itemsize < _CAST_BYTES) if summed else cast + master

    def _moments(
        self, vector: Vector, numel: float, split: bool, variant: Variant, unit: Neighbours, made: tuple[float, ...],
        pieces: bool,
    ) -> None:
        """What of ``_kept`` is there at each moment of the backward: gathered parameters and what the block behind is reducing
        from its beginning, gradients when they are ``made`` (more than 1: by what runs then, which copies those of ``split``
        weights, one after the other), and at the end either is gone, for its own are reduced, or, where FSDP2 has no part in
        it, are copied to their sums. What one of all blocks has gathered is there whatever runs: each counts its part. With one
        micro-batch, what each has gathered is there from its forward to its backward, and gradients are pieces then. The last
        of several reduces sums, in the place of what was gathered, and later of these. Where FSDP2 has no part a copy in the
        compute dtype is there from a forward to its backward, or, made again, in the latter."""
        master, cast = numel * _CAST_BYTES, numel * self.itemsize
        once, taken = self.microbatches == 1, bool(variant.data_axes)
        reduces, gathered = taken and (variant.zero >= 2 or once), variant.zero == 3
        parts = self.mesh.size(variant.shard_axes) if variant.zero else 1
        copied = taken and any(self.mesh.size(axis) > 1 and axis not in variant.data_axes for axis in self.mesh.axes)
        own = 0.0 if taken and not reduces and self.itemsize == _CAST_BYTES and not copied else cast
        there = [max(own * (one > 0), cast * (one > 1)) for one in made]
        piece = master / parts * (1 + (parts == 1))  # a piece that is all of it is copied
        if unit.root:
            ended = own * (1 + copied) if once or reduces or not taken else max(own * (1 + copied), master - cast, piece - cast)
            vector[list(MOMENTS)] = [*there, 0.0 if unit.last else ended]
            vector[SAVED] = own * unit.last  # made first of all, and there until the root's are reduced
            if once:  # in the place of what was gathered
                least = max(own + master, master + piece) if taken else master * (1 + (self.mesh.world > 1))
                vector[GRADIENTS] = max(own, least - cast * (taken or self.itemsize < _CAST_BYTES))
            return
        begun = cast * unit.ahead * gathered
        lasting = reduces and unit.lasting and not once
        reducing = master * reduces * unit.beyond * (not lasting)
        ended = master * (1 + (self.mesh.world > 1)) if not taken else own * (1 + copied) + max(reducing, begun)
        if gathered:
            vector[PARAMETERS] += cast / unit.blocks
        elif taken and once:
            vector[PARAMETERS] -= cast
            vector[SAVED] = cast
            there = [one + cast for one in there]
        if lasting:
            vector[GRADIENTS] += master / unit.blocks
        if once:
            vector[GRADIENTS] = master / parts
            reducing += master / parts
            ended = max(ended, (master + piece) * taken)
        elif taken and not reduces:  # of the last micro-batch, in the place of a sum and of what was gathered
            reducing = max(0.0, master / parts - cast)
            ended = max(ended, master - cast, piece - cast)
        vector[BEHIND] = reducing * unit.behind
        vector[TRANSIENT] = begun
        vector[list(MOMENTS)] = [*(begun + one for one in there), ended]
        self._copied(vector, numel, variant, not taken and self.itemsize < _CAST_BYTES, pieces)

    def _copied(self, vector: Vector, numel: float, variant: Variant, counts: bool, pieces: bool) -> None:
        """Where it ``counts``, the copy in the compute dtype of what FSDP2 has no part in goes with its block; that of a weight
        read in ``pieces`` is the call's own."""
        if counts:
            cast = numel * self.itemsize
            vector[PARAMETERS] -= cast
            vector[[TRANSIENT if variant.recompute != "none" else SAVED, *MOMENTS[:-1]]] += cast * (not pieces)
