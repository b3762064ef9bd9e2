"""More models of ``tests.strangers``: what architectures of all kinds do between two linears. A body computes [batch, length,
width] of [batch, length, width]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D, T, B = 8, 4, 8
Parts = Callable[[], Mapping[str, Any]]
Body = Callable[[Any, Tensor], Tensor]
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def weight(*shape: int) -> nn.Parameter:
    """Drawn."""
    return nn.Parameter(torch.randn(shape) * 0.3)


def linear() -> dict[str, Any]:
    return {"more": nn.Linear(D, D)}


def mixed_up(m: Any, x: Tensor) -> Tensor:
    """Mixup by halves of a batch that is turned around."""
    return 0.7 * x + 0.3 * x.flip(0)


def rolled(m: Any, x: Tensor) -> Tensor:
    """Shift along the sequence, and negatives from the next sample."""
    return x + 0.1 * x.roll(1, 1) - 0.1 * m.more(x).roll(1, 0)


def capsules(m: Any, x: Tensor) -> Tensor:
    votes = torch.einsum("btd,kde->btke", x, m.votes)
    logits = x.new_zeros(x.shape[0], T, 3)
    for _ in range(2):
        s = (logits.softmax(-1).unsqueeze(-1) * votes).sum(1)
        v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
        logits = logits + torch.einsum("btke,bke->btk", votes, v)
    return x + v.mean(1, keepdim=True)


def scanned(m: Any, x: Tensor) -> Tensor:
    a, h, out = m.decay.sigmoid(), x.new_zeros(x.shape[0], D), []
    for step in range(T):
        h = a * h + (1 - a) * m.more(x[:, step])
        out.append(h * x[:, step].sigmoid())
    return torch.stack(out, 1)


def rendered(m: Any, x: Tensor) -> Tensor:
    alpha = 1 - torch.exp(-F.softplus(m.more(x)))
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], 1), 1)[:, :-1]
    return x + alpha * through


def solved_by_euler(m: Any, x: Tensor) -> Tensor:
    for step in range(3):
        x = x + 0.2 * torch.tanh(m.more(x) + math.sin(step))
    return x


def with_sinks(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    scores = q @ k.transpose(1, 2) / math.sqrt(D) + torch.arange(T).view(1, 1, T).sub(T) * 0.1
    scores = torch.cat([scores, m.sink.view(1, 1, 1).expand(x.shape[0], T, 1)], -1)
    return x + scores.softmax(-1)[..., :-1] @ v


def padded(m: Any, x: Tensor) -> Tensor:
    hidden = x.detach().sum(-1) > 2
    hidden = hidden & (torch.arange(T) > 0)
    return x + m.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0].masked_fill(hidden.unsqueeze(-1), 0)


def experts(m: Any, x: Tensor) -> Tensor:
    gates = m.router(x).softmax(-1)
    top, at = gates.topk(2, -1)
    kept = torch.zeros_like(gates).scatter(-1, at, top / top.sum(-1, keepdim=True))
    return x + torch.einsum("bte,btde->btd", kept, torch.stack([f(x) for f in m.experts], -1))


def balanced(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    gates = m.router(h).softmax(-1)
    share = F.one_hot(gates.argmax(-1), 3).to(y.dtype).mean((0, 1))
    return (y - t).square().mean() + 0.1 * 3 * (share * gates.mean((0, 1))).sum()


def in_place(m: Any, x: Tensor) -> Tensor:
    x = m.more(x).mul_(2)
    x[:, 0] += 1
    x[..., 1:3].mul_(0.5)
    x.index_add_(1, torch.tensor([0, 2]), m.mid(x[:, 1:3].clone()))
    return x.add_(m.mid(x.clone()))


def scattered(m: Any, x: Tensor) -> Tensor:
    at = x.detach().argsort(1)
    return x.gather(1, at) + torch.zeros_like(x).scatter_add(1, at.roll(1, 1), m.more(x))


def standardized(m: Any, x: Tensor) -> Tensor:
    w = m.conv.weight
    w = (w - w.mean((1, 2), keepdim=True)) / (w.std((1, 2), keepdim=True) + 1e-3)
    return F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), w, m.conv.bias).transpose(1, 2)


def images(m: Any, x: Tensor) -> Tensor:
    y = F.pixel_shuffle(m.conv(x.view(-1, 2, T, T)), 2)
    y = F.interpolate(y, scale_factor=0.5, mode="bilinear", align_corners=False)
    grid = F.affine_grid(m.turn.expand(y.shape[0], 2, 3), list(y.shape), align_corners=False)
    return F.grid_sample(y, grid, align_corners=False).view_as(x)


def unfolded(m: Any, x: Tensor) -> Tensor:
    pieces = F.unfold(x.transpose(1, 2).unsqueeze(-1), (3, 1), padding=(1, 0)).view(-1, D, 3, T)
    return (pieces * m.taps.view(1, D, 3, 1)).sum(2).transpose(1, 2)


def bagged(m: Any, x: Tensor) -> Tensor:
    ids = (x.detach().abs() * 5).long().clamp(max=9)
    return x + F.embedding_bag(ids.flatten(0, 1), m.table, mode="sum").view(*x.shape[:2], D)


def bagged_alike(m: Any, x: Tensor) -> Tensor:
    """Bags of one length, some by weights."""
    ids = (x.detach().abs() * 5).long().clamp(max=9).flatten(0, 1)
    weighed = F.embedding_bag(ids, m.table, mode="sum", per_sample_weights=x.flatten(0, 1))
    return x + (F.embedding_bag(ids, m.table) + weighed).view_as(x)


def factored(m: Any, x: Tensor) -> Tensor:
    q, r = torch.linalg.qr(m.square + 2 * torch.eye(D, dtype=x.dtype))
    return x @ q * torch.linalg.det(m.square + 3 * torch.eye(D, dtype=x.dtype)).abs().pow(0.1) + x @ r * 0.1


def distances(m: Any, x: Tensor) -> Tensor:
    return x + torch.cdist(x, m.anchors).neg().exp() @ m.anchors


def medians(m: Any, x: Tensor) -> Tensor:
    return x - x.median(1, keepdim=True).values + x.cummax(1).values + x.logcumsumexp(1) * 0.1 + x.amax(2, keepdim=True)


def splined(m: Any, x: Tensor) -> Tensor:
    bases = torch.stack([F.relu(x - knot) for knot in torch.linspace(-1, 1, 4).tolist()], -1)
    return torch.einsum("btdk,dke->bte", bases, m.splines)


def graph(m: Any, x: Tensor) -> Tensor:
    near = (x.unsqueeze(2) - x.unsqueeze(1)).square().sum(-1)
    near = (near <= near.topk(2, -1, largest=False).values[..., -1:]).to(x.dtype)
    return F.elu(near / near.sum(-1, keepdim=True) @ m.more(x)) + x


def sets(m: Any, x: Tensor) -> Tensor:
    pooled = torch.cat([x.max(1).values, x.mean(1), x.std(1, correction=0)], -1)
    return x * m.gate(pooled).sigmoid().unsqueeze(1)


def rotated(m: Any, x: Tensor) -> Tensor:
    at = torch.outer(torch.arange(T, dtype=x.dtype), m.rates)
    a, b = x.chunk(2, -1)
    return torch.cat([a * at.cos() - b * at.sin(), a * at.sin() + b * at.cos()], -1)


def checkpointed(m: Any, x: Tensor) -> Tensor:
    x = checkpoint(lambda h: m.more(h).tanh(), x, use_reentrant=False)
    return checkpoint_sequential(nn.Sequential(m.mid, nn.Tanh(), m.inside), 2, x, use_reentrant=False)  # type: ignore


def mapped(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: m.more(row).tanh() * row.sum())(x)


def called_otherwise(m: Any, x: Tensor) -> Tensor:
    """A layer called with weights that are made of its own."""
    return torch.func.functional_call(m.more, {"weight": m.more.weight.tril(), "bias": m.mid.bias}, (x,))


def adversary(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Two losses in one, each for its own weights."""
    real, fake = m.judge(t), m.judge(y.detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean() + (m.judge(y) - 1).square().mean() * 0.1


def ranked(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    one, two = y.mean(-1), t.mean(-1)
    wanted = (two.unsqueeze(-1) > two.unsqueeze(-2)).to(y.dtype)
    return F.binary_cross_entropy_with_logits(one.unsqueeze(-1) - one.unsqueeze(-2), wanted) + F.huber_loss(y, t, delta=0.5)


def triplets(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """The hardest of a batch."""
    e = F.normalize(h.mean(1), dim=-1)
    apart = 1 - e @ e.t()
    kind = torch.arange(B) % 3
    same = kind.unsqueeze(0) == kind.unsqueeze(1)
    far = apart.masked_fill(~same, -1).max(1).values
    near = apart.masked_fill(same, 9).min(1).values
    return F.relu(far - near + 0.3).mean() + 0.1 * (y - t).square().mean()


def focal(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    labels = t.argmax(-1).masked_fill(t[..., 0] > 1, -100)
    p = F.log_softmax(y, -1)
    each = F.nll_loss(p.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    kept = (labels != -100).sum().clamp(min=1)
    return ((1 - (-each).exp()).square() * each).sum() / kept


def aligned(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Connectionist temporal classification."""
    p = F.log_softmax(y, -1).transpose(0, 1)
    return F.ctc_loss(p, torch.ones(B, 2, dtype=torch.long), torch.full((B,), T), torch.full((B,), 2), zero_infinity=True)


def distilled(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = (m.head(m.mid(h).tanh()).roll(1, -1) / 2).softmax(-1)
    return F.kl_div((y / 2).log_softmax(-1), wanted, reduction="batchmean") * 4 + F.cosine_embedding_loss(
        y.flatten(0, 1), t.flatten(0, 1), torch.ones(B * T))


def centred(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Centres that follow their classes, and pull."""
    of = F.one_hot(t.argmax(-1), 3).to(y.dtype)
    pull = (h.detach() - of @ m.centres).square().mean()
    if m.training:
        with torch.no_grad():
            m.centres.lerp_(torch.einsum("btk,btd->kd", of, h) / of.sum((0, 1)).clamp(min=1).unsqueeze(-1), 0.1)
    return (y - t).square().mean() + 0.1 * pull + 0.1 * (h - of @ m.centres).square().mean()


def chosen(m: Any, x: Tensor) -> Tensor:
    """Only rows that are large: how many follows from the data."""
    return x + m.more(x[x.sum(-1) > 0]).sum(0)


def counted(m: Any, x: Tensor) -> Tensor:
    return x * int(x.detach().abs().sum() > 3)


def packed(m: Any, x: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 3, 4, 2, 4, 4, 1, 4]), batch_first=True, enforce_sorted=False)
    return x + nn.utils.rnn.pad_packed_sequence(m.gru(rows)[0], batch_first=True, total_length=T)[0]


def shared() -> dict[str, Any]:
    """One module under two names, and one weight in two modules."""
    one, two = nn.Linear(D, D), nn.Linear(D, D)
    two.bias = one.bias
    return {"one": one, "also": one, "two": two, "dict": nn.ParameterDict({"a": weight(D), "b": weight(D)})}


BODIES: Mapping[str, tuple[Parts, Body, Loss | None]] = {
    "mixed up": (dict, mixed_up, None), "rolled": (linear, rolled, None),
    "capsules": (lambda: {"votes": weight(3, D, D)}, capsules, None),
    "scanned": (lambda: linear() | {"decay": weight(D)}, scanned, None), "rendered": (linear, rendered, None),
    "euler": (linear, solved_by_euler, None),
    "sinks": (lambda: {"qkv": nn.Linear(D, 3 * D), "sink": nn.Parameter(torch.tensor(0.3))}, with_sinks, None),
    "padded": (lambda: {"attention": nn.MultiheadAttention(D, 2, batch_first=True)}, padded, None),
    "experts": (lambda: {"router": nn.Linear(D, 3), "experts": nn.ModuleList(nn.Linear(D, D) for _ in range(3))}, experts,
                balanced),
    "in place": (linear, in_place, None), "scattered": (linear, scattered, None),
    "standardized": (lambda: {"conv": nn.Conv1d(D, D, 3)}, standardized, None),
    "images": (lambda: {"conv": nn.Conv2d(2, 8, 3, padding=1), "turn": nn.Parameter(torch.eye(2, 3).unsqueeze(0))}, images,
               None),
    "unfolded": (lambda: {"taps": weight(D, 3)}, unfolded, None), "bagged": (lambda: {"table": weight(10, D)}, bagged, None),
    "bagged alike": (lambda: {"table": weight(10, D)}, bagged_alike, None),
    "factored": (lambda: {"square": weight(D, D)}, factored, None),
    "distances": (lambda: {"anchors": weight(5, D)}, distances, None),
    "medians": (dict, medians, None), "splines": (lambda: {"splines": weight(D, 4, D)}, splined, None),
    "graph": (linear, graph, None), "sets": (lambda: {"gate": nn.Linear(3 * D, D)}, sets, None),
    "rotated": (lambda: {"rates": weight(D // 2)}, rotated, None), "checkpointed": (linear, checkpointed, None),
    "vmap": (linear, mapped, None), "functional call": (linear, called_otherwise, None),
    "adversary": (lambda: {"judge": nn.Linear(3, 1)}, lambda m, x: x, adversary), "ranked": (dict, lambda m, x: x, ranked),
    "triplets": (dict, lambda m, x: x, triplets), "focal": (dict, lambda m, x: x, focal),
    "ctc": (dict, lambda m, x: x, aligned),
    "distilled": (dict, lambda m, x: x, distilled),
    "centres": (lambda: {"centres": torch.randn(3, D)}, lambda m, x: x, centred), "chosen": (linear, chosen, None),
    "counted": (dict, counted, None), "packed": (lambda: {"gru": nn.GRU(D, D, batch_first=True)}, packed, None),
    "shared": (shared, lambda m, x: m.two(m.also(m.one(x).tanh())) * m.dict["a"] + m.dict["b"], None),
    "compiled": (linear, lambda m, x: torch.compile(m.more, backend="eager")(x).tanh(), None),
    "scripted": (lambda: {"more": torch.jit.script(nn.Linear(D, D))}, lambda m, x: m.more(x), None),
    "lazy": (lambda: {"more": nn.LazyLinear(D)}, lambda m, x: m.more(x), None),
    "bilinear": (lambda: {"two": nn.Bilinear(D, D, D)}, lambda m, x: m.two(x, x.flip(1)), None),
    "copies of positions": (linear, lambda m, x: m.more(x)[:, 1:3].repeat(1, 2, 1), None),
    "copies of samples": (linear, lambda m, x: m.more(x)[:B // 2].repeat(2, 1, 1), None),
    "all frozen": (lambda: {"more": nn.Linear(D, D).requires_grad_(False)}, lambda m, x: m.more(x).detach(), None),
    "transformer": (lambda: {"layers": nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 2)}, lambda m, x: m.layers(x), None),
    "decoder": (lambda: {"layers": nn.TransformerDecoder(
        nn.TransformerDecoderLayer(D, 2, 16, dropout=0.0, batch_first=True, norm_first=True), 2)},
        lambda m, x: m.layers(x, x.flip(1), tgt_is_causal=True,
                              tgt_mask=nn.Transformer.generate_square_subsequent_mask(T).to(x)), None),
}
"""As ``tests.strangers.MODELS``."""
