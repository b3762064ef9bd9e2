"""The loss in pieces: found by data flow, chosen by memory, equal to the single process, and smaller."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright import piecewise
from meshwright.compiler.search import search
from meshwright.compiler.search.errors import NoBetterError
from meshwright.compiler.search.task import Timing
from meshwright.compiler.structure.pieces import in_pieces, rows_of
from meshwright.cost.cluster import Cluster
from meshwright.ir.declared.operator import PIECES
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import Pins
from meshwright.ir.sharding import piece
from meshwright.planner import capture_model, make_plan
from meshwright.runtime.collectives import Group
from meshwright.runtime.ops import OPS
from tests.equality import captured_once, differences
from tests.models import make


class Alone(nn.Module):
    """A model that returns its loss, and nothing beside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return {"loss": self.model(input_ids=input_ids, labels=labels, attention_mask=attention_mask).loss}


class Scorer(nn.Module):
    """A head over 13 classes whose logits are cast, shifted by a slice, smoothed; a sum where ``mean`` is not asked for."""

    def __init__(self, mean: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(13, 16), nn.Linear(16, 16), nn.Linear(16, 13)
        self.mean = "mean" if mean else "sum"
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.mix(self.embed(ids)))).float()[:, 1:-1]
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=3, reduction=self.mean
        )
        return {"loss": losses}


def _scored(**how: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    return Scorer(**how), {"ids": torch.randint(13, (4, 9)), "labels": torch.randint(13, (4, 7))}


def _case(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if name.startswith("scorer"):
        return _scored(mean="sum" not in name, tied="tied" in name)
    model, batch = make(name)
    return Alone(model), batch


def _equal(rank: int, world: int, cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """What differs, under all pins of every model; each plan has its loss in pieces, and its file gives the same plan."""
    found = []
    for name, all_pins in cases.items():
        model, batch = _case(name)
        model.train()

        def build(pins: Mapping[str, Any], model: nn.Module = model, batch: Any = batch) -> nn.Module:
            parallel = mw.autoparallel(model, init_device_mesh("cpu", (world,)), ((), batch), pins=dict(pins), progress=False)
            rows = pins.get("loss_rows", 0)
            assert rows_of(parallel.plan.graph) == rows
            assert (f"pieces of {rows} tokens" in str(parallel.plan)) == bool(rows)
            return parallel

        named = {f"{name} under {dict(pins)}": partial(build, pins) for pins in all_pins}
        with captured_once(f"{name} alone"):
            found += differences(rank, model, batch, named)
    return found


ONE = {"pp": 1}
TWO: dict[str, list[dict[str, Any]]] = {
    "llama": [{"tp": 2, "loss_rows": 5}, {"cp": 2, "attention": "ring", "loss_rows": 3}, {"dp": 2, "zero": 3, "loss_rows": 7}],
    "gpt2": [{"tp": 2, "loss_rows": 3}],  # the weight is the embedding's
    "bert": [{"cp": 2, "loss_rows": 4}],  # a bias, most labels ignored
    "odd": [{"tp": 2, "loss_rows": 4}, {"cp": 2, "loss_rows": 1000}],
    "scorer": [{"tp": 2, "loss_rows": 4}], "scorer sum tied": [{"dp": 2, "loss_rows": 1}, {"tp": 2, "loss_rows": 0}],
}
FOUR: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full", "loss_rows": 3},
        {"pp": 2, "dp": 2, "microbatches": 2, "schedule": "1f1b", "zero": 1, "loss_rows": 4},
        {"dp": 2, "tp": 2, "microbatches": 2, "zero": 2, "loss_rows": 2},
    ],
    "gpt2": [{"pp": 2, "tp": 2, "microbatches": 2, "loss_rows": 3}],
}


def test_two_processes(pool: Callable[[int], Any]) -> None:
    """Vocabulary, sequence, batch split; tied weights, biases, smoothing, slices; odd lengths and vocabularies."""
    assert pool(2).run(_equal, 2, TWO) == [[]] * 2


def test_four_processes(pool: Callable[[int], Any]) -> None:
    """Together: with sequence parallelism, recomputation, pipelines, micro-batches, ZeRO."""
    assert pool(4).run(_equal, 4, FOUR) == [[]] * 4


def _split(rank: int, vocab: int, dtype: torch.dtype) -> None:
    """The operator on columns of the vocabulary against torch, gradients too."""
    world = dist.get_world_size()
    group = Group(dist.group.WORLD.group_name, rank, world)
    make_ = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 5, 8, generator=make_).to(dtype), torch.randn(vocab, 8, generator=make_).to(dtype)
    bias, labels = torch.randn(vocab, generator=make_).to(dtype), torch.randint(vocab, (3, 5), generator=make_)
    labels[1, 2:4] = -100
    wide = [one.double().clone().requires_grad_() for one in (x, weight, bias)]
    wanted = F.cross_entropy(F.linear(*wide).flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
    (wanted * 0.5).backward()
    offset, rows = piece(vocab, Mesh.of(a=world), ("a",), {"a": rank})
    mine = [one.clone().requires_grad_() for one in (x, weight[offset : offset + rows], bias[offset : offset + rows])]
    total, count = OPS[PIECES](*mine, labels, -100, 0.1, 4, offset=offset, vocab=vocab, axes=group)
    (total * 0.5).backward()
    assert (count.item(), count.requires_grad) == (13.0, False)
    dx = mine[0].grad.clone()
    dist.all_reduce(dx)  # every rank's is a term
    close = {"rtol": 0.03, "atol": 0.03} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(total.double(), wanted, **close)
    for found, want in ((dx, wide[0].grad), *((one.grad, other.grad[offset : offset + rows]) for one, other in
                                             zip(mine[1:], wide[1:], strict=True))):
        torch.testing.assert_close(found.double(), want, **close)


def test_the_operator(pool: Callable[[int], Any]) -> None:
    for vocab, dtype in ((16, torch.float32), (5, torch.float64), (11, torch.bfloat16)):
        pool(2).run(_split, vocab, dtype)


def _graph(model: nn.Module, batch: Mapping[str, torch.Tensor], loss_fn: Any = None, precision: str = "fp32") -> Any:
    return capture_model(copy.deepcopy(model).train(), (), dict(batch), (), loss_fn, precision)


class Reads(nn.Module):
    """Logits that something else reads, or something else makes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head, self.how = nn.Embedding(13, 16), nn.Linear(16, 13), how

    def forward(self, ids: torch.Tensor) -> Any:
        logits = self.head(self.embed(ids))
        if self.how == "scaled":
            logits = logits * 0.5
        if self.how == "narrowed":
            logits = logits.half().float()
        if self.how == "classes":
            logits = logits[..., :12]
        reduction = "none" if self.how == "each" else "mean"
        each = F.cross_entropy(logits.flatten(0, 1), ids.flatten().clamp(0, 11), reduction=reduction)
        loss = each.mean()
        if self.how == "penalty":
            loss = loss + logits.logsumexp(-1).square().mean()
        return {"loss": loss, **({"logits": logits} if self.how == "output" else {})}


@pytest.mark.parametrize("how", ["output", "scaled", "narrowed", "classes", "each", "penalty"])
def test_logits_that_something_else_reads_or_makes_stay_whole(how: str) -> None:
    batch = {"ids": torch.zeros(4, 8, dtype=torch.int64)}
    graph = _graph(Reads(how), batch)
    assert rows_of(graph) is None
    assert in_pieces(graph, 4) is graph
    with pytest.raises(mw.PinError, match=r"loss_rows=4.*loss_fn=mw.loss_alone"):
        mw.plan(Reads(how), "cpu:1x2", ((), batch), pins={"loss_rows": 4})
    assert rows_of(_graph(Reads("plain"), batch)) == 0


def test_a_loss_alone_is_found() -> None:
    """With ``loss_fn=mw.loss_alone`` nobody reads the logits of a model that returns them; what has no one loss is refused."""
    model, batch = make("llama")
    for precision in ("fp32", "bf16"):
        graph = _graph(model, batch, mw.loss_alone, precision)
        made = in_pieces(graph, 4)
        assert (rows_of(graph), rows_of(made), len(made.blocks)) == (0, 4, len(graph.blocks))
        assert [op.target for op in made.ops if op.module == "lm_head"] == [PIECES]
    assert rows_of(_graph(model, batch)) is None
    assert float(mw.loss_alone((torch.zeros(2), torch.tensor(3.0)))) == 3.0
    with pytest.raises(mw.InputError, match="2 scalars"):
        mw.loss_alone((torch.tensor(1.0), torch.tensor(3.0)))
    for bad in (-1, True, 2.5):
        with pytest.raises(mw.PinError, match="loss_rows"):
            mw.plan(model, "cpu:1x1", ((), batch), pins={"loss_rows": bad})


def test_memory_chooses(tmp_path: Path) -> None:
    """Where there is room logits are whole; where there is not they are in pieces, which the plan's file and pins say too."""
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                             vocab_size=8192, use_cache=False))
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(1, 32768, dtype=torch.int64, device="meta"))
    cluster, pins = Cluster.parse("h100:1x2"), {"cp": 2, "dp": 1, "pp": 1, "tp": 1, "zero": 3}

    def planned(where: Cluster, **more: Any) -> Any:
        return mw.plan(model, where, ((), batch), loss_fn=mw.loss_alone, pins={**pins, **more}, precision="bf16")

    whole = planned(cluster)
    assert rows_of(whole.graph) == 0
    small = cluster.with_memory(0.6 * whole.predicted.bytes_per_rank)
    found = planned(small)
    assert (rows_of(found.graph), found.predicted.fits) == (2048, True)
    assert found.predicted.bytes_per_rank < 0.6 * whole.predicted.bytes_per_rank
    with pytest.raises(mw.OutOfMemoryError):
        planned(small, loss_rows=0)
    found.save(tmp_path / "plan.json")
    again = mw.load_plan(tmp_path / "plan.json")
    assert (rows_of(again.graph), again.to_pins().loss_rows) == (2048, 2048)
    pinned = mw.plan(model, small, ((), batch), loss_fn=mw.loss_alone, pins=again.to_pins(), precision="bf16")
    assert pinned.predicted.bytes_per_rank == found.predicted.bytes_per_rank
    slower = planned(cluster, loss_rows=2048)
    assert slower.predicted.step_seconds > whole.predicted.step_seconds  # the product that runs again


def test_of_a_long_sequence_only_pieces_are_searched() -> None:
    """Where making the logits again is less than the search may miss, all logits at once are not looked at, and what they could
    spare is in the bound: it holds for the plan with all of them."""
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=512, num_hidden_layers=2, vocab_size=8192,
                                             num_attention_heads=4, use_cache=False))

    def planned(tokens: int, **pins: Any) -> Any:
        batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(1, tokens, dtype=torch.int64, device="meta"))
        return mw.plan(model, "h100:1x2", ((), batch), loss_fn=mw.loss_alone, precision="bf16",
                       pins={"cp": 2, "dp": 1, "pp": 1, "tp": 1, **pins})

    assert rows_of(planned(1024).graph) == 0
    found, whole = planned(524288), planned(524288, loss_rows=0)
    assert rows_of(found.graph) == 2048
    proof = found.certificate
    assert any("spare no more than the product that makes them again" in words for words in proof.assumes)
    assert "the loss and the MLPs run at once, or in pieces" in proof.assumes[-1]
    assert proof.bound_seconds <= whole.predicted.step_seconds
    assert found.predicted.step_seconds < whole.predicted.step_seconds * 1.02


def test_a_pipeline_in_pieces_is_compared_with_all_logits_of_its_own_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank of a pipeline makes the logits again, that is more of its step than of all: one narrow search with all of
    them follows, none of everything, and the bound holds for both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, vocab_size=256,
                                             num_attention_heads=8, use_cache=False))
    ids = torch.zeros(64, 2048, dtype=torch.int64, device="meta")
    graph = capture_model(model, (), {"input_ids": ids, "labels": ids}, (), mw.loss_alone, "bf16")
    cluster, again = Cluster.parse("h100:1x8"), piecewise._logits_again(graph, Cluster.parse("h100:1x8").device, 2048)
    limits, search = list[float](), piecewise.best_plan

    def counted(*args: Any, limit: float = piecewise.AGAIN, **more: Any) -> Any:
        limits.append(limit)
        return search(*args[:2], args[2] if len(args) > 2 else limit, **more)

    def planned(**pins: Any) -> Any:
        return make_plan(graph, cluster, Pins(pp=4, **pins), precision="bf16", gap=1.5 * again)

    apart = [planned(loss_rows=rows).predicted.step_seconds for rows in (0, 2048)]
    monkeypatch.setattr(piecewise, "best_plan", counted)
    monkeypatch.setattr(piecewise, "_FEW", 0.0)  # these are few logits,
    monkeypatch.setattr(piecewise, "_DEAR", math.inf)  # dear for what they are
    found = planned()
    assert limits == [piecewise.AGAIN]
    assert found.predicted.step_seconds <= min(apart) * (1 + 1.5 * again)
    assert found.certificate.bound_seconds <= min(apart)
    assert found.certificate.objective_seconds == found.predicted.step_seconds


@pytest.mark.parametrize(("searched", "left"), [(0.0, 8.0), (15.0, 5.0), (19.5, 2.0), (40.0, 2.0)])
def test_what_is_searched_again_has_what_the_searches_before_left(
    monkeypatch: pytest.MonkeyPatch, searched: float, left: float
) -> None:
    """So that a plan whose loss may be in pieces takes little longer than others."""
    limits = list[float]()
    monkeypatch.setattr(piecewise, "best_plan", lambda task, fits, limit, **more: limits.append(limit))
    timing = Timing(searched=searched)
    piecewise._again(cast("Any", None), cast("Any", None), to_beat=1.0, timing=timing)
    assert limits == [left]


@pytest.mark.parametrize(("part", "gap", "wide"), [
    (0.005, 0.001, False), (0.05, 0.001, True), (0.05, 0.03, False), (0.2, 0.03, True),
])
def test_all_that_may_be_faster_is_looked_at_where_pieces_leave_much_open(part: float, gap: float, wide: bool) -> None:
    """At once, without a look at the same degrees first; what is proven is no more than of the plan in pieces. Where much is
    open already only what is dear is."""
    model, example = make("llama")
    pieces = mw.plan(model, Cluster.parse("h100:1x2"), example)
    proof = replace(search.proof_of(pieces), bound_seconds=search.proof_of(pieces).objective_seconds * (1 - gap))
    pieces, asked = replace(pieces, certificate=proof), list[Any]()

    def made(search: Any) -> Any:
        asked.append(search.func)
        raise NoBetterError(0.9 * proof.bound_seconds, limited=False)

    found = search.proof_of(piecewise._spared(pieces, part, 1e-4, made))
    assert asked == [piecewise._again if wide else piecewise._alike]
    assert found.bound_seconds == pytest.approx(max(1 - part, 0.9 if wide else 0.0) * proof.bound_seconds)


def test_the_loss_is_in_pieces_where_memory_asks_for_micro_batches() -> None:
    """A plan without recomputation, too, may have more micro-batches for its logits alone; where a piece of the usual rows
    takes much of the memory it has fewer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
                                             vocab_size=20000, use_cache=False))
    ids = torch.zeros(8, 512, dtype=torch.int64, device="meta")

    def planned(memory: float = 21e9, **pins: Any) -> Any:
        return mw.plan(model, Cluster.parse("a10g:1x2").with_memory(int(memory)), ((), {"input_ids": ids, "labels": ids}),
                       loss_fn=mw.loss_alone, precision="bf16", pins=pins)

    memory = 0.43 * planned(loss_rows=0).predicted.bytes_per_rank
    whole, found = planned(memory, loss_rows=0), planned(memory)
    assert whole.schedule.microbatches > found.schedule.microbatches == 1
    assert rows_of(found.graph) == 512
    assert found.predicted.step_seconds < 0.9 * whole.predicted.step_seconds


@pytest.mark.parametrize("rows", [256, 8192])
def test_an_mlp_in_pieces_is_never_faster_than_at_once(rows: int) -> None:
    """Where the host's starts are the time of a layer, too: a piece starts its steps one by one, in the backward again."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=4,
                                             vocab_size=512, use_cache=False))
    ids = torch.zeros(8, 512, dtype=torch.int64, device="meta")
    batch = ((), {"input_ids": ids, "labels": ids})
    for cluster in ("a10g:1x2", Cluster.parse("h100:1x2").with_kernels(fused=True)):
        whole, pieces = (mw.plan(model, cluster, batch, precision="bf16", pins={"mlp_rows": n}).predicted.step_seconds
                         for n in (0, rows))
        assert pieces > whole


def test_few_logits_are_made_at_once() -> None:
    """Where a piece would cost more than its rows do on one device alone, and a bound for both would be none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=30000,
                                             num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
                                             use_cache=False))
    ids = torch.zeros(6, 128, dtype=torch.int64, device="meta")

    def planned(**pins: int) -> Any:
        return mw.plan(model, Cluster.parse("h100:6x4").with_memory(12076636), ((), {"input_ids": ids, "labels": ids}),
                       loss_fn=mw.loss_alone, precision="tf32", optimizer="sgd", pins={"pp": 1, **pins})

    found, whole = planned(), planned(loss_rows=0)
    step = found.predicted.step_seconds
    assert step <= whole.predicted.step_seconds * (1 + 1e-9)
    assert 0.9 * step < found.certificate.bound_seconds <= step
