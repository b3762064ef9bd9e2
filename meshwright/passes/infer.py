"""What the operands' shardings say about an operator: which factor each axis splits, without asking the plan.

For one axis, with the kinds of the operands (a dim it splits, "+", "~", or "" for invariant):

    some operand is split      its factor is split: every operand with that factor likewise, the others "~" if a gradient flows
                               into them (each rank reads them on other data, so their gradients are terms of a sum), but
                               for what is added to the sum that a reduction makes, which is pending as well
    some operand is pending    the pending ones are exactly one linear group; the others as above
    otherwise                  the axis is idle, or it splits a factor that only the results have (expand, arange): the
                               result's local shape says which, and several answers are possible
    "~" alone                  if every operand that takes a gradient is "~", so is the result, and what reads it must split

``~`` on some operands only, where nothing is split, is wrong: the gradient would be whole on every rank and be summed.

Micro-batches are one more axis, ``plan.TIME``, always the innermost of a dim: what all of them share needs no mark, since
gradients accumulate. A piece in time also has a *frame*: the axes that split the dim when it was cut. Row i of a micro-batch
is the same row of the batch for two values only if their frames agree; rows next to each other there are so in the batch only
within a rank's share, so an operator that groups rows needs whole groups in every rank's share of every micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.ir.graph import FILL, Op, renamed
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import TIME
from meshwright.ir.program import Stored
from meshwright.ir.rule import NEAR, TOGETHER, VARYING, Assignment, Local, OpRule, SequenceAlgorithm, factors_of, place
from meshwright.ir.sharding import Sharding, format_sharding, piece

Kind = int | str
Lengths = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""(global shape, local shape) of every result."""


class MismatchError(Exception):
    """What is cannot be: ``expected`` and ``found`` in words."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected, self.found = expected, found


@dataclass(frozen=True, slots=True)
class Form:
    """How a value lives: over the devices, and over the micro-batches (``time``: the dim they cut, "+" a sum over them, "" the
    same in all). ``frame``: the axes that split that dim when it was cut; None if it does not matter."""

    sharding: Sharding
    time: Kind = ""
    frame: tuple[str, ...] | None = None

    def kind(self, axis: str) -> Kind:
        """What one axis does to the value, TIME included."""
        return self.time if axis == TIME else self.sharding.kind(axis)

    def __str__(self) -> str:
        when = {"": "", "+": ", a sum over micro-batches"}.get(str(self.time), f", dim {self.time} cut into micro-batches")
        return format_sharding(self.sharding) + when


@dataclass(frozen=True)
class Site:
    """One rank of a mesh (axes of one rank left out; with TIME last if there are micro-batches)."""

    mesh: Mesh
    coordinates: Mapping[str, int]


def assignments(
    rule: OpRule, forms: Sequence[Form], differentiable: Sequence[bool], results: Lengths, site: Site, axes: Sequence[str]
) -> Iterator[dict[str, str]]:
    """Every assignment that fits the operands and the results. MismatchError if an axis fits none.

    ``axes``: those that may do something here.
    """
    fixed: dict[str, str] = {}
    idle: list[str] = []
    for axis in axes:
        factor = _of_operands(rule, [form.kind(axis) for form in forms], differentiable, axis)
        if factor is None:
            idle.append(axis)
        else:
            fixed[axis] = factor
    read = {factor for dims in rule.operands for factor in dims}
    created = [f for f in rule.splittable if f not in read]
    reads = [form for form, takes in zip(forms, differentiable, strict=True) if takes]
    must = {axis for axis in idle for form in reads if form.kind(axis) == "~"}
    apart = {axis for axis in must - {TIME} if all(form.kind(axis) == "~" for form in reads)}
    splits = [_lengthwise(rule, factor, results, idle, site) for factor in created]
    for split in itertools.product(*splits):
        used = [axis for part in split for axis in part]
        if len(set(used)) == len(used) and must - apart <= set(used):
            through = dict.fromkeys(sorted(apart - set(used)), VARYING)
            yield {**fixed, **{axis: factor for factor, part in zip(created, split, strict=True) for axis in part}, **through}
    if must - apart and not created:
        axis = min(must - apart)
        raise MismatchError(f"nothing read differently over {axis!r} (~{axis}), which splits nothing here", _shown(forms))


def _of_operands(rule: OpRule, kinds: Sequence[Kind], differentiable: Sequence[bool], axis: str) -> str | None:
    """The factor (or linear group) of one axis; None if no operand is split or pending over it."""
    split = {rule.operands[i][kind]: i for i, kind in enumerate(kinds) if isinstance(kind, int)}
    pending = frozenset(i for i, kind in enumerate(kinds) if kind == "+")
    wanted: list[int | None] = [None] * len(kinds)
    ways = {**rule.algorithms, **rule.grouped}
    algorithm = next((name for name, one in ways.items() if _is_algorithm(one, kinds)), None)
    if algorithm is not None and axis != TIME:
        wanted = list(ways[algorithm].operands)
        what = algorithm
    elif split:
        factor, first = next(iter(split.items()))
        others = [i for i in split.values() if i != first]
        joined = next((both for both in rule.together if set(factors_of(both)) == set(split)), None)
        if joined is not None and axis != TIME:
            factor, others = joined, []
        if others or factor is None or factor in rule.whole or (axis == TIME and factor in rule.internal):
            i = others[0] if others else first
            raise MismatchError(f"operand {i} not split over {axis!r} along dim {kinds[i]} (rule {rule})",
                                "it is" + f", and operand {first} along dim {kinds[first]}" * bool(others))
        parts = factors_of(factor)
        wanted = [next((dims.index(one) for one in parts if one in dims), None) for dims in rule.operands]
        what = factor
    elif pending:
        group = next((g for g, members in enumerate(rule.linear) if members == pending), None)
        if group is None:
            raise MismatchError(f"no pending sum over {axis!r}, in which the operator is not linear (rule {rule})",
                                f"+{axis} in operand {', '.join(map(str, sorted(pending)))}")
        what = f"+{group}"
    else:
        return None
    for i, (kind, dim) in enumerate(zip(kinds, wanted, strict=True)):
        if dim is not None and kind != dim:
            raise MismatchError(f"operand {i} split over {axis!r} along dim {dim} like the others", _named(kind, axis))
        if dim is None and split and rule.adds(i, what):
            if kind != "+":
                raise MismatchError(f"operand {i} a term of the sum (+{axis}) that it is added to", _named(kind, axis))
        elif dim is None and i not in (pending if not split else ()):
            _read_differently(i, kind, differentiable[i], axis)
    return what


def _is_algorithm(algorithm: SequenceAlgorithm, kinds: Sequence[Kind]) -> bool:
    """Whether what an axis splits of the operands is what an algorithm splits."""
    return [kind if isinstance(kind, int) else None for kind in kinds] == list(algorithm.operands)


def _read_differently(position: int, kind: Kind, differentiable: bool, axis: str) -> None:
    """An operand that every rank of the axis reads on other data."""
    if kind == "+":
        raise MismatchError(f"operand {position} complete over {axis!r}", f"a pending sum +{axis}")
    if differentiable and axis != TIME and kind != "~":
        want = f"operand {position} read differently over {axis!r} (~{axis}), so that its gradient is summed"
        raise MismatchError(want, _named(kind, axis))


def _lengthwise(
    rule: OpRule, factor: str, results: Lengths, idle: Sequence[str], site: Site
) -> list[tuple[str, ...]]:
    """The sets of idle axes, in mesh order, whose split of a created factor gives the local lengths."""
    places = [(whole[dims.index(factor)], local[dims.index(factor)])
              for dims, (whole, local) in zip(rule.results, results, strict=True) if factor in dims]
    found = []
    for count in range(len(idle) + 1):
        for axes in itertools.combinations(idle, count):
            if all(piece(whole, site.mesh, axes, site.coordinates)[1] == local for whole, local in places):
                found.append(axes)
    return found


def outcome(
    rule: OpRule, assignment: Assignment, forms: Sequence[Form], differentiable: Sequence[bool], mesh: Mesh
) -> list[Form]:
    """The results' forms under an assignment, after a last look that the operands are as ``rule.place`` wants them."""
    if not rule.legal(assignment, mesh, even=False):
        found = ", ".join(f"{axis}: {factor}" for axis, factor in assignment.items())
        raise MismatchError(f"a split that the rule allows ({rule})", found)
    placed = place(rule, assignment, mesh, differentiable)
    for i, (form, need) in enumerate(zip(forms, placed.operands, strict=True)):
        want = without(need, (TIME,))
        have = form.sharding if differentiable[i] else form.sharding.at_rest()
        if have != want:
            raise MismatchError(f"operand {i} {format_sharding(want)}", format_sharding(have))
    frames = {form.frame for form in forms if isinstance(form.time, int) and form.frame is not None}
    if len(frames) > 1:
        rows = " and ".join(f"over {axes}" if axes else "whole" for axes in sorted(frames))
        raise MismatchError("operands that hold the same rows of a micro-batch", f"micro-batches cut while the dim was {rows}")
    frame, factor = next(iter(frames), None), assignment.get(TIME, "")
    if frame and rule.sizes.get(factor, 0) % mesh.size((*frame, TIME)):
        raise MismatchError("micro-batches that hold whole groups of a rank's rows",
                            f"{rule.sizes[factor]} groups of rows that were cut while split over {frame}")
    times = [sharding.kind(TIME) for sharding in placed.results]
    return [
        Form(without(sharding, (TIME,)), time, frame if isinstance(time, int) else None)
        for sharding, time in zip(placed.results, times, strict=True)
    ]


def same_call(
    op: Op, origin: Op, names: Sequence[str], rule: OpRule, assignment: Assignment, site: Site,
    shapes: Sequence[tuple[tuple[int, ...], ...]], called: str = "",
) -> None:
    """MismatchError unless ``op`` is ``origin`` on the local values ``names``, its literals rewritten as the rule says.

    ``shapes``: the global ones of the operands and of the results; ``called``: the operator's name in pins.
    """
    assignment = _sent_once(rule, assignment, dict(op.kwargs).get("near"), site.mesh)
    here = renamed(origin, names)
    placed = place(rule, assignment, site.mesh, [True] * len(rule.operands))

    def call(coordinates: Mapping[str, int]) -> tuple[str, Any, Any]:
        if rule.localize is None:
            return _plain_call(here.target, here.args, here.kwargs)
        return _plain_call(*rule.localize(here, Local(site.mesh, coordinates, assignment, placed, *shapes, name=called)))

    want, have = call(site.coordinates), _plain_call(op.target, op.args, op.kwargs)
    if have != want:
        raise MismatchError(f"{want[0]}{want[1]} {want[2] or ''}".rstrip(), f"{have[0]}{have[1]} {have[2] or ''}".rstrip())
    if TIME in assignment and _only_made(rule, assignment[TIME]):
        # every micro-batch runs the same call, so what it makes must be the same for all pieces
        last = {**site.coordinates, TIME: site.mesh.size(TIME) - 1}
        if (not names and op.target != FILL) or call(last) != want:
            raise MismatchError("the same call in every micro-batch", f"a split over micro-batches made by {op.target}")


def _sent_once(rule: OpRule, assignment: Assignment, near: Any, mesh: Mesh) -> Assignment:
    """The assignment in which what moves between factors split together goes once to so many neighbours, as the call says; that
    is seen in no sharding. Raises MismatchError for a number that does not divide the ranks."""
    if near is None:
        return assignment
    found = {axis: f"{factor}{NEAR}{near}" if TOGETHER in factor else factor for axis, factor in assignment.items()}
    if not rule.legal(found, mesh, even=False):
        raise MismatchError("neighbours that divide the ranks among which rows move", f"{near}")
    return found


def _only_made(rule: OpRule, factor: str) -> bool:
    """Whether a factor is one that the results alone have."""
    return any(factor in dims for dims in rule.results) and not any(factor in dims for dims in rule.operands)


def same_parts(rule: OpRule, operands: Sequence[Stored | None]) -> None:
    """MismatchError unless parameters of several parts are read as such, and no others. ``operands``: those that are stored."""
    for position, item in enumerate(operands):
        dim, parts = rule.fused.get(position, (0, 1))
        if item is None and parts > 1:
            raise MismatchError(f"operand {position} a parameter, split within each of its {parts} parts", "another value")
        if item is not None and (item.fused, item.fused_dim) != (parts, dim):
            found = f"{item.fused} along dim {item.fused_dim}"
            raise MismatchError(f"operand {position} of {parts} parts, along dim {dim}", found)


def _plain_call(target: str, args: Any, kwargs: Any) -> tuple[str, Any, Any]:
    """A call whose lists are tuples and whose keywords are in order."""

    def plain(arg: Any) -> Any:
        return tuple(map(plain, arg)) if isinstance(arg, tuple | list) else arg

    return target, plain(args), tuple(sorted((key, plain(value)) for key, value in kwargs))


def without(sharding: Sharding, axes: Sequence[str]) -> Sharding:
    """The sharding with some axes left out."""
    if not axes:
        return sharding
    dims = tuple(tuple(axis for axis in dim if axis not in axes) for dim in sharding.dims)
    partial, varying, mirrored = (marks.difference(axes) for marks in (sharding.partial, sharding.varying, sharding.mirrored))
    return Sharding(dims, partial, varying, mirrored)


def _named(kind: Kind, axis: str) -> str:
    words = {"+": f"a pending sum +{axis}", "~": f"~{axis}", "": f"the same on every rank of {axis!r} (invariant)"}
    return words[kind] if isinstance(kind, str) else f"dim {kind} split over {axis!r}"


def _shown(forms: Sequence[Form]) -> str:
    return ", ".join(map(str, forms))
