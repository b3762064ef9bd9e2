"""Losses: sums over the batch, which leave pending sums; a count beside each, never a mean of means.

Cross entropy with a split vocabulary runs the split form of ``mw.cross_entropy``: the maximum, the sum of exponentials and the
label's logit are all-reduced inside, and its results are complete on every rank of the vocabulary's axes.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, dims_of, numel, rewrite
from meshwright.graph import Op
from meshwright.rule import Local, OpRule, Traffic

NONE, MEAN, SUM = 0, 1, 2
"""aten's numbers for a loss's reduction."""


def _cross_entropy(call: Call) -> OpRule:
    tokens = numel(call["labels"].shape)
    smoothed = bool(call["label_smoothing"])
    traffic = Traffic("all_reduce", tokens, 4), Traffic("all_reduce", (3 if smoothed else 2) * tokens, 4)
    return call.line("*b v, *b -> (), ()", internal={"v": traffic}, localize=_cross_entropy_local)


def _cross_entropy_local(op: Op, local: Local) -> Rewritten:
    axes = local.axes_of("v")
    if not axes:
        return rewrite(op)
    dim = len(local.operand_shapes[0]) - 1
    return rewrite(op, offset=local.operand_piece(0, dim)[0], vocab=local.operand_shapes[0][dim], axes=axes)


def _elementwise_loss(call: Call) -> OpRule:
    """A loss per element, or their sum; a mean in one operator stays whole."""
    terms = ", ".join(["..."] * len(call.operands))
    if call["reduction"] == NONE:
        return call.line(f"{terms} -> ...")
    if call["reduction"] == MEAN or len({operand.shape for operand in call.operands}) > 1:
        return call.whole()
    return call.rule([dims_of(operand) for operand in call.operands], [[]])


def _whole(call: Call) -> OpRule:
    return call.whole()


ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
).split()

RULES: Mapping[str, Declaration] = {
    "mw.cross_entropy": declare(_cross_entropy),
    "aten.cross_entropy_loss.default": declare(_whole),
    "aten.nll_loss_forward.default": declare(_whole),
    "aten.nll_loss2d_forward.default": declare(_whole),
    **{f"aten.{name}.default": declare(_elementwise_loss) for name in ELEMENTWISE},
}
