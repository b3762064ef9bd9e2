"""Models that nobody planned for: each on one process and under every kind of plan. Equal, or refused by an error of our own on
every rank; nothing else.

    python -m tests.strangers               every model under every plan of WAYS, a line for each that is neither
    python -m tests.strangers -v pp norm    a line for each trial: of one way, of the models whose names hold a word
    python -m tests.strangers --drawn 3 zb "pp x tp"    each model under one of these ways

Every model is trained, evaluated with and without gradients and trained again, in double precision. What it says on the way and
its weights and buffers afterwards are compared. ``test_strangers`` runs some of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD

from meshwright.api import autoparallel
from meshwright.errors import MeshwrightError
from tests import backwards
from tests.batch_losses import BATCH_LOSSES
from tests.bodies import BODIES
from tests.functions import FUNCTIONS
from tests.losses import LOSSES
from tests.mixing import MIXING
from tests.modules import MODULES
from tests.nestings import NESTINGS
from tests.trials import report, unlike

WAYS: Mapping[str, Mapping[str, Any]] = {
    "dp": {"dp": 2, "zero": 2, "microbatches": 1}, "micro-batches": {"dp": 2, "zero": 3, "microbatches": 2},
    "tp": {"dp": 1, "tp": 2}, "pp": {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2}, "pp once": {"pp": 2, "microbatches": 1},
    "1f1b": {"pp": 2, "microbatches": 4, "schedule": "1f1b"},
    "interleaved": {"pp": 2, "microbatches": 4, "schedule": "interleaved1f1b"},
    "zb": {"pp": 2, "microbatches": 4, "schedule": "zb"}, "zbv": {"pp": 2, "microbatches": 4, "schedule": "zbv"},
    "dualpipev": {"pp": 2, "microbatches": 4, "schedule": "dualpipev"},
    "gpipe": {"pp": 2, "microbatches": 4, "schedule": "gpipe"},
    "pp x dp": {"pp": 2, "dp": 2, "tp": 1, "zero": 2, "microbatches": 2},
    "pp x tp": {"pp": 2, "dp": 1, "tp": 2, "microbatches": 2}, "cp": {"cp": 2},
    "dp x tp": {"dp": 2, "tp": 2}, "zero 3": {"dp": 2, "zero": 3, "microbatches": 1},
    "hsdp": {"dp": 4, "shard": 2, "zero": 3, "microbatches": 2},
}
FOUR = ("pp x dp", "pp x tp", "dp x tp", "hsdp")
D, T, B = 8, 4, 8
Body = Callable[[Any, Tensor], Tensor]


class Stranger(nn.Module):
    """Linears around ``body``, which reads what ``parts`` gives the model; ``loss`` of (model, output, target, input)."""

    def __init__(self, parts: Mapping[str, Any], body: Body, loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.inside, self.mid, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.body, self.loss = body, loss

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        h = self.body(self, self.inside(x))
        y = self.head(self.mid(h).tanh())
        return {"loss": (y - t).square().mean() if self.loss is None else self.loss(self, y, t, h), "y": y}


def data(seed: int = 0) -> dict[str, Tensor]:
    """A batch."""
    drawn = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(B, T, D, generator=drawn).double(), "t": torch.randn(B, T, 3, generator=drawn).double()}


def weight(*shape: int) -> nn.Parameter:
    """Drawn."""
    return nn.Parameter(torch.randn(shape) * 0.3)


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Norms(torch.autograd.Function):
    """A gradient over its norm, which is no sum over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-6)


class Asks(torch.autograd.Function):
    """Computes what is asked for; the weight learns three times as fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        asked = ctx.needs_input_grad
        return grad * w if asked[0] else None, (3 * grad * x).sum((0, 1)) if asked[1] else None


def normed(norm: Callable[..., Any], **options: Any) -> Callable[[], Mapping[str, Any]]:
    """Two linears whose weights are made by ``norm``."""
    return lambda: {name: norm(nn.Linear(D, D), "weight", **options) for name in ("one", "two")}


def two(m: Any, x: Tensor) -> Tensor:
    return m.two(m.one(x).tanh())  # type: ignore[no-any-return]


def cells(m: Any, x: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[0], D)
    found = []
    for step in x.unbind(1):
        h, c = m.cell(step, (h, c))
        found.append(h)
    return torch.stack(found, 1)


def fixed_point(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(3):
            z = torch.tanh(m.more(z) * 0.5 + x)
    return torch.tanh(m.more(z) * 0.5 + x)


def quantized(m: Any, x: Tensor) -> Tensor:
    hot = F.one_hot((x.unsqueeze(-2) - m.codes).square().sum(-1).argmin(-1), 5).to(x.dtype)
    if m.training:
        with torch.no_grad():
            m.counts.mul_(0.9).add_(hot.sum((0, 1)), alpha=0.1)
    return x + (hot @ m.codes - x).detach()


def queued(m: Any, x: Tensor) -> Tensor:
    keys = x.mean(1)
    found = x + (keys @ m.queue.clone().t()).logsumexp(-1).view(-1, 1, 1)
    with torch.no_grad():
        m.queue.index_copy_(0, (m.at + torch.arange(B)) % 32, keys)
        m.at.add_(B).remainder_(32)
    return found


def grouped(m: Any, x: Tensor) -> Tensor:
    to = torch.arange(B * T) % 5
    return x + torch.zeros(5, D, dtype=x.dtype).index_add(0, to, x.flatten(0, 1))[to].view_as(x)


def skips(m: Any, x: Tensor) -> Tensor:
    x, kept = x.transpose(1, 2), []
    for down, norm in zip(m.down, m.norm, strict=True):
        x = norm(down(x)).relu()
        kept.append(x)
        x = F.avg_pool1d(x, 2)
    for up in m.up:
        x = up(x) + kept.pop()
    return x.transpose(1, 2)


def pairs(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    a, b = F.normalize(m.mid(h).mean(1), dim=-1), F.normalize(h.flip(-1).mean(1), dim=-1)
    logits, own = a @ b.t() * m.scale.exp().clamp(max=100), torch.arange(B)
    return F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own) + 0.1 * y.square().mean()


def correlated(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (h.mean(1), m.mid(h).mean(1)))
    return (a.t() @ b / B - torch.eye(D, dtype=y.dtype)).square().sum() + 0.1 * y.square().mean()


def only_in_training(m: Any, x: Tensor) -> Tensor:
    """A path that is dropped for no sample."""
    return x + m.more(x) * (torch.rand(x.shape[0], 1, 1) < 2) / 0.5 if m.training else x


def in_training_more(m: Any, y: Tensor, t: Tensor, h: Tensor) -> Tensor:
    return (y - t).square().mean() + (0.3 * h.square().mean() if m.training else 0.0)


def drawn(m: Any, x: Tensor) -> Tensor:
    """Draws, what decides nothing: slopes that are all the same, what is kept for sure, a dropout of everything."""
    x = F.rrelu(x, 0.25, 0.25, m.training) * torch.bernoulli(torch.ones_like(x)) + torch.randn_like(x) * 0
    return x + F.dropout(x, 1.0, m.training) + torch.rand(D).lt(2)


def hooked(m: Any, x: Tensor) -> Tensor:
    x = m.mid(x)
    x.register_hook(lambda grad: grad * 0.5)
    return x


Case = tuple[Callable[[], Mapping[str, Any]], Body, Callable[..., Tensor] | None]


def function(body: Body) -> Case:
    """A body between whose parts gradients are not the derivative."""
    return lambda: {"more": nn.Linear(D, D), "step": nn.Parameter(torch.tensor(0.1)), "steps": weight(D)}, body, None


def of(parts: Callable[[], Mapping[str, Any]], body: Body, loss: Callable[..., Tensor] | None = None) -> Case:
    """A case."""
    return parts, body, loss


def with_hook(way: Callable[[nn.Linear], Callable[..., Any]]) -> Case:
    """A linear with a hook that doubles what comes out, or does nothing."""
    def parts() -> Mapping[str, Any]:
        linear = nn.Linear(D, D)
        way(linear)(lambda *given: given[2] * 2 if len(given) == 3 and isinstance(given[2], Tensor) else None)
        return {"more": linear}

    return of(parts, lambda m, x: m.more(x))


ROUND, REVERSE = backwards.Round, backwards.Reverse
MODELS: Mapping[str, Case] = {
    "rounded": function(lambda m, x: m.more(ROUND.apply(x, 4.0))),
    "reversed": function(lambda m, x: REVERSE.apply(m.more(x), 0.5)),
    "nested": function(lambda m, x: REVERSE.apply(ROUND.apply(REVERSE.apply(m.more(x), 2.0), 4.0), 0.5)),
    "reversed everywhere": function(
        lambda m, x: REVERSE.apply(m.mid(REVERSE.apply(m.more(REVERSE.apply(x, 0.5)).tanh(), 2.0)), 0.7)),
    "learned step": function(lambda m, x: backwards.Quantize.apply(m.more(x), m.step)),
    "rounded weight": function(lambda m, x: F.linear(x, ROUND.apply(m.more.weight, 4.0))),
    "asks": function(lambda m, x: Asks.apply(m.more(x), m.steps)),
    "norm of a gradient": function(lambda m, x: Norms.apply(m.more(x))),
    "weight norm": of(normed(parametrizations.weight_norm), two), "old weight norm": of(normed(nn.utils.weight_norm), two),
    "spectral norm": of(normed(parametrizations.spectral_norm), two),
    "old spectral norm": of(normed(nn.utils.spectral_norm), two),
    "orthogonal": of(normed(parametrizations.orthogonal, orthogonal_map="cayley"), two),
    "parametrized": of(lambda: {name: parametrize.register_parametrization(nn.Linear(D, D), "weight", Symmetric())
                                for name in ("one", "two")}, two),
    "one block thrice": of(dict, lambda m, x: x + m.mid(m.inside(x + m.mid(m.inside(x).tanh())).tanh())),
    "tensors in a list": of(lambda: {"scales": [torch.full((D,), 0.5 + i).double() for i in range(3)]},
                            lambda m, x: x * m.scales[0] * m.scales[2] + m.scales[1]),
    "complex": of(lambda: {"pairs": weight(T // 2 + 1, D, 2)}, lambda m, x: torch.fft.irfft(
        torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.pairs), n=T, dim=1)),
    "hypernetwork": of(lambda: {"code": weight(4), "maker": nn.Linear(4, D * D)},
                       lambda m, x: F.linear(x, m.maker(m.code).view(D, D))),
    "lists of weights": of(lambda: {"ws": nn.ParameterList([weight(D, D) for _ in range(3)])}, lambda m, x: (
        x @ torch.stack(list(m.ws)).sum(0) @ torch.cat([m.ws[0][:4], m.ws[1][4:]]))),
    "recurrent": of(lambda: {"lstm": nn.LSTM(D, D, 2, batch_first=True, bidirectional=True),
                             "gru": nn.GRU(2 * D, D, batch_first=True)}, lambda m, x: m.gru(m.lstm(x)[0])[0]),
    "cell": of(lambda: {"cell": nn.LSTMCell(D, D)}, cells), "fixed point": of(lambda: {"more": nn.Linear(D, D)}, fixed_point),
    "statistics": of(lambda: {"norm": nn.BatchNorm1d(T)}, lambda m, x: m.norm(x)),
    "codebook": of(lambda: {"codes": torch.randn(5, D), "counts": torch.ones(5)}, quantized),
    "queue": of(lambda: {"queue": torch.randn(32, D), "at": torch.zeros((), dtype=torch.long)}, queued),
    "groups across the batch": of(dict, grouped), "skips": of(lambda: {
        "down": nn.ModuleList(nn.Conv1d(D, D, 3, padding=1) for _ in range(2)),
        "norm": nn.ModuleList(nn.GroupNorm(2, D) for _ in range(2)),
        "up": nn.ModuleList(nn.ConvTranspose1d(D, D, 2, 2) for _ in range(2))}, skips),
    "no elements": of(lambda: {"none": nn.Parameter(torch.empty(0, 3)), "wide": nn.Parameter(torch.empty(4, 0)),
                               "number": nn.Parameter(torch.tensor(2.0))},
                      lambda m, x: x * m.number + m.none.sum() + m.wide.sum(1).sum()),
    "solved": of(dict, lambda m, x: torch.linalg.solve(
        x.transpose(1, 2) @ x + torch.eye(D, dtype=x.dtype), x.transpose(1, 2)).transpose(1, 2)),
    "frozen and small": of(lambda: {"base": nn.Linear(D, D).requires_grad_(False), "low": nn.Linear(D, 2),
                                    "high": nn.Linear(2, D)}, lambda m, x: m.base(x) + 2 * m.high(m.low(x))),
    "pairs": of(lambda: {"scale": nn.Parameter(torch.tensor(1.0))}, lambda m, x: x, pairs),
    "correlated": of(dict, lambda m, x: x, correlated),
    "hardest": of(dict, lambda m, x: x, lambda m, y, t, h: (y - t).square().mean((1, 2)).topk(3).values.mean()),
    "only in training": of(lambda: {"more": nn.Linear(D, D)}, only_in_training, in_training_more),
    "drawn, and no matter": of(dict, drawn), "running norms": of(lambda: {
        "mean": nn.BatchNorm1d(T, momentum=0.3), "own": nn.InstanceNorm1d(T, track_running_stats=True),
        "plain": nn.BatchNorm1d(T, affine=False, track_running_stats=False)}, lambda m, x: m.plain(m.own(m.mean(x)))),
    "hook on a tensor": of(dict, hooked), "hook on a parameter": with_hook(lambda one: one.weight.register_hook),
    "hook after a gradient": with_hook(lambda one: one.bias.register_post_accumulate_grad_hook),
    "hook of a module": with_hook(lambda one: one.register_full_backward_hook),
    "hook of a forward": with_hook(lambda one: one.register_forward_hook),
    "penalized": of(dict, lambda m, x: x, lambda m, y, t, h: (y - t).square().mean() + 0.01 * sum(
        p.abs().sum() for p in m.parameters()) + 0.1 * (m.mid.weight @ m.mid.weight.t()).norm()),
    **BODIES, **LOSSES, **NESTINGS, **FUNCTIONS, **MIXING, **BATCH_LOSSES,
    **MODULES,
}
"""{name: (its parts, its body, its loss)}."""


def loop(model: Any) -> list[float]:
    """Steps, and evaluations with and without gradients between them; what they say."""
    optimizer, said = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05), []
    for step in range(2):
        loss = model(**data(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item())
        for gradients in (True, False):
            model.eval()
            with torch.set_grad_enabled(gradients):
                said.append(float(model(**data(step + 5))["loss"]))
            model.train()
    return said


def trials(rank: int, way: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """(model, what came out: "equal", "refused: ...", or what is wrong) under a way."""
    torch.set_num_threads(1)
    return [(name, tried(name, WAYS[way])) for name in names]


def tried(name: str, pins: Mapping[str, Any]) -> str:
    """What came out of a model under pins."""
    single, model = (_made(name) for _ in range(2))
    try:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        parallel: Any = autoparallel(model, mesh, ((), data()), pins=dict(pins), progress=False)
        said, state = loop(parallel), parallel.full_state_dict()
    except MeshwrightError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:
        return f"RAW {type(error).__name__}: {error}"
    return "; ".join(unlike(said, loop(single), state, single.state_dict())[:3]) or "equal"


NO_WORDS = re.compile(r"refused: (Verify|Sharding|Rule|Graph|Mesh)Error:|please report")
"""Errors of a plan, and of the form of a value that no user gave: they tell nobody what to do."""


def judge(results: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Whether all ranks say the same, and that it is equal, or refused in words that a user can act on; what they say."""
    alike = len({one.partition(":")[0] for one in results}) == 1
    return alike and results[0].startswith(("equal", "refused")) and not any(map(NO_WORDS.search, results)), results


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    parts, body, loss = MODELS[name]
    return Stranger(parts(), body, loss).double()


def main(arguments: Sequence[str]) -> int:
    """Print what is neither equal nor refused on every rank."""
    from tests import strangers

    return report(__doc__, arguments, strangers.trials, MODELS, WAYS, usual=WAYS, four=FOUR, judge=judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
