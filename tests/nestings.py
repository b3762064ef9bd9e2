"""More models of ``tests.strangers``: layers and losses whose parts are named, shared, laid out or looked up in unusual ways,
and operators that look across samples. A body computes [batch, length, width] of [batch, length, width], a loss a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tests.bodies import B, Body, D, Loss, Parts, T, linear, weight

# --------------------------------------------------------------------------------------------------------- names and holders


class Borrowed(nn.Module):
    """A layer whose weight is another's, through a property."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.owner = [owner]
        self.bias = weight(D)

    @property
    def weight(self) -> Tensor:
        """The owner's, turned."""
        return self.owner[0].weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LowRank(nn.Module):
    """A layer around a frozen one, which passes on what it is asked for."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base.requires_grad_(False), weight(2, D), weight(D, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.up @ self.down * 0.5, self.bias)  # type: ignore[arg-type]


class Wrapper(nn.Module):
    """Around a whole part of a model, by hooks on it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(D))
        inner.register_forward_pre_hook(lambda module, given: (given[0] * self.scale,))
        inner.register_forward_hook(lambda module, given, out: out + given[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Lower(nn.Module):
    """A parametrization with weights of its own, between two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x.tril() * self.gain


def borrowed() -> dict[str, Any]:
    one = nn.Linear(D, D)
    return {"one": one, "two": Borrowed(one)}


def unregistered() -> dict[str, Any]:
    """A layer in a list that is no ``ModuleList``: no optimizer has it."""
    return {"layers": [nn.Linear(D, D).double()]}


def tied_parametrized() -> dict[str, Any]:
    one, two = nn.Linear(D, D), nn.Linear(D, D)
    parametrize.register_parametrization(one, "weight", Lower())
    two.weight = one.parametrizations.weight.original
    return {"one": one, "two": two}


def turned_weights() -> dict[str, Any]:
    """Weights and a buffer that do not lie densely in the order of their dims."""
    one = nn.Linear(D, D)
    one.weight = nn.Parameter(one.weight.detach().t().contiguous().t())
    conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return {"one": one, "conv": conv, "kept": torch.randn(D, T).t()}


def turned(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x.view(-1, 2, T, T).contiguous(memory_format=torch.channels_last))
    return m.one(x) + m.kept + y.flatten(1)[:, : T * D].reshape(x.shape)


def cached(m: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return m.two(m.one(m.one(x).tanh()))  # type: ignore[no-any-return]


def asking(m: Any, x: Tensor) -> Tensor:
    """What a forward asks of tensors."""
    y = m.more(x)
    factor = 2.0 if y.requires_grad and y.grad_fn is not None and not y.is_leaf else 0.5
    held = 1.0 if m.more.weight.is_leaf and m.more.weight.requires_grad else 3.0
    return x + y * factor * held * (x.dim() - 2) * (1.0 if x.is_contiguous() else 5.0)


def tried(m: Any, x: Tensor) -> Tensor:
    try:
        return m.more(x.flatten())  # type: ignore[no-any-return]
    except RuntimeError:
        return m.more(x) + x  # type: ignore[no-any-return]


def registered_within(m: Any, x: Tensor) -> Tensor:
    """A buffer that is registered anew by every forward."""
    if m.training:
        m.register_buffer("mean", m.mean * 0.9 + x.detach().mean((0, 1)) * 0.1)
    return x - m.mean


def borrowed_grads(m: Any, x: Tensor) -> Tensor:
    """A weight that is read with its gradient and without, in eval only, and under no_grad."""
    with torch.no_grad():
        y = m.more(x)
    return x @ m.more.weight.detach() + F.linear(x, m.more.weight) * y if m.training else x + m.only(x)


# --------------------------------------------------------------------------------------------------------------------- norms


def cumulative() -> dict[str, Any]:
    """The mean over all calls so far, which counts in Python."""
    return {"norm": nn.BatchNorm1d(T, momentum=None)}


def one_norm_twice(m: Any, x: Tensor) -> Tensor:
    return m.norm(x) + m.norm(m.more(x)) * 0.5  # type: ignore[no-any-return]


def frozen_norms() -> dict[str, Any]:
    """One with running statistics in training, one of them without learning."""
    one = nn.BatchNorm1d(T).eval()
    one.train = lambda mode=True: one  # type: ignore[method-assign]
    return {"one": one, "two": nn.BatchNorm1d(T).requires_grad_(False)}


# ------------------------------------------------------------------------------------------------------------ across samples


def capacity(m: Any, x: Tensor) -> Tensor:
    """Experts with room for some tokens each, in the order of the batch."""
    flat = x.flatten(0, 1)
    gates = m.router(flat).softmax(-1)
    hot = F.one_hot(gates.argmax(-1), 3).to(x.dtype)
    place = (hot.cumsum(0) * hot).sum(-1)
    kept = (place <= 9).to(x.dtype) * (gates * hot).sum(-1)
    return x + (kept.unsqueeze(-1) * torch.einsum("nk,kde,nd->ne", hot, m.experts, flat)).view_as(x)


def sinkhorn(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Assignments that are balanced over a batch."""
    scores = F.normalize(h.mean(1), dim=-1) @ F.normalize(m.prototypes, dim=-1).t()
    with torch.no_grad():
        q = (scores / 0.3).exp().t()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / len(q)
            q = q / q.sum(0, keepdim=True) / B
        q = (q * B).t()
    return -(q.roll(1, 0) * (scores / 0.5).log_softmax(-1)).sum(-1).mean() + 0.1 * (y - t).square().mean()


def differences(m: Any, x: Tensor) -> Tensor:
    """Neighbours in a batch, every second sample, pairs of halves."""
    y = x + F.pad(x[1:] - x[:-1], (0, 0, 0, 0, 1, 0)) * 0.3
    y = torch.stack([y[::2] * 2, y[1::2] - y[::2]], 1).flatten(0, 1)
    return torch.cat([y[B // 2:], y[: B // 2]]) + y.view(2, -1, T, D).mean(0).repeat(2, 1, 1) + x.diff(dim=0, prepend=x[:1])


def strided(m: Any, x: Tensor) -> Tensor:
    """A view by strides, over samples."""
    flat = x.contiguous()
    return x + flat.as_strided((B - 1, T, D), (T * D, D, 1), T * D).sum(0) * 0.2 + flat.view(-1).unfold(0, D, D).view_as(x)


def reduced(m: Any, x: Tensor) -> Tensor:
    """Statistics of a batch, by sample and by feature."""
    flat = x.flatten(0, 1)
    spread = (flat - flat.mean(0)).t() @ flat * 0.1 / len(flat)
    low = torch.quantile(flat, 0.3, 0) + flat.kthvalue(3, 0).values + flat.logsumexp(0) * 0.1 + flat.nanmedian(0).values
    return x @ spread + low + torch.linalg.norm(flat, 3, 0) * 0.1 + flat.var(0, correction=1) + torch.aminmax(flat, dim=0).max


def placed(m: Any, x: Tensor) -> Tensor:
    """Writes at places that come from data, some of them twice."""
    at = (x.detach().abs().sum((1, 2)) * 3).long() % 5
    table = m.table.clone().index_put((at,), x.mean(1), accumulate=True)
    most = torch.full((5, D), -3.0).to(x).scatter_reduce(0, at.unsqueeze(-1).expand(B, D), x.mean(1), "amax")
    return x + (table[at] + most[at]).unsqueeze(1)


def looked_up(m: Any, x: Tensor) -> Tensor:
    """Places in sorted lists, weights by rank in the batch."""
    rank = x.detach().mean((1, 2)).argsort().argsort().to(x.dtype)
    bins = torch.bucketize(x.detach(), torch.linspace(-1, 1, 4).to(x))
    return x * (1 + 0.1 * rank.view(-1, 1, 1)) + m.steps[bins] + torch.take_along_dim(x, x.detach().argsort(-1), -1)


# ----------------------------------------------------------------------------------------------------------------- operators


def factors(m: Any, x: Tensor) -> Tensor:
    """Matrices that are taken apart, of samples and of weights."""
    gram = x @ x.transpose(1, 2) / D + torch.eye(T).to(x)
    low = torch.linalg.cholesky(gram)
    y = torch.cholesky_solve(x, low) + torch.linalg.inv(gram) @ x + torch.linalg.matrix_exp(gram * 0.1) @ x
    spread = m.square @ m.square.t() + torch.diag(torch.arange(1.0, D + 1)).to(x)
    return y + x @ torch.linalg.svdvals(spread).diag_embed() * 0.01 + torch.linalg.solve_triangular(low, x, upper=False)


def rare(m: Any, x: Tensor) -> Tensor:
    y = torch.logaddexp(x, m.more(x)) + torch.special.erfcx(x.abs()) + torch.lgamma(x.abs() + 1) + torch.sinc(x)
    y = y + torch.addcmul(x, x, y, value=0.1) + torch.addcdiv(x, x, y.abs() + 1) + torch.lerp(x, y, 0.3) + torch.hypot(x, y)
    y = y + torch.trapezoid(x, dim=1).unsqueeze(1) + torch.kron(m.kinds, m.kinds[:, :2]) * 0.1
    y = y + x.nan_to_num() + x.rot90(2, [1, 2])
    wide = torch.tensordot(x, m.cube, 2) + torch.einsum("...ij,...kj->...ik", x, x).sum(-1, keepdim=True).flatten(1).sum(
        1, keepdim=True)
    return y + wide.unsqueeze(1) + torch.cross(x[..., :3], x[..., 3:6], dim=-1).sum(-1, keepdim=True) + x.renorm(2, 0, 3.0)


def transformed(m: Any, x: Tensor) -> Tensor:
    """Short transforms, folds and pools."""
    spectrum = torch.fft.fft2(x)
    y = torch.fft.ifft2(spectrum * m.filter).real
    pieces = F.unfold(x.unsqueeze(1), (2, 2), stride=2)
    y = y + F.fold(pieces * 0.5, (T, D), (2, 2), stride=2).squeeze(1)
    y = y + F.adaptive_max_pool1d(x, D) + F.max_pool2d(x.unsqueeze(1), 3, 1, 1).squeeze(1)
    y = y + m.norm(x.view(-1, 4, 2, T)).view_as(x)
    return y + F.conv_transpose1d(x, m.taps, padding=1) + F.channel_shuffle(x.view(B, T, 2, -1), 2).reshape(x.shape)


def attended(m: Any, x: Tensor) -> Tensor:
    """Weights that go out, keys that are added, groups of heads, a bias that is learned."""
    y, probabilities = m.attention(x, x, x, attn_mask=torch.full((T, T), -1.0).triu(1).to(x), average_attn_weights=False)
    q, k, v = m.heads(x).view(-1, T, 4, 4).transpose(1, 2).split((2, 1, 1), 1)
    grouped = F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias, enable_gqa=True)
    return x + y + probabilities.mean((1, 3)).unsqueeze(-1)[:, :T] + grouped.transpose(1, 2).flatten(2)


def rnns(m: Any, x: Tensor) -> Tensor:
    """Projected and plain, with states that are learned."""
    start = m.start.expand(1, x.shape[0], 4).contiguous(), m.start.new_zeros(1, x.shape[0], D)
    y, (h, c) = m.lstm(x, start)
    return m.rnn(y)[0] + torch.cat([h, h], -1).transpose(0, 1) + c.transpose(0, 1) + m.gru(x[:, 0], x[:, 1]).unsqueeze(1)


def many_losses(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """torch's rarer ones."""
    kind = t.argmax(-1)
    flat, labels = y.flatten(0, 1), kind.flatten()
    found = F.multi_margin_loss(flat, labels)
    found = found + F.multilabel_soft_margin_loss(flat, (t > 0).to(y).flatten(0, 1)) + F.margin_ranking_loss(
        y[..., 0], y[..., 1], t[..., 0].sign(), margin=0.1) + F.hinge_embedding_loss(y, t.sign())
    found = found + F.cross_entropy(y.transpose(1, 2), t.softmax(-1).transpose(1, 2), label_smoothing=0.1)
    return found + F.nll_loss(y.log_softmax(-1).transpose(1, 2), kind, reduction="sum") / B + F.multilabel_margin_loss(
        flat, torch.cat([labels.unsqueeze(-1), torch.full((B * T, 2), -1)], -1))


def of_a_vector(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """An element of a vector of losses, with the parts that are nobody's."""
    parts = torch.stack([(y - t).square().mean(), (y - t).abs().mean(), h.square().mean()])
    return (parts * torch.tensor([1.0, 0.5, 0.0]).to(y)).cumsum(0)[1]


def similar(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """Two ways of one sample, each of which is a target of the other without gradient."""
    one, two = m.mid(h).mean(1), m.more(h).mean(1)
    return -(F.cosine_similarity(one, two.detach(), -1).mean() + F.cosine_similarity(two, one.detach(), -1).mean()) / 2 + (
        y - t).square().mean()


def sparse_graph() -> dict[str, Any]:
    """A graph's edges as a sparse buffer."""
    at = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 2]])
    return linear() | {"edges": torch.sparse_coo_tensor(at, torch.ones(5).double(), (T, T))}


def along_edges(m: Any, x: Tensor) -> Tensor:
    return torch.stack([torch.sparse.mm(m.edges, one) for one in m.more(x).unbind()]) + x


Case = tuple[Parts, Body, Loss | None]


def judged(loss: Loss, parts: Callable[[], Mapping[str, Any]] = dict) -> Case:
    return parts, lambda m, x: x, loss


NESTINGS: Mapping[str, Case] = {
    "borrowed": (borrowed, lambda m, x: m.two(m.one(x).tanh()), None),
    "passed on": (lambda: {"more": LowRank(nn.Linear(D, D))}, lambda m, x: m.more(x), None),
    "wrapped by hooks": (lambda: {"more": Wrapper(Wrapper(nn.Linear(D, D)))}, lambda m, x: m.more(x).tanh(), None),
    "unregistered": (unregistered, lambda m, x: m.layers[0](x), None),
    "tied parametrized": (tied_parametrized, lambda m, x: m.two(m.one(x).tanh()), None),
    "cached": (tied_parametrized, cached, None), "turned weights": (turned_weights, turned, None),
    "asking": (linear, asking, None), "tried": (linear, tried, None),
    "registered within": (lambda: {"mean": torch.zeros(D)}, registered_within, None),
    "read both ways": (lambda: linear() | {"only": nn.Linear(D, D)}, borrowed_grads, None),
    "cumulative": (cumulative, lambda m, x: m.norm(x), None),
    "one norm twice": (lambda: linear() | {"norm": nn.BatchNorm1d(T)}, one_norm_twice, None),
    "frozen norms": (frozen_norms, lambda m, x: m.two(m.one(x)), None),
    "synchronized": (lambda: {"norm": nn.SyncBatchNorm(T)}, lambda m, x: m.norm(x), None),
    "capacity": (lambda: {"router": nn.Linear(D, 3), "experts": weight(3, D, D)}, capacity, None),
    "sinkhorn": judged(sinkhorn, lambda: {"prototypes": weight(5, D)}), "differences": (dict, differences, None),
    "strided": (dict, strided, None), "reduced": (dict, reduced, None),
    "placed": (lambda: {"table": weight(5, D)}, placed, None),
    "looked up": (lambda: {"steps": weight(5)}, looked_up, None), "factors": (lambda: {"square": weight(D, D)}, factors, None),
    "rare": (lambda: linear() | {"kinds": weight(2, 4), "cube": weight(T, D, D)}, rare, None),
    "transforms": (lambda: {"filter": weight(T, D), "norm": nn.GroupNorm(2, 4), "taps": weight(T, T, 3)}, transformed, None),
    "attended": (lambda: {"attention": nn.MultiheadAttention(D, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
                          "heads": nn.Linear(D, 16), "bias": weight(T, T)}, attended, None),
    "recurrent projections": (lambda: {"lstm": nn.LSTM(D, D, proj_size=4, batch_first=True), "start": weight(1, 1, 4),
                                       "rnn": nn.RNN(4, D, nonlinearity="relu", batch_first=True), "gru": nn.GRUCell(D, D)},
                              rnns, None),
    "many losses": judged(many_losses), "of a vector": judged(of_a_vector), "similar": judged(similar, linear),
    "sparse graph": (sparse_graph, along_edges, None),
}
"""As ``tests.strangers.MODELS``."""
