"""The longest sequence that trains on given devices, and the plan for it.

Every length is captured and planned with all that the search has (context, tensor and sequence parallelism, ZeRO,
recomputation, micro-batches); a plan that fits says that the length trains. Lengths are doubled until none fits, then the gap
is halved until it is an eighth of the length. That what fits a length fits every shorter one is assumed, not proven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.api import plan
from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.planner import OutOfMemoryError

FINE = 8
"""Lengths are told apart by this part of the highest power of two below them."""


@dataclass(frozen=True)
class Longest:
    """The longest sequence found to fit, its plan, and the shortest found not to."""

    tokens: int
    plan: Plan
    too_long: int | None

    def __str__(self) -> str:
        more = "" if self.too_long is None else f"; {self.too_long:,} do not fit"
        return f"{self.tokens:,} tokens{more}\n{self.plan}"


def longest(
    model: nn.Module, cluster: Cluster | str, batch: int, *, inputs: Callable[[int], Any] | None = None,
    precision: str = "bf16", optimizer: str | float = "adamw", pins: Pins | Mapping[str, Any] | None = None,
    shortest: int = 1024, most: int = 1 << 24,
) -> Longest:
    """The longest sequence with which ``model`` trains on ``cluster`` at a global batch of ``batch`` sequences.

    ``inputs``: tokens -> example inputs as ``plan`` takes them; without it the model takes ``input_ids`` and ``labels``.
    ``shortest``, ``most``: tokens to begin with, and to end at. Raises OutOfMemoryError if not even ``shortest`` fits, and what
    ``plan`` raises.
    """
    if batch < 1 or not 1 <= shortest <= most:
        raise InputError(f"longest needs batch >= 1 and 1 <= shortest <= most, got batch={batch}, shortest={shortest}, "
                         f"most={most}")
    example = inputs or _ids(batch)

    def planned(tokens: int) -> Plan | None:
        try:
            return plan(model, cluster, example(tokens), precision=precision, optimizer=optimizer, pins=pins)
        except OutOfMemoryError:
            if tokens == shortest:
                raise
            return None

    low, best, high = shortest, planned(shortest), None
    assert best is not None
    while high is None and low < most:
        tokens = min(2 * low, most)
        found = planned(tokens)
        low, best, high = (tokens, found, None) if found is not None else (low, best, tokens)
    while high is not None and high - low > max(1, low // FINE):
        tokens = (low + high) // 2
        found = planned(tokens)
        low, best, high = (tokens, found, high) if found is not None else (low, best, tokens)
    return Longest(low, best, high)


def _ids(batch: int) -> Callable[[int], Any]:
    def example(tokens: int) -> Any:
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
        return (), {"input_ids": ids, "labels": ids.clone()}

    return example
