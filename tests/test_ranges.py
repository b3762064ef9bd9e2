"""What whole numbers can be: what is certain is decided before the model runs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.compiler.capture.capture import capture
from meshwright.compiler.capture.ranges import COMPARISONS, Span, holds
from meshwright.ir.graph import Graph
from meshwright.runtime.interpret import run

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SIZE = 4


class Asking(nn.Module):
    """[n, 4] scores and [n] numbers, to what a function makes of them and of a weight."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, SIZE)
        self.function = function

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        return scores * self.function(scores, numbers)


def _best(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(2).indices


def _without(numbers: torch.Tensor, number: int, other: int = 0) -> torch.Tensor:
    return numbers.masked_fill(numbers == number, other)


CERTAIN: tuple[tuple[Function, str], ...] = (
    (lambda s, n: (_best(s) >= SIZE).any(), "ge"), (lambda s, n: (_best(s) < 0).any(), "lt"),
    (lambda s, n: (torch.sort(_best(s).reshape(-1)).values > SIZE - 1).any(), "gt"),
    (lambda s, n: (s.argmax(-1) != SIZE).any(), "ne"), (lambda s, n: (s.argsort(-1)[:, :1] == -1).any(), "eq"),
    (lambda s, n: (s.max(-1).indices.int() <= SIZE - 1).any(), "le"),
    (lambda s, n: (n.remainder(SIZE) >= SIZE).any(), "ge"), (lambda s, n: (n.clamp(0, 3) // 2 >= 2).any(), "ge"),
    (lambda s, n: (torch.full((2,), 3) < SIZE).all(), "lt"), (lambda s, n: (n.to(torch.uint8) < 0).any(), "lt"),
    (lambda s, n: (torch.where(n > 0, _best(s)[:, 0], 7) > 7).any(), "gt"),
    (lambda s, n: (torch.cat([_best(s), s.argmax(-1, keepdim=True)], -1) >= SIZE).any(), "ge"),
    (lambda s, n: (_without(_best(s), 3) > 2).any(), "gt"),
    (lambda s, n: _best(s).clamp(max=SIZE - 1).sum(), "clamp"), (lambda s, n: _best(s).clamp(0).sum(), "clamp"),
    (lambda s, n: s.masked_fill((_best(s) >= SIZE)[:, :1], 7.0), "masked_fill"),
    (lambda s, n: s.masked_fill(~(_best(s) < SIZE)[:, :1], 7.0), "masked_fill"),
    (lambda s, n: s.masked_fill(((_best(s) < 0) & (_best(s) > 1))[:, :1], 7.0), "masked_fill"),
    (lambda s, n: torch.where((_best(s) < SIZE)[:, :1], s, torch.zeros(())), "where"),
    (lambda s, n: torch.where((_best(s) < 0)[:, :1], s.detach(), s[:1]), "where"),
)
OPEN: tuple[tuple[Function, str], ...] = (
    (lambda s, n: (_best(s) >= SIZE - 1).any(), "ge"), (lambda s, n: (_best(s) > 0).any(), "gt"),
    (lambda s, n: (n >= 0).any(), "ge"), (lambda s, n: (n.abs() >= 0).any(), "ge"),  # the least number has no opposite
    (lambda s, n: (torch.stack([s.argmax(-1), n], -1) >= 0).any(), "ge"),
    (lambda s, n: (_without(_best(s), 2) > 2).any(), "gt"), (lambda s, n: (_without(_best(s), 3, 5) > 2).any(), "gt"),
    (lambda s, n: (_best(s).masked_fill(_best(s + 1) == 3, 0) > 2).any(), "gt"),  # of another choice
    (lambda s, n: (_best(s) + n.max() >= 0).any(), "ge"), (lambda s, n: (s * s >= 0).any(), "ge"),  # not if it is nan
    (lambda s, n: (n.remainder(-SIZE) >= 0).any(), "ge"), (lambda s, n: _best(s).clamp(max=SIZE - 2).sum(), "clamp"),
    (lambda s, n: (n.clamp(0, 300).to(torch.int8) >= 0).any(), "ge"),  # 300 is 44 there, and 200 is -56
    (lambda s, n: (n.to(torch.int8) // 300 <= 0).any(), "le"),  # 300 is 44 there
    (lambda s, n: (_best(s).to(torch.int8) == torch.tensor(256)).any(), "eq"),
    (lambda s, n: s.masked_fill((_best(s) >= 1)[:, :1], 7.0), "masked_fill"),
    (lambda s, n: torch.where((_best(s) < SIZE)[:, :1], s.detach(), s), "where"),  # gradients of zero, not none
    (lambda s, n: torch.where(torch.ones(6, SIZE, dtype=torch.bool), s.detach(), s), "where"),
)


def _captured(function: Function) -> tuple[Asking, tuple[torch.Tensor, torch.Tensor], Graph]:
    torch.manual_seed(0)
    model, given = Asking(function), (torch.randn(6, SIZE), torch.tensor([-200, -3, 0, 3, 200, 300]))
    return model, given, capture(model, given, {})


@pytest.mark.parametrize(("function", "kind"), [*CERTAIN, *OPEN])
def test_what_is_certain_is_decided_and_nothing_else_is(function: Function, kind: str) -> None:
    model, inputs, graph = _captured(function)
    asked = any(op.target.startswith(f"aten.{kind}.") for op in graph.ops)
    assert asked == ((function, kind) in OPEN)
    held = dict(model.named_parameters())
    (output,) = graph.outputs
    found = run(graph, {param.value: held[param.fqn] for param in graph.params} | dict(zip(graph.inputs, inputs, strict=True)))
    torch.testing.assert_close(found[output], model(*inputs))


WHOLE = st.integers(-3, 3)


@given(WHOLE, WHOLE, WHOLE, WHOLE, st.sampled_from(sorted(COMPARISONS)))
def test_a_comparison_holds_if_it_does_of_all_numbers(a: int, b: int, c: int, d: int, comparison: str) -> None:
    left, right = Span(min(a, b), max(a, b)), Span(min(c, d), max(c, d))
    outcomes = {bool(getattr(torch, comparison)(torch.tensor(x), y))
                for x in range(left.low, left.high + 1) for y in range(right.low, right.high + 1)}
    assert holds(comparison, left, right) == (outcomes.pop() if len(outcomes) == 1 else None)
