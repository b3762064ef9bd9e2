"""Scaled dot product attention: batch dims and heads pass.

Query ``[*b, h, s, d]``, key ``[*b, g, t, d]``, value ``[*b, g, t, e]``, mask broadcasting to ``[*b, h, s, t]``. With grouped
queries (``enable_gqa``) consecutive query heads share a key head, so heads are split in units of key heads. The sequence and
the head dim are whole: a split sequence is not a local call but an algorithm (ring, all-gather, Ulysses), which a rule states
by making ``s`` an internal factor and localizing to that algorithm's operator.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Operand, Rewritten, argument, broadcast_dims
from meshwright.ir.graph import Op
from meshwright.ir.rule import Factor, Local, OpRule


def _attention(call: Call) -> OpRule:
    """Heads are ``h``, with as many units as there are key heads (a single key head serves any split of the query heads)."""
    leading = call.shape[:-2]
    factors: list[Factor | None] = [*(f"b{i}" for i in range(len(leading) - 1)), *["h"] * bool(leading)]
    key = call["key"].shape[:-2]
    shared = bool(leading) and call["enable_gqa"] and 1 < key[-1] < leading[-1]

    def dims(tensor: Operand) -> list[Factor | None]:
        own = broadcast_dims(tensor.shape[:-2], leading, factors)
        if shared and own and tensor.shape[-3] == key[-1]:
            own[-1] = "h"
        return [*own, None, None]

    units: dict[Factor, int] = {"h": key[-1]} if shared else {}
    return call.rule([dims(operand) for operand in call.operands], [dims(call.results[0])], units=units)


def _with_dropout(op: Op, local: Local) -> Rewritten:
    """With dropout it lends the kernel a generator."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments = tuple(argument(op, name) for name in names)
    if not arguments[4]:
        return op.target, op.args, op.kwargs
    return "mw.sdpa", arguments, ()


RULES: Mapping[str, Declaration] = {
    "aten.scaled_dot_product_attention.default": declare(_attention, _with_dropout),
}
