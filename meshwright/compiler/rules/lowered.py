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


def _behind(shape: Sequence[int], dim: int) -> bool:
    """Whether pieces along a dim of a local value do not lie one after the other: dims before it are longer than one."""
    return math.prod(shape[:dim]) > 1


def _inner(work: Work) -> bool:
    """Whether a collective is along a dim whose pieces do not lie one after the other, or are put in another order."""
    return len(work.args) > 1 and (_behind(work.operands[0], work.args[1]) or bool(dict(work.kwargs).get("mirrored")))


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
    """What is sent, in the order of the ranks, and what is received, before it is in order."""
    kwargs, (dim, to_dim) = dict(work.kwargs), work.args[1:3]
    sent = work.read_bytes() * (_behind(work.operands[0], to_dim) or bool(kwargs.get("to_mirrored")))
    received = work.made_bytes() * (_behind(work.results[0], dim) or bool(kwargs.get("mirrored")))
    return float(sent + received), float(sent + received)


def _packed(work: Work) -> tuple[float, float]:
    """What is sent, in the order of the ranks."""
    return float(work.read_bytes()), float(work.read_bytes())


def _whole(work: Work) -> tuple[int, ...]:
    """The shape of what linears gather."""
    dim, shape = work.args[3], work.operands[0]
    return (*shape[:dim], dict(work.kwargs)["size"], *shape[dim + 1 :])


def _regathered(work: Work) -> tuple[float, float]:
    """What lies beside operands, results and gradients: the whole activation, received before that is put in order, and the
    former beside the results. In the backward both are there, with the gradient that each linear makes of it, and their sum.
    The sum is made before any gradient of a weight; where a third is added to that of two, it is there twice."""
    whole, made = math.prod(_whole(work)) * work.reads.itemsize, work.makes.itemsize * sum(map(math.prod, work.results))
    inner, count, need = _behind(work.operands[0], work.args[3]), len(work.args[1]), work.gradients
    forward = max((1 + inner) * whole - made, whole)
    makes = [work.read_bytes(at) for at in range(count + 1) if need[at]]
    received, summed = whole * any(need[1 : count + 1]), whole * (count + (count > 1)) * need[0]
    backward = max(received * (1 + inner) + summed, received + summed + whole * (count > 2) * need[0] - sum(makes))
    return float(forward), float(backward)


def _linears(work: Work) -> Sequence[Product]:
    rows = math.prod(work.results[0][:-1])
    return [Product(1, rows, shape[-1], _whole(work)[-1]) for shape in work.results]


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
