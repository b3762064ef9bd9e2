"""Context parallelism: the sequence split over an axis of its own, attention by each of its forms, equal to one process."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.api import autoparallel
from meshwright.compiler.search.candidates import _contexts, near_ranks
from meshwright.cost.cluster import Cluster
from meshwright.ir.pins import ATTENTION, PinError, Pins
from meshwright.ir.serialize import plan_hash
from meshwright.runtime.attention.forms import attend
from meshwright.views.report import render
from tests.equality import captured_once, check, differences, loss_of
from tests.models import Case, make

FORMS: list[dict[str, Any]] = [{"cp": 2, "attention": form} for form in ATTENTION]
TWO: dict[str, list[dict[str, Any]]] = {
    "llama": FORMS, "bert": [{"cp": 2, "attention": "ring"}, {"cp": 2, "attention": "all-gather"}],
    "t5": [{"cp": 2, "attention": "ring"}], "vit": [{"cp": 2, "attention": "ulysses"}],
    "Mistral": [{"cp": 2}, {"cp": 2, "attention": "ulysses"}],
}
FOUR: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"cp": 4, "attention": "ulysses"},  # of two key heads
        {"cp": 4, "ulysses": 2, "attention": "ring", "zero": 3},
        {"dp": 2, "cp": 2, "zero": 2, "microbatches": 2, "attention": "ring", "recompute": "full"},
        {"cp": 2, "tp": 2, "sequence_parallel": True, "attention": "all-gather"},
        {"pp": 2, "cp": 2, "microbatches": 2, "schedule": "1f1b", "zero": 3, "recompute": "selective"},
    ],
    "t5": [
        {"cp": 4},
        {"pp": 2, "cp": 2, "microbatches": 2, "schedule": "gpipe", "zero": 3, "recompute": "full", "attention": "all-gather"},
    ],
    "Mistral": [
        {"cp": 4, "zero": 3, "recompute": "full"},  # the window reaches two pieces back
        {"pp": 2, "cp": 2, "microbatches": 2, "schedule": "zb", "zero": 1, "attention": "ulysses"},
    ],
}


@pytest.mark.parametrize("name", TWO)
def test_forms_of_attention(pool: Callable[[int], Any], name: str) -> None:
    """Grouped heads, causal and not, padding, a bias with a gradient, cross attention, a window, lengths that do not divide."""
    assert pool(2).run(check, name, 2, TWO[name]) == [[]] * 2


@pytest.mark.parametrize("name", FOUR)
def test_together_with_the_rest(pool: Callable[[int], Any], name: str) -> None:
    """With data and tensor ranks, ZeRO, micro-batches, recomputation."""
    assert pool(4).run(check, name, 4, FOUR[name]) == [[]] * 4


class Attends(nn.Module):
    """Two layers of attention, in a form of its own; the length does not divide, nor is it that of the keys."""

    def __init__(self, form: str, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.form, self.heads = form, heads
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(2))

    def forward(self, x: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        for number, (q, k, v, o) in enumerate(self.layers):
            source = keys if self.form == "cross" else x
            parts = [f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, y in ((q, x), (k, source), (v, source))]
            form = {"mixed": ("causal", "documents"), "windows": ("causal", "window")}.get(self.form, (self.form,) * 2)[number]
            x = x + o(self.attention(form, *parts, mask).transpose(1, 2).flatten(2))
        return {"loss": (x * x).mean(), "hidden": x}

    def attention(self, form: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if form == "written":
            scores = q @ k.transpose(-1, -2) * 0.3
            scores = scores.masked_fill(torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool(), float("-inf"))
            return scores.softmax(-1) @ v
        if form == "documents":
            return F.scaled_dot_product_attention(q, k, v, (mask[:, None, :] == mask[:, :, None])[:, None])
        if form == "window":
            away = torch.arange(q.shape[-2])[:, None] - torch.arange(q.shape[-2])
            return F.scaled_dot_product_attention(q, k, v, (away >= -1) & (away <= 3))
        if form == "added":
            return F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :] * 0.5, scale=0.7)
        dropped = 0.5 if form == "dropped" and self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=form in ("causal", "dropped"))


def _case(form: str) -> Case:
    torch.manual_seed(2)
    length = 12 if form in ("mixed", "windows", "dropped") else 11  # two chunks for each of two ranks, or not
    documents = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3])[:length].expand(4, length).float().contiguous()
    return Attends(form), {"x": torch.randn(4, length, 16), "keys": torch.randn(4, 7, 16), "mask": documents}


def _forms(rank: int, form: str, world: int, all_pins: Sequence[Mapping[str, Any]]) -> list[str]:
    model, batch = _case(form)

    def build(pins: Mapping[str, Any]) -> nn.Module:
        parallel = autoparallel(model, init_device_mesh("cpu", (world,)), ((), batch), pins=pins, progress=False)
        assert parallel.plan.mesh.size("cp") == pins["cp"]
        hidden = parallel(**batch)["hidden"].full_tensor()
        torch.testing.assert_close(hidden, copy.deepcopy(model)(**batch)["hidden"])  # in the user's order
        return parallel

    with captured_once(f"attention {form}"):
        return differences(rank, model, batch, {f"{form} under {pins}": partial(build, pins) for pins in all_pins})


@pytest.mark.parametrize("form", ["written", "documents", "added", "cross", "mixed", "windows"])
def test_attention_of_every_kind(pool: Callable[[int], Any], form: str) -> None:
    """Written out, masks that are data, an added one, keys of another length, layers with a window and without (their pieces
    are two chunks); outputs come back whole and in order."""
    pins = FORMS[:1] if form in ("written", "windows") else FORMS if form == "documents" else FORMS[::2]
    assert pool(2).run(_forms, form, 2, pins) == [[]] * 2


def _proposed(rank: int) -> tuple[str, list[str]]:
    """(the mesh that the search chooses, what differs) on two nodes of two ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
                         max_position_embeddings=256, use_cache=False)
    model, ids = LlamaForCausalLM(config), torch.randint(64, (2, 256))
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        batch = {"input_ids": ids, "labels": ids.clone()}
        parallel = autoparallel(model, init_device_mesh("cpu", (4,)), ((), batch), pins={"cp": 4}, progress=False)
    return str(parallel.plan.mesh), differences(rank, model, batch, {"proposed": lambda: parallel})


def test_the_search_proposes_two_axes(pool: Callable[[int], Any]) -> None:
    """Sequence for heads within a node, a ring across: where that is faster it is chosen without a pin, and it runs."""
    assert pool(4).run(_proposed) == [("dp=1 x cp*=2 x up=2 x tp=1", [])] * 4


@pytest.mark.parametrize(
    ("cp", "tp", "heads", "tokens", "pins", "near"),
    [
        (16, 1, 32, 4096, {}, [1, 8]), (16, 2, 32, 4096, {}, [1, 4]),
        (16, 1, 12, 4096, {}, [1, 4]), (16, 1, 9, 4096, {}, [1]),  # as far as heads allow
        (8, 1, 32, 4096, {}, [1]), (16, 8, 32, 4096, {}, [1]),  # within a node, and where tensor ranks fill it
        (8, 1, 4, 4096, {}, [1, 4]), (4, 2, 4, 4096, {}, [1, 2]), (8, 1, 12, 4096, {}, [1, 4]),  # of a node, of too few heads
        (16, 1, 32, 4100, {}, [1]),  # pieces of one length only
        (16, 1, 32, 4096, {"cp": 16, "attention": "ring"}, [1]), (16, 1, 32, 4096, {"cp": 16, "ulysses": 2}, [2]),
    ],
)
def test_two_axes_are_candidates_where_they_can_run(
    cp: int, tp: int, heads: int, tokens: int, pins: dict[str, Any], near: list[int]
) -> None:
    assert near_ranks(cp, tp, Cluster.parse("h100:16x8"), Pins.of(pins), (heads, tokens)) == near


def _dropped(rank: int) -> tuple[float, float, bool]:
    """(loss, the same again under the seed, whether eval is that of one process)."""
    model, batch = _case("dropped")
    losses = []
    for _ in range(2):
        torch.manual_seed(9)
        parallel = autoparallel(model, init_device_mesh("cpu", (2,)), ((), batch), pins={"cp": 2, "attention": "ring"},
                                progress=False)
        loss = loss_of(parallel(**batch))
        loss.backward()
        assert all(torch.isfinite(p.grad.full_tensor()).all() for p in parallel.parameters() if p.grad is not None)
        losses.append(loss.item())
    want = loss_of(copy.deepcopy(model).eval()(**batch)).item()
    return losses[0], losses[1], abs(loss_of(parallel.eval()(**batch)).item() - want) < 1e-5


def test_dropout_of_probabilities(pool: Callable[[int], Any]) -> None:
    """Dropout inside attention draws by the seed, and not in eval."""
    (first, again, quiet), other = pool(2).run(_dropped)
    assert (first, again, quiet) == other
    assert first == again
    assert quiet


def _refused(model: nn.Module, batch: Any, pins: Mapping[str, Any], devices: int = 4) -> str:
    with pytest.raises(PinError) as caught:
        mw.plan(model, f"cpu:1x{devices}", ((), batch), pins=dict(pins))
    return str(caught.value)


def test_what_cannot_be_is_refused_with_what_can() -> None:
    """Too few heads, too short a sequence, none at all, pins without cp."""
    model, batch = make("llama")
    text = _refused(model, batch, {"cp": 8, "attention": "ulysses"}, 8)
    assert "keys [4, 2, 8, 8], cannot run so over cp=8 (of such heads sequence is exchanged over 2, 4 ranks); nearest" in text
    longer = {name: torch.ones(4, 12, dtype=torch.long) for name in batch}
    text = _refused(model, longer, {"cp": 6, "ulysses": 3}, 6)
    assert "cannot run so over cp=6 (of such heads sequence is exchanged over 2 ranks); nearest legal setting: ulysses" in text
    mw.plan(model, "cpu:1x6", ((), longer), pins={"cp": 6})
    assert "needs a pin cp that is a larger multiple of it" in _refused(model, batch, {"cp": 4, "ulysses": 4})
    assert "needs pin cp" in _refused(model, batch, {"attention": "ring"})
    assert "take cp=8, or a sequence of" in _refused(model, batch, {"cp": 16}, 16)
    assert "no sequence was found" in _refused(*make("convnet"), {"cp": 2, "dp": 2})


def test_sequence_parallelism_beside_an_open_cp() -> None:
    """Where tp is open, candidates without tensor ranks are passed over: they ended the search once."""
    model, batch = make("gpt2")
    plan = mw.plan(model, "v100-32g:4x1", ((), batch), pins={"cp": "<=4", "sequence_parallel": True})
    assert plan.mesh.size("tp") > 1
    assert "leave none for it" in _refused(model, batch, {"cp": "<=4", "dp": 4, "sequence_parallel": True})


@pytest.mark.parametrize(("pins", "length", "text", "others"), [
    ({"cp": 4, "ulysses": 2}, 13, "take a sequence of 12 or 16, or drop the pin ulysses", []),
    ({"cp": 8, "ulysses": 2}, 12, "take a sequence of 8 or 16, cp=4, or drop", [{"cp": 4, "ulysses": 2, "dp": 2}]),
    ({"cp": 2, "tp": 2, "sequence_parallel": True}, 13, "tp=2 and cp=2; take a sequence of 12 or 16, or drop",
     [{"cp": 2, "tp": 2}]),
    ({"tp": 4, "sequence_parallel": True}, 6, "split over tp=4; take a sequence of 4 or 7, tp=2, or drop", []),
])
def test_a_length_that_cannot_be_split_is_refused_with_those_that_can(
    pins: dict[str, Any], length: int, text: str, others: list[dict[str, Any]]
) -> None:
    """What the message offers is planned: the lengths on both sides, the degree, the pin dropped."""
    model, _ = make("llama")
    devices = pins.get("cp", 1) * pins.get("tp", 1)

    def batch(tokens: int) -> dict[str, torch.Tensor]:
        return {name: torch.ones(4, tokens, dtype=torch.long) for name in ("input_ids", "labels")}

    said = _refused(model, batch(length), pins, devices)
    assert text in said
    offered = re.search(r"a sequence of (\d+) or (\d+)", said)
    assert offered is not None
    for tokens in offered.groups():
        mw.plan(model, f"cpu:1x{devices}", ((), batch(int(tokens))), pins=pins)
    for other in others:
        mw.plan(model, f"cpu:1x{devices}", ((), batch(length)), pins=other)


def test_the_plan_says_how_attention_runs(tmp_path: Path) -> None:
    """The form is in the assignment, in the report, and survives a file."""
    model, batch = make("llama")
    plan = mw.plan(model, "cpu:1x4", ((), batch), pins={"cp": 4, "attention": "ring"})
    assert [dict(a) for a in plan.assignments.values()].count({"cp": "ring"}) == 2
    assert "cp=4 (sequence, attention by ring + data)" in render(plan)
    assert all(group.data_axes == ("cp",) for group in plan.groups)
    assert str(plan.mesh) == "dp=1 x cp*=4 x tp=1"  # causal: two chunks a rank
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert plan_hash(again) == plan_hash(plan)
    assert again.mesh == plan.mesh
    assert [dict(a) for a in again.assignments.values()].count({"cp": "ring"}) == 2


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("ends", [(5,), (4, 5), (2, 4, 5)])
def test_rows_that_see_nothing_are_means_of_all_keys(ends: tuple[int, ...], learned: bool) -> None:
    """A mask that adds the least number there is to whole rows leaves neither scores nor how many keys a block has in the
    log-sum-exp: of pieces of unlike lengths means were merged as if alike, and blocks written out were sums."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    mask = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min).triu(1)
    mask[:, :, :2] = torch.finfo(torch.float32).min
    mask.requires_grad_(learned)
    blocks = [(0, 5, start, end, start, False) for start, end in itertools.pairwise((0, *ends))]
    outs = F.scaled_dot_product_attention(q, k, v, mask), attend(q, k, v, mask, 0.0, None, blocks)
    given, into = torch.randn(1, 2, 5, 8), (q, k, v, mask) if learned else (q, k, v)
    wanted, found = (torch.autograd.grad(out, into, given) for out in outs)
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (3, 2), (3, 2, 2)], ids=str)
def test_masks_of_every_shape(leading: tuple[int, ...], learned: bool) -> None:
    """As short as the keys, and with dims of one element; more than one dim may stand in front of the heads."""
    drawn, whole = torch.Generator().manual_seed(0), (*leading, 6, 6)
    blocks = [(0, 6, 0, 2, 0, False), (0, 6, 2, 6, 2, False)]
    shapes = [(*leading, 6, 4)] * 3
    for first in range(len(whole) if learned else len(whole) - 1):  # torch takes a single dim only where it takes a gradient
        for ones in itertools.product((False, True), repeat=len(whole) - first):
            shape = [1 if one else size for one, size in zip(ones, whole[first:], strict=True)]
            q, k, v, mask = (torch.randn(*given, dtype=torch.float64, generator=drawn, requires_grad=True)
                             for given in (*shapes, shape))
            mask.requires_grad_(learned)
            outs = F.scaled_dot_product_attention(q, k, v, mask), attend(q, k, v, mask, 0.0, None, blocks)
            given, into = torch.randn(*shapes[0], dtype=torch.float64, generator=drawn), (q, k, v, *[mask] * learned)
            wanted, found = (torch.autograd.grad(out, into, given) for out in outs)
            torch.testing.assert_close((outs[1], *found), (outs[0], *wanted))


def test_pieces_are_short_where_a_node_has_more_ranks_than_pieces() -> None:
    """One sample leaves no other use for a node's ranks, whatever their number; where each has a sample, and over nodes,
    only powers of two that leave 8192 tokens are candidates."""
    asked = [(3, 24576, 1, 8), (4, 8192, 1, 4), (6, 4096, 2, 8), (4, 8192, 8, 4), (6, 65536, 6, 8), (16, 8192, 1, 8)]
    assert [_contexts(Pins(), *one) for one in asked] == [[1, 3], [1, 2, 4], [1, 2, 3], [1], [1, 2], [1]]
