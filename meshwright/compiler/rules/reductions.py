"""Operators that reduce dims, or work along one.

A sum may be split along the dims it sums: every rank holds a term. A mean is a sum divided by the GLOBAL count. The others
(maximum, variance, norm, sort, cumulative sums) need their dims whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, argument, broadcast_dims, dims_of, words
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
    at = call["dim"] % len(shape)
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
WHOLE_DIMS = words(
    "amax.default amin.default max.default min.default max.dim min.dim argmax.default argmin.default all.default all.dim "
    "any.default any.dim prod.default prod.dim_int logsumexp.default median.default median.dim norm.Scalar "
    "norm.ScalarOpt_dim linalg_vector_norm.default var.correction var.dim std.correction std.dim var_mean.correction "
    "std_mean.correction aminmax.default kthvalue.default mode.default histc.default bincount.default"
)
ALONG = words(
    "cumprod.default cummax.default cummin.default logcumsumexp.default sort.default sort.stable argsort.default topk.default "
    "glu.default"
)

RULES: Mapping[str, Declaration] = {
    "aten.sum.default": declare(_sum),
    "aten.sum.dim_IntList": declare(_sum),
    "aten.mean.default": declare(_sum, _mean),
    "aten.mean.dim": declare(_sum, _mean),
    "aten.count_nonzero.default": declare(_count),
    "aten.count_nonzero.dim_IntList": declare(_count),
    "aten.cosine_similarity.default": declare(_cosine_similarity),
    "aten.cumsum.default": declare(_cumulative_sum),
    **{f"aten.{name}": declare(_whole_dims) for name in WHOLE_DIMS},
    **{f"aten.{name}": declare(_along) for name in ALONG},
    **{f"aten.fft_{name}.default": declare(_transform) for name in TRANSFORMS},
}
