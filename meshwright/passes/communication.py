"""Collectives as functions on shardings: what each is legal on, and what comes out.

    slice           "" -> S(i)      all_gather      S(i) -> ""     reduce_scatter  +  -> S(i)
    vary            "" -> ~         gather_vary     S(i) -> ~      all_reduce      +  -> ""
    unvary          ~  -> ""        all_to_all      S(i) -> S(j)   identity        all as it was
    mirror          S(i) -> S(i)*, or back                         term            "" -> +

With ``mirrored`` (of what an all-to-all makes: ``to_mirrored``) the split is mirrored.

The counterpart of ``meshwright.ir.reshard``, which plans these steps; written again so that one checks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwright.ir.sharding import Sharding, format_sharding
from meshwright.passes.infer import MismatchError


def _with(sharding: Sharding, dim: int, axes: Sequence[str], mirrored: str = "") -> Sharding:
    """With other axes on a dim, of which ``mirrored`` is mirrored."""
    dims = (*sharding.dims[:dim], tuple(axes), *sharding.dims[dim + 1 :])
    left = {axis for other in dims for axis in other}
    return replace(sharding, dims=dims, mirrored=(sharding.mirrored | ({mirrored} - {""})).intersection(left))


def _need(sharding: Sharding, axis: str, kind: str) -> None:
    words = {"": "invariant", "+": f"a pending sum +{axis}", "~": f"read differently (~{axis})"}
    if sharding.kind(axis) != kind:
        raise MismatchError(f"a value that is {words[kind]} over {axis!r}", format_sharding(sharding))


def _slice(sharding: Sharding, axis: str, dim: int, mirrored: bool = False) -> Sharding:
    _need(sharding, axis, "")
    return _with(sharding, dim, (*sharding.dims[dim], axis), axis if mirrored else "")


def _vary(sharding: Sharding, axis: str) -> Sharding:
    _need(sharding, axis, "")
    return replace(sharding, varying=sharding.varying | {axis})


def _unvary(sharding: Sharding, axis: str) -> Sharding:
    _need(sharding, axis, "~")
    return replace(sharding, varying=sharding.varying - {axis})


def _all_gather(sharding: Sharding, axis: str, dim: int, mirrored: bool = False) -> Sharding:
    if sharding.dims[dim][-1:] != (axis,) or (axis in sharding.mirrored) != mirrored:
        how = f"{axis}*" if mirrored else axis
        raise MismatchError(f"a value whose dim {dim} is split over {how}, innermost", format_sharding(sharding))
    return _with(sharding, dim, sharding.dims[dim][:-1])


def _gather_vary(sharding: Sharding, axis: str, dim: int, mirrored: bool = False) -> Sharding:
    return _vary(_all_gather(sharding, axis, dim, mirrored), axis)


def _reduce_scatter(sharding: Sharding, axis: str, dim: int, mirrored: bool = False) -> Sharding:
    return _slice(_all_reduce(sharding, axis), axis, dim, mirrored)


def _all_reduce(sharding: Sharding, axis: str) -> Sharding:
    _need(sharding, axis, "+")
    return replace(sharding, partial=sharding.partial - {axis})


def _all_to_all(
    sharding: Sharding, axis: str, dim: int, to_dim: int, mirrored: bool = False, to_mirrored: bool = False
) -> Sharding:
    return _slice(_all_gather(sharding, axis, dim, mirrored), axis, to_dim, to_mirrored)


def _mirror(sharding: Sharding, axis: str, dim: int, mirrored: bool = False) -> Sharding:
    return _slice(_all_gather(sharding, axis, dim, not mirrored), axis, dim, mirrored)


def _term(sharding: Sharding, axis: str) -> Sharding:
    _need(sharding, axis, "")
    return replace(sharding, partial=sharding.partial | {axis})


def _identity(sharding: Sharding, axis: str) -> Sharding:
    return sharding


COMMUNICATION: Mapping[str, Callable[..., Sharding]] = {
    "mw.slice": _slice, "mw.vary": _vary, "mw.unvary": _unvary, "mw.all_gather": _all_gather, "mw.gather_vary": _gather_vary,
    "mw.reduce_scatter": _reduce_scatter, "mw.all_reduce": _all_reduce, "mw.all_to_all": _all_to_all, "mw.identity": _identity,
    "mw.mirror": _mirror, "mw.term": _term,
}
"""{target: (sharding, axis, *dims) -> sharding}; MismatchError where the collective is not legal."""
