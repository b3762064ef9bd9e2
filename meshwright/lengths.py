"""The longest sequence that trains on given devices, and the plan for it.

Every length is captured and planned with all that the search has (context, tensor and sequence parallelism, ZeRO,
recomputation, micro-batches, the loss in pieces); a plan that fits says that the length trains. Lengths are doubled until none
fits, then the gap is halved until it is an eighth of the length. That what fits a length fits every shorter one is assumed, not
proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.api import plan
from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError
from meshwright.ir.pins import ULYSSES, PinError, Pins
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


def loss_alone(output: Any) -> Any:
    """A ``loss_fn``: of what a model returns its loss alone, that is ``output.loss``, ``output["loss"]``, or its only scalar
    of floating point. Nobody reads the logits then, so that the loss may be made in pieces.

    >>> loss_alone({"loss": torch.tensor(1.5), "logits": torch.zeros(2, 3)})
    tensor(1.5000)
    """
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is not None:
        return found
    scalars = [one for one in _tensors(output) if one.ndim == 0 and one.is_floating_point()]
    if len(scalars) != 1:
        raise InputError(f"the model's output has no loss, and {len(scalars)} scalars of floating point; give a loss_fn that "
                         "says which one")
    return scalars[0]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(item)


def longest(
    model: nn.Module, cluster: Cluster | str, batch: int, *, inputs: Callable[[int], Any] | None = None,
    loss_fn: Callable[..., Any] | None = loss_alone,
    precision: str = "bf16", optimizer: str | float = "adamw", pins: Pins | Mapping[str, Any] | None = None,
    shortest: int = 1024, most: int = 1 << 24,
) -> Longest:
    """The longest sequence with which ``model`` trains on ``cluster`` at a global batch of ``batch`` sequences.

    ``inputs``: tokens -> example inputs as ``plan`` takes them; without it the model takes ``input_ids`` and ``labels``.
    ``loss_fn``: as of ``plan``; what there is keeps the loss alone, so that it can be made in pieces (give it to
    ``autoparallel`` too, to run the plan found); None: outputs are the model's.
    As much memory is left free as ``plan`` leaves (3%, unless ``cluster`` was given its memory).
    ``shortest``, ``most``: tokens to begin with, and to end at. Raises OutOfMemoryError if not even ``shortest`` fits, and what
    ``plan`` raises.
    """
    if batch < 1 or not 1 <= shortest <= most:
        raise InputError(f"longest needs batch >= 1 and 1 <= shortest <= most, got batch={batch}, shortest={shortest}, "
                         f"most={most}")
    example = inputs or _ids(batch)

    def planned(tokens: int) -> Plan | None:
        try:
            return plan(model, cluster, example(tokens), loss_fn=loss_fn, precision=precision, optimizer=optimizer, pins=pins)
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


def by_heads(
    model: nn.Module, cluster: Cluster | str, batch: int, *, most: int, shortest: int = 1024, **options: Any
) -> Longest | None:
    """The longest sequence, by the same prices, of what long sequences are trained with by hand: all-to-all attention alone,
    over as many ranks as the heads allow, ZeRO-3 over all, full recomputation, all logits at once; the outputs of the model are
    held as it returns them, unless ``loss_fn`` drops them. None where no such layout can be or fits.

    ``most``, ``shortest``: tokens to end at and to begin with; ``options``: those of ``longest``.
    """
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    refused = OutOfMemoryError, PinError
    for cp in (n for n in range(min(cluster.world, shortest), 0, -1) if cluster.world % n == 0):
        pins: dict[str, Any] = {"cp": cp, "tp": 1, "pp": 1, "zero": 3, "recompute": "full", "loss_rows": 0, "mlp_rows": 0}
        pins |= {"attention": ULYSSES} if cp > 1 else {}
        try:
            return longest(model, cluster, batch, pins=pins, most=most, shortest=shortest, **{"loss_fn": None, **options})
        except refused:
            continue
    return None


def _ids(batch: int) -> Callable[[int], Any]:
    def example(tokens: int) -> Any:
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
        return (), {"input_ids": ids, "labels": ids.clone()}

    return example
