"""Collectives as functions on shardings: what each is legal on, and what comes out.

    slice           "" -> S(i)      all_gather      S(i) -> ""     reduce_scatter  +  -> S(i)
    vary            "" -> ~         gather_vary     S(i) -> ~      all_reduce      +  -> ""
    unvary          ~  -> ""        all_to_all      S(i) -> S(j)   identity        all as it was

The counterpart of ``meshwright.ir.reshard``, which plans these steps; written again so that one checks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwright.ir.sharding import Sharding, format_sharding
from meshwright.passes.infer import MismatchError


def _with(sharding: Sharding, dim: int, axes: Sequence[str]) -> Sharding:
    return replace(sharding, dims=(*sharding.dims[:dim], tuple(axes), *sharding.dims[dim + 1 :]))


def _need(sharding: Sharding, axis: str, kind: str) -> None:
    words = {"": "invariant", "+": f"a pending sum +{axis}", "~": f"read differently (~{axis})"}
    if sharding.kind(axis) != kind:
        raise MismatchError(f"a value that is {words[kind]} over {axis!r}", format_sharding(sharding))


def _slice(sharding: Sharding, axis: str, dim: int) -> Sharding:
    _need(sharding, axis, "")
    return _with(sharding, dim, (*sharding.dims[dim], axis))


def _vary(sharding: Sharding, axis: str) -> Sharding:
    _need(sharding, axis, "")
    return replace(sharding, varying=sharding.varying | {axis})


def _unvary(sharding: Sharding, axis: str) -> Sharding:
    _need(sharding, axis, "~")
    return replace(sharding, varying=sharding.varying - {axis})


def _all_gather(sharding: Sharding, axis: str, dim: int) -> Sharding:
    if sharding.dims[dim][-1:] != (axis,):
        raise MismatchError(f"a value whose dim {dim} is split over {axis!r}, innermost", format_sharding(sharding))
    return _with(sharding, dim, sharding.dims[dim][:-1])


def _gather_vary(sharding: Sharding, axis: str, dim: int) -> Sharding:
    return _vary(_all_gather(sharding, axis, dim), axis)


def _reduce_scatter(sharding: Sharding, axis: str, dim: int) -> Sharding:
    return _slice(_all_reduce(sharding, axis), axis, dim)


def _all_reduce(sharding: Sharding, axis: str) -> Sharding:
    _need(sharding, axis, "+")
    return replace(sharding, partial=sharding.partial - {axis})


def _all_to_all(sharding: Sharding, axis: str, dim: int, to_dim: int) -> Sharding:
    return _slice(_all_gather(sharding, axis, dim), axis, to_dim)


def _identity(sharding: Sharding, axis: str) -> Sharding:
    return sharding


TRANSFERS: Mapping[str, Callable[..., Sharding]] = {
    "mw.slice": _slice, "mw.vary": _vary, "mw.unvary": _unvary, "mw.all_gather": _all_gather, "mw.gather_vary": _gather_vary,
    "mw.reduce_scatter": _reduce_scatter, "mw.all_reduce": _all_reduce, "mw.all_to_all": _all_to_all, "mw.identity": _identity,
}
"""{target: (sharding, axis, *dims) -> sharding}; MismatchError where the collective is not legal."""
