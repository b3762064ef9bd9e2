"""Parameters, buffers and gradients of a parallel module in users' hands: as in one process, or refused on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright.api import autoparallel
from meshwright.errors import InputError, RunError
from meshwright.runtime.state.names import refuse_own_state
from tests.equality import captured_once, compare, loss_of

TWO: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-0": {"dp": 2, "zero": 0}, "ZeRO-3": {"dp": 2, "zero": 3}, "accumulated": {"dp": 2, "zero": 1, "microbatches": 2},
    "tp": {"tp": 2}, "pp": {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2},
}
FOUR: Mapping[str, Mapping[str, Any]] = {
    "dp x tp": {"dp": 2, "tp": 2, "zero": 3}, "HSDP": {"dp": 4, "shard": 2, "zero": 2},
    "pp x dp": {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2, "zero": 1},
}


class Net(nn.Module):
    """Rows that do not divide, a number, a tied weight, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.norm, self.gain = nn.LayerNorm(8), nn.Parameter(torch.tensor(1.3))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": F.cross_entropy(self.head(self.norm(x) * self.gain + self.shift).flatten(0, 1), labels.flatten())}


def case() -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(1)
    return Net(), {"ids": torch.randint(0, 11, (8, 4)), "labels": torch.randint(0, 11, (8, 4))}


_PLANS: dict[str, Any] = {}
"""Plans of ``case``'s model that this process has found."""


def parallelize(model: nn.Module, batch: Any, pins: Mapping[str, Any]) -> Any:
    mesh, key = init_device_mesh("cpu", (dist.get_world_size(),)), f"{dist.get_world_size()} {sorted(pins.items())}"
    if not all(p.requires_grad for p in model.parameters()):
        return autoparallel(model, mesh, ((), batch), pins=dict(pins), progress=False)
    with captured_once("weights"):
        if key in _PLANS:
            return autoparallel(model, mesh, ((), batch), plan=_PLANS[key], progress=False)
        parallel: Any = autoparallel(model, mesh, ((), batch), pins=dict(pins), progress=False)
    _PLANS[key] = parallel.plan
    return parallel


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(model: Any, batch: Any, make: Callable[[Any], torch.optim.Optimizer], count: int = 2) -> None:
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def same_state(parallel: Any, single: nn.Module, rank: int, what: str) -> list[str]:
    state = parallel.full_state_dict()
    return [f"{what}: {line}" for line in compare(state, single.state_dict())] if rank == 0 else []


# --- the writers: each changes weights of either module in the same way ---------------------------------------------------


def in_place(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.data.mul_(1.01)
        with torch.no_grad():
            p.add_(0.01)
            p.copy_(torch.full(p.shape, 0.3) * 0.9 if "norm" in name else p * 0.9)
        if "embed" in name:
            p.data.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        if "layers.1" in name:
            nn.init.constant_(p, 0.05)


def frozen(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0" not in name and "embed" not in name)


def thawed(model: nn.Module) -> None:
    model.requires_grad_(True)


def written(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """After writes of every kind, also behind a forward that had no backward, losses and two steps are the single process's."""
    torch.set_num_threads(1)
    problems: list[str] = []
    for what, pins in cases.items():
        single, batch = case()
        parallel = parallelize(copy.deepcopy(single), batch, pins)
        for write in (in_place, frozen, thawed):
            for model in (single, parallel):
                loss_of(model(**batch))  # what it gathers is stale afterwards
                write(model)
                steps(model, batch, adamw)
            problems += same_state(parallel, single, rank, f"{what}, {write.__name__}")
        wanted = {key: torch.randn_like(x) for key, x in single.state_dict().items() if key != "head.weight"}
        wanted["head.weight"] = wanted["embed.weight"]
        for model in (single, parallel):
            model.load_state_dict(wanted)
        averaged = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for model in (single, parallel)]
        for model, average in zip((single, parallel), averaged, strict=True):
            for _ in range(2):
                steps(model, batch, adamw, 1)
                average.update_parameters(model)
        problems += same_state(averaged[1].module, averaged[0].module, rank, f"{what}, averaged")
        problems += same_state(parallel, single, rank, f"{what}, loaded")
    return problems


def test_writes(pool: Callable[[int], Any]) -> None:
    """In-place edits, initialization, freezing and thawing, loading one process's state, averaging."""
    assert pool(2).run(written, TWO) == [[]] * 2
    assert pool(4).run(written, {"pp x dp": FOUR["pp x dp"]}) == [[]] * 4


def norms(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    torch.set_num_threads(1)
    problems: list[str] = []
    for what, pins in cases.items():
        single, batch = case()
        parallel = parallelize(copy.deepcopy(single), batch, pins)
        for model in (single, parallel):
            for _ in range(2):  # gradients of two calls add up
                loss_of(model(**batch)).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)
        for kind in (1.0, 2.0, 3.0, 0.0, float("inf"), float("-inf")):
            want = torch.nn.utils.get_total_norm([p.grad for p in single.parameters()], kind)
            torch.testing.assert_close(parallel.clip_grad_norm_(1e9, kind), want, rtol=1e-4, atol=1e-6)
            for foreach in (None, True, False):
                arguments = (1e9, kind, False, foreach)
                if "pp" in pins:
                    with pytest.raises(RunError, match=r"parallel\.clip_grad_norm_"):
                        torch.nn.utils.clip_grad_norm_(parallel.parameters(), *arguments)
                else:
                    found = whole(torch.nn.utils.clip_grad_norm_(parallel.parameters(), *arguments))
                    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
        torch.nn.utils.clip_grad_norm_(single.parameters(), 0.01)
        if "pp" in pins:
            parallel.clip_grad_norm_(0.01)
        else:
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.01)
        wanted = {name: p.grad for name, p in single.named_parameters()}
        found = {name: whole(p.grad) for name, p in parallel.named_parameters()}
        problems += [f"{what}: {line}" for line in compare(found, {name: wanted[name] for name in found})]
        assert all(p.grad.tolist() == found[name].tolist() for name, p in parallel.named_parameters())
        parallel.zero_grad(set_to_none=False)
        assert all(not whole(p.grad).any() for p in parallel.parameters())
    return problems


def test_norms_and_clipping(pool: Callable[[int], Any]) -> None:
    """Torch's own functions are right, or name the module's own where a rank has a stage only; that one is right always."""
    assert pool(2).run(norms, TWO) == [[]] * 2
    assert pool(4).run(norms, FOUR) == [[]] * 4


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, fused=True, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def optimized(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    torch.set_num_threads(1)
    problems: list[str] = []
    for what, pins in cases.items():
        model, batch = case()
        start = model.state_dict()
        parallel = parallelize(model, batch, pins)
        for name, make in OPTIMIZERS.items():
            single = copy.deepcopy(model)
            parallel.load_state_dict(start)
            if name == "LBFGS" and "pp" in pins:
                with pytest.raises(RunError, match="without a pipeline"):
                    steps(parallel, batch, make)
                continue
            for module in (single, parallel):
                steps(module, batch, make, 1 if name == "LBFGS" else 3)  # it magnifies what rounding leaves
            problems += same_state(parallel, single, rank, f"{what}, {name}")
    return problems


def test_optimizers(pool: Callable[[int], Any]) -> None:
    """Also those that reduce, factor, orthogonalize or join what they update equal the single process after three steps."""
    assert pool(2).run(optimized, {name: TWO[name] for name in ("ZeRO-3", "tp", "pp")}) == [[]] * 2
    assert pool(4).run(optimized, FOUR) == [[]] * 4


def regularized(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    torch.set_num_threads(1)
    problems: list[str] = []
    for what, pins in cases.items():
        single, batch = case()
        parallel = parallelize(copy.deepcopy(single), batch, pins)

        def loss_with_decay(model: Any, batch: Any = batch) -> Tensor:
            return loss_of(model(**batch)) + 0.1 * sum((p**2).sum() for p in model.parameters())  # type: ignore[no-any-return]

        if "pp" in pins:
            with pytest.raises(RunError, match="of its own stages"):
                loss_with_decay(parallel)
            continue
        for model in (single, parallel):
            optimizer = adamw(model.parameters())
            for _ in range(2):
                loss_with_decay(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        problems += same_state(parallel, single, rank, what)
    return problems


def test_losses_of_parameters(pool: Callable[[int], Any]) -> None:
    """What is computed from parameters joins the loss, forward and backward."""
    assert pool(2).run(regularized, TWO) == [[]] * 2


def refuse_additions(parallel: Any, call: Callable[[], Any]) -> None:
    """What nothing would read, put in by each way that there is."""
    inner = parallel.layers[0]  # of which every stage has the modules
    for where, name in ((parallel, "norm"), (inner, "1")):
        child = getattr(where, name)
        for put in (
            lambda where=where: where.register_buffer("more", torch.ones(2)),
            lambda where=where: where.register_parameter("more", nn.Parameter(torch.ones(2))),
            lambda where=where: where.add_module("more", nn.Linear(2, 2)),
            lambda where=where: where.register_module("more", nn.Linear(2, 2)),
            lambda where=where: setattr(where, "more", nn.Parameter(torch.ones(2))),
            lambda where=where: setattr(where, "more", nn.Linear(2, 2)),
            lambda where=where, name=name: setattr(where, name, nn.LayerNorm(8)),
            lambda where=where, name=name: setattr(where, name, None),
            lambda where=where, name=name: delattr(where, name),
        ):
            with pytest.raises(RunError, match=r"(set on|of) (the|a sub-module of a) parallel module.*before autoparallel"):
                put()
        where._modules["more"] = nn.GELU()
        with pytest.raises(RunError, match="'more' was put into"):
            call()
        del where._modules["more"]
        where._modules[name] = nn.LayerNorm(8)
        with pytest.raises(RunError, match=f"'{name}' was put into"):
            call()
        where._modules[name] = child
    linear = inner[0]
    tied = partial(setattr, linear, "weight", nn.Parameter(torch.ones(2)))
    for change in (tied, lambda: delattr(linear, "weight"), lambda: setattr(linear, "weight", None),
                   *(partial(f, linear) for f in (nn.utils.weight_norm, nn.utils.spectral_norm, parametrizations.weight_norm))):
        with pytest.raises(RunError, match="before autoparallel"):  # by each rank itself, for others do not come to know
            change()


def refused(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> None:
    torch.set_num_threads(1)
    for pins in cases.values():
        model, batch = case()
        model.norm.bias.requires_grad_(False)
        parallel = parallelize(model, batch, pins)
        named = dict(parallel.named_parameters())
        for p in named.values():
            for new in (torch.zeros(p.shape), torch.zeros_like(p)):
                with pytest.raises(RunError, match=r"p\.data\.copy_"):
                    p.data = new
            with pytest.raises(RunError, match="distribute_tensor"):
                p.grad = torch.zeros(p.shape)
            p.grad = distribute_tensor(torch.ones(p.shape), p.device_mesh, p.placements)
            assert bool(whole(p.grad).all())
            with pytest.raises(RunError, match=r"squeeze_.* shape of a DTensor.*full_tensor"), torch.no_grad():
                p.unsqueeze_(0)
            p.grad.data = p.grad.data * 0
            assert not whole(p.grad).any()
            p.grad = None
        with pytest.raises(RunError, match="before autoparallel"):
            parallel.apply(lambda module: None)
        if "pp" in pins:
            for shared in (None, torch.Generator()):
                with pytest.raises(RunError, match="same random numbers"):
                    nn.init.normal_(next(iter(named.values())), generator=shared)
        else:
            torch.manual_seed(rank)
            first = nn.init.normal_(named["embed.weight"]).full_tensor()
            torch.manual_seed(0)
            assert torch.equal(first, torch.empty(11, 8).normal_()), "drawn as one process draws, by the first rank"
            for name, p in named.items():
                if any(getattr(placement, "dim", None) == 0 for placement in p.placements):
                    with pytest.raises(RunError, match="write into a view"), torch.no_grad():
                        p[3].zero_()
                elif p.ndim:
                    with torch.no_grad():
                        p[3].zero_()
                    assert not p.full_tensor()[3].any(), name

        others = dict(named)
        refuse_additions(parallel, partial(parallel, **batch))
        assert dict(parallel.named_parameters()) == others

        def expect(match: str, parallel: Any = parallel, batch: Any = batch) -> None:
            for act in (lambda: parallel(**batch), parallel.full_state_dict):
                with pytest.raises(RunError, match=match):
                    act()

        holder = parallel.norm if hasattr(parallel.norm, "bias") else None  # in a pipeline, of one stage only
        if holder is not None:
            with pytest.raises(RunError, match="'bias_orig' is set on a sub-module"):
                prune.l1_unstructured(holder, "bias", 0.3)
            holder.bias.requires_grad_(True)
        expect("'norm.bias' was frozen when")
        if holder is not None:
            holder.bias.requires_grad_(False)
            kept, holder._parameters["weight"] = holder.weight, nn.Parameter(torch.ones(8))
        expect("'norm.weight' of the parallel module was replaced")
        if holder is not None:
            holder._parameters["weight"] = kept
            del parallel._buffers["shift"]
        expect("'shift' of the parallel module was removed")
        if holder is not None:
            parallel._buffers["shift"] = next(place.tensor for place in parallel._places if place.fqn == "shift")
        model.layers[0].requires_grad_(False)
        expect("of the model that was parallelized was frozen")
        model.layers[0].requires_grad_(True)
        parallel(**batch)


def test_refusals(pool: Callable[[int], Any]) -> None:
    """What the engine cannot follow is refused on every rank, by name, and changes nothing."""
    pool(2).run(refused, TWO)
    pool(4).run(refused, FOUR)


TURNED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quantile": lambda p: p.detach().flatten().quantile(0.3),
    "quantiles": lambda p: torch.quantile(p.grad, torch.tensor([0.1, 0.9]), dim=0),
    "without nan": lambda p: p.detach().abs().nanquantile(0.5, dim=-1, keepdim=True),
    "clipped": lambda p: p.grad.clamp(max=p.grad.abs().quantile(0.9)),
    "differentiated": lambda p: torch.autograd.grad(p.sin().quantile(0.4), p)[0],
    "squeezed": lambda p: p.detach().clone().unsqueeze_(0).transpose_(0, -1).mul_(2).squeeze_() + 1,
    "turned": lambda p: p.detach().abs().t_(),
}


READ: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda p: torch.tensor(p.detach().numpy()), "as an array": lambda p: torch.tensor(np.asarray(p.grad)),
    "written": lambda p: [abs(float(f"{x:9.5f}") - x.item()) < 1e-5 for x in (p.detach().norm(), p.sum(), p.grad.max())],
    "copied": lambda p: whole(copy.deepcopy(p.detach())),
}


def turned(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> None:
    torch.set_num_threads(1)
    for pins in cases.values():
        model, batch = case()
        parallel, single = parallelize(model, batch, pins), case()[0]
        for one in (parallel, single):
            one(**batch)["loss"].backward()
        for (name, p), q in zip(parallel.named_parameters(), single.parameters(), strict=True):
            for what, value in TURNED.items():
                found, wanted = value(p), value(q)
                assert (found.shape, found.stride()) == (wanted.shape, wanted.stride()), (name, what)
                torch.testing.assert_close(whole(found), wanted)
            for what, read in READ.items():
                torch.testing.assert_close(read(p), read(q), msg=f"{name}: {what}")
            with pytest.raises(RuntimeError, match="requires grad"):
                p.numpy()
            with pytest.raises(ValueError, match="read-only"):
                p.detach().numpy()[...] = 0
            with pytest.raises(RunError, match="full_tensor"):
                torch.from_dlpack(p.detach())


def test_views_in_place(pool: Callable[[int], Any]) -> None:
    """Of what is computed from weights and gradients, as ``torch.quantile`` does it to what it has sorted."""
    pool(2).run(turned, {name: TWO[name] for name in ("ZeRO-3", "tp")})


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


class Named(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"net.{name}": x for name, x in super().state_dict(*args, **kwargs).items()}


def test_what_state_dicts_would_lack_is_refused() -> None:
    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(more=torch.ones(1)))
    for module, words in ((Extra(2, 2), "get_extra_state"), (Named(2, 2), "state_dict"), (hooked, "state_dict_hooks")):
        with pytest.raises(InputError, match=f"module '0' .* changes what state_dict.. gives .{words}.*What to do"):
            refuse_own_state(nn.Sequential(module))
    refuse_own_state(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


class Registered(nn.Module):
    """Its modules, parameters and buffers are registered in an order that each process may have for itself, as where a
    ModuleDict is made of a set; ``drawn``: the order in which it initializes its own."""

    def __init__(self, names: str, drawn: str = "abc") -> None:
        super().__init__()
        self.parts, self.drawn = nn.ModuleDict({name: nn.Linear(8, 8) for name in names}), drawn
        for name in names:
            self.register_parameter(f"scale_{name}", nn.Parameter(torch.empty(8)))
            self.register_buffer(f"shift_{name}", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in self.drawn:
            nn.init.normal_(self.get_parameter(f"scale_{name}"))
            self.get_buffer(f"shift_{name}").fill_(float(ord(name)))

    def forward(self, x: Tensor) -> Tensor:
        for name in "abc":
            x = self.parts[name](x).tanh() * self.get_parameter(f"scale_{name}") + self.get_buffer(f"shift_{name}")
        return x.square().mean()


def _registered_apart(rank: int, cases: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
    """(names of parameters in order, and what is drawn for them) under each plan of a model that rank 1 has in another order;
    what is wrong."""
    x, mesh, said, wrong = torch.linspace(-1, 1, 64).view(8, 8), init_device_mesh("cpu", (2,)), list[Any](), list[str]()
    order = "abc"[::1 - 2 * rank]
    for pins in cases:
        single, model = Registered("abc"), Registered(order)
        model.load_state_dict(single.state_dict())
        parallel: Any = autoparallel(model, mesh, (x,), pins=dict(pins), progress=False)
        for one in (parallel, single):
            one(x).backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        wrong += same_state(parallel, single, rank, str(pins))
        with torch.device("meta"):
            blank, drawing = Registered(order), Registered("abc", drawn=order)
        torch.manual_seed(1)
        made = autoparallel(blank, mesh, (x,), plan=parallel.plan, progress=False)
        said += [(name, whole(tensor).tolist()) for name, tensor in made.named_parameters()]
        with pytest.raises(InputError, match=r"initialization makes other weights on ranks \[1\].*'scale_a'.*What to do"):
            autoparallel(drawing, mesh, (x,), plan=parallel.plan, progress=False)
    return said, wrong


def _blank_twins(rank: int) -> list[list[float]]:
    x, mesh, said = torch.ones(8, 8), init_device_mesh("cpu", (2,)), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        with torch.device("meta"):
            twins = [Registered("abc") for _ in range(2)]
        for made in [autoparallel(twin, mesh, (x,), pins={"dp": 2}, progress=False) for twin in twins]:
            said.append([number for p in made.parameters() for number in whole(p).flatten().tolist()])
    return said


def test_models_on_the_meta_device_begin_apart(pool: Callable[[int], Any]) -> None:
    """As two that one process initializes; from one seed they begin so again."""
    here, there = pool(2).run(_blank_twins)
    assert here == there
    assert here[:2] == here[2:4]
    assert all(here[one] != here[two] for one, two in ((0, 1), (0, 4), (4, 5)))


def test_parameters_that_each_process_has_in_an_order_of_its_own(pool: Callable[[int], Any]) -> None:
    """They are gathered one after the other, and initialized from seeds of their own: in rank 0's order."""
    cases = [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 3}, {"tp": 2}]
    here, there = pool(2).run(_registered_apart, cases)
    assert here == there
    said, wrong = here
    assert wrong == []
    assert said[:9] == said[9:18] == said[18:]
    assert [name for name, _ in said[:9:2]] == ["scale_a", "scale_c", "parts.a.bias", "parts.b.bias", "parts.c.bias"]


class Ties(nn.Module):
    """Two names of one weight, and outputs in a dict, in an order that each process may have for itself."""

    def __init__(self, names: str) -> None:
        super().__init__()
        one = nn.Linear(8, 8)
        for name in names:
            self.add_module(name, nn.Linear(8, 8))
            self.get_submodule(name).weight = one.weight
        self.head, self.names = nn.Linear(8, 8), names

    def forward(self, x: Tensor) -> dict[str, Any]:
        a, b = self.get_submodule("a")(x).tanh(), self.get_submodule("b")(x).tanh()
        y = self.head((b if self.training else b.cumsum(-1)) + a)
        found: dict[str, Any] = {"loss": (y - a).square().mean(), "a": a, "b": b}
        return {**{name: found.pop(name) for name in self.names}, **found}


def _tied_apart(rank: int, cases: Sequence[Mapping[str, Any]], folder: str) -> list[str]:
    """What is wrong under each plan of a model that rank 1 ties, and whose outputs it has, in another order; what a restart in
    which rank 0 has the other order makes of the plan and the checkpoint."""
    x, mesh, wrong = torch.linspace(-1, 1, 64).view(8, 8), init_device_mesh("cpu", (2,)), list[str]()
    plan: Any = None
    for number, pins in enumerate(cases):
        for first in ("ab", "ba"):
            torch.manual_seed(0)
            single, model = Ties(first), Ties(first[::1 - 2 * rank])
            model.load_state_dict(single.state_dict())
            parallel: Any = autoparallel(model, mesh, (x,), progress=False,
                                         **({"pins": dict(pins)} if first == "ab" else {"plan": plan}))
            plan = parallel.plan
            for one in (parallel, single):
                steps(one.train(), {"x": x}, lambda ps: torch.optim.AdamW(ps, lr=0.1))
            wrong += same_state(parallel, single, rank, f"{pins} {first}")
            with torch.no_grad():
                found, wanted = parallel.eval()(x), single.eval()(x)
            wrong += [f"{pins} {first}: outputs are {[*found]}"] if [*found] != [*wanted] else []
            wrong += compare({name: whole(found[name]) for name in "ab"}, {name: wanted[name] for name in "ab"})
            if first == "ab":
                parallel.save(f"{folder}/{number}")
                kept = parallel.full_state_dict()
        parallel.load(f"{folder}/{number}")
        now = parallel.full_state_dict()
        wrong += compare({name: now[name] for name in kept}, kept)
    return wrong


def test_ties_and_outputs_that_each_process_has_in_an_order_of_its_own(pool: Callable[[int], Any], tmp_path: Path) -> None:
    """They are rank 0's."""
    cases = [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "microbatches": 2}]
    assert pool(2).run(_tied_apart, cases, str(tmp_path)) == [[], []]
