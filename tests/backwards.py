"""Models whose gradients are not the derivative of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Round(torch.autograd.Function):
    """Straight through: every operator of the forward has a derivative (zero), so a trace passes through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


rounded = Round.apply


class Reverse(torch.autograd.Function):
    """Gradient reversal, in the newer style."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class Quantize(torch.autograd.Function):
    """A step size that is learned (LSQ), one for all or one for every channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        inside = (((x / step) >= -8) & ((x / step) <= 7)).to(grad.dtype)
        of_step = (((x / step).round() - x / step) * inside + (x / step).clamp(-8, 7).round() * (1 - inside)) * grad
        return grad * inside, of_step.sum() if step.ndim == 0 else of_step.sum(tuple(range(grad.ndim - 1)))


class Linear(torch.autograd.Function):
    """A product whose weight learns twice as fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, 2 * grad.flatten(0, -2).t() @ x.flatten(0, -2), grad.flatten(0, -2).sum(0)


class Larger(torch.autograd.Function):
    """Two results, one without a gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x > y, x, y), x > y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        (larger,) = ctx.saved_tensors
        return grad * 0.5, torch.where(larger, 0, grad)


class Scores(torch.autograd.Function):
    """A softmax with a steeper backward: its last dim is whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True)) * 3


class SignLoss(torch.autograd.Function):
    """A squared error that learns by signs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: Tensor) -> Tensor:
        ctx.save_for_backward(x - wanted)
        return (x - wanted).square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (error,) = ctx.saved_tensors
        return grad * error.sign(), None


class InPlace(torch.autograd.Function):
    """Both directions write into copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :1] = 0
        return y.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:, 1:].mul_(3)
        return grad


class Model(nn.Module):
    """Two linears around ``body(model, x, t)``, which gives the loss."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.step, self.steps = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.rand(8) * 0.1 + 0.05)
        self.body = body

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        return {"loss": self.body(self, x, t)}


def _error(y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(y, t)


def _without_gradient(m: Any, x: Tensor, t: Tensor) -> Tensor:
    with torch.inference_mode():
        gate = m.a(x).sigmoid()
    with torch.no_grad():
        shift = m.a(x).round() - m.a(x).data
    return _error(m.b((m.a(x) + shift) * gate.clone()), t)


class Normed(torch.autograd.Function):
    """A backward of an operator that is asked for some of its gradients alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], weight, None, 1e-5)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, mean, rstd = ctx.saved_tensors
        call = torch.ops.aten.native_layer_norm_backward
        found = call(grad, x, [x.shape[-1]], mean, rstd, weight, None, [True, True, False])
        return found[0] * 0.5, found[1]


CASES: Mapping[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "activations rounded": lambda m, x, t: _error(m.b(rounded(m.a(x), 4.0)), t),
    "weights rounded": lambda m, x, t: _error(m.b(F.linear(x, rounded(m.a.weight, 4.0), m.a.bias)), t),
    "reversed": lambda m, x, t: _error(m.b(Reverse.apply(m.a(x), 0.5)), t),
    "one step": lambda m, x, t: _error(m.b(Quantize.apply(m.a(x), m.step)), t),
    "steps": lambda m, x, t: _error(m.b(Quantize.apply(m.a(x), m.steps)), t),
    "linear": lambda m, x, t: _error(m.b(Linear.apply(x.relu(), m.a.weight, m.a.bias)), t),
    "two results": lambda m, x, t: _error(m.b(Larger.apply(m.a(x), x)[0]) * Larger.apply(m.a(x), x)[1], t),
    "scores": lambda m, x, t: _error(m.b(Scores.apply(m.a(x))), t),
    "loss": lambda m, x, t: SignLoss.apply(m.b(m.a(x).relu()), t) / t.numel(),
    "in place": lambda m, x, t: _error(m.b(InPlace.apply(m.a(x))), t),
    "some gradients alone": lambda m, x, t: _error(m.b(Normed.apply(m.a(x), m.steps)), t),
    "checkpoint": lambda m, x, t: _error(checkpoint(m.b, checkpoint(m.a, m.a(x), use_reentrant=False), use_reentrant=True), t),
    "scores in a checkpoint": lambda m, x, t: _error(
        m.b(checkpoint(lambda h: Scores.apply(m.a(h)), m.b(x), use_reentrant=False)), t),
    "detached": lambda m, x, t: _error(m.b(m.a(x) + (m.a(x).round() - m.a(x)).detach()), t),
    "without gradient": _without_gradient,
    "converted to what it is": lambda m, x, t: _error(m.to(x.device).float().b(m.a.to(x)(x)), t),
}
"""{name: the loss of a model}: all are kept as they are."""


def make(name: str) -> tuple[Model, dict[str, Tensor]]:
    """The named case with its batch."""
    torch.manual_seed(3)
    return Model(CASES[name]), {"x": torch.randn(4, 8), "t": torch.randn(4, 8)}
