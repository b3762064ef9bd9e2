"""More models of ``tests.strangers``: layers that mix samples by views and groups, that keep running values of what passes, or
whose weights are made from packed, complex or shared ones. As in ``tests.bodies``, a body computes [batch, length, width] of
[batch, length, width]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bodies import B, Body, D, Loss, Parts, T, linear, weight

Case = tuple[Parts, Body, Loss | None]


# ---------------------------------------------------------------------------------------------------- samples mixed by views


def chunks(m: Any, x: Tensor) -> Tensor:
    """The batch in pieces, each around its own mean; the pieces are of other sizes than any device's."""
    return torch.cat([m.more(part - part.mean(0)) for part in x.split([3, 1, 4])])


def samples_as_channels(m: Any, x: Tensor) -> Tensor:
    """A filter for every sample, demodulated, by one convolution with as many groups as samples."""
    style = m.style(x.mean(1)).view(-1, 1, D, 1)
    filters = m.taps.unsqueeze(0) * style
    filters = filters * (filters.square().sum((2, 3), keepdim=True) + 1e-6).rsqrt()
    n = x.shape[0]
    out = F.conv1d(x.transpose(1, 2).reshape(1, n * D, T), filters.reshape(n * D, D, 3), padding=1, groups=n)
    return out.view(n, D, T).transpose(1, 2)


def attended_samples(m: Any, x: Tensor) -> Tensor:
    """Attention between samples."""
    rows = x.flatten(1).unsqueeze(0)
    q, k, v = (rows.view(1, -1, 4, D).transpose(1, 2) for _ in range(3))
    return x + m.more(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def members(m: Any, x: Tensor) -> Tensor:
    """Two members of an ensemble, on a batch that is repeated; their mean, and how far they are apart."""
    twice = x.repeat(2, 1, 1).view(2, -1, T, D) * m.rank.view(2, 1, 1, D)
    out = m.more(twice.flatten(0, 1)).view(2, -1, T, D)
    return out.mean(0) + out.var(0, correction=0)


def beams(m: Any, x: Tensor) -> Tensor:
    """Every sample three times in a row, and the best of them."""
    wide = x.repeat_interleave(3, 0) + m.shifts.repeat(x.shape[0], 1).unsqueeze(1)
    scores = m.more(wide).sum((1, 2)).view(-1, 3)
    best = scores.argmax(1) + 3 * torch.arange(x.shape[0])
    return wide.index_select(0, best)


def labelled_first(m: Any, x: Tensor) -> Tensor:
    """The first three samples go one way, the others another."""
    return torch.cat([m.more(x[:3]).tanh(), x[3:] * 0.5 + x[:3].mean(0)])


def space_to_batch(m: Any, x: Tensor) -> Tensor:
    y = x.view(-1, 2, 2, D).permute(1, 0, 2, 3).reshape(-1, 2, D)
    y = m.conv(y.transpose(1, 2)).transpose(1, 2)
    return y.view(2, -1, 2, D).transpose(0, 1).reshape(x.shape)


def sequence_first(m: Any, x: Tensor) -> Tensor:
    out, last = m.gru(x.transpose(0, 1), m.start.expand(-1, x.shape[0], -1).contiguous())
    return out.transpose(0, 1) + last.sum(0).unsqueeze(1)


def cells_of_neighbours(m: Any, x: Tensor) -> Tensor:
    """Messages along edges between all positions of all samples, by sums, means and maxima."""
    nodes = x.flatten(0, 1)
    start, end = m.edges
    sent = m.more(torch.cat([nodes[start], nodes[end] - nodes[start]], -1)).tanh()
    at = end.unsqueeze(-1).expand_as(sent)
    most = torch.zeros_like(nodes).scatter_reduce(0, at, sent, "amax", include_self=False)
    mean = torch.zeros_like(nodes).scatter_reduce(0, at, sent, "mean", include_self=False)
    total = torch.zeros_like(nodes).index_add(0, end, sent)
    return (nodes + most + mean + 0.1 * total).view_as(x)


def edges() -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(1)
    return {"more": nn.Linear(2 * D, D), "edges": torch.randint(0, B * T, (2, 50), generator=drawn)}


def processes(m: Any, x: Tensor) -> Tensor:
    """A Gaussian process over the samples of a batch."""
    rows = x.mean(1)
    kernel = (-torch.cdist(rows, rows).square() / 2).exp() + 0.1 * torch.eye(x.shape[0], dtype=x.dtype)
    chosen = torch.cholesky_solve(rows, torch.linalg.cholesky(kernel))
    return x + chosen.unsqueeze(1) * m.scale


# ---------------------------------------------------------------------------------------------------------- running values


def extremes(m: Any, x: Tensor) -> Tensor:
    """Observers of quantization: the least and the largest so far, how many were seen, and what is rounded by them."""
    if m.training:
        with torch.no_grad():
            m.least.copy_(torch.minimum(m.least, x.amin((0, 1))))
            m.most.copy_(torch.maximum(m.most, x.amax((0, 1))))
            m.seen += x.shape[0]
    step = (m.most - m.least).clamp(min=1e-3) / 15
    rounded = ((x - m.least) / step).round().clamp(0, 15) * step + m.least
    return x + (rounded - x).detach() / (1 + m.seen)


def renormalized(m: Any, x: Tensor) -> Tensor:
    """Batch renormalization: statistics of the batch, corrected towards running ones."""
    mean, std = x.mean((0, 1)), x.std((0, 1), correction=0) + 1e-3
    if not m.training:
        return (x - m.mean) / m.std * m.gain
    r, d = (std.detach() / m.std).clamp(0.5, 2), ((mean.detach() - m.mean) / m.std).clamp(-1, 1)
    with torch.no_grad():
        m.mean.lerp_(mean, 0.1)
        m.std.lerp_(std, 0.1)
    return ((x - mean) / std * r + d) * m.gain


def first_batch(m: Any, x: Tensor) -> Tensor:
    """Actnorm: the first batch of training decides the scale."""
    if m.training:
        with torch.no_grad():
            m.shift.copy_(torch.where(m.ready, m.shift, -x.mean((0, 1))))
            m.factor.copy_(torch.where(m.ready, m.factor, 1 / (x.std((0, 1)) + 1e-3)))
            m.ready.fill_(True)
    return (x + m.shift) * m.factor * m.gain


def by_sample(m: Any, x: Tensor) -> Tensor:
    """A running mean for each place in the batch."""
    read = m.seen.clone()
    if m.training:
        m.seen.mul_(0.9).add_(x.detach().mean(1), alpha=0.1)
    return x - read.unsqueeze(1)


def stateful(m: Any, x: Tensor) -> Tensor:
    """A recurrence that begins where the call before ended."""
    out, last = m.gru(x, m.state.clone())
    m.state.copy_(last.detach())
    return out  # type: ignore[no-any-return]


def codes(m: Any, x: Tensor) -> Tensor:
    """A codebook by moving sums, smoothed, whose dead codes become the samples that are worst coded."""
    rows = x.flatten(0, 1)
    apart = torch.cdist(rows, m.table)
    at = apart.argmin(-1)
    hot = F.one_hot(at, 6).to(x.dtype)
    found = m.table[at]
    if m.training:
        with torch.no_grad():
            m.sizes.mul_(0.8).add_(hot.sum(0), alpha=0.2)
            m.sums.mul_(0.8).add_(hot.t() @ rows, alpha=0.2)
            worst = rows[apart.amin(-1).topk(6).indices]
            table = m.sums / ((m.sizes + 1e-2) / (m.sizes.sum() + 6e-2) * m.sizes.sum()).unsqueeze(-1)
            m.table.copy_(torch.where((m.sizes < 0.7).unsqueeze(-1), worst, table))
    use = hot.mean(0)
    return (rows + (found - rows).detach() + 0.1 * (-(use * (use + 1e-6).log()).sum()).exp()).view_as(x)


def neighbours(m: Any, x: Tensor) -> Tensor:
    """The nearest of a bank of keys, whose places are written in turn."""
    keys = x.mean(1)
    near = torch.cdist(keys, m.bank.clone()).topk(3, largest=False)
    found = torch.einsum("bk,bkd->bd", (-near.values).softmax(-1), m.values.clone()[near.indices])
    if m.training:
        with torch.no_grad():
            places = (m.place + torch.arange(B)) % 20
            m.bank[places] = keys.detach()
            m.values[places] = m.more(keys).detach()
            m.place.add_(B).remainder_(20)
    return x + found.unsqueeze(1)


def iterated(m: Any, x: Tensor) -> Tensor:
    """A spectral norm by hand."""
    with torch.no_grad():
        if m.training:
            v = F.normalize(m.more.weight.t() @ m.u, dim=0)
            m.u.copy_(F.normalize(m.more.weight @ v, dim=0))
        v = F.normalize(m.more.weight.t() @ m.u, dim=0)
    return F.linear(x, m.more.weight / (m.u.clone() @ m.more.weight @ v), m.more.bias)


def alternating(m: Any, x: Tensor) -> Tensor:
    """Even steps one way, odd ones the other."""
    if m.training:
        m.step += 1
    return torch.where(m.step % 2 == 0, m.more(x), m.mid(x))


def shrinking(m: Any, x: Tensor) -> Tensor:
    """Weights under a threshold go out and stay out."""
    if m.training:
        with torch.no_grad():
            m.kept.logical_and_(m.more.weight.abs() > 0.02)
    return F.linear(x, m.more.weight * m.kept, m.more.bias)


# ------------------------------------------------------------------------------------------------------------------ weights


def nibbles(m: Any, x: Tensor) -> Tensor:
    """Weights of four bits, two in a byte, with scales by groups; the scales learn."""
    low, high = (m.packed & 15).to(x.dtype) - 8, (m.packed >> 4).to(x.dtype) - 8
    w = torch.stack([low, high], -1).flatten(1).view(D, 2, 4) * m.scales.unsqueeze(-1)
    return x + F.linear(x, w.view(D, D))


def eight_bits(m: Any, x: Tensor) -> Tensor:
    """Weights and activations of eight bits: what is largest in the batch decides the step of all."""
    step = x.detach().abs().amax() / 127
    small = (x.detach() / step).round().clamp(-128, 127).to(torch.int8)
    out = (small.int() @ m.whole.t().int()).to(x.dtype) * step * m.scales
    return x + out + (F.linear(x, m.whole.to(x.dtype) * m.scales.unsqueeze(-1)) - out).detach() * 0 + 0.1 * x * step


def shaped(m: Any, x: Tensor) -> Tensor:
    """A number of heads that stands in a buffer."""
    return m.more(x.reshape(-1, int(m.heads), D // int(m.heads)).transpose(1, 2).reshape(-1, T, D))  # type: ignore


def complex_weights(m: Any, x: Tensor) -> Tensor:
    z = torch.complex(x, x.roll(1, -1)) @ m.turn
    return (z * torch.polar(torch.ones_like(x), m.angle.expand_as(x))).abs() + z.imag


def fourier(m: Any, x: Tensor) -> Tensor:
    y = torch.fft.fft2(x, dim=(1, 2)).real
    z = torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(m.filter), s=(T, D), norm="ortho")
    return 0.1 * y + z


def slices(m: Any, x: Tensor) -> Tensor:
    """One matrix, whose parts are an encoder, a decoder and biases."""
    w = m.all
    hidden = (x @ w[:D, :3] + w[D, :3]).tanh()
    return x + hidden @ w[:D, :3].t() + hidden @ w[D + 1:, :].reshape(3, -1)[:, :D] + w[D, 3:].sum()


def gated(m: Any, x: Tensor) -> Tensor:
    gate, up = m.fused(x).chunk(2, -1)
    one, two, three = m.fused.weight.split([D, 4, 4])
    return m.down(F.silu(gate) * up) + F.linear(F.linear(x, two), one[:, :4]) + F.linear(x, three).repeat(1, 1, 2)


def kronecker(m: Any, x: Tensor) -> Tensor:
    return x @ torch.kron(m.left, m.right) @ torch.matrix_exp(m.square - m.square.t())


def unstacked(m: Any, x: Tensor) -> Tensor:
    """Layers in one stacked weight, and a mixture of them by a softmax of logits."""
    for w, b in zip(m.stack.unbind(), m.bias, strict=True):
        x = x + F.linear(x, w, b).tanh()
    return x + torch.einsum("l,lij,btj->bti", m.logits.softmax(0), m.stack, x)


def generated(m: Any, x: Tensor) -> Tensor:
    """Weights for every sample, from the sample."""
    w = m.maker(x.mean(1)).view(-1, D, 3)
    return x + torch.bmm(torch.bmm(x, w), w.transpose(1, 2)).tanh()


# --------------------------------------------------------------------------------------------------------------- positions


def rotary(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(-1, T, 3, 2, 4).permute(2, 0, 3, 1, 4)
    cos, sin = m.cos[:T].to(x.dtype), m.sin[:T].to(x.dtype)

    def turned(z: Tensor) -> Tensor:
        return z * cos + torch.cat([-z[..., 2:], z[..., :2]], -1) * sin

    y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return x + y.transpose(1, 2).flatten(2)


def tables() -> dict[str, Any]:
    at = torch.outer(torch.arange(16.0), 1 / 10 ** torch.arange(0, 2.0)).repeat(1, 2)
    return {"qkv": nn.Linear(D, 3 * D), "cos": at.cos(), "sin": at.sin()}


def slopes(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(-1, T, 3, 2, 4).permute(2, 0, 3, 1, 4)
    at = torch.arange(T)
    bias = -m.slopes.view(-1, 1, 1) * (at.unsqueeze(1) - at).abs() + torch.full((T, T), -1e9).triu(1)
    return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(x.dtype)).transpose(1, 2).flatten(2)


def biased(m: Any, x: Tensor) -> Tensor:
    """Biases of as many dims as there are, and fewer, for queries of three and of five dims."""
    y, many = x, x.view(-1, T, 2, 2, 2).permute(0, 2, 3, 1, 4)
    for bias in m.three:
        y = y + F.scaled_dot_product_attention(x, x * 0.5, x.tanh(), bias)
    for bias in m.five:
        y = y + F.scaled_dot_product_attention(many, many * 0.5, many.tanh(), bias).permute(0, 3, 1, 2, 4).reshape(x.shape)
    return y


def shifted_scores(m: Any, x: Tensor) -> Tensor:
    """Transformer-XL's scores, moved by a view, and a table by distance."""
    q, k, v = m.qkv(x).view(-1, T, 3, 2, 4).permute(2, 0, 3, 1, 4)
    far = torch.einsum("bhtd,rd->bhtr", q + m.u, m.places)
    far = F.pad(far, (1, 0)).view(-1, 2, T + 1, T)[:, :, 1:]
    at = (torch.arange(T).unsqueeze(1) - torch.arange(T)).clamp(-2, 2) + 2
    scores = (q @ k.transpose(-1, -2) + far) / 2 + m.table(at).permute(2, 0, 1)
    return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def retained(m: Any, x: Tensor) -> Tensor:
    """Linear attention by running sums, and retention by a mask of decays."""
    q, k, v = m.qkv(x).chunk(3, -1)
    fast, slow = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("btd,bte->btde", slow, v).cumsum(1)
    y = torch.einsum("btd,btde->bte", fast, state) / torch.einsum("btd,btd->bt", fast, slow.cumsum(1)).unsqueeze(-1)
    at = torch.arange(T)
    decay = (m.decay.sigmoid() ** (at.unsqueeze(1) - at).clamp(min=0)).tril()
    return x + y + (q @ k.transpose(1, 2) * decay) @ v


def induced(m: Any, x: Tensor) -> Tensor:
    """A set's blocks: points that are learned ask the set, the set asks them."""
    points = m.points.expand(x.shape[0], -1, -1)
    read = m.one(points, x, x)[0]
    return x + m.two(x, read, read, need_weights=True)[0] * m.two(x, read, read)[1].mean()


def waves(m: Any, x: Tensor) -> Tensor:
    y = x.transpose(1, 2)
    for step, (filters, gates) in enumerate(zip(m.filters, m.gates, strict=True)):
        padded = F.pad(y, (2 ** step, 0))
        y = y + filters(padded).tanh() * gates(padded).sigmoid()
    return y.transpose(1, 2)


def deformed(m: Any, x: Tensor) -> Tensor:
    """Samples at places that a convolution says."""
    y = x.view(-1, 2, T, T)
    lines = torch.linspace(-1, 1, T, dtype=x.dtype)
    grid = torch.stack(torch.meshgrid(lines, lines, indexing="xy"), -1) + 0.1 * m.offsets(y).permute(0, 2, 3, 1)
    return F.grid_sample(y, grid, padding_mode="border", align_corners=True).view_as(x) + x


def windows(m: Any, x: Tensor) -> Tensor:
    """Windows of an image, moved by half a window, with a mask where the image ends."""
    y = x.view(-1, T, T, 2).roll((-1, -1), (1, 2))
    y = y.view(-1, 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 2)
    places = torch.arange(T * T).view(T, T).roll((-1, -1), (0, 1)).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4) // 6
    mask = torch.where(places.unsqueeze(1) == places.unsqueeze(2), 0.0, -1e4).repeat(x.shape[0], 1, 1).to(x.dtype)
    y = (y @ y.transpose(1, 2) + mask + m.bias).softmax(-1) @ y
    y = y.view(-1, 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(-1, T, T, 2)
    return y.roll((1, 1), (1, 2)).reshape(x.shape) + x


def shuffled_pixels(m: Any, x: Tensor) -> Tensor:
    y = m.up(x.view(-1, 2, T, T))
    return F.pixel_unshuffle(y, 2)[:, ::4].reshape(-1, 2, T, T).flatten(1).view_as(x) + m.shuffle(x.transpose(1, 2).unsqueeze(
        -1)).squeeze(-1).transpose(1, 2)


def spectra(m: Any, x: Tensor) -> Tensor:
    window = torch.hann_window(8, dtype=x.dtype)
    z = torch.stft(x.flatten(1), 8, 4, window=window, return_complex=True)
    z = z * m.gain.view(1, -1, 1)
    return torch.istft(z, 8, 4, window=window, length=T * D).view_as(x) + z.abs().mean()


def crossed(m: Any, x: Tensor) -> Tensor:
    """Products of all pairs of fields."""
    dots = torch.bmm(x, x.transpose(1, 2))
    rows, columns = torch.tril_indices(T, T, -1)
    return x + m.more(torch.cat([dots[:, rows, columns], x.mean(1)], -1)).unsqueeze(1)


def selective(m: Any, x: Tensor) -> Tensor:
    step = F.softplus(m.step(x))
    a, b = torch.exp(step.unsqueeze(-1) * -m.rates.exp()), step.unsqueeze(-1) * m.into(x).unsqueeze(2)
    h, found = x.new_zeros(x.shape[0], D, 2), []
    for t in range(T):
        h = a[:, t] * h + b[:, t] * x[:, t].unsqueeze(-1)
        found.append((h * m.out(x)[:, t].unsqueeze(1)).sum(-1))
    return torch.stack(found, 1) + x * m.skip


MIXING: Mapping[str, Case] = {
    "uneven chunks": (linear, chunks, None),
    "samples as channels": (lambda: {"style": nn.Linear(D, D), "taps": weight(D, D, 3)}, samples_as_channels, None),
    "attended samples": (linear, attended_samples, None), "members": (lambda: linear() | {"rank": weight(2, D)}, members, None),
    "beams": (lambda: linear() | {"shifts": weight(3, D)}, beams, None), "labelled first": (linear, labelled_first, None),
    "space to batch": (lambda: {"conv": nn.Conv1d(D, D, 3, padding=1)}, space_to_batch, None),
    "sequence first": (lambda: {"gru": nn.GRU(D, D), "start": weight(1, 1, D)}, sequence_first, None),
    "edges over samples": (edges, cells_of_neighbours, None), "processes": (lambda: {"scale": weight(D)}, processes, None),
    "extremes": (lambda: {"least": torch.zeros(D), "most": torch.zeros(D), "seen": torch.tensor(0)}, extremes, None),
    "renormalized": (lambda: {"mean": torch.zeros(D), "std": torch.ones(D), "gain": weight(D)}, renormalized, None),
    "first batch": (lambda: {"shift": torch.zeros(D), "factor": torch.ones(D), "ready": torch.tensor(False),
                             "gain": weight(D)}, first_batch, None),
    "learned first batch": (lambda: {"shift": weight(D), "factor": weight(D), "ready": torch.tensor(False), "gain": weight(D)},
                            first_batch, None),
    "by sample": (lambda: {"seen": torch.zeros(B, D)}, by_sample, None),
    "stateful": (lambda: {"gru": nn.GRU(D, D, batch_first=True), "state": torch.zeros(1, B, D)}, stateful, None),
    "dead codes": (lambda: {"table": torch.randn(6, D), "sums": torch.randn(6, D), "sizes": torch.ones(6)}, codes, None),
    "nearest of a bank": (lambda: linear() | {"bank": torch.randn(20, D), "values": torch.randn(20, D),
                                              "place": torch.tensor(0)}, neighbours, None),
    "iterated": (lambda: linear() | {"u": F.normalize(torch.randn(D), dim=0)}, iterated, None),
    "alternating": (lambda: linear() | {"step": torch.tensor(0)}, alternating, None),
    "shrinking": (lambda: linear() | {"kept": torch.ones(D, D, dtype=torch.bool)}, shrinking, None),
    "nibbles": (lambda: {"packed": torch.randint(0, 256, (D, 4), dtype=torch.uint8), "scales": weight(D, 2)}, nibbles, None),
    "eight bits": (lambda: {"whole": torch.randint(-128, 128, (D, D), dtype=torch.int8), "scales": torch.rand(D) * 0.01},
                   eight_bits, None),
    "shaped": (lambda: linear() | {"heads": torch.tensor(2)}, shaped, None),
    "complex weights": (lambda: {"turn": nn.Parameter(torch.randn(D, D, dtype=torch.cdouble)), "angle": weight(D)},
                        complex_weights, None),
    "fourier": (lambda: {"filter": weight(T, D // 2 + 1, 2)}, fourier, None),
    "slices": (lambda: {"all": weight(2 * D + 1, 6)}, slices, None),
    "gated": (lambda: {"fused": nn.Linear(D, 2 * D), "down": nn.Linear(D, D)}, gated, None),
    "kronecker": (lambda: {"left": weight(2, 2), "right": weight(4, 4), "square": weight(D, D)}, kronecker, None),
    "unstacked": (lambda: {"stack": weight(3, D, D), "bias": weight(3, D), "logits": weight(3)}, unstacked, None),
    "generated": (lambda: {"maker": nn.Linear(D, 3 * D)}, generated, None),
    "rotary": (tables, rotary, None), "slopes": (lambda: {"qkv": nn.Linear(D, 3 * D), "slopes": torch.tensor([0.5, 0.25])},
                                                 slopes, None),
    "biased": (lambda: {
        "three": nn.ParameterList([weight(T), weight(T, 1), weight(1, T, T), weight(B, 1, T)]),
        "five": nn.ParameterList([weight(T), weight(2, 1, T), weight(2, 1, T, 1), weight(B, 1, 2, T, T)])}, biased, None),
    "shifted scores": (lambda: {"qkv": nn.Linear(D, 3 * D), "u": weight(2, 1, 4), "places": weight(T, 4),
                                "table": nn.Embedding(5, 2)}, shifted_scores, None),
    "retained": (lambda: {"qkv": nn.Linear(D, 3 * D), "decay": nn.Parameter(torch.tensor(1.0))}, retained, None),
    "induced": (lambda: {"points": weight(1, 3, D), "one": nn.MultiheadAttention(D, 2, batch_first=True),
                         "two": nn.MultiheadAttention(D, 2, batch_first=True)}, induced, None),
    "waves": (lambda: {name: nn.ModuleList(nn.Conv1d(D, D, 2, dilation=2 ** i) for i in range(2))
                       for name in ("filters", "gates")}, waves, None),
    "deformed": (lambda: {"offsets": nn.Conv2d(2, 2, 3, padding=1)}, deformed, None),
    "windows": (lambda: {"bias": weight(4, 4)}, windows, None),
    "shuffled pixels": (lambda: {"up": nn.ConvTranspose2d(2, 2, 2, 2), "shuffle": nn.ChannelShuffle(2)}, shuffled_pixels, None),
    "spectra": (lambda: {"gain": weight(5)}, spectra, None),
    "crossed": (lambda: {"more": nn.Linear(T * (T - 1) // 2 + D, D)}, crossed, None),
    "selective": (lambda: {"step": nn.Linear(D, D), "into": nn.Linear(D, 2), "out": nn.Linear(D, 2), "rates": weight(D, 2),
                           "skip": weight(D)}, selective, None),
}
"""As ``tests.strangers.MODELS``."""
