"""Drop-in equality of whole training loops: losses, clipped gradients, two optimizer steps, the full state dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.equality import check
from tests.models import MODELS, OTHERS

DEGREES: dict[str, dict[str, Any]] = {
    "searched": {}, "dp": {"dp": 4}, "tp": {"tp": 4}, "dp x tp": {"dp": 2, "tp": 2},
    "zero 1": {"dp": 4, "zero": 1}, "zero 2": {"dp": 4, "zero": 2}, "zero 3": {"dp": 4, "zero": 3},
    "HSDP": {"dp": 4, "shard": 2, "zero": 3}, "sequence parallel": {"dp": 2, "tp": 2, "sequence_parallel": True},
}
HELD: dict[str, tuple[str, ...]] = {
    "odd": tuple(DEGREES), "bare": ("dp", "tp", "zero 3", "HSDP"), "llama": ("searched", "zero 2", "HSDP", "sequence parallel"),
    "gpt2": ("searched", "tp", "HSDP", "sequence parallel"), "bert": ("dp x tp", "sequence parallel"),
    "t5": ("searched", "tp", "sequence parallel"), "vit": ("dp x tp", "zero 1", "HSDP"), "convnet": ("searched", "dp x tp"),
    "masked_mean": ("dp", "sequence parallel"), "encoder": ("tp", "dp x tp", "HSDP"),
    "heads": ("searched", "tp", "sequence parallel"),
}
"""{model: under which degrees on four ranks}: the one of uneven lengths under all; of the others mainly those that two ranks
cannot hold, or that split heads, channels and sequences by four."""
CLIPPED = ("llama", "gpt2", "bert")
TWO: list[dict[str, Any]] = [
    {"dp": 2}, {"tp": 2}, *({"dp": 2, "zero": zero} for zero in (1, 2, 3)), {"tp": 2, "sequence_parallel": True},
]
ONE: list[dict[str, Any]] = [{"dp": 1, "tp": 1}, {"zero": 3}, {"sequence_parallel": True}]
ACCUMULATED: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2, "microbatches": 2, "zero": zero, "sequence_parallel": True} for zero in (0, 1, 2, 3)
]
WHOLE = ("llama", "gpt2", "bert", "t5", "vit", "masked_mean", "encoder", "adapted")


def some(pins: list[dict[str, Any]], names: Sequence[str], name: str, count: int) -> list[dict[str, Any]]:
    """``count`` of the pins, evenly spaced, from another start for each model: all of them under one model or another."""
    step, start = len(pins) // count, list(names).index(name)
    return [pins[(start + step * at) % len(pins)] for at in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_four_processes(pool: Callable[[int], Any], name: str) -> None:
    """Searched, and under pins of the degrees; of some models clipped: ``clip_grad_norm_`` returns the single process's
    norm and scales alike."""
    clipped = name in CLIPPED
    pins = [*(DEGREES[degree] for degree in HELD[name]), *[{"dp": 2, "tp": 2, "zero": 3}] * clipped]
    assert pool(4).run(check, name, 4, pins, 0.1 if clipped else None) == [[]] * 4


@pytest.mark.parametrize("name", MODELS)
def test_two_processes(pool: Callable[[int], Any], name: str) -> None:
    """Searched, and under pins that two ranks can hold."""
    assert pool(2).run(check, name, 2, [{}, *some(TWO, list(MODELS), name, 2)]) == [[]] * 2


def test_a_loss_on_whole_logits_under_sequence_parallelism(pool: Callable[[int], Any]) -> None:
    """What is pinned of an operator goes before what sequence parallelism asks of all: every rank computes the loss of all
    tokens and words, as software does that gathers its logits."""
    pins = [{"dp": 1, "tp": 2, "sequence_parallel": True, "operators": {"*:cross_entropy": ""}}]
    assert pool(2).run(check, "llama", 2, pins) == [[]] * 2


@pytest.mark.parametrize("name", MODELS)
def test_one_process(pool: Callable[[int], Any], name: str) -> None:
    """World size 1 is an ordinary case."""
    assert pool(1).run(check, name, 1, [{}, *some(ONE, list(MODELS), name, 1)]) == [[]]


@pytest.mark.parametrize("name", WHOLE)
def test_gradient_accumulation(pool: Callable[[int], Any], name: str) -> None:
    """Two micro-batches are the whole batch, masked means included."""
    mine = some(ACCUMULATED, WHOLE, name, 2)
    pins = [{k: v for k, v in p.items() if name != "vit" or k != "sequence_parallel"} for p in mine]
    assert pool(4).run(check, name, 4, pins) == [[]] * 4


@pytest.mark.parametrize(
    ("name", "other"), [("llama", (0, "full", 1)), ("gpt2", (2, "selective", 1)), ("vit", (2, "selective", 1))]
)
def test_recomputation(pool: Callable[[int], Any], name: str, other: tuple[int, str, int]) -> None:
    """Recomputation of the blocks, full with ZeRO and micro-batches, and full alone or selective."""
    pins: list[dict[str, Any]] = [
        {"dp": 2, "tp": 2, "zero": zero, "recompute": kind, "microbatches": count}
        for zero, kind, count in ((3, "full", 2), other)
    ]
    assert pool(4).run(check, name, 4, pins) == [[]] * 4


@pytest.mark.parametrize("name", ["gpt2", "encoder", "heads"])
def test_fused_projections(pool: Callable[[int], Any], name: str) -> None:
    """A weight of several projections is split within each of them (over four ranks: above), and is whole again in the state
    dict."""
    pins = [{"dp": 2, "tp": 2, "zero": zero, "sequence_parallel": name == "gpt2"} for zero in (1, 3)]
    assert pool(4).run(check, name, 4, pins) == [[]] * 4


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(pool: Callable[[int], Any], name: str) -> None:
    """Architectures that nothing here was written for."""
    sequence = name not in ("resnet", "towers", "skips", "odd_head", "tied_odd") or None
    pins = [{"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": sequence}, {"tp": 4}]
    assert pool(4).run(check, name, 4, pins) == [[]] * 4
