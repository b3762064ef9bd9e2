"""Convolution, pooling and resampling: samples and channels pass, space is whole.

A split of the input channels leaves a pending sum; with a bias, which must be added once, or with groups, they are whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, rewrite, words
from meshwright.ir.declared.operator import Cost, Product, Saves, Work
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, OpRule


def _convolution(call: Call) -> OpRule:
    """Input ``[n, i, *s]`` or ``[i, *s]``, weight ``[o, i / groups, *k]``; a transposed weight is ``[i, o / groups, *k]``."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    space = weight.ndim - 2
    spatial: list[Factor | None] = [None] * space
    samples: list[Factor | None] = ["n"] * (x.ndim - space - 1)
    transposed = bool(call.arguments.get("transposed", "transpose" in call.target))
    single = call["groups"] == 1
    i, o = ("i", "o") if single else (None, None)
    kernel = [i, o, *spatial] if transposed else [o, i, *spatial]
    operands = [[*samples, i, *spatial], kernel, *([[o]] if bias is not None else [])]
    return call.rule(operands, [[*samples, o, *spatial]], whole=["i"] if bias is not None else [])


def _windows(work: Work) -> Sequence[Product]:
    """A row for every place of the result, as long as the window."""
    result, weight = work.results[0], work.operands[1]
    channels = result[1] if len(result) > 1 else 1
    return (Product(1, math.prod(result) // max(channels, 1), channels, math.prod(weight[1:])),)


def _spread(work: Work) -> Sequence[Product]:
    """A transposed one: a row for every place of the input, which is spread over a window of the result."""
    x, weight = work.operands[:2]
    channels = x[-(len(weight) - 1)]
    return (Product(1, math.prod(x) // max(channels, 1), math.prod(weight[1:]), channels),)


CONVOLUTIONS = words(
    "convolution.default conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding"
)
TRANSPOSED = words("conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input")


def _sampled(call: Call) -> OpRule:
    """Values of ``[n, c, *s]`` at the places ``[n, *t, dims]``."""
    space: list[Factor | None] = [None] * (call["input"].ndim - 2)
    return call.rule([["n", "c", *space], ["n", *space, None]], [["n", "c", *space]])


def _grid_sizes(op: Op, local: Local) -> Rewritten:
    """Of as many samples as there are here."""
    return rewrite(op, size=(local.result_shape()[0], *op.args[1][1:]))


def _line(space: int, results: int = 1) -> str:
    dots = " ." * space
    return f"*b{dots} -> " + ", ".join([f"*b{dots}"] * results)


convolved = partial(
    declare, _convolution, cost=Cost("matmul", products=_windows), saves="0:1 1:0", recompute="costly",
    runs="aten.convolution.default",
)
largest = partial(declare, saves=Saves.parse("0 r1", extra=lambda work: math.prod(work.results[0]) * 8))


def _rules() -> dict[str, Declaration]:
    rules = {f"aten.{name}": convolved() for name in CONVOLUTIONS}
    rules |= {f"aten.{name}": convolved(cost=Cost("matmul", products=_spread)) for name in TRANSPOSED}
    for space in (1, 2, 3):
        average = _line(space) + " ; +0"
        rules[f"aten.avg_pool{space}d.default"] = declare(average)
        rules[f"aten.adaptive_avg_pool{space}d.default"] = declare(average, saves="" if space < 3 else "0")
        rules[f"aten.max_pool{space}d.default"] = largest(_line(space))
        rules[f"aten.max_pool{space}d_with_indices.default"] = largest(_line(space, 2))
        rules[f"aten.adaptive_max_pool{space}d.default"] = declare(_line(space, 2), saves="0 r1" if space == 2 else "0")
        rules[f"aten.upsample_nearest{space}d.vec"] = declare(average, saves="" if space == 2 else "0")
    for name, space in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)):
        rules[f"aten.upsample_{name}{space}d.vec"] = declare(_line(space) + " ; +0")
    rules["aten._adaptive_avg_pool2d.default"] = declare("*b . . -> *b . . ; +0")
    rules["aten.channel_shuffle.default"] = declare("b . *s -> b . *s ; +0")
    rules["aten.affine_grid_generator.default"] = declare("b . . -> b . . . ; +0", _grid_sizes)
    rules["aten.pixel_shuffle.default"] = declare("*b . . . -> *b . . . ; +0")
    rules["aten.pixel_unshuffle.default"] = declare("*b . . . -> *b . . . ; +0")
    rules["aten.im2col.default"] = declare("b . . . -> b . . ; +0")
    rules["aten.col2im.default"] = declare("b . . -> b . . . ; +0")
    rules["aten.grid_sampler.default"] = declare(_sampled)
    return rules


RULES: Mapping[str, Declaration] = _rules()
