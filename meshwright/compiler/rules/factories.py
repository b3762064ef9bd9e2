"""Operators that make a tensor from numbers: every rank makes its piece."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, argument, rewrite
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, OpRule


def _sized(op: Op, local: Local) -> Rewritten:
    return rewrite(op, size=local.result_shape())


def _new(call: Call) -> OpRule:
    """The operand lends its dtype alone: split along where it has the result's shape, else whole."""
    x = call.operands[0]
    factors: list[Factor | None] = [f"dim{i}" for i in range(len(call.shape))]
    return call.rule([factors if x.shape == call.shape else [None] * x.ndim], [factors], localize=_sized)


def _arange(call: Call) -> OpRule:
    """Whole numbers only: a piece of a float range could differ in its last digits."""
    numbers = [call[name] for name in ("start", "end", "step") if name in call.arguments]
    exact = all(isinstance(number, int) for number in numbers) and not call.results[0].dtype.is_floating_point
    whole, localize = ([], _arange_local) if exact else (["dim0"], None)
    return call.rule([], [["dim0"]], whole=whole, localize=localize, located=["dim0"])


def _arange_local(op: Op, local: Local) -> Rewritten:
    start = 0 if op.target == "aten.arange.default" else argument(op, "start")
    step = argument(op, "step") if op.target == "aten.arange.start_step" else 1
    offset, length = local.result_piece(0)
    first = start + offset * step
    return "aten.arange.start_step", (first, first + length * step, step), op.kwargs


def _whole(call: Call) -> OpRule:
    return call.whole()


made = partial(declare, cost="factory", saves="", gradient=False)

RULES: Mapping[str, Declaration] = {
    **{f"aten.{name}.default": made("-> ...", _sized) for name in ("zeros", "ones", "full")},
    "aten.empty.memory_format": made("-> ...", _sized),
    **{f"aten.new_{name}.default": made(_new) for name in ("zeros", "ones", "full", "empty")},
    **{f"aten.{name}_like.default": made("... -> ...") for name in ("zeros", "ones", "full", "empty")},
    **{f"aten.arange.{name}": made(_arange) for name in ("default", "start", "start_step")},
    **{f"aten.{name}": made(_whole) for name in ("scalar_tensor.default", "linspace.default", "eye.default", "eye.m")},
    **{f"aten.{name}.default": made(_whole) for name in ("tril_indices", "triu_indices")},
    "aten.one_hot.default": made("*b -> *b ."),
}
