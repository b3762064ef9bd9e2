"""Drop-in equality: the same model, batch and optimizer on one process and in parallel, compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright import api
from meshwright.api import autoparallel
from meshwright.ir.graph import Graph
from meshwright.planner import capture_model
from tests.models import make
from tests.pool import once

STEPS = 2
RELATIVE = 1e-4
EPS = 1e-3
"""Of AdamW: well above the rounding noise of gradients that are exactly zero in theory (a key's bias under softmax)."""


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output."""
    return output["loss"] if isinstance(output, Mapping) else output.loss


def kept(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, where a ``full_state_dict`` lies."""
    return {key: value.detach().to("cpu", copy=True) for key, value in state.items()}


def train(
    model: nn.Module, batch: Mapping[str, torch.Tensor], steps: int = STEPS, clip: float | None = None, calls: int = 1
) -> list[float]:
    """Losses (and norms, if clipped) of an ordinary training loop; ``calls``: backwards before each optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    losses = []
    for _ in range(steps):
        for _ in range(calls):
            loss = loss_of(model(**batch))
            loss.backward()
        if clip is not None:
            norm = getattr(model, "clip_grad_norm_", lambda c: nn.utils.clip_grad_norm_(model.parameters(), c))(clip)
            losses.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """What differs between two state dicts by more than RELATIVE of a tensor's largest element."""
    if list(found) != list(wanted):
        return [f"keys differ: {sorted(set(found) ^ set(wanted)) or 'in order'}"]
    bad = []
    for name, want in wanted.items():
        have = found[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            bad.append(f"{name}: {have.dtype}{tuple(have.shape)} instead of {want.dtype}{tuple(want.shape)}")
            continue
        have, want = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (have, want))
        scale = max(want.double().abs().max().item(), 1e-3) if want.numel() else 1.0
        worst = (have.double() - want.double()).abs().max().item() if want.numel() else 0.0
        if not worst <= RELATIVE * scale:
            bad.append(f"{name}: off by {worst:.2e} of {scale:.2e}")
    return bad


@cache
def _known(name: str, double: bool) -> dict[tuple[Any, ...], Graph]:
    return {}


@contextmanager
def captured_once(name: str, double: bool = False) -> Iterator[None]:
    """Within, only this model is captured, once for each loss function, precision and mode, by one process of a pool for all:
    half of the time of a small plan, and three quarters of that of starting one that is given."""
    known = _known(name, double)

    def capture(model: nn.Module, args: Any, kwargs: Any, targets: Any, loss_fn: Any, *how: Any) -> Graph:
        def make() -> Graph:
            return capture_model(model, args, kwargs, targets, loss_fn, *how)

        mode = (model.training, torch.is_grad_enabled(), *how)
        key = (loss_fn, *mode)
        if key not in known:
            called = "-".join(str(part) for part in (name, double, *mode))
            known[key] = make() if loss_fn is not None else once(called, make)
        return known[key]

    with mock.patch.object(api, "capture_model", capture):
        yield


def differences(
    rank: int, model: nn.Module, batch: Mapping[str, torch.Tensor], cases: Mapping[str, Callable[[], nn.Module]],
    clip: float | None = None, calls: int = 1,
) -> list[str]:
    """What differs between a loop on the model and on each of the modules that ``cases`` build, by their names."""
    torch.set_num_threads(1)
    single = copy.deepcopy(model)
    losses = train(single, batch, clip=clip, calls=calls)
    wanted = {key: value.detach().clone() for key, value in single.state_dict().items()}
    problems = []
    for what, build in cases.items():
        torch.manual_seed(7)
        try:
            parallel = build()
            found = train(parallel, batch, clip=clip, calls=calls)
            state = parallel.full_state_dict()
        except Exception as error:
            raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
        off = [f"{a} instead of {b}" for a, b in zip(found, losses, strict=True) if not abs(a - b) <= RELATIVE * abs(b)]
        if off:
            problems.append(f"{what}: losses {off}")
        if rank == 0:
            problems += [f"{what}: {line}" for line in compare(state, wanted)]
    return problems


def check(rank: int, name: str, world: int, all_pins: Sequence[Mapping[str, Any]], clip: float | None = None) -> list[str]:
    """Train the named model in parallel under each of ``all_pins``; what differs from the single process."""
    model, batch = make(name)
    model.train()

    def build(pins: Mapping[str, Any]) -> nn.Module:
        return autoparallel(model, init_device_mesh("cpu", (world,)), ((), batch), pins=dict(pins), progress=False)

    with captured_once(name):
        cases = {f"{name} on {world} under {dict(pins)}": partial(build, pins) for pins in all_pins}
        return differences(rank, model, batch, cases, clip)
