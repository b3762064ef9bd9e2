"""Normalizations and softmax: the dims that are normalized stay whole, the others pass. A group norm is split in
whole groups of channels.

Batch norm in training is the exception: its batch may be split, and the statistics, being of the whole batch, are summed
inside ``mw.batch_norm`` (forward: the mean, then the squares around it; backward: the two sums of its gradient).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, argument, dims_of, numel, rewrite
from meshwright.ir.declared.operator import Bytes, Saves, Work
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, OpRule, Traffic


def _softmax(call: Call) -> OpRule:
    dims = dims_of(call.operands[0], call["dim"])
    return call.rule([dims], [dims])


def _layer_norm(call: Call) -> OpRule:
    """Normalized over the last dims; the statistics that native forms return keep them as size 1."""
    x = call["input"]
    kept = x.ndim - len(call["normalized_shape"])
    dims: list[Factor | None] = [f"dim{i}" if i < kept else None for i in range(x.ndim)]
    affine = [[None] * operand.ndim for operand in call.operands[1:]]
    return call.rule([dims, *affine], [dims] * len(call.results))


def _instance_norm(call: Call) -> OpRule:
    """Every channel of every sample by itself; running statistics, where there are any, are of the whole batch."""
    x = call["input"]
    if call["running_mean"] is not None:
        return call.whole()
    dims: list[Factor | None] = ["n", "c", *[None] * (x.ndim - 2)]
    return call.rule([dims, *(["c"] for _ in call.operands[1:])], [dims])


def _weight_norm(call: Call) -> OpRule:
    """Every slice along ``dim`` scaled to a length of its own; of -1, which is how torch spells none, the whole to one."""
    direction, length = call["v"], call["g"]
    if call["dim"] == -1:
        return call.whole()
    dims: list[Factor | None] = ["n" if i == call["dim"] % direction.ndim else None for i in range(direction.ndim)]
    return call.rule([dims, [f if size > 1 else None for f, size in zip(dims, length.shape, strict=True)]], [dims])


def _group_norm_local(op: Op, local: Local) -> Rewritten:
    parts = local.mesh.size(local.axes_of("c"))
    if op.target == "aten.group_norm.default":
        return rewrite(op, num_groups=argument(op, "num_groups") // parts)
    samples, channels = local.operand_shape(0)[:2]
    return rewrite(op, N=samples, C=channels, group=argument(op, "group") // parts)


def _batch_norm(call: Call) -> OpRule:
    """Channels pass. Samples pass too: with given statistics freely, in training with traffic inside. Either way the new
    statistics are complete on every rank, which is what makes ``n`` internal."""
    x = call["x"]
    rest: list[Factor | None] = [None] * (x.ndim - 2)
    channel = [["c"] for _ in call.operands[1:]]
    channels = x.shape[1]
    sums = Traffic("all_reduce", channels, 4)
    traffic = sums, sums, Traffic("all_reduce", 2 * channels, 4, backward=True)
    return call.rule(
        [["n", "c", *rest], *channel],
        [["n", "c", *rest], *([["c"]] * (len(call.results) - 1))],
        internal={"n": traffic if call["training"] else ()},
        localize=_batch_norm_local if call["training"] else None,
    )


def _fixed_batch_norm(call: Call) -> OpRule:
    """By given statistics: every element by itself."""
    dims = dims_of(call["input"])
    if call["training"] or len(dims) < 2:
        return call.whole()
    return call.rule([dims, *([dims[1]] for _ in call.operands[1:])], [dims])


def _batch_norm_local(op: Op, local: Local) -> Rewritten:
    """The count is that of the whole batch; the sums are over the axes that split it."""
    axes = local.axes_of("n")
    if not axes:
        return rewrite(op)
    shape = local.operand_shapes[0]
    return rewrite(op, count=shape[0] * numel(shape[2:]), axes=axes)


def _rows(statistics: int) -> Bytes:
    """So many fp32 numbers for every row."""
    return lambda work: math.prod(work.operands[0][:-1]) * statistics * 4


def _samples(work: Work) -> float:
    return work.operands[0][0] * 2 * 4


def _channels(work: Work) -> float:
    return work.operands[0][1] * 2 * 4 if len(work.operands[0]) > 1 else 0


softmax = partial(declare, _softmax, cost="reduce", saves="r0")
layer_norm = partial(declare, _layer_norm, cost="norm", saves=Saves.parse("0 1", extra=_rows(2)))
group_norm = partial(declare, localize=_group_norm_local, cost="norm", saves=Saves.parse("0 1", extra=_samples))
batch_norm = partial(declare, cost="norm", saves=Saves.parse("0 1:0", extra=_channels))

RULES: Mapping[str, Declaration] = {
    "aten.softmax.int": softmax(),
    "aten._softmax.default": softmax(),
    "aten._safe_softmax.default": declare(_softmax),
    "aten.log_softmax.int": softmax(),
    "aten._log_softmax.default": softmax(),
    "aten.layer_norm.default": layer_norm(),
    "aten.native_layer_norm.default": layer_norm(),
    "aten.rms_norm.default": layer_norm(saves=Saves.parse("0 1", extra=_rows(1))),
    "aten._fused_rms_norm.default": declare(_layer_norm),
    "aten.group_norm.default": group_norm("n c/num_groups *s!, c?, c? -> n c *s!"),
    "aten.native_group_norm.default": group_norm("n c/group *s!, c?, c? -> n c *s!, n c, n c"),
    "aten.instance_norm.default": declare(_instance_norm, cost="norm", saves="0 1:0"),
    "aten._weight_norm.default": declare(_weight_norm),
    "aten.batch_norm.default": batch_norm(_fixed_batch_norm),
    "mw.batch_norm": batch_norm(_batch_norm, updates=(3, 4)),
}
