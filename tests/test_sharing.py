"""Tensors of a model that lie in the same memory: kept one, or refused with both names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.compiler.capture.capture import capture
from meshwright.errors import CaptureError, MeshwrightError
from tests.equality import compare


class Two(nn.Module):
    """Two layers, and what a test puts beside them."""

    def __init__(self, change: Callable[[Two], None], device: str = "cpu") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device)
        self.extra: Any = None
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(x)))
        return (y + self.extra.sum() if isinstance(self.extra, Tensor) else y).sum()


def _set(**values: Callable[[Two], Any]) -> Callable[[Two], None]:
    def change(model: Two) -> None:
        for name, make in values.items():
            owner, _, key = name.rpartition("__")
            setattr(getattr(model, owner) if owner else model, key, make(model))

    return change


REFUSED: Mapping[str, tuple[Callable[[Two], None], str]] = {
    "parameter of a parameter's data": (
        _set(second__weight=lambda m: nn.Parameter(m.first.weight.data)), "'first.weight' and parameter 'second.weight' share"),
    "transpose": (_set(second__weight=lambda m: nn.Parameter(m.first.weight.data.t())), "'first.weight' and .*'second.weight'"),
    "slice": (_set(second__bias=lambda m: nn.Parameter(m.first.weight.data[2])), "'first.weight' and parameter 'second.bias'"),
    "attribute": (_set(extra=lambda m: m.first.weight.data), "parameter 'first.weight' and attribute 'extra'"),
    "list": (_set(extra=lambda m: [m.first.weight.data[1:3]]), "'first.weight' and what is kept in 'extra'"),
    "view of a parameter": (_set(extra=lambda m: m.first.weight[:, 0]), "parameter 'first.weight' and attribute 'extra'"),
    "made of a parameter": (_set(extra=lambda m: m.first.weight * 2), "'extra', a tensor that takes gradients"),
    "trained attribute": (
        _set(extra=lambda m: torch.ones(3, requires_grad=True)), "'extra', a tensor that takes gradients"),
    "sparse attribute": (_set(extra=lambda m: torch.eye(3).to_sparse()), "'extra' is of layout torch.sparse_coo"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, device: str) -> None:
    """With both names, on real memory and on none."""
    change, match = REFUSED[what]
    model = Two(change, device)
    with pytest.raises(CaptureError, match=match):
        capture(model, (torch.randn(4, 8),), {})


def test_disjoint_slices_share_nothing() -> None:
    """Weights that are slices or columns of one memory are as good as others."""
    flat = torch.randn(16, 8)
    model = Two(_set(first__weight=lambda m: nn.Parameter(flat[:8]), second__weight=lambda m: nn.Parameter(flat[8:])))
    assert len(capture(model, (torch.randn(4, 8),), {}).params) == 4
    wide = torch.randn(8, 16)
    model = Two(_set(first__weight=lambda m: nn.Parameter(wide[:, :8]), second__weight=lambda m: nn.Parameter(wide[:, 8:])))
    assert len(capture(model, (torch.randn(4, 8),), {}).params) == 4


class Queue(nn.Module):
    """A buffer under two names, which are two tensors of one memory."""

    queue: Tensor
    same: Tensor

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.inside, self.changes = nn.Linear(8, 8), changes
        self.register_buffer("queue", torch.ones(8))
        self.register_buffer("same", self.queue.detach())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inside(x)
        if self.changes:
            self.queue.add_(y.detach().mean(0))
        return {"loss": ((y * self.queue - self.same) ** 2).mean()}


def _queued(rank: int, cases: list[dict[str, Any]]) -> list[str]:
    torch.manual_seed(1)
    model, x = Queue(changes=False), torch.randn(4, 8)
    problems: list[str] = []
    for pins in cases:
        single = copy.deepcopy(model)
        parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((x,), {}), pins=pins, progress=False)
        for module in (single, parallel):
            with torch.no_grad():
                module.queue.mul_(2)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                module(x)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        state = parallel.full_state_dict()
        problems += compare(state, single.state_dict()) if rank == 0 else []
    return problems


def test_buffers_that_are_one_stay_one(pool: Callable[[int], Any]) -> None:
    """What is written under one name is read under the other; a forward that writes is refused with both names."""
    assert pool(2).run(_queued, [{"dp": 2}, {"tp": 2}]) == [[]] * 2
    with pytest.raises(CaptureError, match="'queue', 'same' are one tensor"):
        capture(Queue(changes=True), (torch.randn(4, 8),), {})


class Headed(nn.Module):
    """An encoder, which other models may have too, and a head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.encoder(x).tanh()).square().mean()}


def _pairs(rank: int, pins: dict[str, Any]) -> dict[str, str]:
    """What is said of the second call, by the way in which two parallel modules are used."""
    torch.manual_seed(1)
    x, said = torch.randn(4, 8), {}

    def built(model: nn.Module) -> Any:
        return autoparallel(model, init_device_mesh("cpu", (2,)), ((x,), {}), pins=pins, progress=False)

    def trained(parallel: Any) -> None:
        parallel(x)["loss"].backward()
        optimizer = torch.optim.SGD((p for p in parallel.parameters() if p.requires_grad), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()

    for name in ("two heads", "one step of both", "frozen", "two lengths", "copied over", "compared", "copies", "later"):
        models = [Headed(nn.Linear(8, 8))] * 2
        if name in ("two heads", "one step of both", "frozen"):
            encoder = nn.Linear(8, 8).requires_grad_(name != "frozen")
            models = [Headed(encoder), Headed(encoder)]
        if name == "copies":
            models = [*copy.deepcopy(models)[:1], *models[1:]]
        one, two = built(models[0]), None if name == "later" else built(models[1])
        try:
            if name in ("one step of both", "compared"):
                one(x)["loss"].backward()
            else:
                trained(one)
            if name == "copied over":
                two.load_state_dict(one.state_dict())
            trained(built(models[1]) if two is None else two)
            said[name] = ""
        except MeshwrightError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_parallel_modules_of_the_same_parameters(pool: Callable[[int], Any], pins: dict[str, Any]) -> None:
    """Each has its own: a use in which one process would train one set of weights is refused on every rank."""
    for said in pool(2).run(_pairs, pins):
        refused = {name for name, text in said.items() if text}
        assert refused == {"two heads", "one step of both", "two lengths"}, said
        assert all("another parallel module was built of the same parameters" in said[name] for name in refused)


def _written(rank: int, pins: dict[str, Any]) -> dict[str, str]:
    """What is said of the call that follows, by what was written into the model behind the build."""
    torch.manual_seed(1)
    model, other, x, said = Headed(nn.Linear(8, 8)), Headed(nn.Linear(8, 8)), torch.randn(4, 8), {}
    parallel: Any = autoparallel(model, init_device_mesh("cpu", (2,)), ((x,), {}), pins=pins, progress=False)

    def trained(module: Any) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    def back() -> None:
        whole = [parallel.full_state_dict()]
        dist.broadcast_object_list(whole, 0)
        model.load_state_dict(whole[0])

    for name, write in {
        "loaded": lambda: model.load_state_dict(other.state_dict()),
        "both": lambda: parallel.load_state_dict(model.state_dict()),
        "taken back": back, "on one rank": lambda: rank or nn.init.ones_(model.head.weight),
        "taken back again": back, "trained for itself": lambda: trained(model),
    }.items():
        write()
        try:
            trained(parallel)
            said[name] = ""
        except MeshwrightError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_what_is_written_into_the_model_later(pool: Callable[[int], Any], pins: dict[str, Any]) -> None:
    """The parallel module does not read it, which is said on every rank, unless it holds the same."""
    for said in pool(2).run(_written, pins):
        assert [name for name, text in said.items() if text] == ["loaded", "on one rank"], said
        assert all("of the model that was parallelized was written since" in text for text in said.values() if text)


class Counted(nn.Module):
    """Linears around statistics of the batch, and a buffer that only the caller changes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.norm(self.inside(x)).tanh() * self.scale).square().mean()}


def _as_another(model: nn.Module) -> dict[str, Tensor]:
    return {name: x + 1 for name, x in model.state_dict().items()}


def _under_another(place: Any, key: str) -> None:
    old = getattr(place, key)
    setattr(place, key, nn.Parameter(old.detach() * 2) if isinstance(old, nn.Parameter) else old * 2)


def _given_other_memory(parameter: nn.Parameter, new: Tensor) -> None:
    parameter.data = new


DONE: Mapping[str, tuple[Callable[[Counted], object], str]] = {
    "other memory": (lambda m: _given_other_memory(m.head.weight, m.head.weight.data * 2), "parameter 'head.weight'.*written"),
    "through .data": (lambda m: m.head.weight.data.mul_(2), "parameter 'head.weight'.*written"),
    "another parameter": (lambda m: _under_another(m.head, "weight"), "parameter 'head.weight'.*written"),
    "another buffer": (lambda m: _under_another(m, "scale"), "buffer 'scale'.*written"),
    "registered anew": (lambda m: m.register_buffer("scale", torch.zeros(8)), "buffer 'scale'.*written"),
    "buffer": (lambda m: m.scale.fill_(3.0), "buffer 'scale'.*written"),
    "statistics": (lambda m: m.norm.running_mean.fill_(2.0), "buffer 'norm.running_mean'.*written"),  # type: ignore[union-attr]
    "statistics reset": (lambda m: m.norm.reset_running_stats(), "buffer 'norm.running_mean'.*written"),
    "statistics of a call": (lambda m: m(torch.randn(4, 8)), "buffer 'norm.running_mean'.*train\\(\\) writes buffers"),
    "assigned": (lambda m: m.load_state_dict(_as_another(m), assign=True), "buffer 'scale'.*written"),
    "half": (lambda m: m.half(), "buffer 'scale'.*converted to torch.float16"),
    "evaluated": (lambda m: m.eval()(torch.randn(4, 8)) and m.train(), ""),
    "copied to other memory": (lambda m: _given_other_memory(m.head.weight, m.head.weight.data.clone()), ""),
    "without memory": (lambda m: m.to("meta"), ""),
}


def _done(rank: int, pins: dict[str, Any]) -> dict[str, str]:
    """What is said of the call that follows, by what was done to the model behind the build, by one rank alone."""
    x, mesh, said = torch.randn(4, 8), init_device_mesh("cpu", (2,)), {}
    how: dict[str, Any] = {"pins": pins}
    for name, (do, _) in DONE.items():
        torch.manual_seed(1)
        model = Counted()
        parallel: Any = autoparallel(model, mesh, ((x,), {}), progress=False, **how)
        how = {"plan": parallel.plan}
        parallel(x)["loss"].backward()
        if name == "statistics reset" or rank == 0:
            do(model)
        try:
            parallel(x)["loss"].backward()
            said[name] = ""
        except MeshwrightError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_what_is_done_to_tensors_of_the_model_later(pool: Callable[[int], Any], pins: dict[str, Any]) -> None:
    """It reaches the parallel module by no way, which is said on every rank; what changes nothing is free."""
    for said in pool(2).run(_done, pins):
        for name, (_, words) in DONE.items():
            assert re.search(words, said[name]) if words else not said[name], (name, said[name])
