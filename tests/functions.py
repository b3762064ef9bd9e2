"""More models of ``tests.strangers``: backwards of one's own that look at sizes, norms and modes; draws that decide nothing;
weights and buffers that share memory, are made of each other, or of another kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrize

Parts = Callable[[], Mapping[str, Any]]
Case = tuple[Parts, Callable[[Any, Tensor], Tensor], Callable[..., Tensor] | None]
D, T, B = 8, 4, 8


def weight(*shape: int) -> nn.Parameter:
    """Drawn."""
    return nn.Parameter(torch.randn(shape) * 0.3)


# ------------------------------------------------------------------------------------------------------ backwards of one's own


class MeanOfBatch(torch.autograd.Function):
    """A backward that divides by the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 16.0 / grad.shape[0]


class Clipped(torch.autograd.Function):
    """Rows of the gradient are cut to a norm; what is cut off goes to a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x + w.sum() * 0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        norm = grad.norm(dim=-1, keepdim=True)
        kept = grad * (ctx.most / norm.clamp(min=ctx.most))
        return kept, (grad - kept).sum((0, 1)), None


class Again(torch.autograd.Function):
    """A block that keeps its input alone, and differentiates itself in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = (x @ w).tanh()
        one, two = torch.autograd.grad(y, (x, w), grad)
        return one, two


class Parted(torch.autograd.Function):
    """Several results, one without gradient; a backward in closed form from results that were saved."""

    @staticmethod
    def forward(x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        y = (x / temperature).softmax(-1)
        return y, y.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])
        ctx.temperature = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return 0.5 * (y * (grad - (grad * y).sum(-1, keepdim=True))) / ctx.temperature, None


class Centre(torch.autograd.Function):
    """A gradient without its mean over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean((0, 1))


def parted(m: Any, x: Tensor) -> Tensor:
    y, at = Parted.apply(m.more(x), 0.7)
    return x + y + F.one_hot(at, D).to(x.dtype) * 0.1  # type: ignore[no-any-return]


def straight(m: Any, x: Tensor) -> Tensor:
    """Without a Function: what is added is not differentiated, and half of it is."""
    y = m.more(x)
    hard = (y > 0).to(y.dtype)
    soft = y.sigmoid()
    z = hard + soft - soft.detach()
    return x + torch.where(y > 1, z, z.detach() + 0.5 * (soft - soft.detach()))


# ------------------------------------------------------------------------------------------------ draws that decide nothing


def permuted(m: Any, x: Tensor) -> Tensor:
    """Samples, positions and features are mixed up, and put back."""
    for dim in range(3):
        order = torch.randperm(x.shape[dim])
        x = x.index_select(dim, order)
        x = m.more(x) if dim < 2 else x
        x = x.index_select(dim, order.argsort())
    return x


def masked_as_mae(m: Any, x: Tensor) -> Tensor:
    """Positions in a drawn order go through a layer, and back to their places."""
    order = torch.rand(x.shape[:2]).argsort(1)
    kept = torch.gather(x, 1, order.unsqueeze(-1).expand_as(x))
    return torch.gather(m.more(kept).tanh(), 1, order.argsort(1).unsqueeze(-1).expand_as(x))


def certain(m: Any, x: Tensor) -> Tensor:
    """Of what is certain: hard Gumbel softmax of logits far apart, a multinomial with one choice, nobody's events."""
    far = (m.more(x).detach() > 0).to(x.dtype) * 1e4
    pair = torch.stack([far, 1e4 - far], -1)
    x = x * F.gumbel_softmax(pair, hard=True)[..., 0]
    one = torch.multinomial(F.one_hot(torch.arange(B) % 3, 3).to(x.dtype), 1)
    x = x + one.view(-1, 1, 1) * 0.1 + torch.poisson(torch.zeros_like(x)) + torch.binomial(torch.ones(D), torch.ones(D)).to(x)
    x = x * torch.empty(D).normal_(1.0, 0.0).to(x)
    return x + torch.distributions.Normal(x, 1e-300, validate_args=False).rsample() * 0.1


def dropped_for_nobody(m: Any, x: Tensor) -> Tensor:
    x = F.dropout1d(x, 0.0, m.training) + F.feature_alpha_dropout(x, 0.0, m.training)
    return nn.Dropout2d(0.0)(x.unsqueeze(1)).squeeze(1) + m.more(F.alpha_dropout(x, 0.0, m.training))


# --------------------------------------------------------------------------------------------------------- weights and buffers


class Doubled(nn.Module):
    """A parametrization with a weight of its own."""

    def __init__(self, gain: nn.Parameter) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def shared_gain() -> Mapping[str, Any]:
    """Two layers by one gain, stacked parametrizations on one of them."""
    gain, one, two = nn.Parameter(torch.full((D, 1), 1.5)), nn.Linear(D, D), nn.Linear(D, D)
    for layer in (one, two, two):
        parametrize.register_parametrization(layer, "weight", Doubled(gain))
    return {"one": one, "two": two}


def swapped() -> Mapping[str, Any]:
    """Weights that changed places."""
    one, two = nn.Linear(D, D), nn.Linear(D, D)
    torch.utils.swap_tensors(one.weight, two.weight)
    return {"one": one, "two": two}


def converted() -> Mapping[str, Any]:
    """Weights that ``to`` swapped, not written into."""
    old = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return {"one": nn.Linear(D, D).half().float(), "two": nn.Linear(D, D).double()}
    finally:
        torch.__future__.set_swap_module_params_on_conversion(old)


class Tagged(nn.Parameter):
    """A parameter of a class of its own."""


def tagged() -> Mapping[str, Any]:
    more = nn.Linear(D, D)
    more.weight = Tagged(more.weight.detach())
    more.weight.note = "of mine"  # type: ignore[attr-defined]
    return {"more": more}


def rebuilt_each_time(m: Any, x: Tensor) -> Tensor:
    """A buffer that is another tensor after every call of training."""
    if m.training:
        m.mean = 0.9 * m.mean + 0.1 * x.detach().mean((0, 1))
    return m.more(x - m.mean)


def linear() -> Mapping[str, Any]:
    return {"more": nn.Linear(D, D)}


def two(m: Any, x: Tensor) -> Tensor:
    return m.two(m.one(x).tanh())  # type: ignore[no-any-return]


FUNCTIONS: Mapping[str, Case] = {
    "mean of a batch": (linear, lambda m, x: m.more(MeanOfBatch.apply(m.more(x))), None),
    "clipped rows": (lambda: {"more": nn.Linear(D, D), "rest": weight(D)},
                     lambda m, x: m.more(Clipped.apply(m.more(x), m.rest, 0.001)), None),
    "again": (lambda: {"w": weight(D, D)}, lambda m, x: x + Again.apply(x, m.w), None),
    "parted": (linear, parted, None), "centred gradient": (linear, lambda m, x: Centre.apply(m.more(x)), None),
    "straight": (linear, straight, None),
    "permuted": (linear, permuted, None), "masked as MAE": (linear, masked_as_mae, None), "certain": (linear, certain, None),
    "dropped for nobody": (linear, dropped_for_nobody, None),
    "one gain": (shared_gain, two, None),
    "swapped": (swapped, two, None), "converted": (converted, two, None), "tagged": (tagged, lambda m, x: m.more(x), None),
    "rebuilt each time": (lambda: linear() | {"mean": torch.zeros(D)}, rebuilt_each_time, None),
}
"""As ``tests.strangers.MODELS``."""
