"""Recurrent layers and cells: samples pass, time and features are whole.

A step in time reads all that the step before made, so neither can be split; the weights are read whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Operand, words
from meshwright.ir.rule import Factor, OpRule


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


RULES: Mapping[str, Declaration] = {
    **{f"aten.{name}.input": declare(_layers) for name in words("lstm gru rnn_tanh rnn_relu")},
    **{f"aten.{name}.default": declare(_cell) for name in words("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")},
}
