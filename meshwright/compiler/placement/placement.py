"""What a stage's devices need for a micro-batch, whatever the pipeline: the placement of one (tensor degree, samples).

In a layout dp x cp x tp the data ranks split the batch and nothing else, so how operators are placed, what they take and what
they save depends only on the tensor degree, on the ranks that split the sequence, on those that split the experts, and on the
samples a data rank has at a time - not on pp, dp, ZeRO or the schedule. So it is solved once for each such combination
(``Placements.of``), on the folded graph, with memory unlimited, and read off per position:

    PlacedPosition.activations[r]   resources of one micro-batch under recomputation r, without anything about parameters
    PlacedPosition.prologue         seconds of what is made of inputs alone, once a step before several micro-batches; it is in
                                    nothing else here
    PlacedPosition.weight           the part of its backward seconds that makes gradients of weights, which zero-bubble
                                    schedules run apart
    PlacedPosition.uses             the parameters it reads and how; ``parameter_costs`` prices them for a mesh and a ZeRO
                                    level
    Placement.crossing              local bytes of what a stage boundary behind each position sends
    Placement.outputs               local bytes of what a micro-batch hands back to the caller, who gets that of all
                                    micro-batches (``Placement.handed_back``)

``time_of`` and ``bound`` are seconds of all positions for one micro-batch: no pipeline of P ranks does M of them in less than
M bound / P. Where several micro-batches run ahead what the gradients of their epilogue depend on, that is weighed too, and is
another placement than that of one micro-batch of as many samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from meshwright.compiler.placement.calls import ring_waits
from meshwright.compiler.placement.choices import Scope, check_named, check_sequence, choices, pays_mirrored
from meshwright.compiler.placement.costs import (
    SAVED,
    Costs,
    Variant,
    Vector,
)
from meshwright.compiler.placement.dead_end import nothing_runs
from meshwright.compiler.placement.expert_ranks import Ranks, dearer, shared_out
from meshwright.compiler.placement.fixed import NOTHING_FIXED, FixedDecisions
from meshwright.compiler.placement.pinned import read_pin, told_apart
from meshwright.compiler.placement.problem import Problem
from meshwright.compiler.placement.reader import LIGHT, SolutionReader
from meshwright.compiler.placement.rows import (
    CONTEXT,
    DATA,
    EP,
    TENSOR,
    Placement,
)
from meshwright.compiler.solver.chain import Chain, Infeasible
from meshwright.compiler.solver.solve import Hint, solve
from meshwright.compiler.structure.dims import batch_size
from meshwright.compiler.structure.folding import Folded, fold
from meshwright.compiler.structure.measured import ModuleTimes
from meshwright.compiler.structure.microbatch import prologue
from meshwright.compiler.structure.structure import Structure
from meshwright.cost.cluster import Cluster
from meshwright.cost.memory.replay import passing
from meshwright.ir.declared.operator import Work
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import HEADS, Mesh, role_of
from meshwright.ir.pins import Pins
from meshwright.ir.plan import PlanError, Schedule
from meshwright.ir.rule import Rules

GAP, _SECONDS = 1e-4, 1.0
"""Chosen: the relative distance from its bound at which a placement is solved, or nominal seconds; bounds count it."""


class Placements:
    """Solves placements of one graph on one cluster, each once."""

    def __init__(
        self, graph: Graph, cluster: Cluster, rules: Rules, pins: Pins, *, itemsize: int, state_bytes: float,
        recompute: Sequence[str], fixed: FixedDecisions = NOTHING_FIXED,
    ) -> None:
        self.graph, self.cluster, self.pins = graph, cluster, pins
        self.itemsize, self.state_bytes, self.recompute = itemsize, state_bytes, tuple(recompute)
        self._modules = ModuleTimes.of(graph, rules, cluster.device)
        self.folded: Folded = fold(graph, rules.operators, told_apart(pins, fixed, graph, self._modules))
        self.fixed = fixed.under(self.folded.renamed)
        self.rules = Rules({op.name: rules[op.name] for op in self.folded.graph.ops}, rules.operators)
        self.structure = Structure(self.folded.graph, self.rules)
        self._known: dict[tuple[int, int, int, int, int, bool, bool], Placement] = {}
        self._built, self._solved = 0, 0.0

    @cached_property
    def ahead(self) -> frozenset[str]:
        """The operators that several micro-batches run ahead."""
        return self.of_several.ahead

    @cached_property
    def once(self) -> dict[str, bool]:
        """{operator that runs once a step, before the first micro-batch: whether it works on samples}."""
        free = prologue(self.folded.graph)
        return {op.name: bool(self.structure.kinds(op)["batch"]) for op in self.folded.graph.ops if op.name in free}

    @cached_property
    def of_several(self) -> Schedule:
        """The schedule of the fewest micro-batches that can be, or of one."""
        batch = batch_size(self.folded.graph)
        for count in (n for n in range(2, batch + 1) if batch % n == 0):
            try:
                return self.structure.schedule(count)
            except PlanError:
                continue
        return Schedule()

    def of(
        self, tensor: int, samples: int, context: int = 1, expert: int = 1, heads: int = 1, folded: bool = False,
        several: bool = False,
    ) -> Placement:
        """The placement of ``tensor`` x ``context`` ranks that hold ``samples`` of the batch at a time, each a piece of the
        sequence, which the ``heads`` near ones of them exchange for heads, experts split over ``expert`` data ranks and, if
        they are ``folded``, over all ranks of the sequence; ``several``: a step has more than one micro-batch. Raises PlanError
        where the batch cannot be cut so, or no operators' choices fit together."""
        key = (tensor, samples, context, expert, heads, folded, several and bool(self.ahead))
        if key not in self._known:
            self._known[key] = self.shared_out(*key) or self._solve(*key)
        return self._known[key]

    def accumulate(self, microbatches: int, ranks: int) -> None:
        """Raise PlanError where something of the model cannot run in so many micro-batches of so many data ranks."""
        self.structure.schedule(microbatches, ranks)

    def check(self, mesh: Mesh, roles: Mapping[str, str], count: int, pins: Pins, folded: bool) -> None:
        """Raise PinError, PlanError where an operator has no choice under some pins on a mesh, for so many micro-batches;
        nothing is solved. ``folded``: whether the ranks of the sequence share out the experts."""
        schedule, graph = self.structure.schedule(count), self.folded.graph
        scope = replace(self._scope(mesh, count, folded, roles), pins=pins)
        for op in graph.ops:
            choices(op, self.rules[op.name], scope, schedule.time.get(op.name))

    @cached_property
    def passed(self) -> dict[str, frozenset[str]]:
        """Of every operator the operands whose gradient is that of its result."""
        graph, known = self.folded.graph, self.rules.operators
        return {op.name: frozenset(op.inputs[at] for at in passing(op, Work.of(op, graph), graph, known)) for op in graph.ops}

    def ring_waits(self, tensor: int, samples: int, context: int) -> float:
        """Seconds of a micro-batch that all attention waits for in rings over ``context`` ranks; see ``passing``."""
        folded, mesh = self.folded, self._mesh(1, tensor, context, 1, 1)
        count = batch_size(folded.graph) // samples
        positions = self.structure.positions
        ops = [op for at in folded.serves for op in positions[at].ops(folded.graph)]
        schedule = self.structure.schedule(count)
        return ring_waits(ops, folded.graph, self.rules, self._costs(mesh, count), schedule, CONTEXT, TENSOR)

    @property
    def count(self) -> int:
        """Placements solved so far."""
        return len(self._known)

    @property
    def built(self) -> int:
        """Choices of operators for which problems were built so far: what most of the work goes by. Placements whose experts
        are shared out after others were solved have none."""
        return self._built

    @property
    def solved(self) -> float:
        """Nominal seconds that the solver took for them so far."""
        return self._solved

    def shared_out(
        self, tensor: int, samples: int, context: int, expert: int, heads: int, folded: bool, several: bool = False
    ) -> Placement | None:
        """The placement from that in which every rank has all experts, where that has as many data ranks; None where no experts
        are split, or they are no mixtures that are priced apart. Raises PlanError as ``of`` does."""
        key = tensor, samples, context, expert, heads, folded, several and bool(self.ahead)
        if key not in self._known and self._shares(expert, folded):
            data = self._data(tensor, samples, context, 1)
            if data % expert == 0:
                base = self.of(tensor, samples, context, heads=heads, several=several)
                found = shared_out(base, *self._ranks(tensor, samples, context, expert, heads, folded, data))
                self._known |= {} if found is None else {key: found}
        return self._known.get(key)

    def splitting_adds(
        self, tensor: int, samples: int, context: int, expert: int, heads: int, folded: bool, data: int
    ) -> float:
        """Seconds of so many samples at once on each of ``data`` ranks by which sharing out the experts makes any placement
        slower at least (below 0: faster; -inf: that is not known), whatever their calls read and leave; 0 where they are not
        priced apart. Counted of the calls of the placement of the whole batch at once. Raises PlanError as ``of`` does."""
        if not self._shares(expert, folded):
            return 0.0
        base = self.of(tensor, batch_size(self.folded.graph), context, heads=heads)
        more = dearer(base, *self._ranks(tensor, samples, context, expert, heads, folded, data))
        return more if more < math.inf else 0.0  # there is no call that splits them: no placement either

    def _shares(self, expert: int, folded: bool) -> bool:
        """Whether experts are split that are priced apart: nothing is held, none are read by products, and no weight is pinned
        that ranks which have all experts cannot have."""
        named = any(EP in axes for text in self.pins.tensors.values() for axes in read_pin(text)[0].dims)
        return (expert > 1 or folded) and not (self.fixed or self.structure.stacked.products or named)

    def _ranks(
        self, tensor: int, samples: int, context: int, expert: int, heads: int, folded: bool, data: int
    ) -> tuple[Ranks, Ranks]:
        """What prices a call where experts are split, and where every rank has all."""
        count = batch_size(self.folded.graph) // samples // data
        schedule = self.structure.schedule(count)

        def of(expert: int, over: bool) -> Ranks:
            mesh = self._mesh(data, tensor, context, expert, heads)
            return Ranks(self.folded.graph, self._scope(mesh, count, over), self._costs(mesh, count), schedule)

        return of(expert, folded), of(1, False)

    def _data(self, tensor: int, samples: int, context: int, expert: int) -> int:
        """The most data ranks, of which ``expert`` share out the experts."""
        pieces, most = batch_size(self.folded.graph) // samples, self.cluster.world // (tensor * context)
        data = max((d for d in range(expert, most + 1, expert) if pieces % d == 0), default=0)
        if not data:
            raise PlanError(f"ep={expert} data ranks do not divide the batch into pieces of {samples}")
        return data

    def _mesh(self, data: int, tensor: int, context: int, expert: int, heads: int) -> Mesh:
        axes = {DATA: data // expert, **({EP: expert} if expert > 1 else {})}
        axes |= {CONTEXT: context // heads} if context > 1 else {}
        axes |= {**({HEADS: heads} if heads > 1 else {}), TENSOR: tensor}
        both = context > 1 and pays_mirrored(self.folded.graph, self.rules, self.pins)
        both = context > 1 and self.fixed.mirrored if self.fixed.mirrored is not None else both
        return Mesh(tuple(axes), tuple(axes.values()), frozenset({CONTEXT} if both else ()))

    def _costs(self, mesh: Mesh, count: int) -> Costs:
        return Costs(
            self.cluster, mesh, microbatches=count, itemsize=self.itemsize, state_bytes=self.state_bytes, modules=self._modules
        )

    def _solve(
        self, tensor: int, samples: int, context: int, expert: int, heads: int, folded: bool = False, several: bool = False
    ) -> Placement:
        data = self._data(tensor, samples, context, expert)
        mesh, count = self._mesh(data, tensor, context, expert, heads), batch_size(self.folded.graph) // samples // data
        axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
        schedule = replace(self.structure.schedule(count), ahead=self.ahead if several else frozenset())
        costs = self._costs(mesh, count)
        kept = tuple(axis for axis in (DATA, EP, CONTEXT, HEADS) if axes.get(axis, 1) > 1)
        variants = [Variant(0, kept, (), kind) for kind in self.recompute]
        scope = self._scope(mesh, count, folded)
        problem = Problem(scope, schedule, costs, variants, variants[:1], moments=False)
        self._built += problem.choices
        hint = Hint()
        chain = problem.with_variants(variants[:1]).chain(float("inf"), 0.0)  # with memory unlimited recomputation never pays
        try:
            solution = solve(self._stretched(chain), gap=GAP, limit=_SECONDS, hint=hint)
        except Infeasible:
            raise PlanError(nothing_runs(problem)) from None
        finally:
            self._solved += hint.pricer.effort.spent if hint.pricer is not None else 0.0
        reader = SolutionReader(
            self.folded, self.rules, self.recompute, self.once, self.passed, problem, chain, solution, count,
        )
        return reader.placement(tensor, samples)

    def _scope(self, mesh: Mesh, count: int, folded: bool, roles: Mapping[str, str] | None = None) -> Scope:
        roles = roles or {axis: role_of(axis) for axis in mesh.axes}
        scope = Scope(self.structure, mesh, roles, self.pins, count, self.fixed, self.cluster, folded=folded)
        check_named(scope)
        check_sequence(scope)
        return scope

    def _stretched(self, chain: Chain) -> Chain:
        """The chain of the whole graph."""
        rows = chain.time_rows.copy()
        sequence = tuple(chain.sequence[n] for n in self.folded.serves)
        blocks = {k: chain.kinds[k].variants[0] for k in dict.fromkeys(sequence)}
        each = {k: np.sum([u.min(axis=0) for u in one.unary], axis=0) for k, one in blocks.items()}
        least = np.sum([each[k] for k in sequence], axis=0)
        most = {k: sum(_most_saved(t) for t in (*one.unary, *(e.table for e in one.edges))) for k, one in blocks.items()}
        saved = sum(most[k] for k in sequence)
        rows[:, SAVED] += LIGHT * float((rows @ least).max()) / saved if saved else 0.0
        return replace(chain, sequence=sequence, time_rows=rows)


def _most_saved(table: Vector) -> float:
    """Of all choices of a table [.., RESOURCES] that can be, the most bytes that are saved."""
    bytes_ = table[..., SAVED]
    return float(bytes_[np.isfinite(bytes_)].max(initial=0.0))
