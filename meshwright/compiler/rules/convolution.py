"""Convolution, pooling and resampling: samples and channels pass, space is whole.

A split of the input channels leaves a pending sum; with a bias, which must be added once, or with groups, they are whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, words
from meshwright.ir.rule import Factor, OpRule


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


CONVOLUTIONS = words(
    "convolution.default conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding "
    "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
)


def _sampled(call: Call) -> OpRule:
    """Values of ``[n, c, *s]`` at the places ``[n, *t, dims]``."""
    space: list[Factor | None] = [None] * (call["input"].ndim - 2)
    return call.rule([["n", "c", *space], ["n", *space, None]], [["n", "c", *space]])


def _line(space: int, results: int = 1) -> str:
    dots = " ." * space
    return f"*b{dots} -> " + ", ".join([f"*b{dots}"] * results)


def _rules() -> dict[str, Declaration]:
    rules = {f"aten.{name}": declare(_convolution) for name in CONVOLUTIONS}
    for space in (1, 2, 3):
        average = _line(space) + " ; +0"
        rules[f"aten.avg_pool{space}d.default"] = declare(average)
        rules[f"aten.adaptive_avg_pool{space}d.default"] = declare(average)
        rules[f"aten.max_pool{space}d.default"] = declare(_line(space))
        rules[f"aten.max_pool{space}d_with_indices.default"] = declare(_line(space, 2))
        rules[f"aten.adaptive_max_pool{space}d.default"] = declare(_line(space, 2))
        rules[f"aten.upsample_nearest{space}d.vec"] = declare(average)
    for name, space in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)):
        rules[f"aten.upsample_{name}{space}d.vec"] = declare(_line(space) + " ; +0")
    rules["aten._adaptive_avg_pool2d.default"] = declare("*b . . -> *b . . ; +0")
    rules["aten.pixel_shuffle.default"] = declare("*b . . . -> *b . . . ; +0")
    rules["aten.pixel_unshuffle.default"] = declare("*b . . . -> *b . . . ; +0")
    rules["aten.im2col.default"] = declare("b . . . -> b . . ; +0")
    rules["aten.col2im.default"] = declare("b . . -> b . . . ; +0")
    rules["aten.grid_sampler.default"] = declare(_sampled)
    return rules


RULES: Mapping[str, Declaration] = _rules()
