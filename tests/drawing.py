"""A model that draws in many ways and shows what it drew, trained in parallel beside a single process that is given that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from itertools import combinations
from typing import Any
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.api import autoparallel
from meshwright.runtime.checks.elsewhere import Elsewhere
from tests import architectures, vision
from tests.equality import EPS, captured_once, compare

WIDTH, LENGTH, BATCH = 8, 4, 8


@torch.library.custom_op("meshwright_tests::shaken", mutates_args=())
def shaken(x: Tensor) -> Tensor:
    """Of another library, without a rule, and silent about drawing."""
    return x + torch.randn_like(x) * 0.1


shaken.register_fake(lambda x: torch.empty_like(x))
shaken.register_autograd(lambda ctx, dy: dy, setup_context=lambda ctx, inputs, output: None)

Ask = Callable[[Callable[[], Tensor]], Tensor]
Way = Callable[["Layer", Tensor, Ask], Tensor]
"""(layer, hidden, ask) -> hidden; ``ask(make)`` is what ``make()`` draws, or what was drawn elsewhere in its place."""


def _ratio(function: Callable[[Tensor], Tensor]) -> Way:
    """Of an operator that scales what it reads."""
    def way(layer: Layer, h: Tensor, ask: Ask) -> Tensor:
        h = torch.where(h.abs() < 1e-2, torch.full_like(h, 0.5), h)
        if layer.given:
            return h * ask(lambda: h)
        y = function(h)
        ask(lambda: y / h)
        return y

    return way


def _row(h: Tensor) -> tuple[int, ...]:
    return (h.shape[0], *(1,) * (h.ndim - 1))


def _attention(layer: Layer, h: Tensor, ask: Ask) -> Tensor:
    """Dropout of probabilities, shown by values that have a column of their own for every key: what comes out there are the
    probabilities that were kept."""
    q, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (layer.inside, layer.out))
    width, length = v.shape[-1], v.shape[-2]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    p = (q @ q.transpose(-1, -2) * width**-0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    if layer.given:
        y = (p * ask(lambda: p)) @ v
    else:
        every = torch.cat([v, torch.eye(length, dtype=v.dtype).expand(*v.shape[:-1], length)], -1)
        y = F.scaled_dot_product_attention(q, q, every, dropout_p=0.4, is_causal=True)
        ask(lambda: torch.where(y[..., width:] > p / 2, 1 / 0.6, 0.0).to(y.dtype))
        y = y[..., :width]
    return h + y.transpose(1, 2).flatten(2)


def _gumbel(layer: Layer, h: Tensor, ask: Ask) -> Tensor:
    """What is drawn is what stands between the logarithm of the result and the logits."""
    logits = layer.inside(h)
    if layer.given:
        return h + (logits + ask(lambda: h)).softmax(-1)
    y = F.gumbel_softmax(logits)
    ask(lambda: y.log() - logits)
    return h + y


def _mixed_up(layer: Layer, h: Tensor, ask: Ask) -> Tensor:
    """Mixup of hidden states: partners and shares are drawn."""
    partner = ask(lambda: torch.randperm(BATCH))
    share = ask(lambda: torch.distributions.Beta(2.0, 2.0, validate_args=False).sample((BATCH, 1, 1)))
    return h * share + h[partner] * (1 - share)


def _shuffled(layer: Layer, h: Tensor, ask: Ask) -> Tensor:
    """As masked autoencoders have it."""
    order = ask(lambda: torch.rand(h.shape[:2]).argsort(1)).unsqueeze(-1).expand_as(h)
    kept = layer.out(torch.gather(h, 1, order)[:, : LENGTH // 2])
    rest = layer.gate.expand(h.shape[0], LENGTH - LENGTH // 2, WIDTH)
    return h + torch.gather(torch.cat([kept, rest], 1), 1, order.argsort(1))


def _reparametrized(layer: Layer, h: Tensor, ask: Ask) -> Tensor:
    """A sample of a distribution whose mean and width are learned."""
    mean, width = layer.out(h), layer.gate.exp()
    if layer.given:
        return mean + width * ask(lambda: h)
    y = torch.distributions.Normal(mean, width, validate_args=False).rsample()
    ask(lambda: (y - mean) / width)
    return y


WAYS: Mapping[str, Way] = {
    "attention": _attention,
    "bernoulli": lambda layer, h, ask: h * ask(lambda: torch.bernoulli(torch.full_like(h, 0.7))),
    "bernoulli of data": lambda layer, h, ask: h * ask(lambda: torch.bernoulli(h.detach().sigmoid())),
    "bernoulli in place": lambda layer, h, ask: h * ask(lambda: torch.empty_like(h).bernoulli_(h.detach().sigmoid())),
    "drop path, timm": lambda layer, h, ask: h + layer.out(h) * ask(lambda: h.new_empty(_row(h)).bernoulli_(0.7)).div(0.7),
    "drop path, transformers": lambda layer, h, ask: (
        h + layer.out(h).div(0.7) * ask(lambda: (0.7 + torch.rand(_row(h), dtype=h.dtype, device=h.device)).floor_())
    ),
    "stochastic depth, torchvision": lambda layer, h, ask: (
        h + layer.out(h) * ask(lambda: torch.empty(_row(h), dtype=h.dtype).bernoulli_(0.7).div_(0.7))
    ),
    "one mask for all samples": lambda layer, h, ask: h * ask(lambda: torch.rand(WIDTH)),
    "one learned mask for all samples": lambda layer, h, ask: h * ask(lambda: torch.bernoulli(layer.gate.sigmoid())),
    "one number": lambda layer, h, ask: h * ask(lambda: torch.rand([])),
    "randn_like": lambda layer, h, ask: h + ask(lambda: torch.randn_like(h)),
    "rand_like": lambda layer, h, ask: h + ask(lambda: torch.rand_like(h)),
    "normal": lambda layer, h, ask: h + ask(lambda: torch.normal(torch.zeros_like(h), 0.3)),
    "uniform in place": lambda layer, h, ask: h + ask(lambda: torch.empty_like(h).uniform_(-1, 1)),
    "normal in place": lambda layer, h, ask: h + ask(lambda: h.detach().clone().normal_()),
    "gumbel": lambda layer, h, ask: (h + ask(lambda: -torch.empty_like(h).exponential_().log())).softmax(-1) * h,
    "randint": lambda layer, h, ask: h * ask(lambda: torch.randint(1, 3, (WIDTH,))),
    "randint_like": lambda layer, h, ask: h * ask(lambda: torch.randint_like(h, 1, 3) + torch.randint_like(h, 2)),
    "randperm": lambda layer, h, ask: h[..., ask(lambda: torch.randperm(WIDTH))],
    "multinomial": lambda layer, h, ask: (
        h * ask(lambda: torch.multinomial(h.detach()[:, 0].softmax(-1), 2)).sum(-1).view(_row(h))
    ),
    "poisson": lambda layer, h, ask: h * ask(lambda: torch.poisson(h.detach().exp().clamp(max=4))),
    "dropout": _ratio(lambda h: F.dropout(h, 0.4)),
    "dropout in place": _ratio(lambda h: F.dropout(h * 1, 0.4, inplace=True)),
    "native dropout": lambda layer, h, ask: h * ask(lambda: torch.native_dropout(torch.ones_like(h), 0.4, True)[1].float()),
    "rrelu": _ratio(lambda h: F.rrelu(h, training=True)),
    "feature dropout": _ratio(lambda h: F.dropout1d(h, 0.5)),
    "alpha dropout": lambda layer, h, ask: h * ask(lambda: F.alpha_dropout(torch.ones_like(h), 0.5, True)),
    "gumbel softmax": _gumbel, "mixed up": _mixed_up, "shuffled positions": _shuffled, "reparametrized": _reparametrized,
    "gamma": lambda layer, h, ask: h * ask(
        lambda: torch.distributions.Gamma(h.detach().sigmoid() + 0.5, 1.0, validate_args=False).sample()),
    "geometric, cauchy": lambda layer, h, ask: (
        h + ask(lambda: torch.empty_like(h).geometric_(0.5)) * 0.1 + ask(lambda: torch.empty_like(h).cauchy_()).atan()),
    "log normal": lambda layer, h, ask: h * ask(lambda: torch.empty_like(h).log_normal_(0.0, 0.3)),
    "truncated normal by its inverse": lambda layer, h, ask: h * ask(
        lambda: torch.empty_like(h).uniform_(-0.5, 0.9).erfinv_().mul_(2**0.5).add_(0.3).clamp_(-0.6, 2.0)),
    "random in place": lambda layer, h, ask: h * ask(lambda: torch.empty(WIDTH).random_(1, 4)),
    "binomial": lambda layer, h, ask: h * ask(lambda: torch.binomial(torch.full_like(h, 3.0), h.detach().sigmoid())),
    "some of the samples": lambda layer, h, ask: torch.where(
        ask(lambda: torch.rand(BATCH).argsort()).lt(BATCH // 2).view(_row(h)), h, h.mean(0, keepdim=True)),
    "unknown operator": lambda layer, h, ask: h + ask(lambda: (shaken(h) - h).detach()),
}


class Layer(nn.Module):
    """A mixing of features, and some of the ways to draw. ``given``: whether the numbers come from outside."""

    def __init__(self, ways: Sequence[str]) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.ways, self.given = ways, False

    def forward(self, h: Tensor, ask: Ask) -> Tensor:
        for name in self.ways:
            h = WAYS[name](self, h, ask)
        return h + self.out(F.gelu(self.inside(h)))


class Drawing(nn.Module):
    """Layers; what they drew is among the outputs."""

    def __init__(self, ways: Sequence[str], layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(ways) for _ in range(layers))

    def forward(self, x: Tensor, given: Sequence[Tensor] | None = None) -> dict[str, Any]:
        drawn: list[Tensor] = []

        def ask(make: Callable[[], Tensor]) -> Tensor:
            drawn.append(make() if given is None else given[len(drawn)])
            return drawn[-1]

        for layer in self.layers:
            layer.given = given is not None
            x = layer(x, ask)
        return {"loss": x.square().mean(), "drawn": [tensor.detach() for tensor in drawn]}


def whole(tensor: Any) -> Tensor | None:
    """An output as the single process has it; None where another stage of a pipeline has it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else None if isinstance(tensor, Elsewhere) else tensor


_ASK: ContextVar[Ask] = ContextVar("ask")


class DropPath(nn.Module):
    """As that of ``transformers``, of an ``ask`` that the model around it sets."""

    def forward(self, x: Tensor) -> Tensor:
        return x * _ASK.get()(lambda: (0.7 + torch.rand(_row(x), dtype=x.dtype)).floor_()) / 0.7 if self.training else x


class Shown(nn.Module):
    """A published model that shows what its dropouts, attentions and drop paths drew: the functions that all of them call
    are replaced while it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in [*model.modules()]:
            for name, child in [*module.named_children()]:
                if type(child).__name__.endswith("DropPath"):
                    setattr(module, name, DropPath())

    def forward(self, x: Mapping[str, Tensor], given: Sequence[Tensor] | None = None) -> dict[str, Any]:
        drawn: list[Tensor] = []
        inside: list[float] = []
        dropout, attention = F.dropout, F.scaled_dot_product_attention

        def ask(make: Callable[[], Tensor]) -> Tensor:
            drawn.append(make() if given is None else given[len(drawn)])
            return drawn[-1]

        def dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if inside:  # torch's own hands itself on by its name
                return dropout(x, p)
            if not training or p == 0:
                return x
            x = torch.where(x == 0, torch.full_like(x, 0.5), x)  # of a zero nobody sees whether it was kept
            if given is not None:
                return x * ask(lambda: x)
            inside.append(p)
            y = dropout(x, p)
            inside.clear()
            ask(lambda: (y != 0).to(x.dtype) / (1 - p))
            return y

        def attended(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                     is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
            if not dropout_p:
                return attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
            width, length = v.shape[-1], v.shape[-2]
            if given is None:
                every = torch.cat([v, torch.eye(length, dtype=v.dtype).expand(*v.shape[:-1], length)], -1)
                y = attention(q, k, every, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
                ask(lambda: (y[..., width:] > 0).to(v.dtype) / (1 - dropout_p))
                return y[..., :width]
            eye = torch.eye(length, dtype=v.dtype).expand(*v.shape[:-1], length)
            p = attention(q, k, eye, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa) * ask(lambda: q)
            return p @ v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)

        outer = _ASK.set(ask)
        try:
            with mock.patch.object(F, "dropout", dropped), mock.patch.object(F, "scaled_dot_product_attention", attended):
                return {"loss": self.model(**x)["loss"], "drawn": [tensor.detach() for tensor in drawn]}
        finally:
            _ASK.reset(outer)


def published(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of ``transformers`` with dropout and drop path, away from zeros at which rounding decides, and a batch."""
    with mock.patch.object(vision, "BATCH", BATCH), mock.patch.object(architectures, "B", BATCH):
        model, batch = vision.make(name, drop=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return Shown(model).train(), batch


def trained(
    rank: int, ways: Sequence[str] | str, cases: Sequence[Mapping[str, Any]], seed: int = 5, layers: int = 2
) -> tuple[list[str], list[Any]]:
    """(what differs from a single process that is given the same numbers; the numbers of the first step of each case), of a
    model that draws in these ways, or of the published one of this name."""
    torch.manual_seed(3)
    model: nn.Module
    x: Any
    model, x = published(ways) if isinstance(ways, str) else (Drawing(ways, layers), torch.randn(BATCH, LENGTH, WIDTH))
    problems, numbers = [], []
    for pins in cases:
        single = copy.deepcopy(model)
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with captured_once(f"drawing {crc32(repr((ways, layers)).encode())}"):
            parallel = autoparallel(model, mesh, ((x,), {}), pins=dict(pins), progress=False)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=EPS) for m in (single, parallel)]
        steps = []
        for _ in range(2):
            found = parallel(x)
            mine = [whole(tensor) for tensor in found["drawn"]]
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            steps.append([next(t for t in tensors if t is not None) for tensors in zip(*everyone, strict=True)])
            apart = [i for i, t in enumerate(mine) if t is not None and not torch.equal(t, steps[-1][i])]
            problems += [f"{pins}: ranks have other numbers for draw {i}" for i in apart]
            wanted = single(x, steps[-1])
            for output, optimizer in zip((wanted, found), optimizers, strict=True):
                output["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            if not torch.allclose(found["loss"].detach(), wanted["loss"].detach(), rtol=1e-4):
                problems.append(f"{pins}: loss {float(found['loss'])} instead of {float(wanted['loss'])}")
        same = [i for i, (a, b) in enumerate(zip(*steps, strict=True)) if torch.equal(a, b) and a.numel() > 16]
        problems += [f"{pins}: draw {i} is the same in two steps" for i in same]
        rows = [(i, t.chunk(4)) for i, t in enumerate(steps[0]) if t.ndim and t.shape[0] == BATCH and t.numel() > 64]
        twins = [i for i, pieces in rows if any(torch.equal(a, b) for a, b in combinations(pieces, 2))]
        problems += [f"{pins}: some samples of draw {i} have the same numbers" for i in twins]
        state = parallel.full_state_dict()
        problems += [f"{pins}: {line}" for line in (compare(state, single.state_dict()) if rank == 0 else [])]
        numbers.append(steps[0])
    return problems, numbers
