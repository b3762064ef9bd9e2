"""The task of a search: the graph, cluster, rules and pins that are the same for every candidate.

Whoever starts the search hands in two functions: ``Fits``, which lowers a plan and says whether its program has room on a
device (the search itself imports no pass), and ``Progress``, which hears how far the search is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.compiler.placement.fixed import NOTHING_FIXED, FixedDecisions
from meshwright.compiler.placement.pinned import fixed_by
from meshwright.compiler.structure.measured import ModuleTimes
from meshwright.compiler.structure.structure import Structure
from meshwright.cost import collectives, compute
from meshwright.cost.cluster import Cluster
from meshwright.ir.declared.operator import MLP
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.graph import Graph
from meshwright.ir.pins import RECOMPUTE, PinError, Pins
from meshwright.ir.plan import Plan
from meshwright.ir.prediction import Prediction
from meshwright.ir.rule import Rules, factors_of

Fits = Callable[[Plan], Prediction]
"""The prediction of a plan with the bytes that its program holds at the worst moment: ``fits(plan).fits`` says whether a device
has room for it."""
Progress = Callable[[str, float], None]
"""Is told what is looked at, and which part of the search is done (0 to 1)."""


@dataclass(frozen=True)
class Task:
    """A model, a cluster and what is decided already.

    graph: captured at the global batch, with its blocks
    rules: the sharding rule of every operator by name, and what else is declared of it
    precision: of compute, one of ``ir.declared.precision``
    state_bytes: of the optimizer, per parameter
    gap: the relative distance from the lower bound at which a search may stop
    recompute: the kinds of recomputation that blocks may have, "none" first
    held: decisions about operators, values and blocks that are taken
    """

    graph: Graph
    cluster: Cluster
    rules: Rules
    pins: Pins
    precision: str
    state_bytes: float
    gap: float
    recompute: tuple[str, ...] = RECOMPUTE
    fixed: FixedDecisions = NOTHING_FIXED

    @classmethod
    def of(
        cls, graph: Graph, cluster: Cluster, rules: Rules, pins: Pins, *, precision: str, state_bytes: float,
        gap: float,
    ) -> Task:
        """A task whose recomputation follows from the pins."""
        fixed = fixed_by(pins, graph, cluster.world)
        return cls(graph, cluster, rules, pins, precision, state_bytes, gap, _kinds(pins, graph), fixed)

    def under(self, pins: Pins) -> Task:
        """The same under other pins."""
        return replace(self, pins=pins, recompute=_kinds(pins, self.graph))

    @cached_property
    def structure(self) -> Structure:
        """What is read off the graph."""
        return Structure(self.graph, self.rules)

    @cached_property
    def modules(self) -> ModuleTimes | None:
        """What was measured of the graph's modules."""
        return ModuleTimes.of(self.graph, self.rules, self.cluster.device)

    @cached_property
    def falls(self) -> float:
        """By how much less than its share of a large batch few samples take at most, as measured: 1 where nothing was measured
        that says so, inf where modules were."""
        if self.modules is not None:
            return math.inf
        island = self.cluster.island
        return compute.unevenly_measured(island.device) * collectives.unevenly_measured(island)

    @cached_property
    def experts(self) -> int:
        """The number that the degree of experts divides: the experts of every mixture; 1 where there is none."""
        counts = {
            rule.sizes[one] for rule in self.rules.values() for both in rule.together for one in factors_of(both)[1:]
        }
        counts |= self.structure.stacked.counts(self.structure.classes)
        return math.gcd(*counts) if counts else 1

    @cached_property
    def foldable(self) -> bool:
        """Whether ranks of the sequence may split the experts: the tokens of every mixture have it as a dim of their own."""
        mixtures = [rule for rule in self.rules.values() if rule.together]
        return all(len(rule.together) > 1 for rule in mixtures) and bool(mixtures)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype."""
        return PRECISIONS[self.precision].itemsize

    @cached_property
    def given_bytes(self) -> float:
        """Of the inputs, which every device holds whole."""
        return float(sum(self.graph.values[name].bytes_ for name in dict.fromkeys(self.graph.inputs)))


def _kinds(pins: Pins, graph: Graph) -> tuple[str, ...]:
    """Recomputations that are open. What selective recomputation keeps it knows by the dispatcher's names, products among them:
    it would keep those of every piece of an MLP."""
    kinds = tuple(kind for kind in RECOMPUTE if pins.allows("recompute", kind))
    left = tuple(kind for kind in kinds if kind != "selective") if any(op.target == MLP for op in graph.ops) else kinds
    if not left:
        raise PinError("pin recompute='selective': MLPs in pieces make their inner values again by themselves; pin 'full' or "
                       "'none', or mlp_rows=0")
    return left


@dataclass
class Timing:
    """Seconds of each phase of planning. ``searched``: nominal seconds that its searches took, in parts of a longer limit where
    one was (a larger model: ``search``)."""

    phases: dict[str, float] = field(default_factory=dict)
    searched: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def mark(self, phase: str) -> None:
        """Book the time since the last mark under ``phase``."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now
