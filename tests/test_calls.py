"""Calls that are right on every rank or refused on every rank, and backwards that give the gradient or say why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api import autoparallel
from meshwright.compiler.capture.capture import capture
from meshwright.errors import MeshwrightError
from meshwright.passes.bounds import find_bounds
from meshwright.runtime.checks.calls import check_bounds
from tests.models import make


def parallel_of(name: str, world: int, **pins: Any) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    model, batch = make(name)
    model.train()
    return autoparallel(model, init_device_mesh("cpu", (world,)), ((), batch), pins=pins, progress=False), model, batch


def said(call: Callable[[], Any]) -> str:
    """What a call is refused with."""
    try:
        call()
    except MeshwrightError as error:
        return str(error)
    return "nothing"


def calls(rank: int) -> dict[str, str]:
    """Bad calls of one rank, or of all; good ones between them work."""
    found: dict[str, str] = {}
    parallel, _, batch = parallel_of("llama", 2, tp=2)
    ids = batch["input_ids"]
    other = {**batch, "labels": batch["labels"].roll(rank, 0)}
    found["batch"] = said(lambda: parallel(**other))
    parallel(**batch).loss.backward()
    found["later batch"] = said(lambda: parallel(**other))
    found["shape"] = said(lambda: parallel(**({**batch, "input_ids": ids[:2]} if rank else batch)))
    found["mode"] = said(lambda: parallel.train(not rank)(**batch))
    parallel.train()
    with torch.set_grad_enabled(not rank):
        found["gradients"] = said(lambda: parallel(**batch))
    found["id"] = said(lambda: parallel(**{**batch, "input_ids": ids.clone().fill_(64)}))
    found["negative id"] = said(lambda: parallel(**{**batch, "input_ids": ids.clone().fill_(-1)}))
    found["label"] = said(lambda: parallel(**{**batch, "labels": ids.clone().index_fill_(1, torch.tensor([3]), 70)}))
    found["ignored label"] = said(lambda: parallel(**{**batch, "labels": ids.clone().index_fill_(1, torch.tensor([3]), -100)}))
    found["hook"] = said(lambda: next(parallel.parameters()).register_hook(lambda grad: None))
    found["module hook"] = said(lambda: parallel.model.layers.register_forward_hook(lambda *_: None))
    found["good"] = said(lambda: parallel(**batch).loss.backward())
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    found["weights"] = said(lambda: autoparallel(model, init_device_mesh("cpu", (2,)), (torch.randn(2, 4),), progress=False,
                                                 loss_fn=lambda y: y.sum(), pins={"dp": 2}))
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    found["example"] = said(lambda: autoparallel(model, init_device_mesh("cpu", (2,)), (torch.randn(2, 4 + rank),),
                                                 progress=False, loss_fn=lambda y: y.sum(), pins={"dp": 2}))
    return found


WORDS = {
    "batch": "ranks [1] make another call than rank 0: argument 'labels'", "later batch": "argument 'labels'",
    "shape": "i64[2, 8]", "mode": "training", "gradients": "gradients", "id": "index 64 in embedding of model.embed_tokens",
    "negative id": "index -1", "label": "index 70 in cross_entropy", "ignored label": "nothing", "hook": "would not be called",
    "module hook": "would not be called", "good": "nothing",
    "weights": "ranks [1] were given other weights than rank 0 (2 tensors",
    "example": "check the example inputs",
}


def test_a_bad_call_is_refused_on_every_rank(pool: Callable[[int], Any]) -> None:
    for found in pool(2).run(calls, timeout=300):
        assert list(found) == list(WORDS)
        assert {case: text for case, text in found.items() if WORDS[case] not in text} == {}


def backwards(rank: int) -> list[str]:
    """One micro-batch: every output has its gradient. Two: the loss alone, the others say so."""
    problems = []
    for pins in ({"dp": 2, "zero": 3}, {"tp": 2}):
        parallel, model, batch = parallel_of("masked_mean", 2, **pins)
        out, want = parallel(**batch), model(**batch)
        (out["loss"] / 2 + 0.1 * out["prediction"].full_tensor().square().mean()).backward()
        (want["loss"] / 2 + 0.1 * want["prediction"].square().mean()).backward()
        for (name, p), q in zip(parallel.named_parameters(), model.parameters(), strict=True):
            same = (p.grad is None) == (q.grad is None)
            same = same and (q.grad is None or torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6))
            problems += [] if same else [f"{pins}: {name}"]
        parallel(**batch)  # dropped: leaves nothing behind
        held = list(parallel.parameters())
        loss = parallel(**batch)["loss"]
        told = said(lambda loss=loss, held=held: torch.autograd.grad(loss, held, create_graph=True, allow_unused=True))
        problems += [] if "create_graph" in told else [f"{pins}: create_graph: {told}"]
        if "zero" in pins:
            loss = parallel(**batch)["loss"]
            told = said(lambda loss=loss, held=held: torch.autograd.grad(loss, held, allow_unused=True))
            problems += [] if "Call backward()" in told else [f"{pins}: autograd.grad: {told}"]
    parallel, _, batch = parallel_of("masked_mean", 2, dp=2, microbatches=2)
    out = parallel(**batch)
    float(out["prediction"].full_tensor().detach().sum())
    problems += [] if out["prediction"].requires_grad else ["a silent detach"]
    told = said(lambda: (out["loss"] + out["prediction"].full_tensor().mean()).backward())
    problems += [] if "loss_fn=" in told else [f"micro-batches: {told}"]
    told = said(lambda: parallel(**{**batch, "x": batch["x"].clone().requires_grad_()}))
    problems += [] if "input 'x' requires a gradient" in told else [f"an input: {told}"]
    return problems


def test_backwards(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(backwards, timeout=300) == [[]] * 2


class _Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.more = nn.Embedding(5, 4), nn.Parameter(torch.randn(6, 4))

    def forward(self, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        rows = self.more[b - 1] + self.table(a.clamp(min=0))
        return rows.gather(1, a[:, None]).sum() + self.more[x.argmax(-1)].sum()


def test_bounds() -> None:
    """What follows from whole-number inputs; indexing takes negative ones; what is computed from floats is not looked at."""
    a, b, x = torch.tensor([0, 3]), torch.tensor([0, 6]), torch.randn(2, 6)
    bounds = find_bounds(capture(_Lookups(), (a, b, x), {}))
    assert bounds is not None
    assert {(limit.source, limit.low, limit.high) for limit in bounds.limits} == {("a", 0, 5), ("a", 0, 4), ("b", -6, 6)}
    check_bounds(bounds, {"a": a, "b": b, "x": x})
    for bad in ({"a": torch.tensor([0, 5])}, {"a": torch.tensor([-1, 0])}, {"b": torch.tensor([7, 0])}):
        with pytest.raises(MeshwrightError, match=f"input '{next(iter(bad))}' leads to index"):
            check_bounds(bounds, {"a": a, "b": b, "x": x, **bad})
