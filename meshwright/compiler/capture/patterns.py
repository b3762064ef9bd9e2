"""Operators that hide what can be split, put in a form that shows it.

    linear_nd                 reshape [b, s, k] -> [b*s, k]; addmm or linear   =>   linear on [b, s, k]
    absorb_repeat_kv          k, v expanded to the query heads before attention   =>   attention with enable_gqa on the kv heads
    normalize_dropout         native_dropout without its mask, x * (bernoulli(q) / q) of one in place   =>   dropout
    normalize_batch_norm      any batch norm in training   =>   (out, mean, var) = mw.batch_norm(...), the statistics mutated
    normalize_cross_entropy   cross_entropy_loss, nll_loss of log_softmax on class indices, mean or sum
                              =>   (sum, count) = mw.cross_entropy(logits [*b, v], labels [*b], ignore, smoothing); sum / count
    reduce_losses             an elementwise loss (mse_loss, .., a weighted or soft cross entropy) and its reduction
                              =>   the losses; their mean or sum
    add_products_first        (x + p) + q with p and q products with weights   =>   x + (p + q)
    gather_by_sample          x[arange(b), i], a place or some of every sample   =>   gather along the dim after the sample's
    look_up_bags              a sum or mean of rows of a table, of as many for every bag   =>   embedding; sum or mean
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from meshwright.compiler.capture.movement import ATTENTION, RESHAPE, TURN
from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, rewrite
from meshwright.ir.graph import Graph, Op, Ref


def arguments(op: Op, *defaults: Any) -> tuple[Any, ...]:
    """The positional arguments, filled up with ``defaults`` from the back."""
    return (*op.args, *defaults[len(op.args) - len(defaults):]) if len(op.args) < len(defaults) else op.args


ADD, LINEAR = "aten.add.Tensor", "aten.linear.default"
PRODUCTS = frozenset({"aten.mm.default", "aten.matmul.default"})


# ------------------------------------------------------------------------------------------------------------------- linear
def linear_nd(graph: Graph) -> Graph:
    """Matrix products with a weight keep the dims that their operand had before it was flattened."""
    readers = graph.consumers()
    weights = {param.value for param in graph.params if not param.buffer}

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        if op.target == LINEAR:
            x, weight, bias = arguments(op, None, None, None)
            ops: list[Op] = []
            if bias is not None and edit.shape(bias) != edit.shape(weight)[:1]:  # one number for all features
                out = edit.values[op.outputs[0]]
                product = edit.op(op, op.target, (x, weight), out.shape, out.dtype)
                return product, replace(op, target=ADD, args=(Ref(product.outputs[0]), bias), kwargs=())
        elif op.target == "aten.addmm.default" and not op.kwargs and edit.shape(op.args[0]) == edit.shape(op.args[2])[1:]:
            bias, x, weight = op.args
            weight, ops = _transposed(weight, op, edit)
        elif op.target in PRODUCTS and len(edit.shape(op.args[0])) > 1 and _is_weight(op.args[1], weights, edit):
            (x, weight), bias = op.args, None
            weight, ops = _transposed(weight, op, edit)
        else:
            return None
        out = edit.values[op.outputs[0]]
        lead = _leading_dims(x, op, graph, readers, edit)
        plain = (x, weight) if bias is None else (x, weight, bias)
        if lead is None:
            return (*ops, replace(op, target=LINEAR, args=plain, kwargs=()))
        whole = edit.op(op, RESHAPE, (edit.producer(x).args[0], (*lead, edit.shape(x)[-1])), (*lead, edit.shape(x)[-1]),  # type: ignore[union-attr]
                        edit.dtype(x))
        linear = edit.op(op, LINEAR, (Ref(whole.outputs[0]), *plain[1:]), (*lead, out.shape[-1]), out.dtype)
        flat = replace(op, target=RESHAPE, args=(Ref(linear.outputs[0]), out.shape), kwargs=())
        return (*ops, whole, linear, flat)

    return eliminate_dead_code(rewrite(graph, step))


def _is_weight(ref: Ref, weights: set[str], edit: Edit) -> bool:
    turned = edit.made_by(ref, TURN)
    if len(edit.shape(ref)) != 2:
        return False
    return (turned.args[0] if turned else ref).name in weights


def _transposed(weight: Ref, op: Op, edit: Edit) -> tuple[Ref, list[Op]]:
    turned = edit.made_by(weight, TURN)
    if turned:
        return turned.args[0], []
    turn = edit.op(op, TURN, (weight,), reversed(edit.shape(weight)), edit.dtype(weight))
    return Ref(turn.outputs[0]), [turn]


def _leading_dims(x: Ref, op: Op, graph: Graph, readers: dict[str, list[int]], edit: Edit) -> tuple[int, ...] | None:
    """The dims that a flattening reshape before the 2-D operand ``x`` merged, or those that a reader restores."""
    flat = edit.made_by(x, RESHAPE)
    if flat is None or len(edit.shape(x)) != 2:
        return None
    rows, inner = edit.shape(x)
    before = edit.shape(flat.args[0])
    if len(before) > 2 and before[-1] == inner:
        return before[:-1]
    for index in readers[op.outputs[0]]:
        reader = graph.ops[index]
        shape = edit.values[reader.outputs[0]].shape
        if reader.target == RESHAPE and len(shape) > 2 and math.prod(shape[:-1]) == rows:
            return shape[:-1]
    return None


# ---------------------------------------------------------------------------------------------------------------- attention
def absorb_repeat_kv(graph: Graph) -> Graph:
    """Attention as (q, k, v, mask, dropout_p, is_causal), k and v on their own heads."""
    return eliminate_dead_code(rewrite(graph, _attention))


def _attention(op: Op, edit: Edit) -> Iterable[Op] | None:
    if op.target != ATTENTION:
        return None
    named = dict(op.kwargs)
    args = list(arguments(op, None, None, None, None, 0.0, False))
    for position, key in ((3, "attn_mask"), (4, "dropout_p"), (5, "is_causal")):
        args[position] = named.pop(key, args[position])
    keys, values = (_unrepeated(ref, edit) for ref in args[1:3])
    if keys and values and edit.shape(keys)[1] == edit.shape(values)[1]:
        args[1:3] = keys, values
        if edit.shape(keys)[1] != edit.shape(args[0])[1]:
            named["enable_gqa"] = True
    return (replace(op, args=tuple(args), kwargs=tuple(named.items())),)


def _unrepeated(ref: Ref, edit: Edit) -> Ref | None:
    """[b, kv, s, d] whose heads are each repeated in place to give the value, if it was made so."""
    if len(edit.shape(ref)) != 4:
        return None
    origin: Ref
    repeat = edit.made_by(ref, "aten.repeat_interleave.self_int")
    if repeat and len(repeat.args) > 2 and repeat.args[2] == 1:
        origin = repeat.args[0]
        return origin
    expand = edit.made_by(ref, "aten.expand.default")
    if expand:
        batch, _, *rest = edit.shape(ref)
        origin = expand.args[0]
        return origin if edit.shape(origin) == (batch, 1, *rest) else None
    merge = edit.made_by(ref, RESHAPE)
    expand = edit.made_by(merge.args[0], "aten.expand.default") if merge else None
    split = edit.made_by(expand.args[0], "aten.unsqueeze.default", RESHAPE) if expand else None
    if split is None or expand is None:
        return None
    origin = split.args[0]
    batch, heads, *rest = edit.shape(origin)
    wide = edit.values[expand.outputs[0]].shape
    fits = wide[:2] == (batch, heads) and wide[3:] == tuple(rest) and edit.shape(expand.args[0]) == (batch, heads, 1, *rest)
    return origin if len(wide) == 5 and fits and edit.shape(ref) == (batch, heads * wide[2], *rest) else None


# ------------------------------------------------------------------------------------------------------------------ dropout
def normalize_dropout(graph: Graph) -> Graph:
    """Dropout in place, and that whose mask nobody reads, is the plain one."""
    readers = graph.consumers()
    leaving = set(graph.outputs)

    def once(op: Op | None) -> bool:
        return op is not None and len(readers[op.outputs[0]]) == 1 and op.outputs[0] not in leaving

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        if op.target == "aten.native_dropout.default" and not readers[op.outputs[1]] and op.outputs[1] not in leaving:
            args = (*op.args[:2], op.args[2] is not False)
            return (replace(op, target="aten.dropout.default", args=args, outputs=op.outputs[:1]),)
        scaled = edit.made_by(op.args[1], "aten.div.Scalar") if op.target == "aten.mul.Tensor" else None
        kept = edit.made_by(scaled.args[0], "aten.bernoulli.p") if scaled else None
        if kept is None or scaled is None or not (once(scaled) and once(kept)) or not isinstance(op.args[0], Ref):
            return None
        rate, out = kept.args[1], edit.values[op.outputs[0]]
        if scaled.args[1] != rate or edit.shape(op.args[1]) != out.shape or edit.values[op.args[0].name].shape != out.shape:
            return None
        return (replace(op, target="aten.dropout.default", args=(op.args[0], 1 - rate, True), kwargs=()),)

    return eliminate_dead_code(rewrite(graph, step))


# --------------------------------------------------------------------------------------------------------------- batch norm
def normalize_batch_norm(graph: Graph) -> Graph:
    """Batch norm in training is ``mw.batch_norm``, else ``aten.batch_norm``."""
    mutations = list(graph.mutations)

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        name, args = op.target.removeprefix("aten."), op.args
        if name == "batch_norm.default" and args[5] and len(edit.values[args[0].name].shape) > 1:  # else empty: no statistics
            stats = [edit.new(f"{op.name}_{what}", _channels(args[0], edit), torch.float32) for what in ("mean", "var")]
            for old, new in zip(args[3:5], stats, strict=True):
                if old is not None:
                    edit.values[new] = replace(edit.values[old.name], name=new)
                    mutations.append((old.name, new))
            return (replace(op, target="mw.batch_norm", args=args[:8], outputs=(op.outputs[0], *stats)),)
        if name == "_native_batch_norm_legit_functional.default" and args[5]:
            return (replace(op, target="mw.batch_norm", outputs=(op.outputs[0], *op.outputs[3:5])),)
        if name == "_native_batch_norm_legit.no_stats":
            return (replace(op, target="mw.batch_norm", args=(*args[:3], None, None, True, *args[4:6])),)
        if name == "_native_batch_norm_legit_no_training.default":
            evaluated = (*args[:5], False, *args[5:7], False)
            return (replace(op, target="aten.batch_norm.default", args=evaluated, outputs=op.outputs[:1]),)
        return None

    result = rewrite(graph, step)
    return eliminate_dead_code(replace(result, mutations=tuple(mutations)))


def _channels(x: Ref, edit: Edit) -> tuple[int, ...]:
    return edit.shape(x)[1:2]


# ------------------------------------------------------------------------------------------------------------- cross entropy
def normalize_cross_entropy(graph: Graph) -> Graph:
    """Losses over class indices as a sum and a count, on logits with their own leading dims."""
    return eliminate_dead_code(rewrite(graph, _cross_entropy))


def _cross_entropy(op: Op, edit: Edit) -> Iterable[Op] | None:
    if op.target == "aten.cross_entropy_loss.default":
        logits, labels, weight, reduction, ignore, smoothing = arguments(op, None, None, None, 1, -100, 0.0)
    elif op.target in ("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default"):
        softmax = edit.made_by(op.args[0], "aten.log_softmax.int", "aten._log_softmax.default")
        if softmax is None or softmax.args[1] != min(1, len(edit.shape(op.args[0])) - 1):
            return None
        labels, weight, reduction, ignore = arguments(op, None, None, None, 1, -100)[1:5]
        logits, smoothing = softmax.args[0], 0.0
    else:
        return None
    if weight is not None or reduction not in (1, 2) or edit.dtype(labels).is_floating_point:
        return None
    logits, labels, ops = _classes_last(logits, labels, op, edit)
    wide = torch.promote_types(edit.dtype(logits), torch.float32)
    out = edit.values[op.outputs[0]]
    total, count = edit.new(f"{op.name}_sum", (), wide), edit.new(f"{op.name}_count", (), torch.float32)
    ops.append(Op(f"{op.name}_sum", "mw.cross_entropy", (logits, labels, ignore, float(smoothing)), (), (total, count),
                  op.module, op.source))
    result = Ref(total)
    if reduction == 1:
        ops.append(edit.op(op, "aten.div.Tensor", (result, Ref(count)), (), wide))
        result = Ref(ops[-1].outputs[0])
    if out.dtype != wide:
        ops.append(edit.op(op, "aten._to_copy.default", (result,), (), out.dtype, (("dtype", out.dtype),)))
        result = Ref(ops[-1].outputs[0])
    edit.replace(op.outputs[0], result.name)
    return ops


def _classes_last(logits: Ref, labels: Ref, op: Op, edit: Edit) -> tuple[Ref, Ref, list[Op]]:
    """(logits [*b, v], labels [*b], ops to make them): classes moved from dim 1 to the end, flattened dims restored."""
    shape = edit.shape(logits)
    if len(shape) > 2:
        return _moved(logits, labels, op, edit)
    flat, flat_labels = edit.made_by(logits, RESHAPE), edit.made_by(labels, RESHAPE)
    before = edit.shape(flat.args[0]) if flat else shape
    if flat is None or len(before) < 3 or before[-1] != shape[-1]:
        return logits, labels, []
    if flat_labels and edit.shape(flat_labels.args[0]) == before[:-1]:
        return flat.args[0], flat_labels.args[0], []
    unflat = edit.op(op, RESHAPE, (labels, before[:-1]), before[:-1], edit.dtype(labels))
    return flat.args[0], Ref(unflat.outputs[0]), [unflat]


def _moved(logits: Ref, labels: Ref, op: Op, edit: Edit) -> tuple[Ref, Ref, list[Op]]:
    shape = edit.shape(logits)
    turned = edit.made_by(logits, "aten.transpose.int", "aten.permute.default")
    order = (0, *range(2, len(shape)), 1)
    if turned and len(shape) == 3 and set(turned.args[1:]) == {1, 2}:
        return turned.args[0], labels, []
    if turned and len(turned.args) == 2 and tuple(turned.args[1][dim] for dim in order) == tuple(range(len(shape))):
        return turned.args[0], labels, []
    move = edit.op(op, "aten.permute.default", (logits, order), tuple(shape[dim] for dim in order), edit.dtype(logits))
    return Ref(move.outputs[0]), labels, [move]


# ---------------------------------------------------------------------------------------------------------- elementwise losses
REDUCTIONS: Mapping[str, int] = {  # loss: position of its argument ``reduction``; what stands before it may be left out
    "aten.mse_loss.default": 2, "aten.l1_loss.default": 2, "aten.smooth_l1_loss.default": 2, "aten.huber_loss.default": 2,
    "aten.soft_margin_loss.default": 2, "aten.kl_div.default": 2, "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
}


def reduce_losses(graph: Graph) -> Graph:
    """Losses element by element, reduced by an operator of its own: a split batch then leaves a pending sum."""
    return rewrite(graph, _reduced_loss)


def _reduced_loss(op: Op, edit: Edit) -> Iterable[Op] | None:
    if op.target == "aten.cross_entropy_loss.default":
        return _reduced_entropy(op, edit)
    if op.target not in REDUCTIONS:
        return None
    at, named = REDUCTIONS[op.target], dict(op.kwargs)
    reduction = named.pop("reduction", op.args[at] if len(op.args) > at else 1)
    reduce = {1: "aten.mean.default", 2: "aten.sum.default"}.get(reduction)
    if reduce is None:
        return None
    before = (*op.args[:at], *(None,) * (at - len(op.args)))
    shape = torch.broadcast_shapes(*(edit.shape(ref) for ref in op.args[:2]))
    dtype = edit.values[op.outputs[0]].dtype
    each = edit.op(op, op.target, (*before, 0, *op.args[at + 1 :]), shape, dtype, tuple(named.items()))
    return each, replace(op, target=reduce, args=(Ref(each.outputs[0]),), kwargs=())


def _reduced_entropy(op: Op, edit: Edit) -> Iterable[Op] | None:
    """A mean over class indices is one by the weights of the classes of the labels that count."""
    logits, labels, weight, reduction, ignore, smoothing = arguments(op, None, None, None, 1, -100, 0.0)
    soft, dtype = edit.dtype(labels).is_floating_point, edit.values[op.outputs[0]].dtype
    if reduction not in (1, 2) or len(edit.shape(logits)) < 2 or not (soft or weight is not None):
        return None
    shape = (edit.shape(logits)[0], *edit.shape(logits)[2:])
    each = edit.op(op, op.target, (logits, labels, weight, 0, ignore, smoothing), shape, dtype)
    if soft or reduction == 2:
        target = "aten.mean.default" if reduction == 1 else "aten.sum.default"
        return each, replace(op, target=target, args=(Ref(each.outputs[0]),), kwargs=())
    kind = edit.dtype(weight)
    total = edit.op(op, "aten.sum.default", (Ref(each.outputs[0]),), (), dtype)
    ignored = edit.op(op, "aten.eq.Scalar", (labels, ignore), shape, torch.bool)
    known = edit.op(op, "aten.masked_fill.Scalar", (labels, Ref(ignored.outputs[0]), 0), shape, edit.dtype(labels))
    weights = edit.op(op, "aten.index.Tensor", (weight, (Ref(known.outputs[0]),)), shape, kind)
    counted = edit.op(op, "aten.masked_fill.Scalar", (Ref(weights.outputs[0]), Ref(ignored.outputs[0]), 0), shape, kind)
    count = edit.op(op, "aten.sum.default", (Ref(counted.outputs[0]),), (), kind)
    mean = replace(op, target="aten.div.Tensor", args=(Ref(total.outputs[0]), Ref(count.outputs[0])), kwargs=())
    return each, total, ignored, known, weights, counted, count, mean


# ------------------------------------------------------------------------------------------------------------------ look-ups
ARANGES = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")


_BAGS = ("aten.embedding_bag.padding_idx", "aten.embedding_bag.default")
_MEANS: Mapping[int, str] = {0: "aten.sum.dim_IntList", 1: "aten.mean.dim"}
"""{mode of an embedding bag: what it makes of its rows}."""


def look_up_bags(graph: Graph) -> Graph:
    """Bags of one length as rows [bag, length, width] that are summed: so bags can be split."""
    readers = graph.consumers()

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        if op.target not in _BAGS or op.kwargs:
            return None
        table, ids, starts, by_frequency, mode, _, weights, last, padding = arguments(
            op, None, None, None, False, 0, False, None, False, -1)
        bags, total = edit.shape(starts)[0], math.prod(edit.shape(ids))
        made = edit.made_by(starts, "aten.arange.start_step")
        alike = made is not None and bags and total % bags == 0 and made.args[:3] == (0, total, total // bags)
        if not alike or by_frequency or last or mode not in _MEANS or padding not in (None, -1):
            return None
        if any(readers[name] for name in op.outputs[1:]):
            return None
        shape, width, ops = (bags, total // bags), edit.shape(table)[1], list[Op]()

        def then(target: str, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
            ops.append(edit.op(op, target, args, shape, dtype))
            return Ref(ops[-1].outputs[0])

        dtype = edit.dtype(table)
        found = then(RESHAPE, (ids, shape), shape, edit.dtype(ids))
        rows = then("aten.embedding.default", (table, found), (*shape, width), dtype)
        if weights is not None:
            each = then(RESHAPE, (weights, (*shape, 1)), (*shape, 1), edit.dtype(weights))
            rows = then("aten.mul.Tensor", (rows, each), (*shape, width), dtype)
        return *ops, replace(op, target=_MEANS[mode], args=(rows, (1,)), outputs=op.outputs[:1])

    found = rewrite(graph, step)
    return graph if found is graph else eliminate_dead_code(found)


def add_products_first(graph: Graph) -> Graph:
    """Of a stream and two products with weights the products are added to each other first: where their weights are split both
    are terms, and one sum makes them whole (``structure.meeting``)."""
    readers, leaving = graph.consumers(), {*graph.outputs, *(new for _, new in graph.mutations)}

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        for first, second in (op.args, op.args[::-1]) if op.target == ADD and not op.kwargs else ():
            inner = edit.made_by(first, ADD)
            if inner is None or inner.kwargs or first.name in leaving or len(readers[first.name]) > 1:
                continue
            products = [ref for ref in inner.args if edit.made_by(ref, LINEAR)]
            others = [ref for ref in inner.args if isinstance(ref, Ref) and ref not in products]
            alike = {(edit.shape(ref), edit.dtype(ref)) for ref in (first, second, *inner.args) if isinstance(ref, Ref)}
            if len(products) == len(others) == len(alike) == 1 and edit.made_by(second, LINEAR):
                total = edit.op(op, ADD, (*products, second), *next(iter(alike)))
                return total, replace(op, args=(*others, Ref(total.outputs[0])))
        return None

    found = rewrite(graph, step)
    return graph if found is graph else eliminate_dead_code(found)


def gather_by_sample(graph: Graph) -> Graph:
    """Look-ups by sample as gathers, so that the samples pass through."""
    return eliminate_dead_code(rewrite(graph, _by_sample))


def _by_sample(op: Op, edit: Edit) -> Iterable[Op] | None:
    if op.target != "aten.index.Tensor" or len(op.args[1]) != 2 or None in op.args[1]:
        return None
    x, (rows, places) = op.args
    shape, found, dtype = edit.shape(x), edit.shape(places), edit.dtype(places)
    integer = not dtype.is_floating_point and dtype not in (torch.bool, torch.uint8)
    if not _counts(rows, shape[0], edit) or found[:1] != shape[:1] or len(found) != len(edit.shape(rows)) or not integer:
        return None
    wide = (*(*found, 1)[:2], *shape[2:])
    ops: list[Op] = []

    def then(target: str, args: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
        kwargs = (("dtype", dtype),) if target == "aten._to_copy.default" else ()
        ops.append(edit.op(op, target, args, shape, dtype, kwargs))
        return Ref(ops[-1].outputs[0])

    at = places if dtype == torch.int64 else then("aten._to_copy.default", (places,), found, torch.int64)
    below = then("aten.lt.Scalar", (at, 0), found, torch.bool)
    from_end = then(ADD, (at, shape[1]), found, torch.int64)
    at = then("aten.where.self", (below, from_end, at), found, torch.int64)
    thin = (*wide[:2], *(1,) * len(shape[2:]))
    at = at if found == thin else then(RESHAPE, (at, thin), thin, torch.int64)
    at = at if wide == thin else then("aten.expand.default", (at, wide), wide, torch.int64)
    picked = then("aten.gather.default", (x, 1, at), wide, edit.dtype(x))
    if len(found) == 2:
        edit.replace(op.outputs[0], picked.name)
        return ops
    return (*ops, replace(op, target=RESHAPE, args=(picked, edit.values[op.outputs[0]].shape), kwargs=()))


def _counts(rows: Ref, samples: int, edit: Edit) -> bool:
    """Whether a value is 0, 1, .. samples - 1, as a vector or a column."""
    if edit.shape(rows) == (samples, 1):
        turned = edit.made_by(rows, RESHAPE, "aten.unsqueeze.default")
        rows = turned.args[0] if turned else rows
    made = edit.made_by(rows, *ARANGES)
    if made is None or edit.shape(rows) != (samples,):
        return False
    return made.target == ARANGES[0] or (made.args[0] == 0 and made.args[2:] in ((), (1,)))
