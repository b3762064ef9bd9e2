"""The longest sequence that trains on given devices, and the plan for it.

Every length is planned with all that the search has (context, tensor and sequence parallelism, ZeRO, recomputation,
micro-batches, the loss in pieces); a plan that fits says that the length trains. The next length is what the plan at hand would
fill its memory with; where that is no longer one, an eighth more, then a quarter, a half and the double, until none fits. Then
the gap is halved until it is an eighth of the length. On the way the first plan that fits will do (``ANY``), and the graph of
the shortest is taken at another length where that follows (``resized``); the longest is captured, and its plan searched as
``plan`` does. That what fits a length fits every shorter one is assumed, not proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.api import graph_of
from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError
from meshwright.ir.graph import Graph
from meshwright.ir.pins import ULYSSES, PinError, Pins
from meshwright.ir.plan import Plan, PlanError
from meshwright.planner import GAP, OutOfMemoryError, check_early, make_plan
from meshwright.resized import of_length

FINE = 8
"""Lengths are told apart by this part of the highest power of two below them."""
ANY = 0.9
"""The gap of a search whose first plan will do."""
KEPT = "parameters", "gradients", "optimizer"
"""Kinds of memory that do not grow with the sequence."""


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
    example, held = inputs or _ids(batch), Pins.of(pins)
    where = (Cluster.parse(cluster) if isinstance(cluster, str) else cluster).with_headroom()
    check_early(held, where, batch)

    def captured(tokens: int) -> Graph:
        return graph_of(model, example(tokens), loss_fn=loss_fn, optimizer=optimizer, precision=precision)

    def planned(graph: Graph, gap: float) -> Plan:
        return make_plan(graph, where, held, optimizer=optimizer, precision=precision, gap=gap, remedies=False)

    first = captured(shortest)

    def resized(tokens: int) -> Graph:
        if tokens == shortest:
            return first
        with suppress(PlanError):
            return of_length(first, Fraction(tokens, shortest))
        return captured(tokens)

    def soon(graph: Callable[[int], Graph], tokens: int) -> Plan:
        return planned(graph(tokens), ANY)

    for graph in resized, captured:
        found = _longest(shortest, most, partial(soon, graph))
        with suppress(OutOfMemoryError):
            return replace(found, plan=planned(captured(found.tokens), GAP))
    return found


def _longest(shortest: int, most: int, planned: Callable[[int], Plan]) -> Longest:
    """By plans of one length after another. Raises what ``planned`` does for ``shortest``."""
    low, best, high, step = shortest, planned(shortest), None, 1
    while (low < most) if high is None else high - low > max(1, low // FINE):
        if high is not None:
            tokens = max(low + 1, _rounded((low + high) // 2))
        elif (filling := _filling(best, low)) > low:
            tokens, step = min(filling, most), 1
        else:
            tokens, step = min(max(low + 1, _rounded(low + low * step // FINE)), most), min(2 * step, FINE)
        try:
            low, best = tokens, planned(tokens)
        except OutOfMemoryError:
            high = tokens
    return Longest(low, best, high)


def _filling(plan: Plan, tokens: int) -> int:
    """Tokens with which a plan of ``tokens`` would fill its memory, if all but parameters and their states grows with them."""
    said = plan.predicted
    if said is None:
        return 0
    kept = sum(said.bytes_by_kind.get(kind, 0.0) for kind in KEPT)
    return _rounded(int(tokens * (said.capacity_bytes - kept) / max(said.bytes_per_rank - kept, 1.0)))


def _rounded(tokens: int) -> int:
    """Down to what lengths are told apart by.

    >>> _rounded(1000), _rounded(1100), _rounded(3)
    (960, 1024, 3)
    """
    part = max(1, (1 << tokens.bit_length()) // (2 * FINE))
    return tokens // part * part


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
