"""Operators that reduce dims, or work along one.

A sum may be split along the dims it sums: every rank holds a term. A mean is a sum divided by the GLOBAL count. The others
(maximum, variance, norm, sort, cumulative sums) need their dims whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, argument, broadcast_dims, dims_of, words
from meshwright.ir.declared.operator import Cost
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, OpRule


def _reduced(call: Call) -> set[int]:
    """The dims that are reduced; none named means all."""
    x = call.operands[0]
    asked = call.arguments.get("dim", call.arguments.get("dims"))
    named = () if asked is None else (asked if isinstance(asked, tuple | list) else (asked,))
    return {dim % max(x.ndim, 1) for dim in named} or set(range(x.ndim))


def _result_dims(call: Call, dims: list[Factor | None], reduced: set[int]) -> list[Factor | None]:
    keep = len(call.shape) == len(dims) and len(dims) > 0
    return [None if i in reduced else f for i, f in enumerate(dims) if keep or i not in reduced]


def _sum(call: Call) -> OpRule:
    dims, reduced = dims_of(call.operands[0]), _reduced(call)
    return call.rule([dims], [_result_dims(call, dims, reduced)], linear=[[0]])


def _count(call: Call) -> OpRule:
    """How many elements are not zero: the counts of the pieces add up, those of pending terms do not."""
    dims, reduced = dims_of(call.operands[0]), _reduced(call)
    return call.rule([dims], [_result_dims(call, dims, reduced)])


def _binned(call: Call) -> OpRule:
    """How many elements lie in every bin: where bins are given the counts of the pieces add up, else they follow from all."""
    dims = dims_of(call.operands[0])
    return call.rule([dims], [[None]]) if call.arguments.get("min", 0) != call.arguments.get("max", 0) else call.whole()


def _mean(op: Op, local: Local) -> Rewritten:
    """``mw.mean`` where a reduced dim is split: the pieces' sums over the count of the whole."""
    shape = local.operand_shapes[0]
    asked = argument(op, "dim") if op.target == "aten.mean.dim" else None
    dims = sorted({d % max(len(shape), 1) for d in asked or range(len(shape))})
    if not any(local.placed.operands[0].dims[d] for d in dims):
        return op.target, op.args, op.kwargs
    count = 1
    for d in dims:
        count *= shape[d]
    keepdim = argument(op, "keepdim") if op.target == "aten.mean.dim" else False
    return "mw.mean", (op.args[0], tuple(dims), keepdim, count, argument(op, "dtype")), ()


def _whole_dims(call: Call) -> OpRule:
    """The reduced dims are whole; every result alike."""
    reduced = _reduced(call)
    dims = dims_of(call.operands[0], *reduced)
    return call.rule([dims], [_result_dims(call, dims, reduced)] * len(call.results))


def _along(call: Call) -> OpRule:
    """Whole along ``dim``, results of the same rank."""
    dims = dims_of(call.operands[0], call["dim"])
    return call.rule([dims], [dims] * len(call.results))


def _cumulative_sum(call: Call) -> OpRule:
    dims = dims_of(call.operands[0], call["dim"])
    return call.rule([dims], [dims], linear=[[0]])


def _cosine_similarity(call: Call) -> OpRule:
    """Along ``dim`` of two tensors that broadcast."""
    shape = torch.broadcast_shapes(*(x.shape for x in call.operands))
    at = call["dim"] % max(len(shape), 1)
    factors: list[Factor | None] = [None if i == at else f"dim{i}" for i in range(len(shape))]
    return call.rule([broadcast_dims(x.shape, shape, factors) for x in call.operands], [factors[:at] + factors[at + 1 :]])


def _transform(call: Call) -> OpRule:
    """A Fourier transform: whole along the dims that it transforms."""
    x, dim, sizes = call.operands[0], call["dim"], call.arguments.get("s")
    if dim is None:
        dim = range(-len(sizes), 0) if sizes else range(x.ndim)
    dims = dims_of(x, *(dim if isinstance(dim, tuple | list | range) else (dim,)))
    return call.rule([dims], [dims], linear=[[0]])


TRANSFORMS = words("fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn fftshift ifftshift")
VARIANCES = words("prod.default prod.dim_int var.correction var.dim var_mean.correction")
"""The gradient needs the operand."""
EXTREMES = words(
    "amax.default amin.default logsumexp.default norm.Scalar norm.ScalarOpt_dim linalg_vector_norm.default std.correction "
    "std.dim"
)
"""The gradient needs operand and result."""
PICKS = words("max.default min.default max.dim min.dim")
"""The gradient needs where the result was found, which is the second result."""
TESTS = words("all.default all.dim any.default any.dim")
COUNTS = words("argmax.default argmin.default")
WHOLE_DIMS = words(
    "median.default median.dim nanmedian.default nanmedian.dim nanmean.default quantile.scalar nanquantile.scalar "
    "std_mean.correction aminmax.default kthvalue.default mode.default"
)
ALONG = words("cumprod.default cummax.default cummin.default logcumsumexp.default glu.default")
"""Priced, as the row above, as operators that nobody declared."""
SUM = Cost("reduce", passes=lambda work: [0])  # an expansion of the result's
reduced = partial(declare, cost="reduce", saves="")

RULES: Mapping[str, Declaration] = {
    "aten.sum.default": reduced(_sum, cost=SUM),
    "aten.sum.dim_IntList": reduced(_sum, cost=SUM),
    "aten.mean.default": reduced(_sum, _mean),
    "aten.mean.dim": reduced(_sum, _mean),
    "mw.mean": reduced(None, cost=SUM),
    "aten.count_nonzero.default": reduced(_count),
    "aten.count_nonzero.dim_IntList": reduced(_count),
    "aten.nansum.default": reduced(_count, saves="0"),
    "aten.histc.default": reduced(_binned, gradient=False),
    "aten.bincount.default": reduced(lambda call: call.whole(), gradient=False),
    "aten.cosine_similarity.default": declare(_cosine_similarity),
    "aten.cumsum.default": reduced(_cumulative_sum),
    "aten.topk.default": reduced(_along, saves="r1"),
    **{f"aten.{name}": reduced(_whole_dims, saves="0") for name in VARIANCES},
    **{f"aten.{name}": reduced(_whole_dims, saves="0 r0") for name in EXTREMES},
    **{f"aten.{name}": reduced(_whole_dims, saves="r1") for name in PICKS},
    **{f"aten.{name}": declare(_whole_dims, cost="linear", saves="") for name in TESTS},
    **{f"aten.{name}": reduced(_whole_dims, gradient=False) for name in COUNTS},
    **{f"aten.{name}": declare(_whole_dims) for name in WHOLE_DIMS},
    **{f"aten.{name}": declare(_along) for name in ALONG},
    **{f"aten.{name}": declare(_along, saves="") for name in words("sort.default sort.stable argsort.default")},
    **{f"aten.fft_{name}.default": declare(_transform) for name in TRANSFORMS},
}
