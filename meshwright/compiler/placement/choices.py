"""The legal choices of every operator: which factor each mesh axis splits.

An axis has a *role* (``ir.mesh``): "any" (the solver decides), "data" (it splits the batch and nothing else), "expert" (the
same, and of mixtures the batch and the experts together where it divides these, or the experts of a product), "sequence" (it
splits the sequence where an operator can, of attention by an algorithm that the rule names or by heads) or "tensor" (it splits
anything but the batch, and every weight that is contracted where it divides, unless that is slight beside others: placements
are solved with memory unlimited, and what is large must not lie whole on every rank). Roles come from pins; without pins every
axis is free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.compiler.placement.fixed import NOTHING_FIXED, FixedDecisions
from meshwright.compiler.placement.pinned import read_pin
from meshwright.compiler.structure.dims import DimClasses, sequence_dims
from meshwright.compiler.structure.structure import Structure
from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import neighbours
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import ANY, DATA, EXPERT, HEADS, ROUTED, SAMPLED, SEQUENCE, SHARED, TENSOR, Mesh, role_of
from meshwright.ir.pins import ATTENTION, GATHER, RING, ULYSSES, WINDOW, PinError, Pins, named_by
from meshwright.ir.plan import TIME, PlanError, Schedule
from meshwright.ir.rule import NEAR, VARYING, OpRule, Placed, factors_of, neighbourhood, place
from meshwright.ir.sharding import Sharding, ceil_div
from meshwright.ir.writing.names import choice_text


@dataclass(frozen=True)
class Scope:
    """What the choices of a graph depend on, besides the operator itself."""

    structure: Structure
    mesh: Mesh
    roles: Mapping[str, str]
    pins: Pins
    microbatches: int
    fixed: FixedDecisions = NOTHING_FIXED
    cluster: Cluster | None = None
    near: frozenset[int] = frozenset()
    """Of a plan that is looked at: to how many neighbours its tokens go once."""
    folded: bool = False
    """Whether the ranks of the sequence share out the experts of mixtures too."""

    @property
    def graph(self) -> Graph:
        """Of the operators."""
        return self.structure.graph

    @property
    def classes(self) -> DimClasses:
        """Which of its dims are the same."""
        return self.structure.classes

    def neighbourhoods(self, op: Op, axes: Sequence[str]) -> list[int]:
        """To how many neighbours of a group of these axes a token may go once: those on a node, and what is held."""
        held = self.near | {neighbourhood(factor)[1] for factor in (self.fixed.assignment(op.name, self.mesh) or {}).values()}
        found = {1 if self.cluster is None else neighbours(self.cluster.island, self.mesh, axes)}
        return sorted(found | {one for one in held if one and self.mesh.size(axes) % one == 0})

    @cached_property
    def axes(self) -> tuple[tuple[str, str, bool], ...]:
        """Every axis with its role, and whether it has several ranks."""
        return tuple((axis, self.roles[axis], self.mesh.size(axis) > 1) for axis in self.mesh.axes)

    @cached_property
    def _known(self) -> dict[tuple[int, tuple[bool, ...], bool], tuple[int, ...]]:
        return {}

    def divided(self, size: int, axes: tuple[bool, ...], timed: bool) -> tuple[int, ...]:
        """Of each of some axes, with micro-batches if they are ``timed``, and of several of them together, whether they divide
        a factor of this size evenly (2), or with a shorter last piece (1)."""
        key = size, axes, timed
        if key not in self._known:
            sizes = [one for one, there in zip(self.mesh.sizes, axes, strict=True) if there and one > 1]
            sizes += [self.microbatches] * timed
            parts = [math.prod(some) for n in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, n)]
            self._known[key] = tuple(
                2 if size % n == 0 else int(size > (n - 1) * ceil_div(size, n)) for n in parts
            )
        return self._known[key]

    @cached_property
    def of_every_sample(self) -> frozenset[str]:
        """Those of them that an operator reads which is not made of parameters alone, and runs for all samples on every data
        rank: experts, whose tokens were sorted over the whole batch. Then nothing is left to sum."""
        found: set[str] = set()
        for op in reversed(self.graph.ops):
            read = self.structure.of_parameters.intersection(op.inputs)
            inner = self.structure.of_parameters.intersection(op.outputs)
            if read and (found.intersection(inner) if inner else not self._split_by_sample(op)):
                found.update(read)
        return frozenset(found)

    def splits(self, name: str, dim: int, axis: str) -> bool:
        """Whether an operator may leave a value with this dim split over the axis: ranks that have samples split the batch of
        what is no parameter, or its experts, and nothing else, tensor ranks anything but the batch."""
        role, root = self.roles[axis], self.classes.find((name, dim))
        if (role not in SAMPLED and role != TENSOR) or name in self.structure.stored:
            return True
        return (role == EXPERT and root in self.structure.stacked.dims) or (root in self.structure.batch) == (role in SAMPLED)

    def _split_by_sample(self, op: Op) -> bool:
        """Whether the data axes may split the operator's samples."""
        rule, axes = self.classes.rules[op.name], [axis for axis in self.mesh.axes if self.roles[axis] in SAMPLED]
        return any(
            _legal(rule, dict.fromkeys(axes, factor), self.mesh)
            for factor in self.structure.kinds(op)["batch"].intersection(rule.splittable)
        )


def choices(op: Op, rule: OpRule, scope: Scope, time: str | None) -> list[dict[str, str]]:
    """All assignments of ``op`` that can run and that the pins allow, idle ones first; never empty."""
    if _depends_on_sizes(op, rule, scope):
        return _choices(op, rule, scope, time, _allowed(op, rule, scope))
    known = scope.structure.choices
    key = op.name, scope.axes, scope.of_every_sample.isdisjoint(op.outputs), time, scope.microbatches > 1
    if key not in known:
        known[key] = _allowed(op, rule, scope), {}
    per_axis, found = known[key]
    divided = tuple(
        scope.divided(rule.sizes[factor], tuple(factor in one for one in per_axis), factor == time)
        for factor in rule.splittable
    )
    if divided not in found:
        found[divided] = _choices(op, rule, scope, time, per_axis)
    return list(found[divided])


def _depends_on_sizes(op: Op, rule: OpRule, scope: Scope) -> bool:
    """Whether the choices of an operator depend on more than what axes do and which of its factors they divide."""
    pins = scope.pins
    pinned = pins.tensors or pins.sequence_parallel is not None or pins.zero or pins.says("attention")
    routed = rule.together or op.name in scope.structure.stacked.products
    return bool(pinned or routed or scope.fixed != NOTHING_FIXED or rule.algorithms or rule.grouped or rule.located)


def _allowed(op: Op, rule: OpRule, scope: Scope) -> list[list[str | None]]:
    """What each axis may split by its role and the pins, None for nothing."""
    kinds, weights = scope.structure.kinds(op), scope.structure.contracted(op)
    apart = not scope.structure.of_parameters.isdisjoint(op.outputs)
    routed = ROUTED if scope.folded or scope.fixed.folded else ROUTED - {SEQUENCE}
    per_axis: list[list[str | None]] = []
    for axis in scope.mesh.axes:
        role = scope.roles[axis]
        allowed: list[str | None] = [None, *([VARYING] if apart else [])]
        if apart and role in SAMPLED and scope.of_every_sample.isdisjoint(op.outputs):
            allowed.remove(None)  # what reads it does so for its own samples
        own = weights - kinds["batch"] - kinds["sequence"] - kinds["width"]
        inner = not weights or any(rule.sizes[f] % scope.mesh.size(axis) == 0 for f in own & set(rule.splittable))
        for factor in rule.splittable:
            batch, sequence = factor in kinds["batch"], factor in kinds["sequence"]
            batch |= role == EXPERT and factor in kinds["experts"]
            if (role in SAMPLED and not batch) or (role == TENSOR and batch) or (role == SEQUENCE and not sequence):
                continue
            if role == TENSOR and scope.pins.sequence_parallel is False and (sequence or (factor in kinds["width"] and inner)):
                continue  # what blocks hand on is whole on every rank
            allowed.append(factor)
        if role == SEQUENCE and rule.algorithms:
            allowed = _algorithms(rule, (ULYSSES,) if axis == HEADS else scope.pins.attentions)
        of_tokens = kinds["batch"] if role in (ANY, EXPERT, TENSOR) else set[str]()
        of_tokens = of_tokens | (kinds["sequence"] if role in (ANY, TENSOR) or (role == SEQUENCE and role in routed) else set())
        allowed += [both for both in rule.together if factors_of(both)[0] in of_tokens]
        allowed += rule.grouped if role not in SAMPLED and role != SEQUENCE else ()
        if op.name in scope.structure.meeting and role not in SAMPLED and role != SEQUENCE:
            allowed.append(scope.structure.meeting[op.name])
        per_axis.append(allowed if scope.mesh.size(axis) > 1 else [None])
    return per_axis


def _choices(
    op: Op, rule: OpRule, scope: Scope, time: str | None, per_axis: Sequence[Sequence[str | None]]
) -> list[dict[str, str]]:
    kinds, weights = scope.structure.kinds(op), scope.structure.contracted(op)
    on_weights = op.name not in scope.graph.parameter_free
    routed = ROUTED if scope.folded or scope.fixed.folded else ROUTED - {SEQUENCE}
    found = []
    timed = scope.mesh.innermost(TIME, scope.microbatches)
    for combination in itertools.product(*per_axis):
        assignment = {axis: factor for axis, factor in zip(scope.mesh.axes, combination, strict=True) if factor is not None}
        if _legal(rule, {**assignment, **({TIME: time} if time else {})}, timed):
            found += [assignment, *_once(op, assignment, rule, scope)]
    found = _pinned_tensors(op, rule, _storable(op, rule, found, scope), scope)
    found = _attending(op, rule, found, scope)
    if on_weights and kinds["experts"]:
        found = _forced(_forced(found, kinds["batch"], scope, DATA), kinds["batch"] | kinds["experts"], scope, EXPERT)
    elif on_weights:
        found = _forced(found, kinds["batch"], scope, *SAMPLED)
    if rule.together or op.name in scope.structure.stacked.products:
        found = _forced(found, {*rule.together, scope.structure.stacked.products.get(op.name, "")}, scope, *routed)
    found = _forced(found, kinds["sequence"] | rule.algorithms.keys() | rule.inner, scope, SEQUENCE) if on_weights else found
    if weights and op.name not in scope.structure.slight:
        found = _forced(found, weights, scope, TENSOR)
    elif scope.pins.sequence_parallel and on_weights and kinds["sequence"] & set(rule.splittable) and not _is_held(op, scope):
        # nothing with a sequence dim is computed over again on every tensor-parallel rank
        passed = {scope.structure.meeting.get(op.name, "")}
        found = _forced(found, {*rule.splittable, *rule.grouped, *passed} - kinds["batch"], scope, TENSOR)
    if scope.pins.sequence_parallel:
        found = _sequence_between_blocks(op, rule, found, scope, bool(weights))
    return _held(op, found, scope)


def handed_out(names: Iterable[str], scope: Scope, schedule: Schedule) -> dict[str, Sharding]:
    """{value made of inputs alone that other positions read: the form in which it is handed to them}.

    Ranks that have samples of their own make what belongs to these, where all that makes and reads the value can; else, and for
    the caller, every rank makes all of it.
    """
    graph, classes, leaving = scope.graph, scope.classes, frozenset(scope.graph.outputs)
    forms = {name: Sharding.whole(len(graph.values[name].shape)) for name in names}
    axes = tuple(axis for axis in scope.mesh.axes if scope.roles[axis] in SAMPLED and scope.mesh.size(axis) > 1)
    split: dict[str, Sharding] = {}
    for name, form in forms.items() if axes else ():
        dims = [dim for dim in range(len(form.dims)) if classes.find((name, dim)) in scope.structure.batch]
        if len(dims) == 1 and name not in leaving:
            split[name] = replace(form, dims=tuple(axes if dim == dims[0] else () for dim in range(len(form.dims))))
    placed = {}
    for op in graph.ops:
        if not split.keys().isdisjoint((*op.inputs, *op.outputs)):
            rule, flows = classes.rules[op.name], [graph.values[name].differentiable for name in op.inputs]
            found = choices(op, rule, scope, schedule.time.get(op.name))
            placed[op] = [place(rule, assignment, scope.mesh, flows) for assignment in found]
    while stuck := [op for op, ways in placed.items() if not any(suits(op, one, {**forms, **split}) for one in ways)
                    and not split.keys().isdisjoint((*op.inputs, *op.outputs))]:
        for name in (*stuck[0].inputs, *stuck[0].outputs):
            split.pop(name, None)
    return {**forms, **split}


def ways(
    op: Op, rule: OpRule, scope: Scope, time: str | None, differentiable: Sequence[bool], handed: Mapping[str, Sharding]
) -> tuple[list[dict[str, str]], list[Placed]]:
    """The choices of an operator that suit what it is ``handed`` and hands out, and what they make of operands and results."""
    found = choices(op, rule, scope, time)
    placed = [place(rule, assignment, scope.mesh, differentiable) for assignment in found]
    if not handed.keys().isdisjoint((*op.inputs, *op.outputs)):
        kept = [n for n, where in enumerate(placed) if suits(op, where, handed)]
        found, placed = [found[n] for n in kept], [placed[n] for n in kept]
    return found, placed


def suits(op: Op, where: Placed, handed: Mapping[str, Sharding]) -> bool:
    """Whether an operator so placed makes what it hands out in its form, and reads pieces of what it is handed."""
    made = zip(op.outputs, where.results, strict=True)
    read = zip(op.inputs, where.operands, strict=True)
    return (all(one.dims == handed[name].dims and not one.partial for name, one in made if name in handed)
            and all(is_piece(one, handed[name]) for name, one in read if name in handed))


def is_piece(piece: Sharding, whole: Sharding) -> bool:
    """Whether what one sharding holds on a rank is a piece of what the other does."""
    return all(mine[: len(theirs)] == theirs for mine, theirs in zip(piece.dims, whole.dims, strict=True))


def _once(op: Op, assignment: Mapping[str, str], rule: OpRule, scope: Scope) -> Iterator[dict[str, str]]:
    """The same in which a token goes once to the neighbours that have one of its experts."""
    axes = rule.moving(assignment)
    for near in scope.neighbourhoods(op, axes) if axes else ():
        yield {**assignment, **{axis: f"{assignment[axis]}{NEAR}{near}" for axis in axes}}


def near_of(assignments: Mapping[str, Mapping[str, str]]) -> frozenset[int]:
    """To how many neighbours tokens go once in a plan."""
    found = (neighbourhood(factor)[1] for assignment in assignments.values() for factor in assignment.values())
    return frozenset(near for near in found if near is not None)


def _is_held(op: Op, scope: Scope) -> bool:
    return scope.fixed.assignment(op.name, scope.mesh) is not None


def _held(op: Op, found: list[dict[str, str]], scope: Scope) -> list[dict[str, str]]:
    """The one choice that is held of an operator; all if none is. Raises PinError if it has no such choice."""
    want = scope.fixed.assignment(op.name, scope.mesh)
    if want is None:
        return found
    kept = [choice for choice in found if scope.fixed.like(choice, want)]
    if not kept:
        several = "; ".join(repr(choice_text(choice)) for choice in found[:6])
        where = f"{op.target} of {op.module or 'the model'}"
        raise PinError(f"{choice_text(want)!r} is held of {where}, which cannot run so over mesh {scope.mesh}; it has "
                       f"{several}")
    return kept


def _algorithms(rule: OpRule, wanted: Sequence[str]) -> list[str | None]:
    """How a sequence axis may split an operator whose rule names algorithms, of the ``wanted`` attentions: by one of them, or
    by its ``inner`` factors."""
    passing, every = {GATHER, RING}.intersection(wanted), set(ATTENTION) <= set(wanted)
    named = [name for name in rule.algorithms if every or name in wanted or (passing and name == WINDOW)]
    return [None, *named, *(sorted(rule.inner.intersection(rule.splittable)) if ULYSSES in wanted else ())]


def check_named(scope: Scope) -> None:
    """Raise PlanError for a mesh without an axis that pins of operators or values name: others may have it."""
    if not (scope.pins.operators or scope.pins.values):
        return
    lacking = sorted(axis for axis in scope.fixed.axes if axis not in scope.mesh.axes and role_of(axis) != DATA)
    if lacking:
        raise PlanError(f"pins operators or values name axis {lacking[0]!r}, which mesh {scope.mesh} does not have; leave that "
                        "axis out of them, or pin a mesh that has it")


def check_sequence(scope: Scope) -> None:
    """Raise PinError if nothing of the model can be split over the sequence axes."""
    axes = [axis for axis in scope.mesh.axes if scope.roles[axis] == SEQUENCE and scope.mesh.size(axis) > 1]
    if not axes:
        return
    ranks, graph = scope.mesh.size(axes), scope.graph
    lengths = {
        graph.values[name].shape[dim] for op in graph.ops for name in op.outputs
        for dim in range(len(graph.values[name].shape)) if scope.classes.find((name, dim)) in scope.structure.sequence
    }
    if not lengths:
        raise PinError(f"pin cp={ranks}: no sequence was found in this model: its blocks hand on nothing with a dim beside "
                       "batch and width, and nothing attends; drop the pin")
    rules = scope.classes.rules
    algorithms = [one for op in graph.ops for one in rules[op.name].algorithms.values() if not one.dealt]
    attended_to = {length for algorithm in algorithms for length in algorithm.lengths}
    if len(axes) > 1 and any(length % ranks for length in attended_to):
        near, common = scope.mesh.size(HEADS), math.gcd(*attended_to)
        fewer = max((n for n in range(2 * near, ranks, near) if ranks % n == common % n == 0), default=None)
        others = " and ".join(_nearest(n, lambda n: n % ranks == 0, ranks) for n in sorted(attended_to) if n % ranks)
        raise PinError(f"pin ulysses={near}: sequences of {sorted(attended_to)} are split over two axes, so cp={ranks} must "
                       f"divide them; take {others}, {f'cp={fewer}, ' if fewer else ''}or drop the pin ulysses")
    longest = max(lengths)
    if longest <= (ranks - 1) * ceil_div(longest, ranks):
        nearest = max(n for n in range(1, ranks) if ranks % n == 0 and longest > (n - 1) * ceil_div(longest, n))
        longer = next(n for n in itertools.count(longest) if n > (ranks - 1) * ceil_div(n, ranks))
        raise PinError(f"pin cp={ranks}: a sequence of {longest} leaves some of the {ranks} ranks without any; take "
                       f"cp={nearest}, or a sequence of {longer} or of a multiple of {ranks}")


def attended(graph: Graph, rules: Mapping[str, OpRule]) -> int:
    """Tokens of the longest sequence of which a rank can have a piece while attention runs on all of it; 0 if there is none."""
    return max((min(algorithm.lengths) for op in graph.ops for algorithm in rules[op.name].algorithms.values()), default=0)


def exchanged(graph: Graph, rules: Mapping[str, OpRule]) -> tuple[int, int]:
    """(heads, tokens) that all attention whose sequence can be split over two axes has in common: what is exchanged for the
    other is a divisor of both. (1, 1) where some attention has none."""
    found = [rules[op.name] for op in graph.ops if rules[op.name].algorithms]
    heads = [rule.sizes[factor] for rule in found for factor in rule.inner] if all(rule.inner for rule in found) else [1]
    tokens = [length for rule in found for one in rule.algorithms.values() if not one.dealt for length in one.lengths]
    return (math.gcd(*heads), math.gcd(*tokens)) if found and tokens else (1, 1)


def pays_mirrored(graph: Graph, rules: Mapping[str, OpRule], pins: Pins) -> bool:
    """Whether two chunks of a sequence a rank balance what one would not: attention of which the last rows have most to do."""
    return pins.attentions != (ULYSSES,) and any(one.uneven for op in graph.ops for one in rules[op.name].algorithms.values())


def _attending(op: Op, rule: OpRule, found: list[dict[str, str]], scope: Scope) -> list[dict[str, str]]:
    """Only the assignments in which attention runs as it is pinned."""
    axes = tuple(axis for axis in scope.mesh.axes if scope.roles[axis] == SEQUENCE and scope.mesh.size(axis) > 1)
    if (not scope.pins.says("attention") and len(axes) < 2) or not rule.algorithms or not axes:
        return found
    kept = [assignment for assignment in found if all(axis in assignment for axis in axes)]
    if not kept:
        raise _cannot_attend(op, rule, axes, scope)
    return kept


def _cannot_attend(op: Op, rule: OpRule, axes: tuple[str, ...], scope: Scope) -> PinError | PlanError:
    """Attention cannot run as it is pinned over these axes of the sequence: over how many ranks its heads would allow it, and
    of the divisors of those there are (other axes take the devices that are left) the most over which it can. A PlanError
    where cp is open, for another mesh may run it."""
    asked = [f"ulysses={scope.mesh.size(HEADS)}"] if len(axes) > 1 else []
    asked += [scope.pins.shown("attention")] if scope.pins.says("attention") else []
    ranks, shapes = scope.mesh.size(axes), [list(scope.graph.values[name].shape) for name in op.inputs[:2]]
    text = (f"pin {' with '.join(asked)}: {op.target} of {op.module or 'the model'}, queries {shapes[0]} and keys {shapes[1]}, "
            f"cannot run so over cp={ranks}")
    if rule.inner and (len(axes) > 1 or ULYSSES in scope.pins.attentions):
        ways = [*sorted(rule.inner), *([ULYSSES] if len(axes) == 1 and ULYSSES in rule.algorithms else ())]
        heads = max(shapes[0][-3:-2], default=1)
        numbers = [n for n in range(2, heads + 1) if any(rule.legal({axes[0]: one}, Mesh(axes[:1], (n,))) for one in ways)]
        text += f" (of such heads sequence is exchanged over {', '.join(map(str, numbers)) or 'no'} ranks)"
    algorithms = [name for name in _algorithms(rule, scope.pins.attentions) if name is not None]
    legal = [n for n in range(2, ranks) if len(axes) == 1 and ranks % n == 0
             and any(_legal(rule, {axes[0]: name}, Mesh(axes[:1], (n,))) for name in algorithms)]
    text += f"; nearest legal: cp={max(legal)}" if legal else ""
    return PlanError(text) if scope.pins.cp is None else PinError(text)


def _legal(rule: OpRule, assignment: Mapping[str, str], mesh: Mesh) -> bool:
    """Whether an assignment can run: evenly, or with a shorter last piece where one axis alone splits the factor.

    Micro-batches are always even.
    """
    if rule.legal(assignment, mesh):
        return True
    if not rule.legal(assignment, mesh, even=False):
        return False
    split: dict[str, list[str]] = {}
    for axis, factor in assignment.items():
        for one in () if rule.algorithm(factor) is not None else factors_of(factor):
            split.setdefault(one, []).append(axis)
    return all(
        rule.sizes[factor] % mesh.size(axes) == 0 or (len(axes) == 1 and axes != [TIME]) for factor, axes in split.items()
    )


def _storable(op: Op, rule: OpRule, found: list[dict[str, str]], scope: Scope) -> list[dict[str, str]]:
    """Only the assignments that read trainable parameters as they can be kept: whole over the data ranks, and under a pinned
    ZeRO level in pieces of one length, for FSDP2 splits what every rank has the same length of; of a weight with several
    readers each reads its own piece of how that lies at rest, which may be uneven. The idle one is among them."""
    trained = {param.value for param in scope.graph.params if param.trainable}.intersection(op.inputs)
    if not trained:
        return found
    shared = SHARED - ROUTED if rule.together or op.name in scope.structure.stacked.products else SHARED
    data = [axis for axis in scope.mesh.axes if scope.roles[axis] in shared and scope.mesh.size(axis) > 1]
    even = bool(scope.pins.zero) and scope.pins.shard != 1 and bool(data)

    def kept(assignment: dict[str, str]) -> bool:
        split = [
            (name, scope.graph.values[name].shape[dim], axes)
            for name, dims in zip(op.inputs, rule.operands, strict=True) if name in trained
            for dim, axes in enumerate(_splits(assignment, dims, scope.mesh))
        ]
        return not any(
            set(axes).intersection(data) or (even and name not in scope.structure.tied and size % scope.mesh.size(axes))
            for name, size, axes in split
        )

    return [assignment for assignment in found if kept(assignment)]


def _forced(found: list[dict[str, str]], factors: Set[str], scope: Scope, *roles: str) -> list[dict[str, str]]:
    """Only the assignments in which as many axes of some roles as possible split one of ``factors``."""
    axes = [axis for axis in scope.mesh.axes if scope.roles[axis] in roles and scope.mesh.size(axis) > 1]

    def count(assignment: dict[str, str]) -> int:
        split = [assignment.get(axis, VARYING) for axis in axes]
        return sum(not factors.isdisjoint((neighbourhood(factor)[0], *factors_of(factor))) for factor in split)

    most = max((count(assignment) for assignment in found), default=0)
    return [assignment for assignment in found if count(assignment) == most]


def _sequence_between_blocks(
    op: Op, rule: OpRule, found: list[dict[str, str]], scope: Scope, weights: bool
) -> list[dict[str, str]]:
    """Sequence parallelism pinned: what blocks hand on is split over tp along the sequence. ``weights``: the operator contracts
    some, and splits those instead."""
    axes = [axis for axis in scope.mesh.axes if scope.roles[axis] == TENSOR]
    if axes and scope.mesh.size(axes) == 1:
        raise PinError(f"pin sequence_parallel=True needs tp > 1: {scope.mesh} leaves no ranks for it; drop it, or take fewer "
                       "ranks for something else")
    where = sequence_dims(scope.graph, scope.structure.handed_on.intersection(op.outputs), scope.classes, scope.structure.batch)
    for name, dims in zip(op.outputs, rule.results, strict=True):
        if name not in where or not axes or weights or (factor := dims[where[name]]) is None:
            continue  # a sequence that the operator itself does not split is split where it is read next
        kept = [a for a in found if all(a.get(axis) == factor for axis in axes)]
        if not kept:
            raise PinError(
                f"pin sequence_parallel=True: the sequence of length {scope.graph.values[name].shape[where[name]]} that "
                f"{op.target} of {op.module or 'the model'} hands on cannot be split over "
                f"{_other_sequences(rule, factor, axes, scope)}"
            )
        found = kept
    return found


def _other_sequences(rule: OpRule, factor: str, tensor: Sequence[str], scope: Scope) -> str:
    """Over which ranks a sequence that blocks hand on cannot be split, and the nearest length and degree that can be."""
    axes = [axis for axis in scope.mesh.axes if axis in tensor or (scope.roles[axis] == SEQUENCE and scope.mesh.size(axis) > 1)]
    before, size = scope.mesh.size([axis for axis in axes if axis not in tensor]), scope.mesh.size(tensor)

    def legal(length: int, ranks: int = size) -> bool:
        names = ("tp", "cp") if before > 1 else ("tp",)
        return _legal(replace(rule, sizes={**rule.sizes, factor: length}), dict.fromkeys(names, factor),
                      Mesh(names, (ranks, before)[:len(names)]))

    over, found = f"tp={size}" + (f" and cp={before}" if before > 1 else ""), _nearest(rule.sizes[factor], legal, size * before)
    fewer = max((n for n in range(2, size) if size % n == 0 and legal(rule.sizes[factor], n)), default=None)
    return f"{over}; " + (f"take {found}, " if found else "") + (f"tp={fewer}, " if fewer else "") + "or drop the pin"


def _nearest(length: int, legal: Callable[[int], bool], ranks: int) -> str:
    """The lengths next to one that are legal over so many ranks, in words; empty if none is."""
    below = [n for n in range(1, length) if legal(n)][-1:]
    above = next(([n] for n in range(length + 1, length + 2 * ranks) if legal(n)), [])
    return f"a sequence of {' or '.join(map(str, below + above))}" if below or above else ""


def _pinned_tensors(op: Op, rule: OpRule, found: list[dict[str, str]], scope: Scope) -> list[dict[str, str]]:
    """Only the assignments that read a pinned parameter in its pinned split."""
    if not scope.pins.tensors:
        return found
    owners = {param.value: param for param in scope.graph.params}
    for name, dims in zip(op.inputs, rule.operands, strict=True):
        if name not in owners:
            continue
        for pattern, text in scope.pins.tensors.items():
            if not named_by(pattern, owners[name].fqns):
                continue
            want = read_pin(text)[0].dims
            for axis in {axis for axes in want for axis in axes} - set(scope.mesh.axes):
                raise PinError(f"pin {pattern!r}: {text!r} names axis {axis!r}, the mesh has {', '.join(scope.mesh.axes)}")
            kept = [a for a in found if _splits(a, dims, scope.mesh) == want]
            if not kept:
                raise PinError(f"pin {pattern!r}: {text!r} cannot be: {op.target} of {op.module} has no such legal split of "
                               f"{owners[name].fqn} {scope.graph.values[name].shape} over mesh {scope.mesh}")
            found = kept
    return found


def _splits(assignment: dict[str, str], dims: tuple[str | None, ...], mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(a for a in mesh.axes if f is not None and f in factors_of(assignment.get(a, VARYING))) for f in dims)
