"""MLPs in pieces: found by data flow, chosen where nothing else fits, equal to the single process, and smaller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.compiler.structure.mlps import mlps_in_pieces, rows_of_mlps
from meshwright.cost.cluster import Cluster
from meshwright.ir.declared.operator import MLP
from meshwright.planner import capture_model
from tests.equality import captured_once, differences
from tests.models import make

TWO: dict[str, list[dict[str, Any]]] = {
    "llama": [{"cp": 2, "attention": "ring", "mlp_rows": 3, "recompute": "full"}, {"dp": 2, "zero": 3, "mlp_rows": 7}],
    "bert": [{"tp": 2, "mlp_rows": 4}],  # biases, before and after
    "t5": [{"pp": 2, "microbatches": 2, "mlp_rows": 5}],
}
FOUR: dict[str, list[dict[str, Any]]] = {
    "llama": [{"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full", "mlp_rows": 3}],
    "vit": [{"dp": 2, "tp": 2, "zero": 2, "microbatches": 2, "mlp_rows": 1000}],
}


def _equal(rank: int, world: int, cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """What differs under all pins of every model, each of whose plans has its MLPs in pieces and says so."""
    found = []
    for name, all_pins in cases.items():
        model, batch = make(name)
        model.train()

        def build(pins: Mapping[str, Any], model: nn.Module = model, batch: Any = batch) -> nn.Module:
            parallel = mw.autoparallel(model, init_device_mesh("cpu", (world,)), ((), batch), pins=dict(pins), progress=False)
            assert rows_of_mlps(parallel.plan.graph) == pins["mlp_rows"]
            assert f"the MLPs   in pieces of {pins['mlp_rows']} tokens" in str(parallel.plan)
            return parallel

        with captured_once(name):
            found += differences(rank, model, batch, {f"{name} under {dict(pins)}": partial(build, pins) for pins in all_pins})
    return found


def test_two_processes(pool: Callable[[int], Any]) -> None:
    """Sequence, batch, width and layers split; gates and plain ones, biases on both sides; pieces that do not divide."""
    assert pool(2).run(_equal, 2, TWO) == [[]] * 2


def test_four_processes(pool: Callable[[int], Any]) -> None:
    assert pool(4).run(_equal, 4, FOUR) == [[]] * 4


class Inside(nn.Module):
    """An MLP with something else about it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        up, gate = self.up(x), self.gate(x * 2 if self.how == "another input" else x)
        inner = F.silu(gate) * up
        if self.how == "scaled by a parameter":
            inner = inner * self.scale
        if self.how == "normalized":
            inner = F.layer_norm(inner, (16,))
        if self.how == "dropped":
            inner = F.dropout(inner, 0.5)
        if self.how == "polynomial":
            inner = 0.5 * inner * (1 + torch.tanh(inner + 0.1 * inner**3))
        y = self.down(inner)
        return {"loss": y.square().mean() + (inner.mean() if self.how == "read again" else 0), "y": y}


@pytest.mark.parametrize(("how", "count"), [
    ("plain", 1), ("polynomial", 1), ("another input", 0), ("scaled by a parameter", 0), ("normalized", 0), ("dropped", 0),
    ("read again", 0),
])
def test_what_is_an_mlp(how: str, count: int) -> None:
    """Elements of linears of one value alone, read by one linear alone."""
    batch = {"x": torch.randn(4, 6, 8)}
    graph = capture_model(Inside(how), (), batch, (), None, "fp32")
    assert rows_of_mlps(graph) == (0 if count else None)
    pieces = mlps_in_pieces(graph, 4)
    assert [op.target for op in pieces.ops].count(MLP) == count
    assert count or pieces is graph
    if not count:
        with pytest.raises(mw.PinError, match=r"mlp_rows=4: no linears of one value"):
            mw.plan(Inside(how), "cpu:1x2", ((), batch), pins={"mlp_rows": 4})


def test_memory_chooses(tmp_path: Path) -> None:
    """Where nothing else fits MLPs are in pieces, which the plan's file and pins say too; short samples never are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                                             vocab_size=64, use_cache=False))
    cluster, pins = Cluster.parse("h100:1x2"), {"cp": 2, "dp": 1, "pp": 1, "tp": 1, "zero": 3}

    def planned(where: Cluster, tokens: int = 32768, **more: Any) -> Any:
        batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(1, tokens, dtype=torch.int64, device="meta"))
        return mw.plan(model, where, ((), batch), loss_fn=mw.loss_alone, pins={**pins, **more}, precision="bf16")

    whole = planned(cluster, recompute="full")
    assert rows_of_mlps(whole.graph) == 0
    small = cluster.with_memory(0.7 * whole.predicted.bytes_per_rank)
    found = planned(small)
    assert (rows_of_mlps(found.graph), found.predicted.fits) == (8192, True)
    with pytest.raises(mw.OutOfMemoryError):
        planned(small, mlp_rows=0)
    found.save(tmp_path / "plan.json")
    again = mw.load_plan(tmp_path / "plan.json")
    assert again.to_pins().mlp_rows == 8192
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(1, 32768, dtype=torch.int64, device="meta"))
    pinned = mw.plan(model, small, ((), batch), loss_fn=mw.loss_alone, pins=again.to_pins(), precision="bf16")
    assert pinned.predicted.bytes_per_rank == found.predicted.bytes_per_rank
    with pytest.raises(mw.PinError, match=r"recompute='selective'.*mlp_rows=0"):
        planned(cluster, recompute="selective", mlp_rows=4096)
    with pytest.raises(mw.OutOfMemoryError):  # fewer tokens than a piece
        planned(cluster.with_memory(0.05 * whole.predicted.bytes_per_rank), tokens=4096)
