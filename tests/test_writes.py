"""In-place operators of a forward: replaced where that is plain, by torch's second trace elsewhere; equal either way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from meshwright.compiler.capture.capture import capture
from meshwright.runtime.interpret import run
from tests.test_capture import equal


class Body(nn.Module):
    """A forward with a parameter before and behind."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.body = nn.Parameter(torch.linspace(0.5, 1.5, 6)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale) * self.scale


def _pieces(h: Tensor) -> Tensor:
    out = h.new_empty(4, 7)
    out[..., :2].copy_(h[..., 4:])
    out[..., 2:6] = h[..., :4]
    out[1:3, 6] = h[1:3, 0]
    out[:1, 6] = 1
    out[3:, 6:].fill_(2)
    return out[..., 1:]


def _read_before(h: Tensor) -> Tensor:
    made = h.sin()
    total = made.sum(-1, keepdim=True)
    made /= total
    return made.mul_(2).add_(total)


def _chosen(h: Tensor) -> Tensor:
    weights, ids = torch.topk(h.sigmoid(), 3, -1)
    weights /= weights.sum(-1, keepdim=True)
    return torch.zeros_like(h).scatter_(1, ids, weights)


def _inverse(h: Tensor) -> Tensor:
    order = h.flatten().argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return h.flatten()[order].mul(2)[back].view_as(h)


def _view_first(h: Tensor) -> Tensor:
    made = h.cos()
    part = made[:, :3]
    made.mul_(2)
    return torch.cat([part, made[:, 3:]], 1)  # the view sees the write


def _view_of_a_view(h: Tensor) -> Tensor:
    made = h.cos()
    part = made[:, :4]
    part[1:3] *= 3
    return made + part.sum()


def _result_is_a_view(h: Tensor) -> Tensor:
    made = h.cos()
    part = made[:, :4].mul_(2)
    made.add_(1)
    return made + part.sum(1, keepdim=True)


def _reshaped(h: Tensor) -> Tensor:
    made = h.cos()
    made.view(-1).add_(1)
    return made


def _same_output_twice(h: Tensor) -> Tensor:
    first, second = h.sin(), h.cos()
    first.copy_(second)
    second.zero_()
    return first + second


def _cast(h: Tensor) -> Tensor:
    low = h.to(torch.float64).sin()
    made = h.cos()
    made += low  # keeps its dtype
    return made


PLAIN = {"pieces": _pieces, "read before": _read_before, "chosen": _chosen, "inverse": _inverse, "two": _same_output_twice}
OTHERS = {"view first": _view_first, "view of a view": _view_of_a_view, "result is a view": _result_is_a_view,
          "reshaped": _reshaped, "cast": _cast, "linear": lambda h: nn.functional.linear(h, torch.eye(6)).relu_()}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, whole = [], ExportedProgram.run_decompositions
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda *args: traces.append(1) or whole(*args))
    torch.manual_seed(0)
    graph = equal(Body({**PLAIN, **OTHERS}[name]), (torch.rand(4, 6),))
    assert not traces or name in OTHERS, "torch traced it again"
    assert not any(op.target.split(".")[1].endswith("_") for op in graph.ops)


def _operand(h: Tensor) -> Tensor:
    made = h.sin()
    product = made * h
    made.add_(1)
    return product


SPOILED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "result": (lambda h: h.exp().add_(1), lambda h: h.exp() + 1), "operand": (_operand, lambda h: h.sin() * h),
}
"""What writes into a value that torch has kept for its backward, and the same without a write."""


@pytest.mark.parametrize("name", SPOILED)
def test_writes_that_spoil_torchs_backward(name: str) -> None:
    """One process raises; a graph, which writes into nothing, has the gradient of what was read."""
    (writes, plain), x = (Body(body) for body in SPOILED[name]), torch.rand(4, 6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        writes(x).sum().backward()
    writes.zero_grad()
    graph = capture(writes, (x,), {})
    values = run(graph, {graph.params[0].value: writes.scale, graph.inputs[0]: x})
    (made,) = (values[name] for name in graph.outputs)
    expected = plain(x)
    torch.testing.assert_close(made, expected)
    made.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(writes.scale.grad, plain.scale.grad)
