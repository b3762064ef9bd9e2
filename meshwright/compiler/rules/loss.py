"""Losses: sums over the batch, which leave pending sums; a count beside each, never a mean of means.

Cross entropy with a split vocabulary runs the split form of ``mw.cross_entropy``: the maximum, the sum of exponentials and the
label's logit are all-reduced inside, and its results are complete on every rank of the vocabulary's axes. So does the loss in
pieces, ``mw.linear_cross_entropy``, which makes the logits of a few rows at a time itself (``compiler.structure.pieces``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, broadcast_dims, dims_of, numel, rewrite, words
from meshwright.ir.declared.operator import PIECES, Cost, Product, Saves, Work
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, OpRule, Traffic

NONE, MEAN = 0, 1
"""aten's numbers for a loss's reduction; 2 is the sum."""


def _cross_entropy(call: Call) -> OpRule:
    return call.line("*b v, *b -> (), ()", internal={"v": _sums(call)}, localize=_cross_entropy_local)


def _linear_cross_entropy(call: Call) -> OpRule:
    """The vocabulary split as in ``_cross_entropy``; the width of a row, whose split would sum into the logits, stays whole."""
    line = "*b k!, v k!, v?, *b -> (), ()"
    return call.line(line, internal={"v": _sums(call)}, localize=_linear_cross_entropy_local)


def _sums(call: Call) -> tuple[Traffic, ...]:
    """What a split vocabulary sends: the maxima; sums of exponentials, the labels' logits, and for smoothing all logits'."""
    tokens = numel(call["labels"].shape)
    return Traffic("all_reduce", tokens, 4), Traffic("all_reduce", (3 if call["label_smoothing"] else 2) * tokens, 4)


def _cross_entropy_local(op: Op, local: Local) -> Rewritten:
    return _of_classes(op, local, 0, len(local.operand_shapes[0]) - 1)


def _linear_cross_entropy_local(op: Op, local: Local) -> Rewritten:
    return _of_classes(op, local, 1, 0)


def _of_classes(op: Op, local: Local, operand: int, dim: int) -> Rewritten:
    """Of the classes on this rank; ``dim`` of ``operand`` holds them."""
    axes = local.axes_of("v")
    if not axes:
        return rewrite(op)
    return rewrite(op, offset=local.operand_piece(operand, dim)[0], vocab=local.operand_shapes[operand][dim], axes=axes)


def _elementwise_loss(call: Call) -> OpRule:
    """A loss per element, or their sum; a mean in one operator stays whole."""
    if call["reduction"] == NONE:
        return call.line(", ".join(["...?"] * len(call.slots)) + " -> ...")
    if call["reduction"] == MEAN:
        return call.whole()
    shape = torch.broadcast_shapes(*(operand.shape for operand in call.operands))
    factors: list[Factor | None] = [f"dim{i}" for i in range(len(shape))]
    return call.rule([broadcast_dims(operand.shape, shape, factors) for operand in call.operands], [[]])


def _class_loss(call: Call) -> OpRule:
    """A loss per label, classes whole: ``[n, c, *d]`` and labels ``[n, *d]``, or probabilities like the logits. One that is
    reduced as well stays whole."""
    x, labels = call["self"], call["target"]
    if call["reduction"] != NONE or x.ndim < 2:
        return call.whole()
    dims = dims_of(x, 1)
    each = [dims[0], *dims[2:]]
    weight: list[list[Factor | None]] = [[None]] * (len(call.operands) - 2)
    return call.rule([dims, dims if labels.ndim == x.ndim else each, *weight], [each])


def _whole(call: Call) -> OpRule:
    return call.whole()


COMPARED = words(
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
)

def _wide(work: Work) -> float:
    """Bytes of the logits in fp32."""
    return float(math.prod(work.operands[0]) * max(4, work.reads.itemsize))


def _exponentials(work: Work) -> tuple[float, float]:
    """The logits in fp32 where they are not, and their exponentials; the gradient in fp32 where they are not."""
    narrow = work.reads.itemsize < 4
    return _wide(work) * (1 + narrow), _wide(work) if narrow else 0.0


def _logits(work: Work) -> Sequence[Product]:
    return (Product(1, math.prod(work.operands[0][:-1]), *work.operands[1]),)


def _rows(work: Work) -> int:
    """Rows whose logits there are at a time."""
    return min(int(work.literal(6, "rows", 1)), math.prod(work.operands[0][:-1]))


def _piece(work: Work) -> tuple[float, float]:
    """Of one piece the logits, in fp32 where they are not, and their exponentials; in the backward their gradient, and where
    the weight is narrower than fp32 its gradient in fp32, and that of one piece."""
    size, narrow = work.reads.itemsize, work.reads.itemsize < 4
    elements, weight = _rows(work) * work.operands[1][0], math.prod(work.operands[1])
    wide = max(4, size)
    forward = elements * (wide * (1 + narrow) + size)
    made = elements * (size + wide) if narrow else elements * wide
    summed = weight * wide if narrow else 0
    # the weight's gradient as it is handed on is counted beside this
    return float(forward), float(max(made, elements * size + weight * size * narrow) + summed - weight * size * narrow)


def _passes(work: Work) -> tuple[float, float]:
    """Bytes that the passes over the logits move: as of a cross entropy whose kernels run one by one, with the cast; in the
    backward, too, the weight's gradient of every piece is added to that of those before."""
    wide, narrow = max(4, work.reads.itemsize), work.reads.itemsize < 4
    tokens = math.prod(work.operands[0][:-1])
    once = tokens * work.operands[1][0] * wide
    cast = (1 + work.reads.itemsize / wide) * once if narrow else 0.0
    pieces = math.ceil(tokens / max(1, _rows(work)))
    summed = pieces * math.prod(work.operands[1]) * (2 * wide + narrow * work.reads.itemsize)
    return 6.0 * once + cast, 8.0 * once + 2 * cast + summed


def _kernels(work: Work) -> tuple[int, int]:
    """Of every piece the product and the passes; in the backward the product again, its own passes, two products and the sum
    of the weight's gradients."""
    pieces = math.ceil(math.prod(work.operands[0][:-1]) / max(1, _rows(work)))
    return pieces * (1 + 6), pieces * (1 + 8 + 2 + 1)


def _tokens(work: Work) -> float:
    """For every token its maximum or the sum of its exponentials, its label, and two masks."""
    return math.prod(work.operands[0][:-1]) * (4 + 8 + 1 + 1)


labelled = partial(declare, cost="loss", saves="1")
compared = partial(declare, _elementwise_loss, cost="pointwise", saves="0 1")
PROBABILITIES = Saves.parse("1", extra=lambda work: work.read_bytes())

RULES: Mapping[str, Declaration] = {
    "mw.cross_entropy": declare(
        _cross_entropy, cost=Cost("loss", space=_exponentials), saves=Saves.parse("0 1", extra=_tokens)
    ),
    PIECES: declare(
        _linear_cross_entropy, saves=Saves.parse("0 1", extra=_tokens),
        cost=Cost("matmul", products=_logits, space=_piece, moves=_passes, again=_logits, kernels=_kernels),
    ),
    "mw.valid_count": declare("*b -> ()", cost="reduce", saves=""),
    "aten.cross_entropy_loss.default": labelled(_class_loss, saves=PROBABILITIES),
    "aten.nll_loss.default": labelled(_class_loss),
    "aten.nll_loss2d.default": declare(_class_loss),
    "aten.nll_loss_nd.default": declare(_class_loss),
    "aten.nll_loss_forward.default": labelled(_whole),
    "aten.nll_loss2d_forward.default": declare(_whole),
    **{f"aten.{name}.default": compared() for name in COMPARED},
}
