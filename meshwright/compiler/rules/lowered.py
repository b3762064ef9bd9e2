"""Operators that only lowered programs have: collectives, and what lowering puts beside them.

They have no sharding rule: each turns one sharding into another (``ir.reshard``, ``passes.communication``). The local forms of
operators of the graph (``mw.embedding``, ``mw.mean``) stand beside these in their own tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.ir.declared.operator import Cost, Product, Work


def _first(work: Work) -> Collection[int]:
    """The gradient goes on as it is."""
    return (0,)


def _inner(work: Work) -> bool:
    """Whether a collective is along another dim than the first, where pieces do not lie one after the other."""
    return len(work.args) > 1 and work.args[1] != 0


def _gathered(work: Work) -> tuple[float, float]:
    """What is received is put in order."""
    return float(work.made_bytes()) if _inner(work) else 0.0, 0.0


def _gathered_and_scattered(work: Work) -> tuple[float, float]:
    both = float(work.made_bytes()) if _inner(work) else 0.0
    return both, both


def _scattered(work: Work) -> tuple[float, float]:
    both = float(work.read_bytes()) if _inner(work) else 0.0
    return both, both


def _sliced(work: Work) -> tuple[float, float]:
    return 0.0, float(work.read_bytes()) if _inner(work) else 0.0


def _exchanged(work: Work) -> tuple[float, float]:
    both = float(work.read_bytes() + work.made_bytes())
    return both, both


def _packed(work: Work) -> tuple[float, float]:
    """What is sent, in the order of the ranks."""
    return float(work.read_bytes()), float(work.read_bytes())


def _regathered(work: Work) -> tuple[float, float]:
    """The whole activation as it is received and in order; in the backward again, and its gradient in both forms."""
    whole = float(math.prod(work.results[0][:-1]) * work.operands[0][-1] * work.reads.itemsize)
    return 2 * whole, 4 * whole


def _linears(work: Work) -> Sequence[Product]:
    rows = math.prod(work.results[0][:-1])
    return [Product(1, rows, shape[-1], work.operands[0][-1]) for shape in work.results]


shown = partial(declare, None, saves="")
moved = partial(declare, None, saves="", exchanges=True)

RULES: Mapping[str, Declaration] = {
    "mw.slice": shown(cost=Cost("view", space=_sliced, passes=lambda work: (), copies=_inner)),
    "mw.vary": shown(cost=Cost("view", passes=lambda work: ()), exchanges=True),
    "mw.unvary": shown(cost=Cost("view", passes=_first)),
    "mw.term": declare(None, saves="", cost=Cost("copy", passes=_first)),
    "mw.identity": shown(cost=Cost("view", passes=_first)),
    "mw.all_gather": moved(cost=Cost("copy", space=_gathered)),
    "mw.gather_vary": moved(cost=Cost("copy", space=_gathered_and_scattered)),
    "mw.reduce_scatter": moved(
        cost=Cost("copy", space=_scattered), recompute="costly", runs="_c10d_functional.reduce_scatter_tensor.default"
    ),
    "mw.all_reduce": moved(
        cost=Cost("copy", passes=_first), recompute="costly", runs="_c10d_functional.all_reduce.default"
    ),
    "mw.all_to_all": moved(
        cost=Cost("copy", space=_exchanged), recompute="costly", runs="_c10d_functional.all_to_all_single.default"
    ),
    "mw.mirror": moved(
        cost=Cost("copy", space=_packed), recompute="costly", runs="_c10d_functional.all_to_all_single.default"
    ),
    "mw.gather_linear": declare(
        None, cost=Cost("matmul", products=_linears, space=_regathered), saves="0", recompute="costly", exchanges=True,
        runs="aten.mm.default aten.addmm.default",
    ),
}
