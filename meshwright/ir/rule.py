"""Sharding rules: which dims of an operator's tensors move together.

An ``OpRule`` is a rule instantiated on one operator, shapes known. Every dim of every tensor operand and result carries a
*factor* (an index letter, as in einsum) or None (the dim is always whole). Splitting a factor over a mesh axis splits every
dim that carries it:

* a factor in the operands and the results passes through (split in, split out);
* a factor in the operands only is a reduction: every rank holds a term, the result is a pending sum (``+``);
* a factor in the results only is created (expand, arange): the operands are read differently on each rank (``~``);
* what is *added* to the sum that a reduction makes (the bias of a matrix product) counts once: it is a pending sum there.

* an *internal* factor is communicated inside the operator: results without it are complete on every rank;
* factors may be split *together* by one axis, written ``t&e``: every operand and result is split along those of them that it
  has. The operator moves between the two inside (tokens that travel to their experts). ``t&e:8`` moves a token once to every 8
  neighbours of the axes' ranks, and among these once to each that needs it.

Some splits are no local call but an algorithm, and there may be several for one dim: attention whose queries are split may
gather the keys or pass them on. Each is a named ``SequenceAlgorithm`` of the rule: it says which dim of each operand and
result it splits, and what passes by. An assignment names the algorithm as it names a factor.

``place`` derives every sharding from the rule and an *assignment* {mesh axis: factor}; nothing else knows operators. How an
operator's rule is declared as a line is ``meshwright.ir.notation``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import PlanError
from meshwright.ir.declared.operator import Operators
from meshwright.ir.declared.routing import Routing
from meshwright.ir.graph import Op
from meshwright.ir.mesh import SEQUENCE, Mesh, role_of
from meshwright.ir.notation import RuleError as RuleError
from meshwright.ir.sharding import Sharding, ceil_div, piece

Factor = str
Assignment = Mapping[str, str]
"""{mesh axis: factor it splits}, or {axis: "+k"}: the operator passes a pending sum through its k-th linear group, or
{axis: "~"}: it runs whole on every rank, and what it makes is read differently (its gradient is a pending sum, and so are those
of its operands), {axis: the name of an algorithm}, or {axis: "t&e"}: it splits factors t and e together. An axis not named is
idle: everything is invariant over it."""
VARYING = "~"
TOGETHER = "&"
"""Between factors that one axis splits together."""
NEAR = ":"
"""Before the number of neighbouring ranks to which what moves between these factors is sent once."""
SHARED = "shared"
"""The choice in which ranks split query heads, each of them some that share a key head."""
REMEMBERED = 64
"""Placements that a rule remembers."""


def factors_of(assigned: str) -> tuple[Factor, ...]:
    """The factors that an axis splits: several of "t&e", none of "+0" and "~".

    >>> factors_of("t&e"), factors_of("t&e:8"), factors_of("t"), factors_of("+1")
    (('t', 'e'), ('t', 'e'), ('t',), ())
    """
    if assigned == VARYING or assigned.startswith("+"):
        return ()
    return tuple(neighbourhood(assigned)[0].split(TOGETHER))


def neighbourhood(assigned: str) -> tuple[str, int | None]:
    """What an axis splits, and to how many neighbours tokens go once, None if once for each of what they chose.

    >>> neighbourhood("t&e:8"), neighbourhood("t&e"), neighbourhood("t")
    (('t&e', 8), ('t&e', None), ('t', None))
    """
    factor, found, near = assigned.partition(NEAR)
    if not found or TOGETHER not in factor or not near.isdecimal():
        return assigned, None
    return factor, int(near)


def folded(assignments: Iterable[Assignment]) -> bool:
    """Whether some axis that splits the sequence splits experts together with it.

    >>> folded([{"cp": "t1&e", "ep": "t0&e"}]), folded([{"cp": "t1", "ep": "t0&e"}])
    (True, False)
    """
    return any(TOGETHER in factor and role_of(axis) == SEQUENCE for one in assignments for axis, factor in one.items())


@dataclass(frozen=True)
class Traffic:
    """A collective inside an operator when one of its factors is split: what runs, and how many bytes every rank brings.

    ``elements``: GLOBAL number of elements; they are divided by the other axes that split the operator's batch factors, or,
    if they are those of one ``operand``, by all axes that split it. ``routing``: of rows that go to the experts a token chose,
    which; one of ``elements`` stands for each of them.
    """

    kind: str  # "all_reduce" | "all_gather" | "reduce_scatter" | "all_to_all"
    elements: int
    itemsize: int
    backward: bool = False
    operand: int | None = None
    routing: Routing | None = None


@dataclass(frozen=True)
class SequenceAlgorithm:
    """An algorithm that runs an operator split over one axis, which must have the role sequence.

    ``operands``, ``results``: the dim of each that is split, None where it is whole. ``lengths``: of all these dims.
    ``passing``: operands whose pieces pass by every rank, one at each of as many steps as there are ranks, while it works on
    the one before. ``uneven``: the last of c ranks has (2c - 1) / c times the mean work. ``fetching``: operands of which a rank
    needs ``reach`` rows beyond every chunk of its own, which it fetches from those that have them. ``dealt``: operands of
    ``heads`` heads, of which every rank gets the one that it works with, whole; the number of ranks is a multiple of theirs.
    Pieces are then one chunk each. ``shared``: operands of ``heads`` heads that every rank has whole, and works with one of.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    lengths: tuple[int, ...]
    passing: tuple[int, ...] = ()
    uneven: bool = False
    fetching: tuple[int, ...] = ()
    reach: int = 0
    dealt: tuple[int, ...] = ()
    heads: int = 1
    shared: tuple[int, ...] = ()

    def dim(self, position: int, is_result: bool) -> int | None:
        """The dim of an operand or a result that is split."""
        return (self.results if is_result else self.operands)[position]

    def work(self, shapes: Sequence[tuple[int, ...]], whole: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The operands' local shapes as the work counts them: all that passes by or is dealt. ``whole``: their shapes
        before the split."""
        found = list(shapes)
        for position in self.passing:
            dim = self.operands[position]
            assert dim is not None
            found[position] = (*shapes[position][:dim], whole[position][dim], *shapes[position][dim + 1 :])
        for position in self.dealt:
            found[position] = (*shapes[position][:-3], 1, whole[position][-2], shapes[position][-1])
        for position in self.shared:
            found[position] = (*shapes[position][:-3], 1, *shapes[position][-2:])
        return found

    def fetched(self, shapes: Sequence[tuple[int, ...]], ranks: int, mirrored: bool) -> float:
        """Elements that a rank fetches of operands of these local shapes."""
        found = 0.0
        for position in self.fetching if ranks > 1 else ():
            dim = self.operands[position]
            assert dim is not None
            rows = max(1, shapes[position][dim])
            found += math.prod(shapes[position]) * min((1 + mirrored) * self.reach / rows, ranks - 1)
        return found

    def deals(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> float:
        """Elements of which a rank sends every other its part, of operands of these local shapes."""
        return sum(math.prod(shapes[position]) / self.heads * ranks for position in self.dealt)

    def slowest(self, ranks: int) -> float:
        """Work of the slowest rank over the mean."""
        return (2 * ranks - 1) / ranks if self.uneven else 1.0


@dataclass(frozen=True)
class OpRule:
    """A rule on one operator.

    ``operands``: one tuple per tensor operand, in the order of ``Op.inputs`` (repeats kept, absent optionals left out);
    ``results``: one per output; ``sizes``: how many indivisible units each factor has (a dim may be a multiple of it: a
    hidden dim of 32 heads x 128 has 32 units). ``whole``: factors that may not be split. ``linear``: groups of operand
    positions in which the operator is jointly linear: these may be pending sums together, the result is then one too.
    ``internal``: factors whose split needs communication inside the operator, with that traffic. ``localize``: rewrites
    the call for one rank's shapes; None: the call is right as it stands on local tensors. ``known``: False for an operator
    without a rule, which is replicated. ``even``: factors whose pieces must be equal, because some dim is a multiple of them.
    ``fused``: {operand position: (dim, parts)} of parameters that hold several weights in one, laid one after the other along
    ``dim``: a rank's piece of that dim is its piece of every part. ``algorithms``: algorithms for splits that are no factor's.
    ``grouped``: such that no axis of a sequence takes.
    ``inner``: factors that sequence axes split last, within the pieces of the others, and never in two chunks. ``located``:
    factors whose local call depends on where its piece lies, which must be in one. ``together``: "t&e" and the like, the
    factors that one axis may split together; their keys in ``internal`` say what that moves. ``added``: operand positions that
    are added to what a reduction sums, and so are pending sums over the axes that split one. ``alike``: groups of (operand
    position, dim) that are of one length though no factor joins them (keys, values and the columns of a mask).
    """

    operands: tuple[tuple[Factor | None, ...], ...]
    results: tuple[tuple[Factor | None, ...], ...]
    sizes: Mapping[Factor, int]
    whole: frozenset[Factor] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    internal: Mapping[Factor, tuple[Traffic, ...]] = field(default_factory=dict)
    localize: Localize | None = None
    known: bool = True
    even: frozenset[Factor] = frozenset()
    fused: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    algorithms: Mapping[str, SequenceAlgorithm] = field(default_factory=dict)
    grouped: Mapping[str, SequenceAlgorithm] = field(default_factory=dict)
    inner: frozenset[Factor] = frozenset()
    located: frozenset[Factor] = frozenset()
    together: tuple[str, ...] = ()
    added: frozenset[int] = frozenset()
    alike: tuple[tuple[tuple[int, int], ...], ...] = ()
    _placed: dict[Any, Placed] = field(default_factory=dict, init=False, compare=False, repr=False)

    def algorithm(self, factor: Factor) -> SequenceAlgorithm | None:
        """The algorithm of this name; None if that is a factor's."""
        return self.algorithms.get(factor) or self.grouped.get(factor)

    def mirrors(self, factor: Factor, axis: str, mesh: Mesh) -> bool:
        """Whether an axis splits a factor, or what an algorithm splits, in two chunks a rank."""
        if axis not in mesh.mirrored or factor in self.inner or mesh.size(axis) == 1 or TOGETHER in factor:
            return False
        if factor in self.grouped:
            return False
        if any(factor in factors_of(both)[1:] for both in self.together):
            return False  # experts lie in one piece, whatever their tokens do
        if factor in self.algorithms and self.algorithms[factor].dealt:
            return False
        lengths = self.algorithms[factor].lengths if factor in self.algorithms else (self.sizes[factor],)
        return all(length % (2 * mesh.size(axis)) == 0 for length in lengths)

    def dim(self, factor: Factor, position: int, is_result: bool) -> int | None:
        """The dim of an operand or a result that a factor, several together or an algorithm splits, None if none."""
        if (algorithm := self.algorithm(factor)) is not None:
            return algorithm.dim(position, is_result)
        dims = (self.results if is_result else self.operands)[position]
        return next((dims.index(one) for one in factors_of(factor) if one in dims), None)

    def adds(self, position: int, factor: str) -> bool:
        """Whether an operand is added to the pending sum that a split of the factor makes."""
        if position not in self.added or factor not in self.sizes or factor in self.internal:
            return False
        return not any(factor in dims for dims in (self.operands[position], *self.results))

    @property
    def splittable(self) -> tuple[Factor, ...]:
        """Factors that an axis may split, in order of appearance."""
        seen = dict.fromkeys(f for dims in (*self.results, *self.operands) for f in dims if f is not None)
        return tuple(f for f in seen if f not in self.whole and self.sizes[f] > 1)

    def legal(self, assignment: Assignment, mesh: Mesh, even: bool = True) -> bool:
        """Whether the assignment can run. ``even``: every piece must have the same size."""
        parts: dict[str, int] = {}
        for axis, factor in assignment.items():
            if factor.startswith("+"):
                if int(factor[1:] or 0) >= len(self.linear):
                    return False
                continue
            if factor == VARYING:
                continue
            if self.algorithm(factor) is not None:
                if not self._way_is_legal(factor, assignment, mesh.size(axis), even):
                    return False
                continue
            if TOGETHER in factor and not self._moves(factor, assignment, mesh):
                return False
            if factor in self.located and self.mirrors(factor, axis, mesh):
                return False
            for one in factors_of(factor):
                if one not in self.sizes or one in self.whole:
                    return False
                parts[one] = parts.get(one, 1) * mesh.size(axis)
        return all(
            self.sizes[f] % n == 0
            or (not even and f not in self.even and self.sizes[f] > (n - 1) * ceil_div(self.sizes[f], n))
            for f, n in parts.items()
        )

    def _moves(self, factor: str, assignment: Assignment, mesh: Mesh) -> bool:
        """Whether all axes that split factors together move what they hold in one way, among whole neighbourhoods."""
        both, near = neighbourhood(factor)
        axes = self.moving(assignment)
        alike = all(neighbourhood(assignment[axis])[1] == near for axis in axes)
        return both in self.together and alike and (near is None or (near > 0 and mesh.size(axes) % near == 0))

    def moving(self, assignment: Assignment) -> tuple[str, ...]:
        """The axes that split factors together: one group, among which the operator moves what it holds."""
        return tuple(axis for axis, other in assignment.items() if neighbourhood(other)[0] in self.together)

    def _way_is_legal(self, name: str, assignment: Assignment, ranks: int, even: bool) -> bool:
        """Whether an algorithm has a piece for each of its ranks, and nothing else splits what it splits."""
        algorithm = self.algorithm(name)
        assert algorithm is not None
        others = [factor for factor in assignment.values() if self.algorithm(factor) is not None or factor in self.sizes]
        others.remove(name)
        if name in self.grouped and any(self.algorithm(factor) is not None for factor in others):
            return False
        for factor in others:
            dims = [(algorithm.dim(i, False), self.dim(factor, i, False)) for i in range(len(self.operands))]
            if any(mine is not None and mine == theirs for mine, theirs in dims):
                return False
        several = algorithm.dealt or algorithm.shared
        if several and (ranks <= algorithm.heads or ranks % algorithm.heads or algorithm.lengths[0] % ranks):
            return False
        fits = (n % ranks == 0 or (not even and n > (ranks - 1) * ceil_div(n, ranks)) for n in algorithm.lengths)
        return ranks == 1 or all(fits)

    def __str__(self) -> str:
        """The rule in the notation of ``meshwright.ir.notation``, every dim written out."""

        def term(dims: tuple[Factor | None, ...]) -> str:
            return " ".join(map(self._written, dims)) or "()"

        groups = "".join(" +" + ",".join(map(str, sorted(group))) for group in self.linear)
        text = f"{', '.join(map(term, self.operands))} -> {', '.join(map(term, self.results))}".strip()
        return text + (f" ;{groups}" if groups else "")

    def _written(self, factor: Factor | None) -> str:
        if factor is None or factor in self.whole:
            return "." if factor is None else f"{factor}!"
        return f"{factor}/{self.sizes[factor]}" if factor in self.even else factor


@dataclass(frozen=True)
class Placed:
    """Shardings of one operator's tensors under an assignment: what each operand must be, what each result is."""

    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]


@dataclass(frozen=True)
class Local:
    """What a localizer may know: where one rank stands, every tensor's global shape and sharding, and the operator's ``name``
    in pins, which the trace has no part in."""

    mesh: Mesh
    coordinates: Mapping[str, int]
    assignment: Assignment
    placed: Placed
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    name: str = field(default="", kw_only=True)

    def operand_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        return self.placed.operands[index].local_shape(self.operand_shapes[index], self.mesh, self.coordinates)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of a result."""
        return self.placed.results[index].local_shape(self.result_shapes[index], self.mesh, self.coordinates)

    def result_piece(self, dim: int, index: int = 0) -> tuple[int, int]:
        """(offset, length) of this rank's piece of a result's dim, which is in one (``OpRule.located``)."""
        axes = self.placed.results[index].dims[dim]
        return piece(self.result_shapes[index][dim], self.mesh, axes, self.coordinates)

    def operand_piece(self, index: int, dim: int) -> tuple[int, int]:
        """(offset, length) of this rank's piece of an operand's dim."""
        axes = self.placed.operands[index].dims[dim]
        return piece(self.operand_shapes[index][dim], self.mesh, axes, self.coordinates)

    def operand_chunks(self, index: int, dim: int, coordinates: Mapping[str, int] | None = None) -> tuple[tuple[int, int], ...]:
        """(offset, length) of the chunks of a rank's piece (this one's) of an operand's dim, in order: one, or two where it is
        mirrored over the only axis that splits it."""
        sharding, at = self.placed.operands[index], coordinates or self.coordinates
        axes, size = sharding.dims[dim], self.operand_shapes[index][dim]
        if not sharding.mirrored.intersection(axes):
            return (piece(size, self.mesh, axes, at),)
        ranks, mine = self.mesh.size(axes[0]), at[axes[0]]
        length = size // (2 * ranks)
        return (mine * length, length), ((2 * ranks - 1 - mine) * length, length)

    def axes_of(self, factor: Factor) -> tuple[str, ...]:
        """The axes that split a factor, alone or together with others, in the mesh's order; none of a single rank."""
        split = (axis for axis in self.mesh.axes if self.mesh.size(axis) > 1)
        return tuple(axis for axis in split if factor in factors_of(self.assignment.get(axis, VARYING)))


Localize = Callable[[Op, Local], tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]]
"""(op, local) -> (target, args, kwargs) for one rank."""


class Rules(Mapping[str, OpRule]):
    """The rules of a graph's operators by op name, and what else is declared of every operator by target."""

    __slots__ = ("_by_name", "operators")

    def __init__(self, by_name: Mapping[str, OpRule], operators: Operators) -> None:
        self._by_name, self.operators = by_name, operators

    def __getitem__(self, name: str) -> OpRule:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def place(rule: OpRule, assignment: Assignment, mesh: Mesh, differentiable: Sequence[bool]) -> Placed:
    """Derive the shardings of operands and results.

    Several axes on one factor split it in mesh order, major first (``OpRule.inner``: sequence axes last). ``differentiable``:
    for each operand whether a gradient flows into it; one that takes none is read as invariant instead of ``~``. A rule
    remembers a few of its answers: equal operators share one rule, and lowering and verifying ask the same of each.
    """
    key = (frozenset(assignment.items()), mesh, tuple(differentiable))
    found = rule._placed.get(key)
    if found is None:
        if len(rule._placed) >= REMEMBERED:
            rule._placed.clear()
        found = rule._placed[key] = _place(rule, assignment, mesh, differentiable)
    return found


def _addends(rule: OpRule, factor: Factor) -> Collection[int]:
    """The operands of which a choice such as ``+1`` takes pending sums. Raises PlanError if the rule has no such choice."""
    number = factor[1:] or "0"
    if not number.isdecimal() or int(number) >= len(rule.linear):
        raise PlanError(f"{factor!r} is no choice of the operator: its rule is {rule}. The plan is damaged, or of another "
                        f"rule: plan again")
    return rule.linear[int(number)]


def _place(rule: OpRule, assignment: Assignment, mesh: Mesh, differentiable: Sequence[bool]) -> Placed:
    def sharding(dims: tuple[Factor | None, ...], is_result: bool, position: int) -> Sharding:
        split: list[tuple[str, ...]] = [()] * len(dims)
        partial, varying, mirrored = set(), set(), set()
        for axis in _in_order(rule, assignment, mesh):
            factor = assignment.get(axis)
            if factor is None:
                continue
            if factor == VARYING:
                if any(differentiable) if is_result else differentiable[position]:
                    varying.add(axis)
            elif factor.startswith("+"):
                if is_result or position in _addends(rule, factor):
                    partial.add(axis)
                elif differentiable[position]:
                    varying.add(axis)
            elif (dim := rule.dim(factor, position, is_result)) is not None:
                split[dim] += (axis,)
                if rule.mirrors(dims[dim] or factor if TOGETHER in factor else factor, axis, mesh):
                    mirrored.add(axis)
            elif is_result:
                if neighbourhood(factor)[0] not in rule.internal and rule.algorithm(factor) is None:
                    partial.add(axis)
            elif rule.adds(position, factor):
                partial.add(axis)
            elif differentiable[position]:
                varying.add(axis)
        return Sharding(tuple(split), frozenset(partial), frozenset(varying), frozenset(mirrored))

    return Placed(
        tuple(sharding(dims, False, i) for i, dims in enumerate(rule.operands)),
        tuple(sharding(dims, True, i) for i, dims in enumerate(rule.results)),
    )


def _in_order(rule: OpRule, assignment: Assignment, mesh: Mesh) -> list[str]:
    """The axes, major first; those of a sequence that split an ``inner`` factor come last."""
    return sorted(mesh.axes, key=lambda axis: assignment.get(axis) in rule.inner and role_of(axis) == SEQUENCE)
