"""Predicted peak memory against torch's ``MemTracker``, on fake tensors, and what the search counts of it: runs
``benchmarks/memory.py`` and ``benchmarks/counted.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Every model, level, split, recomputation and precision; programs of one model, batch and precision share its graph.
PROGRAMS = (
    ("gpt2-small zero 0", "gpt2-small zero 1 x4", "gpt2-small selective tp 2", "gpt2-medium zero 3 full", "vit zero 3 bf16",
     "vit tp 2 selective x4", "gpt2-drawing cp 2 ring", "gpt2-drawing cp 2 all-gather",
     "vit one device full bf16"),  # whose blocks copy their weights again, which nobody gathers
    ("llama-1b tp 2 bf16", "llama-110m selective", "llama-110m zero 3 x4", "llama-110m cp 4 all-gather",
     "llama-110m cp 4 ring full", "llama-narrow cp 2 blocks", "llama-narrow cp 2 mlps in pieces"),
    ("mixtral zero 2", "mixtral zero 3 bf16", "mixtral full", "mixtral tp 2 selective",
     "mixtral ep 2 zero 2 x2", "mixtral ep 2 zero 3 bf16",  # experts are shared by other ranks than the rest of their block
     "t5 bf16", "t5 cp 2 ulysses bf16", "t5 cp 2 ring"),  # of T5 attention in fp32, as its mask takes a gradient
)
AT_REST = ("gpt2-small zero 0", "vit zero 3 bf16", "mixtral zero 2")
"""Of which the optimizer's state is compared too, which both count alike."""
PIPELINES = (
    "gpt2-small zb", "gpt2-small zb loss alone bf16", "gpt2-small zbv", "gpt2-small zb dp 2 bf16", "gpt2-small zbv dp 2 bf16",
    "gpt2-small pp 4 zero 3", "llama-110m pp 2 selective", "llama-weights pp 4 bf16",
    "llama-weights tp 2 bf16", "mixtral balanced interleaved",
)


WEIGHTS = ("t5-tables zb dp 2 bf16", "t5-tables zbv dp 2 bf16", "llama-weights pp 2 dp 2 tp 2")
"""Pipelines that hold little beside weights and their gradients."""
COUNTED = (
    "t5-tables zb dp 2 bf16", "t5-tables zbv dp 2 bf16",
    "gpt2-small zero 1 x4", "gpt2-small 1f1b", "gpt2-small zb", "gpt2-small zb loss alone bf16", "gpt2-small zbv",
    "gpt2-small zbv dp 2 bf16", "llama-weights pp 4 bf16", "gpt2-two cp 1",
    "gpt2-two cp 4 all-gather", "gpt2-drawing cp 2 ring", "t5 bf16", "t5 selective x4 bf16", "t5 zero 3 bf16",
    "t5 cp 2 ring bf16", "t5 cp 4 ring", "vit full bf16", "vit tp 2 selective x4", "bert tp 4 x2 bf16", "mixtral balanced full",
)


def rows(*names: str, of: str = "memory.py", deep: bool = False) -> list[dict[str, Any]]:
    """What the benchmark prints for these programs, in four layers unless ``deep`` (a fake group has its own process)."""
    words = [sys.executable, BENCHMARKS / of, "--json", *([] if deep else ["--shallow"]), *names]
    run = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert run.stdout, run.stderr[-2000:]
    return list(json.loads(run.stdout.splitlines()[-1]))


def check(found: list[dict[str, Any]]) -> None:
    for row in found:
        assert -0.02 <= row["error"] <= 0.05, row
        assert sum(row["kinds"].values()) == pytest.approx(row["predicted"])


@pytest.mark.slow
@pytest.mark.parametrize("names", PROGRAMS)
def test_programs(names: tuple[str, ...]) -> None:
    found = rows(*names)
    assert [row["name"] for row in found] == list(names)
    check(found)
    rest = [row for row in found if row["name"] in AT_REST]
    for row in rest:
        assert row["kinds"]["optimizer"] == pytest.approx(row["tracked kinds"]["optstate"], rel=1e-3)
    assert len(rest) == sum(name in AT_REST for name in names)


@pytest.mark.slow
def test_activations_fall_with_the_ranks_of_a_sequence() -> None:
    """As 1/cp under the ring, within 5%; the tracker counts gathered weights among them, which are there whole."""
    ranks = (1, 2, 4)
    found = rows("llama-long cp 1", "llama-long cp 2 ring", "llama-long cp 4 ring")
    check(found)
    held = [row["tracked kinds"]["activation"] - row["kinds"]["gathered"] for row in found]
    assert [size * cp / held[0] for size, cp in zip(held, ranks, strict=True)] == pytest.approx([1.0] * 3, abs=0.05)


@pytest.mark.slow
def test_pipelines() -> None:
    """Every pipeline rank, whole and split backwards, under ZeRO, recomputation and tensor parallelism; what a loss keeps to
    the end of the first half, for which torch retains the graph."""
    found = rows(*PIPELINES)
    assert len(found) == 2 + 2 + 2 + 2 + 2 + 4 + 2 + 4 + 1 + 2
    check(found)
    split = [row["error"] for row in found if "zb" in row["name"]]
    assert len(split) == 10
    assert max(map(abs, split)) < 0.01


def test_gradients_of_weights() -> None:
    """Of a table that two embeddings of a stage read, whose gradients meet before they are added to a sum; of one whose
    embedding is handed on, made where that waits; of the blocks of a stage whose split backward is all in W, there until their
    block is done; of a position bias, whose way goes through all blocks again; of DTensors, copied when all of a block are
    there."""
    found = rows(*WEIGHTS, deep=True)
    assert len(found) == 6
    assert max(abs(row["error"]) for row in found) < 0.015, found


def test_autograd_adds_gradients_in_place_where_it_alone_holds_them() -> None:
    """As the tracker lets it, which is a dispatch mode: under one torch adds every two in a third tensor. The gradient of a
    linear's weight is a view of a product."""
    ids, table = torch.zeros(4, dtype=torch.int64), torch.randn(100, 8, requires_grad=True)

    def adds(loss: torch.Tensor) -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
        return sorted(event.key for event in profile.key_averages() if event.key in ("aten::add", "aten::add_"))

    first, other = F.embedding(ids, table), F.embedding(ids, table)
    table.grad = None
    assert "aten::add_" in adds((first * other).sum())
    table.grad = None
    assert "aten::add_" not in adds(F.linear(F.embedding(ids, table), table).sum())


def test_what_the_search_counts_is_what_the_program_holds() -> None:
    """Whole gradients that are split behind the last micro-batch; outputs that the backward keeps anyway; gradients that are
    copied to where they are summed; one micro-batch, whose gradients are there when its activations are not; keys that are
    gathered through a view; logits in another order; what attention in blocks forms of scores; logits of a loss in fp32 that
    the model does not cast; a loss that reads sums of logits in pieces; inputs that are cast where each rank has its samples;
    results that selective recomputation keeps and a backward reads; what the gather of a model without blocks received, to the
    end of its forward; masks with a bias that rings keep; positions that every rank makes of its own piece; in a pipeline
    gradients of experts, which come while all that their block makes again is there, and of a head, to the end of its stage."""
    found = rows(*COUNTED, of="counted.py", deep=True)
    assert [row["name"] for row in found] == list(COUNTED)
    for row in found:
        assert abs(row["error"]) <= 0.02, row
