"""More models of ``tests.strangers``: losses that rank, sort, match and weigh the samples of a batch, some by running values. A
loss computes a number of (model, output, target, what went into the last layers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bodies import B, Body, D, Loss, Parts, T, weight

Case = tuple[Parts, Body, Loss | None]


def coupled(m: Any, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    log, shift = m.net(a).chunk(2, -1)
    m.logdet = log.tanh().sum((1, 2)) + T * torch.linalg.slogdet(m.mix).logabsdet
    return torch.cat([a, b * log.tanh().exp() + shift], -1) @ m.mix


def flowing(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    return (0.5 * h.square().sum((1, 2)) - m.logdet).mean() / D + F.mse_loss(y, t)


def supervised_contrast(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Both views of all samples against all, with as many positives as a label has."""
    z = F.normalize(torch.cat([h.mean(1), m.mid(h).mean(1)]), dim=-1)
    kind = t.mean(1).argmax(-1).repeat(2)
    own = torch.eye(2 * B, dtype=torch.bool)
    logits = (z @ z.t() / 0.3).masked_fill(own, float("-inf"))
    same = (kind.unsqueeze(0) == kind.unsqueeze(1)) & ~own
    p = logits.log_softmax(-1).masked_fill(own, 0)
    return -((p * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def sigmoid_pairs(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """SigLIP's: every pair of samples is a decision, of a learned temperature and a learned bias."""
    a, b = F.normalize(h.mean(1), dim=-1), F.normalize(m.mid(h).mean(1), dim=-1)
    logits = a @ b.t() * m.scale.exp() + m.shift
    return -F.logsigmoid(logits * (2 * torch.eye(B, dtype=y.dtype) - 1)).sum(-1).mean() + 0.1 * F.mse_loss(y, t)


def variance_and_covariance(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """VICReg's: features vary, and no two alike."""
    a = h.mean(1) - h.mean((0, 1))
    off = (a.T @ a / (B - 1)).fill_diagonal_(0).square().sum() / D
    return F.relu(1 - (a.var(0) + 1e-4).sqrt()).mean() + off + F.mse_loss(y, t)


def tempered_pairs(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """The temperature itself divides, and is read again by what is added."""
    z = F.normalize(h.mean(1), dim=-1)
    return F.cross_entropy(z @ z.roll(1, 1).t() / m.scale, torch.arange(B)) + 0.1 * m.scale.log().abs() + 0.1 * F.mse_loss(y, t)


def angular(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A margin on the angle to the own class."""
    cos = F.linear(F.normalize(h.flatten(0, 1), dim=-1), F.normalize(m.proxies, dim=-1)).clamp(-0.999, 0.999)
    labels = t.argmax(-1).flatten()
    own = torch.cos(torch.acos(cos.gather(1, labels.unsqueeze(1))) + 0.2)
    return F.cross_entropy(cos.scatter(1, labels.unsqueeze(1), own) * 8, labels) + 0.1 * F.mse_loss(y, t)


def centred_teacher(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A teacher that follows its student, whose outputs are centred by a running mean over batches."""
    with torch.no_grad():
        if m.training:
            m.slow.lerp_(m.mid.weight, 0.1)
        out = F.linear(h.roll(1, 1), m.slow)
        wanted = ((out - m.centre) / 0.5).softmax(-1)
        if m.training:
            m.centre.lerp_(out.mean((0, 1)), 0.1)
    return -(wanted * m.mid(h).log_softmax(-1)).sum(-1).mean() + 0.1 * F.mse_loss(y, t)


def hazards(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Cox: who is still there, in the order of the times of a batch."""
    order = t.mean((1, 2)).argsort(descending=True)
    risk, seen = y.mean((1, 2))[order], (t[:, 0, 0] > 0).to(y.dtype)[order]
    return -((risk - risk.logcumsumexp(0)) * seen).sum() / seen.sum().clamp(min=1)


def lovasz(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Errors of all positions of all samples, sorted."""
    labels = (t.flatten() > 0).to(y.dtype)
    errors, order = (1 - y.flatten() * (2 * labels - 1)).sort(descending=True)
    wanted = labels[order]
    union = wanted.sum() + (1 - wanted).cumsum(0)
    jaccard = 1 - (wanted.sum() - wanted.cumsum(0)) / union
    return F.relu(errors) @ torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])


def discrepancy(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Of two distributions, by kernels whose width is the median of all distances."""
    z = torch.cat([y.flatten(1), t.flatten(1)])
    apart = torch.cdist(z, z).square()
    kernel = sum((-apart / (apart.detach().median() * scale + 1e-6)).exp() for scale in (0.5, 1.0, 2.0))
    return kernel[:B, :B].mean() + kernel[B:, B:].mean() - 2 * kernel[:B, B:].mean()  # type: ignore


def robust_groups(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Groups weighed by how badly they did so far."""
    hot = F.one_hot(t[:, 0].argmax(-1), 3).to(y.dtype)
    each = (y - t).square().mean((1, 2))
    groups = hot.t() @ each / hot.sum(0).clamp(min=1)
    weights = m.shares * (0.5 * groups.detach()).exp()
    weights = weights / weights.sum()
    if m.training:
        m.shares.copy_(weights)
    return groups @ weights


def by_class(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A mean over the classes that are there, of means over their positions; shares by counts."""
    labels = t.argmax(-1).flatten()
    each = F.cross_entropy(y.flatten(0, 1), labels, reduction="none")
    count = F.one_hot(labels, 3).sum(0).to(y.dtype)
    sums = torch.zeros(3, dtype=y.dtype).index_add(0, labels, each)
    there = count > 0
    return (sums / count.clamp(min=1)).sum() / there.sum() + (each * (1 / count)[labels]).sum() * 0.1


def hard_ones(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    each = (y - t).square().flatten()
    largest = each.topk(int(0.7 * each.numel())).values
    return largest.mean() + torch.where(each > each.detach().mean(), each, 0).sum() / (each > each.mean()).sum()


def quantiles(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """The middle of the batch by quantiles, and what lies outside."""
    low, high = torch.quantile(h.detach(), torch.tensor([0.1, 0.9], dtype=y.dtype))
    return (y - t).abs().quantile(0.5) + h.clamp(low, high).square().mean() + torch.quantile(y, 0.3, dim=0).mean()


def relative_to_before(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A loss over a running mean of itself."""
    loss = F.mse_loss(y, t)
    if m.training:
        m.mean.lerp_(loss.detach(), 0.5)
    return loss / m.mean.clone()


def fields(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A conditional random field: all ways less the one that is wanted."""
    labels = t.argmax(-1)
    all_ways, one = y[:, 0], y[:, 0].gather(1, labels[:, :1]).squeeze(1)
    for step in range(1, T):
        all_ways = torch.logsumexp(all_ways.unsqueeze(2) + m.moves + y[:, step].unsqueeze(1), 1)
        one = one + m.moves[labels[:, step - 1], labels[:, step]] + y[:, step].gather(1, labels[:, step:step + 1]).squeeze(1)
    return (all_ways.logsumexp(1) - one).mean()


def mixture_of_softmaxes(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    share = m.prior(h).softmax(-1).unsqueeze(-1)
    p = (share * m.heads(h).view(*h.shape[:2], 2, 3).softmax(-1)).sum(-2)
    return F.nll_loss((p + 1e-8).log().flatten(0, 1), t.argmax(-1).flatten()) + 0.1 * F.mse_loss(y, t)


def adaptive(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    return m.tail(h.flatten(0, 1), t.argmax(-1).flatten() * 3).loss  # type: ignore[no-any-return]


def precision_at_all(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A smooth average precision of a batch's ranking."""
    scores, good = y.mean((1, 2)), (t.mean((1, 2)) > 0).to(y.dtype)
    above = ((scores.unsqueeze(0) - scores.unsqueeze(1)) / 0.1).sigmoid() * (1 - torch.eye(B, dtype=y.dtype))
    rank, rank_of_good = 1 + above.sum(1), 1 + (above * good).sum(1)
    return 1 - (good * rank_of_good / rank).sum() / good.sum().clamp(min=1)


def gaussians(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A likelihood under a covariance that is learned, and under the batch's own."""
    low = torch.linalg.cholesky(m.root @ m.root.t() + torch.eye(3, dtype=y.dtype))
    rows = (y - t).flatten(0, 1)
    solved = torch.linalg.solve_triangular(low, rows.t(), upper=False)
    rows = rows - rows.mean(0)
    spread = rows.t() @ rows / (len(rows) - 1) + torch.eye(3, dtype=y.dtype)
    return 0.5 * solved.square().sum(0).mean() + low.diagonal().log().sum() + torch.logdet(spread) * 0.1


def of_loss(loss: Loss, parts: Callable[[], Mapping[str, Any]] = dict) -> Case:
    return parts, lambda m, x: x, loss


BATCH_LOSSES: Mapping[str, Case] = {
    "flow": (lambda: {"net": nn.Linear(4, D), "mix": nn.Parameter(torch.eye(D) + 0.1 * torch.randn(D, D))}, coupled, flowing),
    "supervised contrast": of_loss(supervised_contrast), "sigmoid pairs": of_loss(
        sigmoid_pairs, lambda: {"scale": nn.Parameter(torch.ones(1)), "shift": nn.Parameter(torch.full((1,), -2.0))}),
    "variance and covariance": of_loss(variance_and_covariance),
    "tempered pairs": of_loss(tempered_pairs, lambda: {"scale": nn.Parameter(torch.tensor(0.5))}),
    "angular": of_loss(angular, lambda: {"proxies": weight(3, D)}),
    "centred teacher": of_loss(centred_teacher, lambda: {"slow": torch.randn(D, D), "centre": torch.zeros(D)}),
    "hazards": of_loss(hazards), "lovasz": of_loss(lovasz), "discrepancy": of_loss(discrepancy),
    "robust groups": of_loss(robust_groups, lambda: {"shares": torch.ones(3) / 3}), "by class": of_loss(by_class),
    "hard ones": of_loss(hard_ones), "quantiles": of_loss(quantiles),
    "relative to before": of_loss(relative_to_before, lambda: {"mean": torch.tensor(1.0)}),
    "fields": of_loss(fields, lambda: {"moves": weight(3, 3)}),
    "mixture of softmaxes": of_loss(mixture_of_softmaxes, lambda: {"prior": nn.Linear(D, 2), "heads": nn.Linear(D, 6)}),
    "adaptive": of_loss(adaptive, lambda: {"tail": nn.AdaptiveLogSoftmaxWithLoss(D, 10, [3, 6])}),
    "precision at all": of_loss(precision_at_all), "gaussians": of_loss(gaussians, lambda: {"root": weight(3, 3)}),
}
"""As ``tests.strangers.MODELS``."""
