"""Operators along a sequence: scaled dot product attention, recurrent layers and cells.

Of attention batch dims and heads pass. Query ``[*b, h, s, d]``, key ``[*b, g, t, d]``, value ``[*b, g, t, e]``, mask
broadcasting to ``[*b, h, s, t]``. With grouped queries (``enable_gqa``) consecutive query heads share a key head, so heads are
split in units of key heads. The sequence and the head dim are whole: a split sequence is not a local call but an algorithm
(ring, all-gather, Ulysses), which a rule states by making ``s`` an internal factor and localizing to that algorithm's operator.

Of recurrent layers samples pass, time and features are whole: a step in time reads all that the step before made, so neither
can be split, and the weights are read whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Operand, Rewritten, argument, broadcast_dims, words
from meshwright.ir.declared.operator import Saves, Work
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


def _read(call: Call, dims: list[Factor | None], state: list[Factor | None]) -> list[list[Factor | None]]:
    """The factors of the input, the states and the weights."""
    states = 1 if isinstance(call["hx"], Operand) else len(call["hx"])
    weights: list[list[Factor | None]] = [[None] * weight.ndim for weight in call.operands[1 + states :]]
    return [dims, *[state] * states, *weights]


def _layers(call: Call) -> OpRule:
    """Input ``[n, t, i]`` or ``[t, n, i]``, states ``[layers, n, h]``."""
    if call["input"].ndim < 3:
        return call.whole()
    dims: list[Factor | None] = ["n", None, None] if call["batch_first"] else [None, "n", None]
    state: list[Factor | None] = [None, "n", None]
    return call.rule(_read(call, dims, state), [dims, *[state] * (len(call.results) - 1)])


def _cell(call: Call) -> OpRule:
    """Input ``[n, i]``, states ``[n, h]``."""
    if call["input"].ndim < 2:
        return call.whole()
    dims: list[Factor | None] = ["n", None]
    return call.rule(_read(call, dims, dims), [dims] * len(call.results))


def _statistics(work: Work) -> float:
    """The log-sum-exp of every row of the query, and where the mask takes a gradient (T5's position bias) the probabilities."""
    rows = math.prod(work.operands[0][:-1])
    masked = len(work.gradients) > 3 and work.gradients[3]
    return rows * 4 + (rows * work.operands[1][-2] * work.reads.itemsize if masked else 0)


attention = partial(declare, cost="attention", saves=Saves.parse("0 1 2 r0", beside=_statistics))

RULES: Mapping[str, Declaration] = {
    "aten.scaled_dot_product_attention.default": attention(_attention, _with_dropout),
    "mw.sdpa": attention(None),
    **{f"aten.{name}.input": declare(_layers) for name in words("lstm gru rnn_tanh rnn_relu")},
    **{f"aten.{name}.default": declare(_cell) for name in words("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")},
}
