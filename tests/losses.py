"""More models of ``tests.strangers``: losses that are no sum over the batch, layers that look at all of it, and layers that
write while they compute. A body computes [batch, length, width] of [batch, length, width], a loss a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.bodies import B, Body, D, Loss, Parts, T, linear, weight


def ids_of(x: Tensor, count: int = 10) -> Tensor:
    """Whole numbers that follow from an input."""
    return (x.detach().abs() * 5).long().clamp(max=count - 1)[..., 0]


# ---------------------------------------------------------------------------------------------------------------------- losses


def rooted(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    return F.mse_loss(y, t).sqrt()


def dice(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    p, wanted = y.sigmoid(), t.sigmoid()
    return 1 - 2 * (p * wanted).sum() / (p.sum() + wanted.sum() + 1)


def explained(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """One minus R squared."""
    return (y - t).square().sum() / (t - t.mean()).square().sum()


def log_mean_exp(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """The bound of MINE: one term over pairs, one over a shuffled batch."""
    joint, apart = (y * t).sum(-1), (y * t.roll(1, 0)).sum(-1)
    return apart.exp().mean().log() - joint.mean()


def weighted_classes(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    labels = t.argmax(-1).masked_fill(t[..., 0] > 0.5, -100)
    return F.cross_entropy(y.flatten(0, 1), labels.flatten(), torch.tensor([0.2, 1.0, 3.0]).to(y), label_smoothing=0.1)


def masked_mean(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    kept = (t[..., :1] > 0).to(y.dtype)
    return ((y - t).square() * kept).sum() / kept.sum().clamp(min=1)


def by_rows(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Weights over the batch that follow from how hard a sample is."""
    each = (y - t).square().mean((1, 2))
    return (torch.softmax(each.detach() * 3, 0) * each).sum() + each.std() + 0.1 * each.max() + each.median()


def decorrelated(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    z = h.flatten(0, 1)
    z = z - z.mean(0)
    spread = z.t() @ z / len(z) + 0.1 * torch.eye(D).to(z)
    return (F.normalize(z, dim=0).t() @ F.normalize(z, dim=0) - torch.eye(D).to(z)).square().mean() + spread.logdet() * 0.1


def halves(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Two views of a sample, in the two halves of a batch."""
    one, two = h.mean(1).chunk(2)
    return (F.normalize(one, dim=-1) - F.normalize(two, dim=-1)).square().sum() + F.l1_loss(y, t)


def uncertain(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Several tasks, weighed by learned variances."""
    tasks = (F.mse_loss(y, t), F.smooth_l1_loss(y, t, reduction="sum") / len(y), F.huber_loss(y.mean(1), t.mean(1)))
    return sum(  # type: ignore[return-value]
        (task * torch.exp(-s) + s for task, s in zip(tasks, m.logs.unbind(), strict=True)), torch.zeros(()).to(y))


def likelihoods(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    wanted = t.abs()
    return (F.poisson_nll_loss(y, wanted.round(), reduction="mean")
            + F.binary_cross_entropy_with_logits(y, (t > 0).to(y), pos_weight=torch.tensor([1.0, 2.0, 3.0]).to(y))
            + F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2]) + F.soft_margin_loss(y, t.sign().masked_fill(t == 0, 1.0)))


def divergence(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A variational one, with a weight that is warmed up in a buffer."""
    mean, log = h[..., :4], h[..., 4:]
    kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1).mean()
    return (y - t).square().sum((1, 2)).mean() + kl * (m.step / 4).clamp(max=1)


def prior(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.step += 1
    return x


def between_layers(m: Any, x: Tensor) -> Tensor:
    """A loss that a layer leaves in an attribute."""
    m.left = m.more(x).square().mean()
    return x + m.more(x)


def with_left(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    return (y - t).square().mean() + 0.3 * m.left


# ---------------------------------------------------------------------------------------------------------------------- layers


def renormed(m: Any, x: Tensor) -> Tensor:
    """An embedding whose rows are cut to a norm as they are read."""
    return x + m.table(ids_of(x))


def by_frequency(m: Any, x: Tensor) -> Tensor:
    """A row's gradient is divided by how often a batch reads it."""
    return x + m.table(ids_of(x, 4))


def moved_away(m: Any, x: Tensor) -> Tensor:
    """Statistics of one's own, in a buffer that is another tensor after every call."""
    if m.training:
        m.mean = 0.9 * m.mean + 0.1 * x.detach().mean((0, 1))
    return x - m.mean


def whitened(m: Any, x: Tensor) -> Tensor:
    z = x.flatten(0, 1) - x.mean((0, 1))
    values, vectors = torch.linalg.eigh(z.t() @ z / len(z) + torch.eye(D).to(x))
    return (z @ vectors * values.rsqrt() @ vectors.t()).view_as(x)


def over_the_batch(m: Any, x: Tensor) -> Tensor:
    return x * x.softmax(0) + x.cumsum(0) * 0.1 + x.sort(0).values * 0.1 + torch.fft.fft(x, dim=0).real * 0.1


def folded(m: Any, x: Tensor) -> Tensor:
    """Samples that are mixed by views: batch and length as one, in other groups."""
    return m.more(x.reshape(2, -1, D)).reshape(-1, 2 * D).reshape(x.shape) + x.reshape(T, -1, D).transpose(0, 1)


def by_place(m: Any, x: Tensor) -> Tensor:
    """Numbers of samples: a row of a table for each, every second one another way."""
    return x + m.rows[: x.shape[0]].unsqueeze(1) + torch.where(
        (torch.arange(len(x)) % 2 == 0).view(-1, 1, 1), m.more(x), x.sum(0, keepdim=True) / x.shape[0])


def ghosts(m: Any, x: Tensor) -> Tensor:
    """Batch norms of quarters of a batch."""
    return torch.cat([m.norm(part) for part in x.split(2)])


def memory(m: Any, x: Tensor) -> Tensor:
    """Attention to what earlier calls left in a buffer."""
    read = torch.softmax(x @ m.kept.clone().t(), -1) @ m.kept.clone()
    with torch.no_grad():
        m.kept.copy_(torch.cat([m.kept[2:], x.detach().mean(1)[:2]]))
    return x + read


def reentrant(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda h: m.more(h).tanh() * m.mid(h), x, use_reentrant=True)  # type: ignore[no-any-return]


def narrow(m: Any, x: Tensor) -> Tensor:
    """Half precision by hand, and by autocast, in the middle."""
    low = F.linear(x.bfloat16(), m.more.weight.bfloat16(), m.more.bias.bfloat16()).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mid = F.linear(low, m.mid.weight.float())
    with torch.autocast("cpu", enabled=False):
        return x + mid.double() * 0.1 + low.double() * 0.1


def low_ranks(m: Any, x: Tensor) -> Tensor:
    """Adapters on frozen layers, one of them chosen by position."""
    for base, down, up, scale in zip(m.bases, m.downs, m.ups, (0.5, 2.0), strict=True):
        x = base(x) + scale * F.linear(F.linear(x, down), up)
    return x * m.gain[torch.arange(T) % 2].unsqueeze(-1)


def adapters() -> dict[str, Any]:
    return {"bases": nn.ModuleList(nn.Linear(D, D).requires_grad_(False) for _ in range(2)),
            "downs": nn.ParameterList(weight(2, D) for _ in range(2)), "ups": nn.ParameterList(weight(D, 2) for _ in range(2)),
            "gain": nn.Parameter(torch.ones(2))}


def tied_turned(m: Any, x: Tensor) -> Tensor:
    """A weight and its transpose, and a part of it."""
    return F.linear(F.linear(x, m.square).tanh(), m.square.t()) + x @ m.square[:, :1] * m.square[0]


def caught(m: Any, x: Tensor) -> Tensor:
    """What a hook of another module caught."""
    seen: list[Tensor] = []
    handle = m.more.register_forward_hook(lambda module, given, out: seen.append(out * 2))
    x = m.more(x) + x
    handle.remove()
    return x + seen[0].tanh()


def momentum(m: Any, x: Tensor) -> Tensor:
    """A target that follows its model within the forward."""
    with torch.no_grad():
        if m.training:
            for slow, fast in zip(m.target.parameters(), m.more.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        wanted = m.target(x)
    return m.more(x) - wanted * 0.5


def kinds_of_layers(m: Any, x: Tensor) -> Tensor:
    """Layers that are rarely seen: the shapes are [8, 4, 8]."""
    y = m.prelu(m.norm(x.unsqueeze(1)).squeeze(1))
    pooled, at = F.max_pool1d(y, 2, return_indices=True)
    y = F.max_unpool1d(pooled, at, 2) + F.interpolate(y, scale_factor=2.0, mode="nearest")[..., ::2]
    y = F.pad(F.lp_pool1d(F.pad(y, (1, 1), mode="replicate"), 2, 3, 1), (0, 0))
    return y + F.cosine_similarity(x, y, -1).unsqueeze(-1) + m.deep(x.transpose(1, 2)).transpose(1, 2) + F.glu(
        torch.cat([x, y], -1), -1) + F.hardshrink(x) + F.adaptive_avg_pool1d(y, 1) + F.softmin(y, 1)


class Two(torch.autograd.Function):
    """Two results, one of which has no gradient; an option that is a number; a gradient that is cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, power: int, limit: float) -> tuple[Tensor, Tensor]:
        y, signs = x.abs().pow(power) * w, x.sign()
        ctx.save_for_backward(x, w, signs)
        ctx.power, ctx.limit = power, limit
        ctx.mark_non_differentiable(signs)
        return y, signs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, w, signs = ctx.saved_tensors
        inner = (grad * w * ctx.power * x.abs().pow(ctx.power - 1) * signs).clamp(-ctx.limit, ctx.limit)
        return inner, (grad * x.abs().pow(ctx.power)).sum((0, 1)), None, None


def two_results(m: Any, x: Tensor) -> Tensor:
    y, signs = Two.apply(m.more(x), m.steps, 2, 0.01)
    return y * signs


Case = tuple[Parts, Body, Loss | None]


def judged(loss: Loss, parts: Callable[[], Mapping[str, Any]] = dict) -> Case:
    return parts, lambda m, x: x, loss


LOSSES: Mapping[str, Case] = {
    "rooted": judged(rooted), "dice": judged(dice), "explained": judged(explained), "log mean exp": judged(log_mean_exp),
    "weighted classes": judged(weighted_classes), "masked mean": judged(masked_mean), "by rows": judged(by_rows),
    "decorrelated": judged(decorrelated), "halves": judged(halves),
    "uncertain": judged(uncertain, lambda: {"logs": nn.Parameter(torch.zeros(3))}), "likelihoods": judged(likelihoods),
    "divergence": (lambda: {"step": torch.zeros(())}, prior, divergence),
    "left in an attribute": (linear, between_layers, with_left),
    "renormed": (lambda: {"table": nn.Embedding(10, D, max_norm=0.5)}, renormed, None),
    "by frequency": (lambda: {"table": nn.Embedding(4, D, scale_grad_by_freq=True)}, by_frequency, None),
    "sparse": (lambda: {"table": nn.Embedding(10, D, sparse=True)}, renormed, None),
    "padded table": (lambda: {"table": nn.Embedding(10, D, padding_idx=1)}, renormed, None),
    "moved away": (lambda: {"mean": torch.zeros(D)}, moved_away, None), "whitened": (dict, whitened, None),
    "over the batch": (dict, over_the_batch, None), "folded": (lambda: {"more": nn.Linear(D, D)}, folded, None),
    "by place": (lambda: linear() | {"rows": weight(B, D)}, by_place, None),
    "ghosts": (lambda: {"norm": nn.BatchNorm1d(T)}, ghosts, None),
    "memory": (lambda: {"kept": torch.randn(6, D)}, memory, None),
    "reentrant": (linear, reentrant, None), "narrow": (linear, narrow, None), "low ranks": (adapters, low_ranks, None),
    "tied turned": (lambda: {"square": weight(D, D)}, tied_turned, None), "caught": (linear, caught, None),
    "momentum": (lambda: linear() | {"target": nn.Linear(D, D).requires_grad_(False)}, momentum, None),
    "kinds of layers": (lambda: {"prelu": nn.PReLU(T), "norm": nn.LocalResponseNorm(2), "deep": nn.Conv1d(D, D, 3, padding=1,
                        groups=4, padding_mode="circular")}, kinds_of_layers, None),
    "two results": (lambda: linear() | {"steps": weight(D)}, two_results, None),
}
"""As ``tests.strangers.MODELS``."""
