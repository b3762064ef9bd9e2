"""From one sharding to another: the collective steps, for the price and for the program alike.

Every step names a collective over some axes and its pair in the backward (`y` the value, `dy` its gradient):

    step            value               forward          backward
    slice           "" -> S(i)          local slice      all-gather
    vary            "" -> ~             nothing          all-reduce
    all_gather      S(i) -> ""          all-gather       local slice
    gather_vary     S(i) -> ~           all-gather       reduce-scatter
    reduce_scatter  +  -> S(i)          reduce-scatter   all-gather
    all_reduce      +  -> ""            all-reduce       nothing
    all_to_all      S(i) -> S(j)        all-to-all       all-to-all
    mirror          S(i) -> S(i)*       all-to-all       all-to-all
    unvary          ~  -> ""            nothing          nothing (the first rank's counts), before a term
    term            "" -> +             nothing          nothing

(``+ -> ~`` is all_reduce then vary: all-reduce both ways.) Steps come in the order that keeps tensors small: free slices
and reduce-scatters first, all-to-alls, then gathers, all-reduces last on what is left, ``vary`` and ``term`` at the end. A
``term`` is the value on the first rank and zeros on the others, so that what is added to a pending sum counts once; the
gradient of that sum is whole on every rank, and so is the term's.

What is mirrored (``*``) is another split than what is not: gathers, slices and the others put chunks in order, and ``mirror``
goes from one to the other, either way. Axes that split the pieces further stay split meanwhile, on another dim: logits of a
sequence that is split over ``(cp*,up)`` are never whole over ``up``.

Only the innermost axis of a dim can be removed and only an innermost axis added, so a split that must leave from under
another takes that one along. Sources: the local SPMD calculus of ``spmd_types``; Korthikanti et al. 2022 for the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.ir.mesh import Mesh
from meshwright.ir.sharding import Sharding, ShardingError, format_sharding

STEPS: Mapping[str, tuple[str, str]] = {
    "slice": ("", "all_gather"),
    "vary": ("", "all_reduce"),
    "all_gather": ("all_gather", ""),
    "gather_vary": ("all_gather", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter", "all_gather"),
    "all_reduce": ("all_reduce", ""),
    "all_to_all": ("all_to_all", "all_to_all"),
    "mirror": ("all_to_all", "all_to_all"),
    "unvary": ("", ""),
    "term": ("", ""),
}
"""{step kind: (collective of the forward, collective of the backward)}; "" is local work."""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One collective over ``axis``: ``dim`` is the dim split or joined, ``to_dim`` where an all-to-all leads.

    ``before`` and ``after`` are the value's shardings around it, which say what is mirrored.
    """

    kind: str
    axis: str
    before: Sharding
    after: Sharding
    dim: int = -1
    to_dim: int = -1

    def scale(self, mesh: Mesh) -> float:
        """Elements of the collective's full buffer per global element.

        The full buffer is the tensor that is whole over the group: what an all-gather returns, what a reduce-scatter or an
        all-reduce or an all-to-all reads, on one rank.
        """
        side = self.after if self.kind in ("all_gather", "gather_vary") else self.before
        return 1.0 / mesh.size(side.split_axes)

    def __str__(self) -> str:
        where = "" if self.dim < 0 else f"(dim {self.dim}" + (f" -> {self.to_dim})" if self.to_dim >= 0 else ")")
        return f"{self.kind}{where}@{self.axis}"


@lru_cache(maxsize=1 << 18)
def reshard(source: Sharding, target: Sharding) -> tuple[ReshardStep, ...]:
    """The steps that turn ``source`` into ``target``; empty when nothing is to be done.

    ``source`` carries no ``~`` over an axis that the target wants otherwise, unless pending (what is read differently cannot be
    unread); else ShardingError. What becomes pending is whole before: a term.
    """
    if source.ndim != target.ndim:
        raise ShardingError(f"cannot reshard {format_sharding(source)} into {format_sharding(target)}: dims differ")
    if not source.varying <= target.varying | target.partial:
        raise ShardingError(f"cannot turn the ~ of {format_sharding(source)} into {format_sharding(target)}")
    steps: list[ReshardStep] = []
    now = source
    while True:
        step = _next(now, target)
        if step is None:
            break
        steps.append(step)
        now = step.after
        if len(steps) > 64:
            raise ShardingError(f"no way found from {format_sharding(source)} to {format_sharding(target)}")
    return tuple(steps)


@lru_cache(maxsize=1 << 18)
def _next(now: Sharding, target: Sharding) -> ReshardStep | None:
    """The next step, by priority, or None when ``now`` is the target."""
    kinds = (_add, _move, _mirror, _aside, _remove, _finish)
    return next((step for step in (kind(now, target) for kind in kinds) if step is not None), None)


def _set(now: Sharding, dim: int, axes: tuple[str, ...], target: Sharding | None = None) -> Sharding:
    """With other axes on a dim; one that comes new is mirrored as in ``target``."""
    dims = (*now.dims[:dim], axes, *now.dims[dim + 1 :])
    left = {axis for other in dims for axis in other}
    new = left.difference(now.split_axes).intersection(target.mirrored if target is not None else ())
    return replace(now, dims=dims, mirrored=now.mirrored.intersection(left) | new)


def _marked(sharding: Sharding, dim: int) -> tuple[tuple[str, bool], ...]:
    """The axes of a dim, each with whether it is mirrored."""
    return tuple((axis, axis in sharding.mirrored) for axis in sharding.dims[dim])


def _add(now: Sharding, target: Sharding) -> ReshardStep | None:
    """An axis that becomes a dim's innermost split, from pending (reduce-scatter) or from invariant (slice)."""
    for dim, (have, want) in enumerate(zip(now.dims, target.dims, strict=True)):
        if len(have) >= len(want) or not _stays(now, target, dim):
            continue
        axis = want[len(have)]
        if axis in now.partial:
            after = _set(replace(now, partial=now.partial - {axis}), dim, (*have, axis), target)
            return ReshardStep("reduce_scatter", axis, now, after, dim)
        if now.kind(axis) == "":
            return ReshardStep("slice", axis, now, _set(now, dim, (*have, axis), target), dim)
    return None


def _move(now: Sharding, target: Sharding) -> ReshardStep | None:
    """An innermost axis that goes straight to where it belongs in another dim."""
    for dim, have in enumerate(now.dims):
        if not have or _stays(now, target, dim):
            continue
        axis = have[-1]
        for to_dim, want in enumerate(target.dims):
            there = now.dims[to_dim]
            if to_dim != dim and axis in want and _stays(now, target, to_dim) and want[len(there)] == axis:
                after = _set(_set(now, dim, have[:-1]), to_dim, (*there, axis), target)
                return ReshardStep("all_to_all", axis, now, after, dim, to_dim)
    return None


def _mirror(now: Sharding, target: Sharding) -> ReshardStep | None:
    """An innermost axis that splits its dim in both, but is mirrored in one of them only."""
    for dim, have in enumerate(now.dims):
        want = target.dims[dim]
        if have and have == want[: len(have)] and _marked(now, dim)[:-1] == _marked(target, dim)[: len(have) - 1]:
            axis = have[-1]
            if (axis in now.mirrored) != (axis in target.mirrored):
                return ReshardStep("mirror", axis, now, replace(now, mirrored=now.mirrored ^ {axis}), dim)
    return None


def _aside(now: Sharding, target: Sharding) -> ReshardStep | None:
    """An innermost axis that is to stay, but from over which one must be mirrored, or no longer: to the last dim that nothing
    is to split, from where it comes back."""
    for dim, have in enumerate(now.dims):
        want, free = target.dims[dim], [to for to, axes in enumerate(target.dims) if to != dim and not axes]
        if len(have) > 1 and free and have == want[: len(have)] and not _stays(now, target, dim):
            after = _set(_set(now, dim, have[:-1]), free[-1], (*now.dims[free[-1]], have[-1]))
            return ReshardStep("all_to_all", have[-1], now, after, dim, free[-1])
    return None


def _remove(now: Sharding, target: Sharding) -> ReshardStep | None:
    """An innermost axis that must leave its dim."""
    for dim, have in enumerate(now.dims):
        if not have or _stays(now, target, dim):
            continue
        axis = have[-1]
        after = _set(now, dim, have[:-1])
        if axis in target.varying:
            return ReshardStep("gather_vary", axis, now, replace(after, varying=now.varying | {axis}), dim)
        return ReshardStep("all_gather", axis, now, after, dim)
    return None


def _finish(now: Sharding, target: Sharding) -> ReshardStep | None:
    """Pending sums that must be whole, then the ``~`` marks."""
    for axis in sorted(now.partial - target.partial):
        return ReshardStep("all_reduce", axis, now, replace(now, partial=now.partial - {axis}))
    for axis in sorted(target.varying - now.varying):
        return ReshardStep("vary", axis, now, replace(now, varying=now.varying | {axis}))
    for axis in sorted(now.varying - target.varying):  # its gradient is the first rank's: the term's, which all have whole
        return ReshardStep("unvary", axis, now, replace(now, varying=now.varying - {axis}))
    for axis in sorted(target.partial - now.partial):
        return ReshardStep("term", axis, now, replace(now, partial=now.partial | {axis}))
    return None


def _stays(now: Sharding, target: Sharding, dim: int) -> bool:
    """Whether the axes of a dim are the first of those that it has in the target."""
    have = _marked(now, dim)
    return have == _marked(target, dim)[: len(have)]
