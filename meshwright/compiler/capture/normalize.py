"""The normal form: one spelling for what exports spell in many ways.

``NORMALIZATIONS`` is the ordered tuple of passes, each a pure ``Graph -> Graph``; ``normalize`` applies them, and ``LAST``:

    normalize_dropout                                        (``patterns``) one spelling of dropout
    clean                                                    literal sizes and dims, one name for views and casts, no no-ops
    unmerge_batches                                          (``batches``) batch products on the dims of their batch
    merge_reshapes, split_before_permute, sink_expands       (``movement``) dims that were merged or expanded too early
    linear_nd, absorb_repeat_kv, normalize_batch_norm,       (``patterns``) composite operators
    normalize_cross_entropy, reduce_losses, gather_by_sample, look_up_bags, add_products_first
    fuse_projections                                         (``projections``) several projections in one weight
    simplify_masks                                           (``masks``) attention masks that are known before the run
    decide                                                   (``ranges``) what is certain by what whole numbers can be
    gather_experts, tokens_nd                                (``experts``) stacked experts as one operator, tokens apart
    mark_differentiable                                      (``rewrite``) what a gradient flows through
    open_composites                                          (``exported``) what operators without a rule are made of; if there
                                                             are such, all of the above once more
    keep_old_values, copy_held_outputs                       (``buffers``) copies of buffers that are updated or given out
    lay_out                                                  (``exported``) operands in the order of their dims

Everything is functional here, so copies that only change strides (``contiguous``, ``clone``) are no-ops, and ``view`` is
``reshape``. The last pass puts back those that kernels ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from meshwright.compiler.capture.batches import unmerge_batches
from meshwright.compiler.capture.buffers import copy_held_outputs, keep_old_values
from meshwright.compiler.capture.experts.chain import gather_experts
from meshwright.compiler.capture.experts.tokens import tokens_nd
from meshwright.compiler.capture.exported.composites import open_composites
from meshwright.compiler.capture.exported.dense import lay_out
from meshwright.compiler.capture.masks import simplify_masks
from meshwright.compiler.capture.movement import TURN, merge_reshapes, sink_expands, split_before_permute
from meshwright.compiler.capture.patterns import (
    absorb_repeat_kv,
    add_products_first,
    gather_by_sample,
    linear_nd,
    look_up_bags,
    normalize_batch_norm,
    normalize_cross_entropy,
    normalize_dropout,
    reduce_losses,
)
from meshwright.compiler.capture.projections import fuse_projections
from meshwright.compiler.capture.ranges import decide
from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, mark_differentiable, rewrite
from meshwright.ir.graph import FILL, Graph, Op, Ref
from meshwright.ir.operators import overload

Pass = Callable[[Graph], Graph]

RESHAPES = frozenset({
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.flatten.using_ints", "aten.unflatten.int",
    "aten.view_as.default", "aten.reshape_as.default", "aten.view_copy.default", "aten._reshape_copy.default",
})
EXPANDS = frozenset({"aten.expand.default", "aten.expand_as.default", "aten.expand_copy.default", "aten.broadcast_to.default"})
COPIES = frozenset({
    "aten.alias.default", "aten.clone.default", "aten.contiguous.default", "aten.lift_fresh.default", "aten.alias_copy.default",
    "aten.lift_fresh_copy.default", "aten.positive.default",
})
CASTS = frozenset({
    "aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten.type_as.default",
})
RENAMED: Mapping[str, str] = {
    "aten.__and__.Tensor": "aten.bitwise_and.Tensor", "aten.__or__.Tensor": "aten.bitwise_or.Tensor",
    "aten.__xor__.Tensor": "aten.bitwise_xor.Tensor", "aten.detach_.default": "aten.detach.default",
    "aten.detach_copy.default": "aten.detach.default", "aten.transpose_copy.int": "aten.transpose.int",
    "aten.t_copy.default": "aten.t.default", "aten.permute_copy.default": "aten.permute.default",
    "aten.unsqueeze_copy.default": "aten.unsqueeze.default", "aten.select_copy.int": "aten.select.int",
    "aten.slice_copy.Tensor": "aten.slice.Tensor", "aten.swapaxes.default": "aten.transpose.int",
    "aten.swapdims.default": "aten.transpose.int", "aten.special_softmax.default": "aten.softmax.int",
    "aten.special_log_softmax.default": "aten.log_softmax.int", "aten.special_xlogy.default": "aten.xlogy.Tensor",
}
SYNONYMS: Mapping[str, str] = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctanh": "atanh", "arctan2": "atan2", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div",
    "true_divide": "div", "fix": "trunc", "ger": "outer", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "linalg_matmul": "matmul", "moveaxis": "movedim", "multiply": "mul", "negative": "neg",
    "not_equal": "ne", "subtract": "sub", "special_digamma": "digamma", "special_erf": "erf", "special_erfc": "erfc",
    "special_erfinv": "erfinv", "special_exp2": "exp2", "special_expit": "sigmoid", "special_expm1": "expm1",
    "special_gammaln": "lgamma", "special_log1p": "log1p", "special_logit": "logit", "special_logsumexp": "logsumexp",
    "special_psi": "digamma", "special_sinc": "sinc",
}
"""{an operator of torch: the one that it is another name of, with the same overloads}."""
FILLS: Mapping[str, int | float | None] = {  # what stands in them; None: it is the second argument
    "aten.zeros_like.default": 0, "aten.ones_like.default": 1, "aten.empty_like.default": 0, "aten.full_like.default": None,
    "aten.new_zeros.default": 0, "aten.new_ones.default": 1, "aten.new_empty.default": 0, "aten.new_full.default": None,
}
REPEATS = ("aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor")
DROPPED_KWARGS = frozenset({"device", "pin_memory", "layout", "non_blocking", "memory_format"})
DIM_ARGUMENTS = frozenset({"dim", "dims", "dim0", "dim1"})
SPARSE_ARGUMENTS = frozenset({"sparse", "sparse_grad"})
ONE_MORE_DIM = frozenset({"aten.unsqueeze.default", "aten.stack.default", "aten.diag_embed.default"})
WITHOUT_A_DIM = frozenset({"aten._weight_norm.default", "aten.norm_except_dim.default"})
"""Those to which dim -1 is not the last one, but none."""


def clean(graph: Graph) -> Graph:
    """Canonical literals and names; operators that change nothing are gone."""
    graph = mark_differentiable(graph)
    return eliminate_dead_code(rewrite(graph, _clean_op))


NORMALIZATIONS: tuple[Pass, ...] = (
    normalize_dropout, clean, merge_reshapes, normalize_batch_norm, absorb_repeat_kv, linear_nd, merge_reshapes,
    fuse_projections, merge_reshapes, unmerge_batches, merge_reshapes, split_before_permute, merge_reshapes, simplify_masks,
    sink_expands, normalize_cross_entropy, merge_reshapes, reduce_losses, gather_by_sample, look_up_bags,
    add_products_first, merge_reshapes, decide, mark_differentiable, gather_experts, merge_reshapes, tokens_nd, merge_reshapes,
    mark_differentiable,
)
LAST: tuple[Pass, ...] = (keep_old_values, copy_held_outputs, lay_out)
LEVELS = 8
"""How often what operators are made of is opened once more."""


def normalize(graph: Graph) -> Graph:
    """The graph in normal form."""
    for _ in range(LEVELS):
        for step in NORMALIZATIONS:
            graph = step(graph)
        opened = open_composites(graph)
        if opened is graph:
            break
        graph = opened
    for step in LAST:
        graph = step(graph)
    return graph


def _renamed(target: str) -> str:
    """The name by which an operator is known."""
    target = RENAMED.get(target, target)
    library, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    return f"{library}.{SYNONYMS[name]}.{overload}" if library == "aten" and name in SYNONYMS else target


def _clean_op(op: Op, edit: Edit) -> Iterable[Op] | None:
    target = _renamed(op.target)
    kwargs = tuple((key, value) for key, value in op.kwargs if key not in DROPPED_KWARGS and value is not None)
    if target.startswith("aten.div.") and not kwargs:  # rounding_mode=None has no default
        target = target.removesuffix("_mode")
    op = _dense(replace(op, target=target, args=_literal_dims(target, op, edit), kwargs=kwargs))
    if target in REPEATS and "output_size" not in dict(op.kwargs):  # without it the result's shape is that of numbers
        dim = dict(op.kwargs).get("dim", (*op.args, None)[2]) if target == REPEATS[1] else 0
        shape = edit.values[op.outputs[0]].shape
        op = replace(op, kwargs=(*op.kwargs, ("output_size", shape[0 if dim is None else dim])))
    if target == "aten.broadcast_tensors.default":
        return _broadcast(op, edit)
    if target == "aten.copy.default":
        return _copy(op, edit)
    same = _unchanged(op, edit)
    if same is not None:
        edit.replace(op.outputs[0], same.name)
        return ()
    out = edit.values[op.outputs[0]]
    if target in FILLS:  # the operand lends its shape and dtype alone
        value = FILLS[target] if FILLS[target] is not None else op.args[1 if target.endswith("_like.default") else 2]
        op = replace(op, target=FILL, args=(out.shape, value), kwargs=(("dtype", out.dtype),))
    elif target in RESHAPES:
        op = replace(op, target="aten.reshape.default", args=(op.args[0], out.shape), kwargs=())
    elif target in EXPANDS:
        op = replace(op, target="aten.expand.default", args=(op.args[0], out.shape), kwargs=())
    elif target in CASTS:
        op = replace(op, target="aten._to_copy.default", args=(op.args[0],), kwargs=(("dtype", out.dtype),))
    elif len(out.shape) == 2 and _turns(op, out.dtype):
        op = replace(op, target=TURN, args=(op.args[0],), kwargs=())
    elif target == "aten.squeeze.default":
        op = replace(op, target="aten.reshape.default", args=(op.args[0], out.shape))
    elif target == "aten.slice.Tensor":
        op = replace(op, args=_slice_bounds(op, edit), kwargs=())
    elif target == "aten.slice_scatter.default":
        op = replace(op, args=(*op.args[:2], *_slice_bounds(op, edit)[1:]), kwargs=())
    elif target == "aten.cat.default":
        op = replace(op, args=(_full_parts(op, edit), *op.args[1:]))
    return (op,)


def _broadcast(op: Op, edit: Edit) -> Iterable[Op]:
    """An expand for every operand that needs one."""
    for ref, name in zip(op.args[0], op.outputs, strict=True):
        shape = edit.values[name].shape
        if edit.shape(ref) == shape:
            edit.replace(name, ref.name)
        else:
            yield Op(name, "aten.expand.default", (ref, shape), (), (name,), op.module, op.source)


def _copy(op: Op, edit: Edit) -> Iterable[Op]:
    """Writing over a whole tensor: what is written, cast and expanded to it (aten.copy has no derivative)."""
    source, out = op.args[1], edit.values[op.outputs[0]]
    if edit.dtype(source) != out.dtype:
        cast = edit.op(op, "aten._to_copy.default", (source,), edit.shape(source), out.dtype, (("dtype", out.dtype),))
        yield cast
        source = Ref(cast.outputs[0])
    if edit.shape(source) == out.shape:
        edit.replace(op.outputs[0], source.name)
    else:
        yield replace(op, target="aten.expand.default", args=(source, out.shape), kwargs=())


def _turns(op: Op, dtype: torch.dtype) -> bool:
    """Whether the op is the transposition of a matrix."""
    if op.target == "aten.permute.default":
        return [dim % 2 for dim in op.args[1]] == [1, 0]
    if op.target == "aten.transpose.int":
        return bool((op.args[1] - op.args[2]) % 2)
    conjugates = op.target == "aten.adjoint.default" and dtype.is_complex
    return op.target in ("aten.numpy_T.default", "aten.mT.default", "aten.adjoint.default") and not conjugates


def _unchanged(op: Op, edit: Edit) -> Ref | None:
    """The operand that the op's only result equals, if any."""
    if not op.args or len(op.outputs) != 1:
        return None
    first, out = op.args[0], edit.values[op.outputs[0]]
    if op.target == "aten.cat.default":
        parts = _full_parts(op, edit)
        return parts[0] if len(parts) == 1 and edit.shape(parts[0]) == out.shape else None
    if not isinstance(first, Ref) or edit.values[first.name].dtype != out.dtype or edit.shape(first) != out.shape:
        return None
    if op.target in RESHAPES | EXPANDS | COPIES | CASTS | {"aten.slice.Tensor", "aten.squeeze.default", "aten.squeeze.dim",
                                                          "aten.squeeze.dims"}:
        reversed_ = op.target == "aten.slice.Tensor" and op.args[4:5] not in ((), (1,))
        return None if reversed_ else first
    if op.target == "aten.detach.default":
        return None if edit.values[first.name].differentiable else first
    if op.target == "aten.dropout.default":
        return first if op.args[1] == 0.0 or not op.args[2] else None
    neutral = {"aten.mul.Tensor": 1, "aten.div.Tensor": 1, "aten.add.Tensor": 0, "aten.sub.Tensor": 0}.get(op.target)
    second = op.args[1] if len(op.args) > 1 else None
    is_neutral = neutral is not None and isinstance(second, int | float) and second == neutral
    return first if is_neutral and math.copysign(1, second) > 0 else None  # type: ignore[arg-type]


def _full_parts(op: Op, edit: Edit) -> tuple[Ref, ...]:
    """The operands of a cat without the empty ones (a fresh cache starts as an empty tensor)."""
    parts = tuple(ref for ref in op.args[0] if 0 not in edit.shape(ref))
    return parts or op.args[0][:1]


def _slice_bounds(op: Op, edit: Edit) -> tuple[Any, ...]:
    """(x, dim, start, end, step) with 0 <= start <= end <= size, of a slice or slice_scatter."""
    x, literals = op.args[0], [arg for arg in op.args if not isinstance(arg, Ref)]
    literals += [dict(op.kwargs).get(key) for key in ("dim", "start", "end", "step")[len(literals):]]
    dim, start, end, step = literals
    size = edit.shape(x)[dim or 0]
    first, last = (min(size, max(0, at + size if at < 0 else at)) for at in (start or 0, size if end is None else end))
    return (x, dim or 0, first, max(first, last), step or 1)


def _literal_dims(target: str, op: Op, edit: Edit) -> tuple[Any, ...]:
    """The arguments with dims counted from the front, in the shape that the operands have together."""
    positions = _positions(target, DIM_ARGUMENTS)
    if not positions or not op.inputs or target in WITHOUT_A_DIM:
        return op.args
    ndim = max(len(edit.shape(Ref(name))) for name in op.inputs) + (target in ONE_MORE_DIM)
    args = list(op.args)
    for position in positions:
        if position < len(args):
            args[position] = _from_front(args[position], ndim)
    return tuple(args)


def _dense(op: Op) -> Op:
    """With a dense gradient: collectives and DTensor take no sparse ones. What is computed is the same."""
    args = tuple(False if i in _positions(op.target, SPARSE_ARGUMENTS) else arg for i, arg in enumerate(op.args))
    return replace(op, args=args, kwargs=tuple((key, key not in SPARSE_ARGUMENTS and value) for key, value in op.kwargs))


def _from_front(dim: Any, ndim: int) -> Any:
    if isinstance(dim, tuple):
        return tuple(_from_front(item, ndim) for item in dim)
    return dim + ndim if type(dim) is int and dim < 0 else dim


@cache
def _positions(target: str, names: frozenset[str]) -> tuple[int, ...]:
    """Positions of the schema's arguments of these names that are numbers."""
    if target.startswith("mw."):
        return ()
    arguments = overload(target)._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.name in names and ("int" in str(a.type) or "bool" in str(a.type)))
