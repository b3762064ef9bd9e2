"""Models of ``tests.script_loops``, and what they are given."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

B, T, D, K = 8, 4, 8, 6


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels_of(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, K, shape, generator=torch.Generator().manual_seed(seed))


class Encoder(nn.Module):
    """Residual blocks of two linears."""

    def __init__(self, layers: int = 2, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D) if norm else nn.Identity(), nn.Linear(D, 2 * D), nn.GELU(),
                                                  nn.Linear(2 * D, D)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Classifier(nn.Module):
    """Tokens to classes."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(K, D), Encoder(layers), nn.Linear(D, K)

    def forward(self, ids: Tensor, labels: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.encoder(self.embed(ids)))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        loss = each.mean() if weights is None else (each.mean(1) * weights).sum() / weights.sum()
        return {"loss": loss, "logits": logits, "each": each.mean(1)}


def tokens(seed: int) -> dict[str, Tensor]:
    return {"ids": labels_of(seed, B, T), "labels": labels_of(seed + 100, B, T)}


class Pixels(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
                                  nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, K)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x).mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def pixels(seed: int) -> dict[str, Tensor]:
    return {"x": drawn(seed, B, 3, 6, 6), "labels": labels_of(seed, B)}


class Student(nn.Module):
    """Learns labels and a teacher's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier(1)

    def forward(self, ids: Tensor, labels: Tensor, soft: Tensor) -> dict[str, Tensor]:
        out = self.inner(ids, labels)
        tau = 2.0
        soft_loss = F.kl_div(F.log_softmax(out["logits"] / tau, -1), F.softmax(soft / tau, -1), reduction="batchmean") * tau**2
        return {"loss": 0.5 * out["loss"] + 0.5 * soft_loss / T, "logits": out["logits"]}


class Tower(nn.Module):
    """Embeddings of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Encoder(2), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.out(self.encoder(x).mean(1)), dim=-1)


class Pairs(nn.Module):
    """Both towers in one, with a temperature that is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.texts, self.images, self.scale = Tower(), Tower(), nn.Parameter(torch.tensor(4.5))

    def forward(self, text: Tensor, image: Tensor) -> dict[str, Tensor]:
        a, b = self.texts(text), self.images(image)
        logits, target = self.scale.exp() * a @ b.T, torch.arange(len(a), device=a.device)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        return {"loss": loss, "right": (logits.argmax(-1) == target).double().mean(), "text": a, "image": b}


class Maker(nn.Module):
    """A generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D))

    def forward(self, z: Tensor) -> Tensor:
        return self.net(z)  # type: ignore[no-any-return]


class Judge(nn.Module):
    """A discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 2 * D), nn.LeakyReLU(0.2), nn.Linear(2 * D, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Actor(nn.Module):
    """A policy and a value on one trunk, with the clipped loss of PPO."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = Encoder(2), nn.Linear(D, K), nn.Linear(D, 1)

    def forward(self, x: Tensor, action: Tensor, old: Tensor, advantage: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        logits, value = self.policy(h), self.value(h).squeeze(-1)
        logp = logits.log_softmax(-1)
        mine = logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        ratio = (mine - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gained = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        with torch.no_grad():
            kl, clipped = ((ratio - 1) - ratio.log()).mean(), ((ratio - 1).abs() > 0.2).double().mean()
        loss = -gained + 0.5 * (value - wanted).square().mean() - 0.01 * entropy
        return {"loss": loss, "kl": kl, "clipped": clipped, "logp": logp, "value": value}


class Preferring(nn.Module):
    """DPO: the first half of a batch is preferred to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier(2)

    def forward(self, ids: Tensor, labels: Tensor, reference: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(ids, labels)["logits"].log_softmax(-1)
        mask = labels != 0
        logps = (logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) * mask).sum(-1)
        if reference is None:
            return {"logps": logps}
        chosen, rejected = (logps - reference).chunk(2)
        return {"loss": -F.logsigmoid(0.1 * (chosen - rejected)).mean(), "logps": logps,
                "right": (chosen > rejected).double().mean()}


class Lora(nn.Module):
    """A frozen linear and two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T * 2.0  # type: ignore[no-any-return]


class Tasks(nn.Module):
    """A shared trunk and two heads; a number says which."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.sort, self.size = Encoder(2), nn.Linear(D, K), nn.Linear(D, 1)

    def forward(self, x: Tensor, labels: Tensor, sizes: Tensor, task: int = 0) -> dict[str, Tensor]:
        h = self.trunk(x).mean(1)
        if task == 0:
            return {"loss": F.cross_entropy(self.sort(h), labels)}
        return {"loss": F.mse_loss(self.size(h).squeeze(-1), sizes)}


class BothTasks(Tasks):
    """As ``Tasks``; shares of the losses come in, with learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.uncertain = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, labels: Tensor, sizes: Tensor, shares: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        h = self.trunk(x).mean(1)
        losses = torch.stack([F.cross_entropy(self.sort(h), labels), F.mse_loss(self.size(h).squeeze(-1), sizes)])
        return {"loss": (shares * (losses * (-self.uncertain).exp() + self.uncertain)).sum(), "losses": losses.detach()}


class Queries(nn.Module):
    """InfoNCE against a queue that comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor, keys: Tensor, queue: Tensor) -> dict[str, Tensor]:
        q = self.tower(x)
        logits = torch.cat([(q * keys).sum(-1, keepdim=True), q @ queue.T], 1) / 0.2
        return {"loss": F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))}


class Mixed(nn.Module):
    """Regions under autocast, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.up(x)
            with torch.autocast("cpu", enabled=False):
                g = self.mid(h.float()).tanh()
        y = self.head(g)
        return {"loss": (y - t).square().mean(), "half": h.double().sum() if h.dtype == torch.bfloat16 else h.sum() * 0 + 1e6}


class Vae(nn.Module):
    """Noise and the share of the divergence come in."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread, self.decode = nn.Linear(D, D), nn.Linear(D, 3), nn.Linear(D, 3), nn.Linear(3, D)

    def forward(self, x: Tensor, noise: Tensor, beta: Tensor) -> dict[str, Tensor]:
        h = self.encode(x).relu()
        q = torch.distributions.Normal(self.mean(h), F.softplus(self.spread(h)) + 1e-3)
        p = torch.distributions.Normal(torch.zeros_like(q.loc), torch.ones_like(q.scale))
        found = self.decode(q.loc + q.scale * noise)
        likely = torch.distributions.Normal(found, 0.5).log_prob(x).sum(-1).mean()
        kl = torch.distributions.kl_divergence(q, p).sum(-1).mean()
        return {"loss": beta * kl - likely, "kl": kl.detach(), "found": found}
