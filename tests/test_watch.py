"""What the forward decided in Python: ``eval()`` is the model's own, and changed attributes are noticed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.compiler.capture.capture import capture
from meshwright.compiler.structure.calls.guard import CallWatch
from meshwright.errors import RunError
from meshwright.ir.graph import Graph

SCALE, FACTORS = 1.5, {"a": 1.0}
UNREAD = torch.ones(8)


def _scaled(h: torch.Tensor) -> torch.Tensor:
    return h * SCALE * (FACTORS["a"] if h.ndim == 2 else 1.0)


def _adding(offset: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def add(h: torch.Tensor) -> torch.Tensor:
        return h + offset

    return add


class _Doubled(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * _Doubled.factor

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * _Doubled.factor


class _Layer(nn.Module):
    gamma = 1.0

    @property
    def bound(self) -> float:
        return 100 * self.gamma

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.inside, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(8) if counts else nn.LayerNorm(8)  # which is captured in a fraction of the time
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.beta, self.sizes, self.calls, self.shift = 0.5, [1, {"a": 2.0}], 0, torch.zeros(8)
        self.add = _adding(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        h = self.drop(self.norm(self.inside(x))) * self.beta * self.sizes[1]["a"] + self.shift
        h = _Doubled.apply(self.add(_scaled(h)).clamp(max=self.bound))[:, None]
        h = self.attention(h, h, h)[0][:, 0]
        return h


class _Model(nn.Module):
    """``counts``: its calls, which makes every capture look at three of them."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.layer, self.eps = _Layer(counts), 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"loss": y.square().mean(), "y": y}


def _build(counts: bool) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = _Model(counts), torch.randn(4, 8)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return model, autoparallel(model, mesh, ((x,), {}), pins={"dp": 2}, progress=False), x


def _evaluated(rank: int) -> None:
    model, parallel, x = _build(counts=True)
    parallel(x)["loss"].backward()
    model.layer.calls = 7  # which changes nothing that is computed
    state = parallel.full_state_dict()
    parallel.eval()
    with torch.inference_mode():
        found = parallel(x)["y"].full_tensor()
    if rank == 0:
        single = _Model().eval()
        single.load_state_dict(state)
        torch.testing.assert_close(found, single(x)["y"].detach())
    after = parallel.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in state.items()), "evaluation updates nothing"
    parallel.train()
    parallel(x)["loss"].backward()


def test_evaluation_is_the_models_own(pool: Callable[[int], Any]) -> None:
    """Dropout off and the running statistics, under inference mode too; ``tests/test_modes.py`` has other graphs."""
    pool(2).run(_evaluated)


def _changed(rank: int) -> None:
    model, parallel, x = _build(counts=False)
    parallel(x)
    layer: Any = model.layer
    layer.calls = 7
    model.unread = 1
    parallel(x)

    def refused(message: str) -> None:
        with pytest.raises(RunError, match=message):
            parallel(x)

    layer.beta = 0.1
    refused(r"attribute 'layer\.beta' of the model was 0\.5 when the model was captured and is 0\.1")
    layer.beta = 0.5
    parallel(x)
    layer.sizes[1]["a"] = 3.0
    refused(r"attribute 'layer\.sizes'")
    layer.sizes[1]["a"] = 2.0
    layer.drop.p = 0.1
    refused(r"attribute 'layer\.drop\.p'")
    layer.drop.p = 0.3
    layer.shift += 1
    refused(r"attribute 'layer\.shift'")
    layer.shift -= 1
    parallel(x)
    here, cell = sys.modules[__name__].__dict__, layer.add.__closure__[0]
    with mock.patch.dict(here, SCALE=2.0):
        refused(r"global 'SCALE' of .*test_watch was 1\.5 when the model was captured and is 2\.0")
    with mock.patch.dict(FACTORS, a=2.0):
        refused(r"global 'FACTORS'")
    with mock.patch.object(_Layer, "gamma", 0.01):
        refused(r"'gamma' of class _Layer")
    with mock.patch.object(_Doubled, "factor", 3.0):
        refused(r"'factor' of class _Doubled")
    cell.cell_contents = 0.5
    refused(r"'offset', which _adding.<locals>.add closes over, was 0\.25")
    cell.cell_contents = 0.25
    with mock.patch.dict(here, UNREAD=torch.zeros(8)):
        parallel(x)
    for holder in (parallel.layer, parallel.layer.norm):
        with pytest.raises(RunError, match="'beta' is set on a sub-module"):
            holder.beta = 0.1
    with pytest.raises(RunError, match="'eps' is set on the parallel module"):
        parallel.eps = 0.1
    parallel.eps = model.eps
    parallel.note = "the caller's own"
    layer.norm.eval()
    refused(r"module 'layer\.norm' of the model is out of training mode")
    layer.norm.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused(r"autocast is on around the call.*precision='bf16'")
    parallel(x)
    layer.inside = nn.Linear(8, 8)
    refused(r"module 'layer\.inside' of the model was added, removed or replaced")


def test_changed_python_state_is_noticed(pool: Callable[[int], Any]) -> None:
    """By name, before anything runs; what changes nothing that is computed is let pass."""
    pool(2).run(_changed)


class _Gate:
    """Neither a module nor a function, but called in the forward."""

    def __init__(self) -> None:
        self.width = 2.0

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.width * LIMITS.top


class _Slotted:
    __slots__ = ("top",)

    def __init__(self) -> None:
        self.top = 1.0


LIMITS = _Slotted()


class _Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = [_Gate(), deque([1.0]), np.ones(2), nn.LeakyReLU(0.1), partial(torch.mul, other=1.5), {"f": _scaled}]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        gate, scales, array, bent, times, functions = self.held
        found = functions["f"](times(bent(gate(x)))).sum() * scales[0] * float(array[1])
        return {"loss": found + torch.ones(2).sum()}


def captured(model: nn.Module, args: Any, kwargs: Any, targets: Any, training: bool, functional: bool) -> Graph:
    return capture(model, args, kwargs, targets=targets, training=training, functional=functional)


def test_a_call_in_another_form_is_captured_so() -> None:
    """What looks at how arguments are given makes another graph of them, or the same."""
    x = torch.randn(2, 8)
    for doubled, refused in ((1.0, False), (2.0, True)):
        model = nn.Linear(8, 8)
        model.register_forward_pre_hook(lambda module, args, doubled=doubled: tuple(arg * doubled for arg in args))
        watch = CallWatch(model, capture(model, (), {"input": x * 1}), captured, positional=0)
        watch(True, (), {"input": x}, ())
        if refused:
            with pytest.raises(RunError, match=r"how arguments are given: with 1 by position .* than with 0"):
                watch(True, (x,), {}, ())
        watch(True, (), {"input": x}, ())


def test_contents_of_what_a_forward_holds_are_watched() -> None:
    """Of objects, containers, arrays, modules that are no sub-modules; functions that are put in another's place."""
    model, x = _Holding(), torch.randn(2, 8)
    gate, scales, array, bent, times, functions = model.held

    watch = CallWatch(model, capture(model, (x,), {}), captured, positional=1)

    def refused(message: str) -> None:
        with pytest.raises(RunError, match=message):
            watch(True, (x,), {}, ())

    held = "attribute 'held' of the model holds what was {} when the model was captured and is {}"
    for holder, key, before, after in (
        (vars(gate), "width", 2.0, 3.0), (scales, 0, 1.0, 4.0), (vars(bent), "negative_slope", 0.1, 0.2),
        (times.keywords, "other", 1.5, 2.0),
    ):
        holder[key] = after
        refused(held.format(before, after))
        holder[key] = before
    array[1] = 2
    refused(r"attribute 'held' of the model holds what was")
    array[1] = 1
    LIMITS.top = 3.0
    refused(r"global 'LIMITS' of .*test_watch holds what was 1\.0 when the model was captured and is 3\.0")
    LIMITS.top = 1.0
    functions["f"] = _adding(1.0)
    refused(r"attribute 'held' of the model holds what was \('function', '_scaled'")
    functions["f"] = _scaled
    with mock.patch.object(_Gate, "__call__", lambda gate, h: h):
        refused("'__call__' of class _Gate was")
    with mock.patch.dict(sys.modules[__name__].__dict__, SCALE=2.0):
        refused("global 'SCALE'")
    torch.set_default_dtype(torch.float64)
    try:
        refused(r"torch.get_default_dtype\(\) was torch.float32 when the model was captured and is torch.float64")
    finally:
        torch.set_default_dtype(torch.float32)
    watch(True, (x,), {}, ())
