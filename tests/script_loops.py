"""Scripts of ``tests.scripts``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from tests.looped import whole
from tests.script_models import (
    Actor,
    B,
    BothTasks,
    Classifier,
    D,
    Judge,
    K,
    Lora,
    Maker,
    Mixed,
    Pairs,
    Pixels,
    Preferring,
    Queries,
    Student,
    T,
    Tasks,
    Tower,
    Vae,
    drawn,
    labels_of,
    pixels,
    tokens,
)

Prepare = Callable[..., Any]


def _step(optimizer: Any, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# ---------------------------------------------------------------------------------------------------------------- EMA


class ModelEma:
    """As timm has it."""

    def __init__(self, model: Any, decay: float) -> None:
        self.module, self.decay = copy.deepcopy(model), decay
        self.module.eval()
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model: Any) -> None:
        for mine, its in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(its, weight=1.0 - self.decay)
            else:
                mine.copy_(its)


def ema_of_all(prepare: Prepare) -> Any:
    """Averages of weights and of statistics, evaluated beside the model."""
    model = prepare(Pixels().double(), **pixels(0))
    ema, optimizer, said = ModelEma(model, 0.7), SGD(model.parameters(), 0.1, momentum=0.9), []
    for step in range(3):
        said.append(_step(optimizer, model(**pixels(step))["loss"]))
        ema.update(model)
        model.eval()
        with torch.no_grad():
            for one in (model, ema.module):
                out = one(**pixels(9))
                said += [out["loss"].item(), float((out["logits"].argmax(-1) == pixels(9)["labels"]).double().mean())]
        model.train()
    return said, [model, ema.module]


# ------------------------------------------------------------------------------------------------- noise scale, SAM


def noise_scale(prepare: Prepare) -> Any:
    """The simple noise scale of McCandlish et al. 2018 from two calls a step."""
    model = prepare(Classifier().double(), **tokens(0))
    optimizer, said = AdamW(model.parameters(), 0.02, eps=1e-3), []
    for step in range(2):
        optimizer.zero_grad()
        small = []
        for call in range(2):
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            loss = model(**tokens(10 * step + call))["loss"] / 2
            loss.backward()
            now = [p.grad if old is None else p.grad - old for p, old in zip(model.parameters(), before, strict=True)]
            small.append(sum(float((2 * g).pow(2).sum()) for g in now))
        large = sum(float(p.grad.pow(2).sum()) for p in model.parameters())
        noise = (sum(small) / 2 - large) / (1 / B - 1 / (2 * B))
        said += [large, noise]
        optimizer.step()
    return said, [model]


def asam(prepare: Prepare) -> Any:
    """Adaptive SAM; running statistics are switched off in the second pass, as its reference code does."""
    model = prepare(Pixels().double(), **pixels(0))
    optimizer, said = SGD(model.parameters(), 0.1, momentum=0.9), []

    def statistics(on: bool) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                if on:
                    module.momentum = module.backup_momentum
                else:
                    module.backup_momentum, module.momentum = module.momentum, 0

    for step in range(2):
        said.append(_backward(model(**pixels(step))["loss"]))
        moved = {}
        with torch.no_grad():
            norm = torch.stack([(p.abs() * p.grad).norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                moved[p] = p.square() * p.grad * (0.5 / (norm + 1e-12))
                p.add_(moved[p])
        optimizer.zero_grad()
        statistics(False)
        _backward(model(**pixels(step))["loss"])
        statistics(True)
        with torch.no_grad():
            for p, e in moved.items():
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
    return said, [model]


def _backward(loss: Tensor) -> float:
    loss.backward()
    return loss.item()


# ------------------------------------------------------------------------------------------------- several models


def distilled(prepare: Prepare) -> Any:
    """A teacher that is parallelized too, frozen and in eval(); its logits are the student's input."""
    teacher = Classifier(3).double().eval().requires_grad_(False)
    teacher = prepare(teacher, **tokens(0))
    student = prepare(Student().double(), **tokens(0), soft=drawn(0, B, T, K))
    optimizer, said = AdamW(student.parameters(), 0.02, eps=1e-3), []
    for step in range(3):
        with torch.no_grad():
            soft = teacher(**tokens(step))["logits"]
        said.append(_step(optimizer, student(**tokens(step), soft=soft)["loss"]))
    return said, [teacher, student]


def two_towers(prepare: Prepare) -> Any:
    """A tower each for texts and images; the loss is between all pairs, outside."""
    texts, images = (prepare(Tower().double(), x=drawn(0, B, T, D)) for _ in range(2))
    scale = nn.Parameter(torch.tensor(1.0).double())
    optimizer, said = AdamW([*texts.parameters(), *images.parameters(), scale], 0.02, eps=1e-3), []
    for step in range(3):
        a, b = texts(drawn(step, B, T, D)), images(drawn(step + 50, B, T, D))
        logits = scale.exp() * whole(a) @ whole(b).T
        target = torch.arange(B)
        said.append(_step(optimizer, (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2))
        with torch.no_grad():
            scale.clamp_(0, math.log(100))
    return [*said, scale.item()], [texts, images]


def contrastive(prepare: Prepare) -> Any:
    """CLIP with retrieval over a bank of several batches at the end."""
    def given(seed: int) -> dict[str, Tensor]:
        return {"text": drawn(seed, B, T, D), "image": drawn(seed + 50, B, T, D)}

    model = prepare(Pairs().double(), **given(0))
    no_decay = [p for n, p in model.named_parameters() if p.ndim < 2 or "scale" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim < 2 or "scale" in n)]
    optimizer = AdamW([{"params": rest, "weight_decay": 0.2}, {"params": no_decay, "weight_decay": 0.0}], 0.05, eps=1e-3)
    said = []
    for step in range(3):
        out = model(**given(step))
        said += [_step(optimizer, out["loss"]), float(out["right"])]
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n == "scale":
                    p.clamp_(0, math.log(100))
    model.eval()
    with torch.no_grad():
        outs = [model(**given(step)) for step in (20, 21)]
        text, image = (torch.cat([out[key] for out in outs]) for key in ("text", "image"))
        ranks = (text @ image.T).argsort(-1, descending=True)
        found = (ranks == torch.arange(2 * B)[:, None]).double().argmax(-1)
        said += [float((found < k).double().mean()) for k in (1, 5)] + [float(found.median())]
    return said, [model]


def gan(prepare: Prepare) -> Any:
    """Two modules: the judge learns from what was made and from data, the maker through the judge."""
    maker, judge = prepare(Maker().double(), z=drawn(0, B, D)), prepare(Judge().double(), x=drawn(0, B, D))
    first, second = Adam(maker.parameters(), 0.02, betas=(0.5, 0.9)), Adam(judge.parameters(), 0.02, betas=(0.5, 0.9))
    said = []
    for step in range(2):
        real, z = drawn(step, B, D), drawn(step + 50, B, D)
        fake = maker(z)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        said.append(_step(second, loss))
        said.append(_step(first, F.softplus(-judge(fake)).mean()))
    return said, [maker, judge]


# --------------------------------------------------------------------------------------------- reinforcement, preferences


def ppo(prepare: Prepare) -> Any:
    """Roll-outs with the old policy, several epochs over each, stopped by the divergence."""
    blank = {"action": labels_of(0, B, T), "old": drawn(0, B, T), "advantage": drawn(1, B, T), "wanted": drawn(2, B, T)}
    model = prepare(Actor().double(), x=drawn(0, B, T, D), **blank)
    optimizer, said = Adam(model.parameters(), 0.02, eps=1e-3), []
    for round_ in range(2):
        x = drawn(round_, B, T, D)
        model.eval()
        with torch.no_grad():
            out = model(x=x, **blank)
            logp, value = whole(out["logp"]), whole(out["value"])
        action = (logp.exp().cumsum(-1) > 0.5).double().argmax(-1)
        old = logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        wanted = drawn(round_ + 30, B, T).abs()
        model.train()
        for _epoch in range(3):
            order = torch.randperm(B, generator=torch.Generator().manual_seed(_epoch))
            given = {"x": x, "action": action, "old": old, "advantage": wanted - value, "wanted": wanted}
            out = model(**{name: tensor[order] for name, tensor in given.items()})
            if out["kl"] > 0.5:
                break
            optimizer.zero_grad()
            out["loss"].backward()
            clip = getattr(model, "clip_grad_norm_", None)
            norm = clip(0.5) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            said += [out["loss"].item(), float(out["kl"]), float(out["clipped"]), float(norm)]
    return said, [model]


def dpo(prepare: Prepare) -> Any:
    """A frozen reference beside the policy."""
    policy = Preferring().double()
    frozen = copy.deepcopy(policy).eval()
    for p in frozen.parameters():
        p.requires_grad = False
    frozen = prepare(frozen, **tokens(0))
    policy = prepare(policy, **tokens(0), reference=drawn(0, B))
    optimizer, said = AdamW(policy.parameters(), 0.02, eps=1e-3), []
    for step in range(3):
        with torch.no_grad():
            reference = frozen(**tokens(step))["logps"]
        out = policy(**tokens(step), reference=reference)
        said += [_step(optimizer, out["loss"]), out["right"].item()]
    return said, [frozen, policy]


# ------------------------------------------------------------------------------------------------------- adapters, tasks


def lora(prepare: Prepare) -> Any:
    """Adapters that are trained, merged for an evaluation, and taken out again."""
    net = Classifier()
    for block in net.encoder.blocks:
        block[1], block[3] = Lora(block[1]), Lora(block[3])
    net.embed.requires_grad_(False)
    net.head.requires_grad_(False)
    model = prepare(net.double(), **tokens(0))
    optimizer, said = AdamW([p for p in model.parameters() if p.requires_grad], 0.05, eps=1e-3), []
    for step in range(3):
        said.append(_step(optimizer, model(**tokens(step))["loss"]))
    with torch.no_grad():
        kept = {}
        named = dict(model.named_parameters())
        for name in [name for name in named if name.endswith(".up")]:
            stem = name.removesuffix(".up")
            named[f"{stem}.base.weight"] += 2.0 * named[name] @ named[f"{stem}.down"]
            kept[name] = named[name].clone()
            named[name].zero_()
        model.eval()
        said.append(model(**tokens(9))["loss"].item())
        for name, old in kept.items():
            stem = name.removesuffix(".up")
            named[name].copy_(old)
            named[f"{stem}.base.weight"].sub_(2.0 * old @ named[f"{stem}.down"])
        said.append(model(**tokens(9))["loss"].item())
    return said, [model]


def adapters_alone(prepare: Prepare) -> Any:
    """Only what was trained is kept, and loaded into another with the same base."""
    def make() -> nn.Module:
        torch.manual_seed(3)
        net = Classifier()
        for p in net.parameters():
            p.requires_grad_(False)
        for block in net.encoder.blocks:
            block[1] = Lora(block[1])
        return net.double()

    model, other = prepare(make(), **tokens(0)), prepare(make(), **tokens(0))
    optimizer, said = AdamW([p for p in model.parameters() if p.requires_grad], 0.05, eps=1e-3), []
    for step in range(2):
        said.append(_step(optimizer, model(**tokens(step))["loss"]))
    small = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    result = other.load_state_dict(small, strict=False)
    said += [other(**tokens(7))["loss"].item(), float(len(result.unexpected_keys))]
    return said, [model, other]


def alternating_tasks(prepare: Prepare) -> Any:
    """Another head at every step."""
    def given(seed: int) -> dict[str, Any]:
        return {"x": drawn(seed, B, T, D), "labels": labels_of(seed, B), "sizes": drawn(seed + 9, B), "task": seed % 2}

    model = prepare(Tasks().double(), **given(0))
    optimizer, said = AdamW(model.parameters(), 0.02, eps=1e-3), []
    for step in range(4):
        said.append(_step(optimizer, model(**given(step))["loss"]))
    return said, [model]


def weighted_tasks(prepare: Prepare) -> Any:
    """GradNorm's idea by finite means: shares follow how fast each loss falls."""
    def given(seed: int) -> dict[str, Any]:
        return {"x": drawn(seed, B, T, D), "labels": labels_of(seed, B), "sizes": drawn(seed + 9, B)}

    model = prepare(BothTasks().double(), **given(0), shares=torch.ones(2).double())
    optimizer, said, shares, first = AdamW(model.parameters(), 0.02, eps=1e-3), [], torch.ones(2).double(), None
    for step in range(4):
        out = model(**given(step), shares=shares)
        losses = whole(out["losses"])
        first = losses if first is None else first
        shares = F.softmax(losses / first, 0) * 2
        said += [_step(optimizer, out["loss"]), *losses.tolist()]
    return said, [model]


# ------------------------------------------------------------------------------------------------------------- curricula


def longer_by_copies(prepare: Prepare) -> Any:
    """A short and a long sequence, each with its own module; weights and moments go from one to the other."""
    def given(seed: int, length: int) -> dict[str, Tensor]:
        return {"ids": labels_of(seed, B, length), "labels": labels_of(seed + 9, B, length)}

    torch.manual_seed(0)
    first = Classifier().double()
    second = copy.deepcopy(first)
    short, long = prepare(first, **given(0, 4)), prepare(second, **given(0, 8))
    said, state = [], None
    for model, length in ((short, 4), (long, 8)):
        if state is not None:
            model.load_state_dict(state[0])
        optimizer = AdamW(model.parameters(), 0.02, eps=1e-3)
        if state is not None:
            optimizer.load_state_dict(state[1])
        said += [_step(optimizer, model(**given(step, length))["loss"]) for step in range(2)]
        state = model.state_dict(), optimizer.state_dict()
    return said, [short, long]


def hard_examples(prepare: Prepare) -> Any:
    """A forward that finds which samples are hard, a step that learns these."""
    model = prepare(Classifier().double(), **tokens(0), weights=torch.ones(B).double())
    optimizer, said = AdamW(model.parameters(), 0.02, eps=1e-3), []
    for step in range(3):
        with torch.no_grad():
            each = model(**tokens(step), weights=torch.ones(B).double())["each"]
        worst = each.topk(3).indices
        weights = torch.zeros(B).double()
        weights[worst] = 1.0
        said += [_step(optimizer, model(**tokens(step), weights=weights)["loss"]), float(weights.sum())]
    return said, [model]


# ------------------------------------------------------------------------------------------------- frozen and thawed


def thawed_with_groups(prepare: Prepare) -> Any:
    """ULMFiT: the head first, then one block after the other, each as a group that is added."""
    model = prepare(Classifier().double(), **tokens(0))
    for n, p in model.named_parameters():
        p.requires_grad_(n.startswith("head"))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 0.05, eps=1e-3)
    said = []
    for stage, name in enumerate((None, "encoder.blocks.1", "encoder.blocks.0", "embed")):
        if name is not None:
            fresh = [p for n, p in model.named_parameters() if n.startswith(name)]
            for p in fresh:
                p.requires_grad_(True)
            for decay in (0.1, 0.0):
                chosen = [p for p in fresh if (p.ndim > 1) == (decay > 0)]
                optimizer.add_param_group({"params": chosen, "lr": 0.05 / 2.6**stage, "weight_decay": decay})
        said += [_step(optimizer, model(**tokens(2 * stage + i))["loss"]) for i in range(2)]
    return said, [model]


def moco(prepare: Prepare) -> Any:
    """A query and a key encoder as two modules, and a queue outside."""
    torch.manual_seed(0)
    one = Queries().double()
    two = copy.deepcopy(one.tower)
    queue = F.normalize(drawn(77, 16, D), dim=-1)
    query = prepare(one, x=drawn(0, B, T, D), keys=drawn(1, B, D), queue=queue)
    key = prepare(two.requires_grad_(False), x=drawn(0, B, T, D))
    optimizer, said, at = SGD(query.parameters(), 0.1, momentum=0.9), [], 0
    for step in range(3):
        with torch.no_grad():
            for p, k in zip(query.parameters(), key.parameters(), strict=True):
                k.data.mul_(0.9).add_(p.data, alpha=0.1)
            keys = key(drawn(step + 40, B, T, D))
        said.append(_step(optimizer, query(x=drawn(step, B, T, D), keys=keys, queue=queue)["loss"]))
        queue[at:at + B] = keys
        at = (at + B) % 16
    return [*said, queue.square().sum().item(), queue[3, 2].item()], [query, key]


# ---------------------------------------------------------------------------------------------------- evaluation, decoding


def metrics(prepare: Prepare) -> Any:
    """What evaluations gather over batches: lists of predictions, a confusion matrix, calibration, by NumPy too."""
    model = prepare(Classifier().double(), **tokens(0))
    optimizer, said = AdamW(model.parameters(), 0.05, eps=1e-3), []
    for step in range(2):
        said.append(_step(optimizer, model(**tokens(step))["loss"]))
    model.eval()
    found, wanted, sure, rows = [], [], [], []
    total, count = 0.0, 0
    with torch.no_grad():
        for step in range(5, 8):
            out = model(**tokens(step))
            top = out["logits"].softmax(-1).max(-1)
            found.append(top.indices.cpu())
            sure.append(top.values.cpu())
            wanted.append(tokens(step)["labels"])
            rows += out["logits"][:, 0].argmax(-1).tolist()
            total += out["loss"].item() * B
            count += (out["logits"].argmax(-1) == tokens(step)["labels"]).sum().item()
    found_, wanted_, sure_ = torch.cat(found), torch.cat(wanted), torch.cat(sure)
    confusion = torch.bincount(whole(wanted_ * K + found_).flatten(), minlength=K * K).view(K, K)
    said += [total / 24, count / wanted_.numel(), *confusion.diag().tolist(), float(sum(rows))]
    said += [float((whole(found_).numpy() == wanted_.numpy()).mean()), float(sure_.quantile(0.3))]
    said += [float(((sure_ > t) & (found_ == wanted_)).double().sum()) for t in (0.2, 0.25)]
    return said, [model]


def decoded(prepare: Prepare) -> Any:
    """Greedy, with a plain tensor that is written into."""
    model = prepare(Classifier().double(), **tokens(0))
    model.eval()
    ids, labels = tokens(0)["ids"].clone(), tokens(0)["labels"]
    with torch.no_grad():
        for at in range(T - 1):
            logits = model(ids=ids, labels=labels)["logits"]
            ids[:, at + 1] = logits[:, at].argmax(-1)
    return ids.flatten().tolist(), [model]


def snapshots(prepare: Prepare) -> Any:
    """An ensemble of weights kept on the way; predictions are averaged."""
    model = prepare(Classifier().double(), **tokens(0))
    optimizer, said, kept = SGD(model.parameters(), 0.2), [], []
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    for step in range(4):
        said.append(_step(optimizer, model(**tokens(step))["loss"]))
        schedule.step()
        if step % 2:
            kept.append({k: v.clone() for k, v in model.state_dict().items()})
    model.eval()
    total: Any = 0.0
    with torch.no_grad():
        for state in kept:
            model.load_state_dict(state)
            total = total + model(**tokens(9))["logits"].softmax(-1)
    mean = total / len(kept)
    said += [float(F.nll_loss(mean.log().flatten(0, 1), tokens(9)["labels"].flatten())), float(mean.max())]
    return said, [model]


def mixed(prepare: Prepare) -> Any:
    """Small whole numbers, which half precision holds."""
    model = Mixed()
    with torch.no_grad():
        for p in model.up.parameters():
            p.copy_((p * 10).round())
    model.up.requires_grad_(False)
    x, t = (drawn(0, B, T, D) * 2).round().float(), drawn(1, B, T, 3).float()
    model = prepare(model, x=x, t=t)
    optimizer, said = SGD([p for p in model.parameters() if p.requires_grad], 0.1), []
    for step in range(3):
        out = model(x=(drawn(step, B, T, D) * 2).round().float(), t=t)
        said += [_step(optimizer, out["loss"]), float(out["half"].detach())]
    return said, [model]


def vae(prepare: Prepare) -> Any:
    """Annealed; the distributions are torch's."""
    def given(step: int) -> dict[str, Tensor]:
        return {"x": drawn(step, B, D), "noise": drawn(step + 20, B, 3), "beta": torch.tensor(min(1.0, step / 3)).double()}

    model = prepare(Vae().double(), **given(0))
    optimizer, said = Adam(model.parameters(), 0.02, eps=1e-3), []
    for step in range(4):
        out = model(**given(step))
        said += [_step(optimizer, out["loss"]), float(out["kl"])]
    return said, [model]


def acting(prepare: Prepare) -> Any:
    """Outputs as parameters of torch's distributions, outside: REINFORCE."""
    model = prepare(Tower().double(), x=drawn(0, B, T, D))
    optimizer, said = Adam(model.parameters(), 0.02, eps=1e-3), []
    for step in range(3):
        policy = torch.distributions.Categorical(logits=model(drawn(step, B, T, D)) * 5)
        action = torch.arange(B) % D
        loss = -(policy.log_prob(action) * drawn(step + 9, B)).mean() - 0.1 * policy.entropy().mean()
        said += [_step(optimizer, loss), float(policy.probs.detach().max())]
    return said, [model]


SCRIPTS: Mapping[str, Callable[[Prepare], Any]] = {
    one.__name__.replace("_", " "): one
    for one in (ema_of_all, noise_scale, asam, distilled, two_towers, contrastive, gan, ppo, dpo, lora, adapters_alone,
                alternating_tasks, weighted_tasks, longer_by_copies, hard_examples, thawed_with_groups, moco, metrics, decoded,
                snapshots, mixed, vae, acting)
}
