"""Calls that are right on every rank or refused on every rank, and backwards that give the gradient or say why not."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.api import autoparallel
from meshwright.compiler.capture.capture import capture
from meshwright.compiler.structure.same import aligned
from meshwright.errors import MeshwrightError
from meshwright.ir.plan import Plan
from meshwright.ir.writing.plans import plan_to_file
from meshwright.passes.bounds import find_bounds
from meshwright.planner import capture_model
from meshwright.runtime import assemble
from meshwright.runtime.checks import calls as calls_
from meshwright.runtime.checks.calls import check_bounds
from meshwright.runtime.interpret import run
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
    found["sparse"] = said(lambda: parallel(**{**batch, "input_ids": ids.to_sparse()}))
    found["subclass"] = said(lambda: parallel(**{**batch, "input_ids": ids.as_subclass(type("Own", (Tensor,), {}))}))
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

    def one_rank_fails(model: nn.Module) -> nn.Module:
        return autoparallel(model, init_device_mesh("cpu", (2,)), (torch.randn(2, 4),), progress=False,
                            loss_fn=lambda y: y.sum(), pins={"dp": 2})

    with torch.device("meta"):
        broken = Broken(4, 4)
    broken.fails = rank == 1
    found["initialization"] = said(lambda: one_rank_fails(broken))
    full = mock.patch.object(assemble._Assembly, "_unit", side_effect=torch.OutOfMemoryError("no room"))
    with full if rank == 0 else nullcontext():
        found["memory"] = said(lambda: one_rank_fails(model))
    lost = mock.patch.object(calls_, "digest", side_effect=OSError("file lost"))
    with lost if rank == 0 else nullcontext():
        found["reading"] = said(lambda: one_rank_fails(model))
    found["at last"] = said(lambda: one_rank_fails(model)(torch.randn(2, 4, generator=torch.Generator().manual_seed(1))))
    return found


class Broken(nn.Linear):
    """Initialized on some ranks only."""

    fails = False

    def reset_parameters(self) -> None:
        if self.fails:
            raise OSError("no such weights")
        super().reset_parameters()


WORDS = {
    "batch": "ranks [1] make another call than rank 0: argument 'labels'", "later batch": "argument 'labels'",
    "shape": "i64[2, 8]", "mode": "training", "gradients": "gradients", "id": "index 64 in embedding of model.embed_tokens",
    "negative id": "index -1", "label": "index 70 in cross_entropy", "ignored label": "nothing",
    "sparse": "torch.sparse_coo", "subclass": "nothing", "hook": "would not be called",
    "module hook": "would not be called", "good": "nothing",
    "weights": "ranks [1] were given other weights than rank 0 (2 tensors",
    "example": "check the example inputs",
    "initialization": "rank 1 could not fill its parameters and buffers (OSError: no such weights)",
    "memory": "rank 0 could not make room for its parameters and buffers (OutOfMemoryError: no room)",
    "reading": "rank 0 was given cannot be read (OSError: file lost)", "at last": "nothing",
}


def test_a_bad_call_is_refused_on_every_rank(pool: Callable[[int], Any]) -> None:
    for found in pool(2).run(calls):
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
        for hook in ("register_hook", "retain_grad"):
            told = said(getattr(parallel(**batch)["prediction"], hook))
            problems += [] if "beside the way" in told else [f"{pins}: {hook} of an output: {told}"]
        if "zero" in pins:
            loss = parallel(**batch)["loss"]
            told = said(lambda loss=loss, held=held: loss.backward(inputs=held[:1]))
            problems += [] if "backward(inputs=" in told else [f"{pins}: backward(inputs=): {told}"]
            loss = parallel(**batch)["loss"]
            told = said(lambda loss=loss, held=held: torch.autograd.grad(loss, held, allow_unused=True))
            problems += [] if "Call backward()" in told else [f"{pins}: autograd.grad: {told}"]
    for pins in ({"dp": 2, "zero": 3}, {"tp": 2}, {"dp": 2, "microbatches": 2}):
        parallel, _, batch = parallel_of("masked_mean", 2, **pins)
        loss = parallel(**batch)["loss"]
        loss.backward()
        once = [None if p.grad is None else p.grad.full_tensor().clone() for p in parallel.parameters()]
        with pytest.raises((MeshwrightError, RuntimeError), match=r"a second time|already handed out"):
            loss.backward()
        twice = [None if p.grad is None else p.grad.full_tensor() for p in parallel.parameters()]
        same = all(a is b or torch.equal(a, b) for a, b in zip(once, twice, strict=True))
        problems += [] if same else [f"{pins}: a second backward that fails adds gradients"]
        loss = parallel(**batch)["loss"]
        torch.optim.SGD(parallel.parameters(), 0.1).step()
        told = said(loss.backward)
        problems += [] if "between a forward and its backward" in told else [f"{pins}: a stale backward: {told}"]
    parallel, _, batch = parallel_of("masked_mean", 2, dp=2, microbatches=2)
    out = parallel(**batch)
    float(out["prediction"].full_tensor().detach().sum())
    problems += [] if out["prediction"].requires_grad else ["a silent detach"]
    told = said(lambda: (out["loss"] + out["prediction"].full_tensor().mean()).backward())
    problems += [] if "loss_fn=" in told else [f"micro-batches: {told}"]
    told = said(lambda: parallel(**{**batch, "x": batch["x"].clone().requires_grad_()}))
    problems += [] if "input 'x' requires a gradient" in told else [f"an input: {told}"]
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), forward_ad.dual_level():
            given = {**batch, "x": forward_ad.make_dual(batch["x"], torch.ones_like(batch["x"]))}
            told = said(lambda given=given: parallel(**given))
        problems += [] if "input 'x' has a tangent" in told else [f"a tangent: {told}"]
    return problems


def test_backwards(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(backwards) == [[]] * 2


def around(rank: int) -> list[str]:
    """What people put around a module: the same numbers, or said why not."""
    problems = []
    for pins in ({"dp": 2, "zero": 3}, {"pp": 2}):
        parallel, model, batch = parallel_of("masked_mean", 2, **pins)
        for reentrant in (False, True):
            told = said(lambda parallel=parallel, batch=batch, reentrant=reentrant: checkpoint(
                lambda _: parallel(**batch)["loss"], torch.ones(1, requires_grad=True), use_reentrant=reentrant).backward())
            problems += [] if "torch.utils.checkpoint" in told else [f"{pins}: checkpoint {reentrant}: {told}"]
        gc.collect()  # before 2.13 torch takes the hooks of a checkpoint that raised off with its error, no sooner
        for transform, x in ((torch.vmap, batch["x"][None]), (torch.func.grad, batch["x"])):
            call = transform(lambda x, parallel=parallel, batch=batch: parallel(**{**batch, "x": x})["loss"])
            told = said(lambda call=call, x=x: call(x))
            problems += [] if "transform of torch.func" in told else [f"{pins}: {transform}: {told}"]
        for write in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            told = said(lambda parallel=parallel, write=write: write(parallel))
            problems += [] if "save(" in told else [f"{pins}: pickle: {told}"]
        copied = copy.deepcopy(parallel) if "dp" in pins else None
        for again in (parallel, parallel, *([copied] if copied is not None else [])):
            model.zero_grad()
            model(**batch)["loss"].backward()
            again.zero_grad()
            called = torch.compile(again, backend="eager")
            with torch.autograd.detect_anomaly(check_nan=True):
                called(**batch)["loss"].backward()
            wanted = {name: p.grad for name, p in model.named_parameters()}
            for name, p in again.named_parameters():
                grad, want = p.grad, wanted[name]
                same = (grad is None) == (want is None)
                same = same and (want is None or torch.allclose(grad.full_tensor(), want, rtol=1e-4, atol=1e-6))
                problems += [] if same else [f"{pins}: gradient of {name}"]
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="leave fullgraph=True out"):
            torch.compile(parallel, backend="eager", fullgraph=True)(**batch)
        if copied is not None:
            before = {name: p.full_tensor().clone() for name, p in parallel.named_parameters()}
            torch.optim.SGD(copied.parameters(), 0.1).step()
            same = all(torch.equal(before[name], p.full_tensor()) for name, p in parallel.named_parameters())
            moved = any(not torch.equal(before[name], p.full_tensor()) for name, p in copied.named_parameters())
            problems += [] if same and moved else [f"{pins}: a copy shares parameters"]
    return problems


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_around_a_call(pool: Callable[[int], Any]) -> None:
    """torch.utils.checkpoint, torch.func and pickle are refused; torch.compile, detect_anomaly and copy.deepcopy change
    nothing; torch.compile that may not leave a call as it is says so."""
    assert pool(2).run(around) == [[]] * 2


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


def _put_item(x: Tensor, i: Tensor) -> Tensor:
    x[i] = 0
    return x


ROW = torch.tensor([[0.5, -1.0, 2.0]])
INDEXED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda w, i: w.gather(0, i[:, None].repeat(1, 3)),
    "take_along": lambda w, i: torch.take_along_dim(w, i[:, None], 0),
    "scatter": lambda w, i: w.scatter(0, i[:, None].repeat(1, 3), ROW),
    "scatter_number": lambda w, i: w.scatter(-2, i[:, None].repeat(1, 3), 1.0),
    "scatter_add": lambda w, i: w.scatter_add(0, i[:, None].repeat(1, 3), ROW),
    "scatter_reduce": lambda w, i: w.scatter_reduce(0, i[:, None].repeat(1, 3), ROW, "amax"),
    "index_select": lambda w, i: w.index_select(-2, i), "index_add": lambda w, i: w.index_add(0, i, ROW),
    "index_copy": lambda w, i: w.index_copy(0, i, ROW), "index_fill": lambda w, i: w.index_fill(0, i, 1.0),
    "take": lambda w, i: w.take(i), "put": lambda w, i: w[:, 0].put(i, ROW[:, 0]), "item": lambda w, i: w.T[:, i],
    "index_put": lambda w, i: w.index_put((i,), ROW), "set_item": lambda w, i: _put_item(w * 1, i),
    "one_hot": lambda w, i: F.one_hot(i, 4) * w[:1, :1], "bag": lambda w, i: F.embedding_bag(i[None], w),
    "offsets": lambda w, i: F.embedding_bag(i.new_ones(4), w, torch.cat([i.new_zeros(1), i])),
    "embedding": lambda w, i: F.embedding(i, w, padding_idx=0), "nll": lambda w, i: F.nll_loss(w.T[:1], i),
    "nll_of_images": lambda w, i: F.nll_loss(w.T[:1, :, None, None], i[:, None, None]),
    "cross_entropy": lambda w, i: F.cross_entropy(w.T[:1], i, ignore_index=-4),
    "one": lambda w, i: F.cross_entropy(w[:, 0], i[0]),
    "margin": lambda w, i: F.multi_margin_loss(w.T[:1], i), "by_constant": lambda w, i: w[torch.arange(4)[i]],
    "margins": lambda w, i: F.multilabel_margin_loss(w.T[:1], torch.cat([i, i.new_full((3,), -1)])[None]),
}


class _Indexed(nn.Module):
    """Every way to look up, of an index of its own each."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))

    def forward(self, **given: Tensor) -> Tensor:
        found = [INDEXED[name](self.w, i).sum() for name, i in given.items()]
        return torch.stack([*found, self.w[torch.randint(0, 4, (1,)) + 0 * given["item"]].sum()]).sum()


def test_what_one_process_raises_on_is_out_of_bounds() -> None:
    """Every operator that looks up: the same indices are refused as torch refuses."""
    model, good = _Indexed(), {name: torch.tensor([1]) for name in INDEXED}
    bounds = find_bounds(capture(model, (), good))
    assert bounds is not None
    refused = 0
    for name, look in INDEXED.items():
        for number in (0, 3, 4, 9, 12, -1, -2, -4, -5, -13, -100):
            index = torch.tensor([number])
            try:
                look(model.w, index)
            except (IndexError, RuntimeError):
                refused += 1
                with pytest.raises(MeshwrightError, match=f"input[s ['\\[]+{name}'"):
                    check_bounds(bounds, {**good, name: index})
            else:
                check_bounds(bounds, {**good, name: index})
    assert refused > 100


class Asserting(nn.Module):
    """A forward that asserts something of its inputs (as torch's compilers ask models to), of a sum that no look-up knows."""

    def __init__(self, most: int | None = 40) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.most = most

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        if self.most is not None:
            torch._assert_async((ids.sum(-1) <= self.most).all(), "a row holds too much")
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return {"loss": x.square().mean()}


ROWS = torch.arange(32).view(8, 4) % 7
"""The rows of one data rank and of one micro-batch alone break what is asserted once an element of them grows."""


def asserting(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ways: Mapping[str, Mapping[str, Any]] = {
        "dp": {"dp": 2, "zero": 3, "microbatches": 2}, "tp": {"dp": 1, "tp": 2}, "pp": {"pp": 2, "dp": 1, "microbatches": 2},
    }
    for way, pins in ways.items():
        torch.manual_seed(0)
        model = Asserting()
        parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((ROWS,), {}), pins=pins, progress=False)
        bad = ROWS.clone()
        bad[6, 1] = 15
        bad[6, 2:] = 15
        found[f"{way} good"] = torch.testing.assert_close(parallel(ROWS)["loss"].detach(), model(ROWS)["loss"].detach())
        found[f"{way} bad"] = said(lambda parallel=parallel, bad=bad: parallel(bad))
        parallel.eval()
        found[f"{way} bad in eval"] = said(lambda parallel=parallel, bad=bad: parallel(bad))
    return found


def test_what_a_forward_asserts_of_its_inputs_holds_on_every_rank(pool: Callable[[int], Any]) -> None:
    for found in pool(2).run(asserting):
        assert not any(said for way, said in found.items() if way.endswith("good"))
        bad = {way: said for way, said in found.items() if "bad" in way}
        assert len(bad) == 6
        assert all("a row holds too much" in said for said in bad.values()), bad


def test_what_is_asserted_is_in_the_plan() -> None:
    """A saved plan asserts the same, and is no plan of a model that asserts something else, or nothing."""
    plan = Plan.from_dict(json.loads(json.dumps(plan_to_file(mw.plan(Asserting(), "cpu:1x2", ((ROWS,), {}), pins={"dp": 2})))))
    assert plan.graph.changes is not None
    run(plan.graph.changes, dict.fromkeys(plan.graph.changes.inputs, ROWS))
    with pytest.raises(MeshwrightError, match="a row holds too much"):
        run(plan.graph.changes, dict.fromkeys(plan.graph.changes.inputs, ROWS + 9))
    for most in (40, 41, None):
        graph = capture_model(Asserting(most), (ROWS,), {}, (), None, "fp32")
        if most == 40:
            aligned(plan.graph, graph)
        else:
            with pytest.raises(MeshwrightError, match="made for another model"):
                aligned(plan.graph, graph)


class _Factored(nn.Module):
    """What raises in the last layer where ``sign`` is negative, which no look at the inputs tells beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, sign: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return torch.linalg.cholesky(x.T @ x * sign + torch.eye(8) * 1e-2).square().mean()


def _raises_in_a_step(rank: int, pins: Mapping[str, Any]) -> list[str]:
    """What two calls raise of which the first cannot be computed, on every rank; of ranks that all raise, the step after."""
    world = torch.distributed.get_world_size()
    torch.manual_seed(0)
    given, model = {"x": torch.randn(8, 8), "sign": torch.ones(())}, _Factored()
    want = model(**given)
    parallel: Any = autoparallel(model, init_device_mesh("cpu", (world,)), ((), given), pins=pins, progress=False)
    parallel(**given).backward()
    found = []
    for _ in range(2):
        try:
            parallel(**{**given, "sign": -torch.ones(())})
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    if all("LinAlgError" in text[:20] for text in found):
        torch.testing.assert_close(parallel(**given), want)
    return found


def test_what_one_rank_raises_in_a_step_ends_all(pool: Callable[[int], Any]) -> None:
    """A stage that fails is waited for by nobody: the others are told why, not that they waited too long; where all fail alike
    each raises what one process does, and the run goes on."""
    alike = pool(2).run(_raises_in_a_step, {"dp": 2})
    assert [[text.split(":")[0] for text in found] for found in alike] == [["_LinAlgError"] * 2] * 2
    first, last = pool(2).run(_raises_in_a_step, {"pp": 2, "dp": 1, "tp": 1, "microbatches": 1})
    assert last[0].startswith("_LinAlgError")
    told = "RunError: rank 1 failed in the middle of a step (_LinAlgError"
    assert [text[:len(told)] for text in (*first, last[1])] == [told] * 3


class _OfThisProcess(nn.Module):
    """Computes what each process may compute otherwise: adds up in an order of its own, or asks for its rank."""

    def __init__(self, order: tuple[float, ...], sign: float) -> None:
        super().__init__()
        self.inside, self.order, self.sign = nn.Linear(8, 8), order, sign

    def forward(self, x: Tensor) -> Tensor:
        found = x * self.sign
        for size in self.order:
            found = found + self.inside(x * size)
        return found.square().mean()


def _captured_apart(rank: int, makes: str) -> str:
    order = (1.0, 2.0, 3.0)[::1 - 2 * rank] if makes == "order" else (1.0, 2.0)
    torch.manual_seed(0)
    model = _OfThisProcess(order, -1.0 if makes == "rank" and torch.distributed.get_rank() else 1.0)
    x, mesh = torch.ones(8, 8), init_device_mesh("cpu", (2,))
    return said(lambda: autoparallel(model, mesh, (x,), pins={"dp": 2}, progress=False))


@pytest.mark.parametrize("makes", ["order", "rank"])
def test_ranks_that_compute_otherwise_are_refused_in_words_for_it(pool: Callable[[int], Any], makes: str) -> None:
    """Nobody gave a plan, so the words are not of one."""
    here, there = pool(2).run(_captured_apart, makes)
    assert here == there
    assert re.match(r"rank 1 captured another model than rank 0 \(.*\)\. Build the same model .* on every rank", here)
