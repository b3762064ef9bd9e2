"""Which operators draw random numbers, and what a rank's call of one draws from.

What an operator draws is a function of the run's seed, of the call, and of its *salt*: a number made of the operator's name and
of the piece that this rank makes. So replicas draw the same, pieces differ, a recomputed forward draws what the first one drew,
and a run is repeated by its seed. In the lowered program such a call carries ``draw=(seed, salt, timed)``, which
``runtime.draws`` obeys whatever the operator is; ``timed`` says whether micro-batches draw apart: they do where the operator
makes a piece of its result in each, and one draw that all of them read is one draw.

The operators are not listed: torch tags its own (``nondeterministic_seeded``), and one of another library may draw unseen, so
it is treated as one that does. A function with a backward of its own draws if something inside may.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import Op, Ref
from meshwright.ir.operators import find
from meshwright.ir.plan import TIME
from meshwright.ir.program import DRAW, SEED
from meshwright.ir.rule import Factor, Local, Localize

TAGGED = frozenset({"aten", "mw", "prims", "_c10d_functional"})
"""Namespaces of which only operators that are tagged so draw."""
OFF: Mapping[str, Any] = {"train": False, "training": False, "dropout_p": 0, "dropout": 0}
"""{argument: its value with which no tagged operator draws}."""


def draws(op: Op) -> bool:
    """Whether a call draws random numbers, or may."""
    if op.target == CUSTOM:
        return any(draws(inside) for graph in (op.args[0].forward, op.args[0].backward) for inside in graph.ops)
    overload = find(op.target)
    if overload is None:
        return False
    if op.target.partition(".")[0] not in TAGGED:
        return True
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    formal = overload._schema.arguments
    given = {argument.name: argument.default_value for argument in formal if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(formal, op.args, strict=False)} | dict(op.kwargs)
    return not any(name in given and given[name] == value for name, value in OFF.items())


def draw(op: Op, local: Local, drawn: frozenset[Factor] | None = None) -> tuple[Ref, int, bool]:
    """(seed, salt, timed) of a call. ``drawn``: the factors along which it draws apart; None: all that are split."""
    apart = {
        axis for axis, factor in local.assignment.items()
        if factor[:1] not in ("+", "~") and (drawn is None or factor in drawn)
    }
    axes = [axis for axis in local.mesh.axes if axis in apart and axis != TIME]
    return Ref(SEED), zlib.crc32(f"{local.name or op.name}/{local.mesh.index(local.coordinates, axes)}".encode()), TIME in apart


@dataclass(frozen=True)
class Seeded:
    """A localizer: the call as ``localize`` makes it, with what it draws from."""

    localize: Localize | None = None
    drawn: frozenset[Factor] | None = None

    def __call__(self, op: Op, local: Local) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        target, args, kwargs = self.localize(op, local) if self.localize else (op.target, op.args, op.kwargs)
        return target, args, (*kwargs, (DRAW, draw(op, local, self.drawn)))
