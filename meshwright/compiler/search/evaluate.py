"""The step of one candidate with its way to keep parameters: units, cut, simulation, and what the time is spent on.

    step = ahead + start + max over ranks (end of its last action + reductions left) + optimizer

    ahead       by how much what runs ahead of the schedule delays a rank's first action, the most of all ranks

    start       the longest time before a rank's first action in which it gathers, and makes what is made of inputs alone, that
                waiting for the first micro-batch does not hide
    left        a rank's reductions of the step, less what its last backward hides (``StageCosts.exposed``; nothing where the
                backward is split: it reduces at the end); an early rank reduces while the others still drain
    optimizer   of the slowest rank

Beside its units a rank holds what is made of inputs alone (masks), what it received a little early, and the last stage's rank
what the step hands back (``_boundary_bytes``); what entered and what was sent on is among what its units save.

Recomputation: every stage takes one of none, parts of its blocks evenly spread (``_PARTS``), and all of them, chosen with
the cut; with several stages a rank none or all of them. Then units recompute no more than memory asks for, one by one
(``pipeline.lighten``). Without a pipeline blocks are recomputed one by one until the rest fits (``_alone``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.compiler.pipeline import stages
from meshwright.compiler.pipeline.degrees import Degrees
from meshwright.compiler.pipeline.in_flight import least_in_flight, passed_on
from meshwright.compiler.pipeline.intervals import Intervals, OutsideSeconds, Shared, joined, once
from meshwright.compiler.pipeline.lighten import lighten
from meshwright.compiler.pipeline.stage_bound import link_floor
from meshwright.compiler.pipeline.timed_bound import Sharp, TimedBound
from meshwright.compiler.pipeline.timed_program import KnownPaths
from meshwright.compiler.pipeline.transients import BESIDE, beside_of
from meshwright.compiler.placement.costs import BACKWARD, FORWARD, HOST, HOST_BACK, SEND, SEND_BACK, Variant
from meshwright.compiler.placement.rows import NONE, Placement
from meshwright.compiler.search.candidates import Candidate, MicrobatchSeconds
from meshwright.compiler.search.errors import DoesNotFitError
from meshwright.compiler.search.stage_costs import Array, StageCosts, Units
from meshwright.compiler.structure.positions import Position
from meshwright.cost.timeline import Simulation, Times, forward_only, makespans, simulate
from meshwright.ir.prediction import StageSeconds
from meshwright.ir.schedules import Table, illegal_combination, schedule_of

_PARTS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Evaluation:
    """What was found for a candidate. ``boundaries``: positions at which stages start, and the end; ``recompute``: of every
    position; ``parts``: seconds of the step by what they are spent on, the mean over ranks; ``bound``: seconds that no cut and
    no recomputation can beat; ``memory``: bytes per rank at its peak; ``kinds``: bytes of the fullest rank;
    ``starts``: operators at which stages start, and the end; ``blocks``: of every position, -1 for the root; ``stages``:
    seconds of every stage; ``run``: the simulation; both None without stages."""

    candidate: Candidate
    degrees: Degrees
    zero: int
    placement: Placement
    boundaries: tuple[int, ...]
    recompute: tuple[str, ...]
    seconds: float
    bound: float
    parts: Mapping[str, float]
    memory: tuple[float, ...]
    kinds: Mapping[str, float]
    starts: tuple[int, ...]
    blocks: tuple[int, ...]
    stages: StageSeconds | None
    run: Simulation | None

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time within the schedule."""
        return self.run.bubble_fraction if self.run is not None else 0.0

    def __str__(self) -> str:
        share = f" over {self.degrees.shard}" if self.zero and self.degrees.shard != self.degrees.data else ""
        return f"{self.candidate}, ZeRO {self.zero}{share}"


class Evaluator:
    """Evaluates candidates of one model. ``names``: of the positions, for errors; ``capacity``: bytes of a rank; ``forced``:
    positions at which stages must start. ``work`` counts what was done, which is the same on every machine."""

    def __init__(
        self, costs: StageCosts, positions: Sequence[Position], names: Sequence[str], capacity: float, recompute: Sequence[str],
        forced: Sequence[int] = (),
    ) -> None:
        self.positions = tuple(positions)
        self.costs, self.names, self.capacity, self.recompute = costs, tuple(names), capacity, tuple(recompute)
        self.forced = tuple(forced)
        self.work: Counter[str] = Counter()
        self._tables: dict[tuple[str, int, int, int], Table] = {}
        self._paths: dict[tuple[str, int, int, int], KnownPaths] = {}
        self._units: dict[tuple[int, Degrees, int, bool, bool, str], Units] = {}
        self._timed: dict[tuple[Candidate, Degrees, int, float], TimedBound] = {}

    def units(self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, recompute: str) -> Units:
        """The units of a candidate, made once for all that schedules share."""
        key = (id(placement), degrees, zero, candidate.microbatches > 1, candidate.split, recompute)
        if key not in self._units:
            self._units[key] = self.costs.units(placement, degrees, zero, candidate.microbatches, candidate.split, recompute)
        return self._units[key]

    def step_of(self, candidate: Candidate, placement: Placement, units: Units, run: float) -> float:
        """Seconds of a step that no cut can beat, if its micro-batches take no less than ``run``: what the first rank
        gathers and makes of inputs alone for its first unit comes to these, or what the mean rank does to its work and
        reductions; then its optimizer."""
        late = units.reduce.sum()
        if not candidate.split:
            late = self.costs.exposed(late, units.backward.sum())
        mean = float(candidate.microbatches * units.work + late) / candidate.pp
        alone = placement.prologue_seconds(candidate.microbatches)
        before = (float(units.gather.sum()) + sum(alone)) / candidate.pp if candidate.pp > 1 else sum(alone)
        first = float(units.gather[0]) + alone[0] if candidate.pp > 1 else before
        return max(first + run, before + mean) + float(units.optimizer.sum()) / candidate.pp

    def links(
        self, candidate: Candidate, degrees: Degrees, placement: Placement, work: MicrobatchSeconds, each: Array,
        virtual: Sequence[int], cutoff: float,
    ) -> float:
        """Seconds that no cut of a pipeline can beat because of what is sent. ``work``: of a micro-batch through all units;
        ``each``: of every unit; ``virtual``: stages a rank, the fewest first."""
        slack, crossing = placement.slack, self._places(self._crossing(degrees, placement))
        at = stages.positions_of(crossing)
        seconds = np.zeros(len(at))
        seconds[1:-1] = crossing[np.array(at[1:-1], dtype=np.int64) - 1]
        path = work.path if candidate.split else work.total
        return link_floor(
            seconds, seconds, np.add.reduceat(each, at[:-1]) * slack, work.forward, path - work.forward, candidate.schedule,
            candidate.pp, (virtual[0], virtual[-1]), candidate.microbatches, cutoff,
        )

    def too_much(self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, alone: bool) -> bool:
        """Whether all ranks together cannot hold the units of a pipeline, however they are cut: a proof that takes no time.
        ``alone``: of one stage a rank or more, else of more."""
        if candidate.pp == 1:
            return False
        units = self.units(candidate, degrees, zero, placement, self.recompute[0])
        room = candidate.pp * (self.capacity - placement.made_alone(candidate.microbatches)) - units.state.sum()
        room += self.costs.twice(candidate, degrees, zero, placement, most=len(self.names)).sum()
        room -= placement.collected(candidate.microbatches)
        room += sum(one.bytes_ for one in self._shared(candidate, degrees, zero, placement))
        known = [least_in_flight(candidate.schedule, candidate.pp, candidate.microbatches, one) for one in {alone, False}
                 if one or schedule_of(candidate.schedule).stages != 1]
        count, summed = min(known)
        if room < 0 or count <= 1:
            return bool(room < 0)
        variants = [self.units(candidate, degrees, zero, placement, name) for name in self.kinds(candidate, zero)]
        room += 0.0 if summed else float(units.summed.sum())
        return bool(count * np.min([variant.least_held for variant in variants], axis=0).sum() > room)

    def run(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, *, capacity: float | None = None,
        cutoff: float = float("inf"),
    ) -> Evaluation:
        """The best cut and recomputation of a candidate within ``capacity`` bytes, if not the device's; what takes longer than
        ``cutoff`` seconds need not be the best. Raises DoesNotFitError, ScheduleError."""
        capacity = self.capacity if capacity is None else capacity
        if candidate.pp == 1:
            self.work["alone"] += 1
            return self._alone(candidate, degrees, zero, placement, capacity)
        variants, marks = self._variants(candidate, degrees, zero, placement)
        crossing, table = self._crossing(degrees, placement), self.table(candidate)
        twice = self.costs.twice(candidate, degrees, zero, placement)
        shared = self._shared(candidate, degrees, zero, placement)
        cuts = self._cut(candidate, placement, variants, crossing, table, capacity, cutoff, twice, shared)
        chosen = np.zeros(len(self.names), dtype=int)
        for stage, option in enumerate(cuts.options):
            chosen[cuts.boundaries[stage] : cuts.boundaries[stage + 1]] = option
        units, recompute = Units.taken(variants, chosen), tuple(marks[way][n] for n, way in enumerate(chosen.tolist()))
        ways = [(units, recompute)]
        if any(name != self.recompute[0] for name in recompute):
            room = self.room(candidate, placement, capacity + twice)
            ways.append(self._lightened(candidate, degrees, zero, placement, cuts, table, room, recompute, crossing))
        found = []
        for units, recompute in ways:  # summed as those of a plan that is read (``settled``), to the bit
            units = units.less(*once(shared, cuts.boundaries, len(recompute)))
            own = self._as_cut(candidate, placement, units, crossing, table, cuts.boundaries, cuts.bound)
            found.append(self._result(candidate, degrees, zero, placement, units, variants[0], recompute, own, crossing, table))
        return min(found, key=lambda one: one.seconds)

    def _programs(self, seconds: float) -> None:
        """Linear programs were solved in so many nominal seconds."""
        self.work["nanosecond of programs"] += round(1e9 * seconds)

    def glance(self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement) -> float:
        """Seconds of a pipeline's step without a search for its cut; inf where it does not fit so."""
        variants, _ = self._variants(candidate, degrees, zero, placement)
        crossing, table = self._places(self._crossing(degrees, placement)), self.table(candidate)
        shared = self._shared(candidate, degrees, zero, placement)
        units, positions = Units.between(variants, crossing, [one.pending for one in variants], shared)
        room = self.room(candidate, placement, self.capacity + self.costs.twice(candidate, degrees, zero, placement))
        self.work["stage glanced at"] += candidate.stages
        outside = self._outside(candidate, placement, variants[0]).at(positions)
        return stages.glance(units, table, room, not self.costs.waits(candidate.schedule), outside)

    def _lightened(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, cuts: stages.Cuts, table: Table,
        room: Array, recompute: Sequence[str], crossing: Array,
    ) -> tuple[Units, tuple[str, ...]]:
        """The units of a cut, each recomputed no more than memory asks for, and how: the way that ends first."""
        kinds = self.kinds(candidate, zero)
        there = once(self._shared(candidate, degrees, zero, placement), cuts.boundaries, len(recompute))
        variants = [self.units(candidate, degrees, zero, placement, name).less(*there) for name in kinds]
        names = ("saved", "pending", "summed", "state", "entered", "left", *BESIDE)
        saved, pending, summed, state, entered, left, *beside = (np.array([getattr(u, key) for u in variants]) for key in names)
        begin, end = np.array(cuts.boundaries[:-1]), np.array(cuts.boundaries[1:]) - 1
        for held in (saved, pending):
            held[:, begin] += entered[:, begin]
            held[:, end] += left[:, end]
        work = np.array([one.forward + one.backward for one in variants])
        before = np.array([kinds.index(name) for name in recompute])
        bytes_ = np.array([saved, pending, summed, state - summed])
        ways = lighten(bytes_, np.array(beside), work, table, cuts.boundaries, room.tolist(), before)
        taken = [(Units.taken(variants, chosen), tuple(kinds[n] for n in chosen.tolist())) for chosen in ways]
        if len(taken) == 1:
            return taken[0]
        work = np.add.reduceat(np.array([one.columns[:3] for one, _ in taken]), begin, axis=2)
        forward, inputs, weights = work.transpose(1, 2, 0)
        sent = np.repeat(crossing[end[:-1], None], len(taken), axis=1)
        times = Times(forward, inputs, weights, sent, sent)
        self.work["action simulated"] += len(taken) * table.microbatches * table.stages * 2
        return taken[int(makespans(table, times, overlap=not self.costs.waits(candidate.schedule)).argmin())]

    def _as_cut(
        self, candidate: Candidate, placement: Placement, units: Units, crossing: Array, table: Table, starts: Sequence[int],
        bound: float,
    ) -> stages.Cuts:
        """Units that are cut so."""
        each = self._stage_units(units.cut_at(starts, table.mixed), crossing)
        whole = []
        for start, stop in itertools.pairwise(starts):
            unit, (forward, backward) = joined(each[start:stop]), placement.repeated(start)
            forward, backward = unit.forward + forward, unit.backward_input + backward
            whole.append(replace(unit, forward=forward, backward_input=backward))
        cuts = stages.cut(whole, candidate.pp, candidate.virtual_stages, candidate.schedule, candidate.microbatches,
                          overlap=not self.costs.waits(candidate.schedule), table=table, bound=0.0)
        return replace(cuts, boundaries=tuple(starts), bound=bound)

    def settled(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, starts: Sequence[int],
        kept: Sequence[Variant],
    ) -> Evaluation:
        """A candidate that is cut, keeps its parameters and recomputes as it is given. ``zero``: the level of the root;
        ``starts``: positions at which stages start, and their number; ``kept``: of every position."""
        marks = tuple(one.recompute for one in kept)
        plain = self._kept(candidate, degrees, zero, placement, [replace(one, recompute=self.recompute[0]) for one in kept])
        units = self._kept(candidate, degrees, zero, placement, kept)
        if candidate.pp == 1:
            seconds = self._step_alone(candidate, placement, units)
            return self._whole(candidate, degrees, zero, placement, units, plain, marks, seconds, seconds)
        crossing, table = self._crossing(degrees, placement), self.table(candidate)
        units = units.less(*once(self._shared(candidate, degrees, zero, placement), starts, len(marks)))
        cuts = self._as_cut(candidate, placement, units, crossing, table, starts, 0.0)
        return self._result(candidate, degrees, zero, placement, units, plain, marks, cuts, crossing, table)

    def _kept(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, kept: Sequence[Variant]
    ) -> Units:
        """The units whose positions keep their parameters and recompute each as it is given."""
        units = self.units(candidate, degrees, zero, placement, self.recompute[0])
        for one in dict.fromkeys(kept):
            own = replace(one, recompute=NONE)
            variant = None if own == degrees.variant(zero) else own
            if variant is None and one.recompute == self.recompute[0]:
                continue
            split, recompute = candidate.split, one.recompute
            other = self.costs.units(placement, degrees, zero, candidate.microbatches, split, recompute, variant)
            units = units.mixed(other, np.array([there == one for there in kept]))
        return units

    def relaxed(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, most: int = 0, cutoff: float = 0.0,
        capacity: float | None = None,
    ) -> float:
        """Seconds that no cut and no recomputation can beat within ``capacity`` bytes, if not the device's, with any number of
        stages a rank from the candidate's to ``most`` if that is more; inf if it is proven that nothing fits. ``cutoff``:
        seconds above which nothing sharper is needed."""
        capacity = self.capacity if capacity is None else capacity
        units, outside = self._divisible(candidate, degrees, zero, placement)
        several = candidate.virtual_stages, max(candidate.virtual_stages, most)
        schedule, pp, count, slack = candidate.schedule, candidate.pp, candidate.microbatches, placement.slack
        boundary = passed_on(schedule, pp, several[0], count) * min(placement.sent[:-1]) + placement.made_alone(count)
        boundary[schedule_of(schedule).stage_rank(pp, several[0])[-1]] += placement.collected(count)
        twice = self.costs.twice(candidate, degrees, zero, placement, most=several[1])
        room = np.maximum(capacity - boundary + twice, 1.0)
        bound = stages.step_bound(units, pp, several, schedule, count, room, outside, cutoff / slack)
        self.work["packing"] += 1
        self.work["unit of ranks alone"] += pp * units.count * units.options * (bound.by == "stages")
        self.work["rank of divided units"] += pp * (bound.by in ("divided", "whole"))
        self._programs(bound.work)
        found = bound.seconds * slack
        return max(cutoff, found) if bound.seconds >= cutoff / slack > 0 else found

    def timed(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, known: float, cutoff: float,
        capacity: float | None = None, sharp: Sharp = Sharp.STAGES,
    ) -> float:
        """Seconds that no cut can beat within ``capacity`` bytes, if not the device's, no less than ``known``, by the
        schedule's own table. ``cutoff``: seconds above which nothing sharper is needed. Asked for whole units after divided
        ones, and to beat no more, it goes on where it was."""
        slack, table, capacity = placement.slack, self.table(candidate), self.capacity if capacity is None else capacity
        key, asked = (candidate, degrees, zero, capacity), cutoff / slack
        bound = self._timed.pop(key, None)
        before = bound.work if bound is not None and asked <= bound.cutoff else 0.0
        if bound is None or asked > bound.cutoff:
            units, outside = self._divisible(candidate, degrees, zero, placement)
            most = capacity + self.costs.twice(candidate, degrees, zero, placement, most=candidate.virtual_stages)
            room, passed = np.maximum(most - self._boundary_bytes(candidate, placement), 1.0), min(placement.sent[:-1])
            paths = self._paths.setdefault((table.name, table.pp, table.stages, table.microbatches), KnownPaths(table))
            bound = TimedBound(units, table, outside, room, known / slack, asked, paths, passed)
        seconds = bound.seconds if 0.0 < asked <= bound.seconds else bound.sharpen(sharp)
        if Sharp.QUICK < sharp < Sharp.LONG and not 0.0 < asked <= seconds:
            self._timed[key] = bound
        self.work["pipeline timed"] += 1
        self._programs(bound.work - before)
        return max(known, seconds * slack)

    def _divisible(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement
    ) -> tuple[Intervals, OutsideSeconds]:
        """What lies between two places where a stage can begin, under every kind of recomputation. From I to W it holds no
        less than this: the first stage all, others what waits."""
        crossing = self._places(self._crossing(degrees, placement))
        variants = [self.units(candidate, degrees, zero, placement, name) for name in self.kinds(candidate, zero)]
        shared = self._shared(candidate, degrees, zero, placement)
        units, positions = Units.between(variants, crossing, [one.least_held for one in variants], shared)
        return units, self._outside(candidate, placement, variants[0]).at(positions)

    def _outside(self, candidate: Candidate, placement: Placement, units: Units) -> OutsideSeconds:
        """What units add outside the micro-batches."""
        slowed = 1.0 if candidate.split else float(self.costs.exposed(np.ones(1), np.full(1, np.inf))[0])
        first = units.gather + np.array(placement.prologue_seconds(candidate.microbatches))
        return OutsideSeconds(first, units.reduce, units.optimizer, slowed)

    def room(self, candidate: Candidate, placement: Placement, capacity: float | Array) -> Array:
        """Bytes of every rank [pp] for its units, of ``capacity`` bytes, of all or of each."""
        return np.asarray(np.maximum(capacity - self._boundary_bytes(candidate, placement), 1.0))

    def _boundary_bytes(self, candidate: Candidate, placement: Placement) -> Array:
        """Bytes of every rank [pp] beside its units: what is made of inputs alone, what was received and waits to be read, each
        value like the widest, and on the last stage's rank what all micro-batches hand back."""
        table = self.table(candidate)
        waiting = schedule_of(table.name).waiting(table.pp, candidate.virtual_stages, table.microbatches)
        found = np.zeros(table.pp) + waiting * max(placement.sent[:-1]) + placement.made_alone(table.microbatches)
        found[table.stage_rank[-1]] += placement.collected(candidate.microbatches)
        return np.asarray(found)

    def _shared(self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement) -> tuple[Shared, ...]:
        """Weights that several positions read and count, where a stage has them."""
        return self.costs.shared(placement, degrees, zero, candidate.microbatches, apart=False)

    def kinds(self, candidate: Candidate, zero: int) -> tuple[str, ...]:
        """The recomputations that may be combined with a schedule."""
        if candidate.pp == 1:
            return self.recompute
        legal = (kind for kind in self.recompute if illegal_combination(candidate.schedule, zero=zero, recompute=kind) is None)
        return tuple(legal)

    def table(self, candidate: Candidate) -> Table:
        """The schedule's table, made once."""
        key = (candidate.schedule, candidate.pp, candidate.virtual_stages, candidate.microbatches)
        if key not in self._tables:
            self._tables[key] = schedule_of(candidate.schedule).table(*key[1:])
        return self._tables[key]

    def _variants(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement
    ) -> tuple[list[Units], list[tuple[str, ...]]]:
        """Units under every recomputation a stage may take, and the recomputation of every position in it."""
        plain = self.units(candidate, degrees, zero, placement, self.recompute[0])
        blocks = np.array([placement.rows[row].block for row in placement.sequence])
        variants, marks = [plain], [(self.recompute[0],) * len(blocks)]
        for name in self.kinds(candidate, zero)[1:]:
            recomputed = self.units(candidate, degrees, zero, placement, name)
            for part in _PARTS if candidate.virtual_stages == 1 else _PARTS[-1:]:
                where = blocks & (np.floor((np.arange(len(blocks)) + 1) * part) > np.floor(np.arange(len(blocks)) * part))
                variants.append(plain.mixed(recomputed, where))
                marks.append(tuple(name if there else self.recompute[0] for there in where))
        return variants, marks

    def _cut(
        self, candidate: Candidate, placement: Placement, variants: Sequence[Units], crossing: Array, table: Table,
        capacity: float, cutoff: float, twice: Array, shared: Sequence[Shared],
    ) -> stages.Cuts:
        room = self.room(candidate, placement, capacity + twice)
        options = [self._stage_units(variant, crossing) for variant in variants]
        self.work["stage to cut"] += candidate.stages
        try:
            cuts = stages.cut(
                options[0], candidate.pp, candidate.virtual_stages, candidate.schedule, candidate.microbatches, room.tolist(),
                options=options[1:], outside=self._outside(candidate, placement, variants[0]), shared=shared,
                overlap=not self.costs.waits(candidate.schedule), table=table, bound=0.0, cutoff=cutoff,
            )
            self.work["stage cut"] += cuts.looked * candidate.stages
            self._programs(cuts.work)
            self.work["action simulated"] += cuts.candidates * table.microbatches * table.stages * 2
            return cuts
        except stages.StageError as error:
            self.work["stage that does not fit"] += candidate.stages
            received = self._boundary_bytes(candidate, placement).max() / 2**30
            words = f"{error} Masks, what was received and is handed back take up to {received:.3g} GiB beside that."
            outputs = placement.collected(candidate.microbatches) / 2**30
            if outputs > received / 2:
                words += (f" {outputs:.3g} GiB of it are what the model returns for all micro-batches: if only the loss is "
                          "needed (no logits), give loss_fn=mw.loss_alone.")
            raise DoesNotFitError(words, capacity + error.excess, error.proven) from None

    def _crossing(self, degrees: Degrees, placement: Placement) -> Array:
        """Seconds to send what crosses a boundary behind every position."""
        seconds = {bytes_: self.costs.crossing(degrees, bytes_) for bytes_ in dict.fromkeys(placement.sent)}
        return np.array([seconds[bytes_] for bytes_ in placement.sent])

    def _places(self, crossing: Array) -> Array:
        """The same, inf where no stage can start because others are pinned."""
        return np.where(np.isin(np.arange(len(crossing)) + 1, self.forced), crossing, np.inf) if self.forced else crossing

    def _stage_units(self, units: Units, crossing: Array) -> list[stages.Unit]:
        places = self._places(crossing).tolist()
        beside = units.pending, units.summed, units.released, units.entered, units.left, *units.beside[2:]
        columns = [column.tolist() for column in (*units.columns, *beside)]
        rows = zip(self.names, *columns[:6], places, places, *columns[6:], strict=True)
        return [stages.Unit(*row) for row in rows]

    def _result(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, units: Units, plain: Units,
        recompute: tuple[str, ...], cuts: stages.Cuts, crossing: Array, table: Table,
    ) -> Evaluation:
        at = crossing[[b - 1 for b in cuts.boundaries[1:-1]]]
        waits = self.costs.waits(candidate.schedule)
        run = simulate(table, cuts.forward, cuts.backward_input, cuts.backward_weight, (at, at), overlap=not waits)
        rank_of = np.repeat(table.stage_rank, cuts.sizes)

        def per_rank(column: Array) -> Array:
            return np.bincount(rank_of, column, candidate.pp)

        begin = np.array([start[0] for start in run.start])
        ends = np.array([end[-1] for end in run.end])
        before = units.gather + np.array(placement.prologue_seconds(candidate.microbatches))
        start = float(np.maximum(per_rank(before) - begin, 0.0).max())
        left = per_rank(units.reduce)
        if not candidate.split:
            left = self.costs.exposed(left, per_rank(units.backward))
        optimizer = float(per_rank(units.optimizer).max())
        seconds = self._ahead(units, cuts, at, table, begin) + start + float((ends + left).max()) + optimizer
        parts = self._parts(candidate, placement, units, plain, optimizer)
        again = sum(sum(placement.repeated(start)) for start in cuts.boundaries[:-1])
        parts["compute"] += again * candidate.microbatches / candidate.pp
        parts["outside the schedule"] = max(0.0, seconds - float(ends.max()) - optimizer)  # rounding may be below nothing
        for part in ("outside the schedule", "exposed communication"):  # what runs ahead of it is told as recomputation, too
            parts[part] = max(0.0, parts[part] - max(0.0, sum(parts.values()) - seconds))
        parts["pipeline bubble"] = max(0.0, seconds - sum(parts.values()))
        boundary = self._boundary_bytes(candidate, placement)
        twice = self.costs.twice(candidate, degrees, zero, placement, cuts.boundaries)
        memory = np.array(cuts.memory) + boundary - twice
        fullest = int(np.argmax(memory))
        units = units.cut_at(cuts.boundaries, table.mixed)
        state, alone = float(per_rank(units.state - units.summed)[fullest]), placement.made_alone(candidate.microbatches)
        columns = np.array([units.saved, units.pending, units.summed])
        held = np.add.reduceat(columns, cuts.boundaries[:-1], axis=1)
        held[:2] += units.entered[list(cuts.boundaries[:-1])] + units.left[[at - 1 for at in cuts.boundaries[1:]]]
        own = list(table.stages_of(fullest))
        held, (peaks, later, *_) = held[:, own], [of[own] for of in beside_of(units.beside, cuts.boundaries[:-1])]
        gradients = max(
            (float((counts * held).sum() + counts[2] @ later) + peak, float(counts[2] @ held[2]))
            for moments, peak in zip(table.moments[fullest], peaks.tolist(), strict=True) for counts in moments
        )[1]
        kinds = {"state": state - float(twice[fullest]), "gradients": gradients, "inputs": alone,
                 "activations": cuts.memory[fullest] - state - gradients,
                 "received and handed back": float(boundary[fullest]) - alone}
        slack = placement.slack
        return Evaluation(
            candidate, degrees, zero, placement, cuts.boundaries, recompute, seconds,
            max(self.step_of(candidate, placement, plain, 0.0), cuts.bound) * slack, parts,
            tuple(memory.tolist()), kinds, self._starts(cuts.boundaries), tuple(p.block for p in self.positions),
            StageSeconds(cuts.forward, cuts.backward_input, cuts.backward_weight, tuple(at.tolist()), waits or None), run,
        )

    def _ahead(self, units: Units, cuts: stages.Cuts, at: Array, table: Table, begin: Array) -> float:
        """Seconds by which the schedule is later for what runs ahead of it: stages before the last run forward whole, the last
        as far as it takes. ``begin``: of every rank's first action without."""
        if not units.ahead.any():
            return 0.0
        needed = float(units.ahead[cuts.boundaries[-2] :].sum())
        return float((forward_only(table, [*cuts.forward[:-1], needed], at) - begin).max())

    def _starts(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        return (*(self.positions[b].start for b in boundaries[:-1]), self.positions[-1].stop)

    def _parts(
        self, candidate: Candidate, placement: Placement, units: Units, plain: Units, optimizer: float
    ) -> dict[str, float]:
        """Seconds of the mean rank: compute (gradients added up included), recomputation (with what runs ahead),
        communication, optimizer."""
        ahead = float(plain.ahead.sum())
        share = candidate.microbatches / candidate.pp
        none, pinned = (
            np.array([placement.rows[row].of_microbatch(kind, candidate.microbatches) for row in placement.sequence])
            for kind in (NONE, self.recompute[0])
        )
        adding = np.stack([np.zeros_like(plain.added), plain.added], axis=1)
        computes = [np.maximum(a[:, [FORWARD, BACKWARD]] + adding, a[:, [HOST, HOST_BACK]]).sum() for a in (none, pinned)]
        compute, recomputed = float(computes[0]), float(computes[1] - computes[0])
        recomputed += float((pinned - none)[:, [SEND, SEND_BACK]].sum())
        return {
            "compute": compute * share,
            "exposed communication": max(0.0, plain.work - ahead - recomputed - compute) * share,
            "recomputation": max(0.0, units.work - plain.work + ahead + recomputed) * share,
            "optimizer": optimizer,
        }

    # one stage

    def _alone(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, capacity: float
    ) -> Evaluation:
        """No pipeline: the whole model on every rank; blocks recompute, the first ones first, until it fits."""
        plain = self.units(candidate, degrees, zero, placement, self.recompute[0])
        marks, held = [self.recompute[0]] * len(self.names), _held(candidate, placement)
        blocks = [n for n, row in enumerate(placement.sequence) if placement.rows[row].block]
        units, best, bound = plain, np.inf, np.inf
        if _memory(plain) + held <= capacity:
            best = bound = self._step_alone(candidate, placement, plain)
        for name in self.recompute[1:] if not np.isfinite(best) else ():
            recomputed = self.units(candidate, degrees, zero, placement, name)
            count = _fewest(plain, recomputed, blocks, capacity - held)
            if count is None:
                continue
            numbers = np.arange(len(self.names))
            mixed, fewer = (plain.mixed(recomputed, np.isin(numbers, blocks[:n])) for n in (count, count - 1))
            seconds = self._step_alone(candidate, placement, mixed)
            bound = min(bound, self._step_alone(candidate, placement, fewer))
            if seconds < best:
                best, units = seconds, mixed
                marks = [name if n in blocks[:count] else self.recompute[0] for n in range(len(self.names))]
        if not np.isfinite(best):
            least = held + min(_memory(self.units(candidate, degrees, zero, placement, name)) for name in self.recompute)
            raise DoesNotFitError(
                f"{candidate}: {least / 2**30:.3g} GiB of {capacity / 2**30:.3g} GiB on every rank", least
            )
        return self._whole(candidate, degrees, zero, placement, units, plain, tuple(marks), best, bound)

    def _whole(
        self, candidate: Candidate, degrees: Degrees, zero: int, placement: Placement, units: Units, plain: Units,
        recompute: tuple[str, ...], seconds: float, bound: float,
    ) -> Evaluation:
        """Without a pipeline."""
        memory = _memory(units) + _held(candidate, placement)
        parts = self._parts(candidate, placement, units, plain, float(plain.optimizer.sum()))
        parts["compute"] += float(sum(placement.prologue_seconds(candidate.microbatches)))
        parts["exposed communication"] += max(0.0, seconds - sum(parts.values()))
        state, alone = float(units.state.sum()), placement.made_alone(candidate.microbatches)
        kinds = {"state": state, "activations": memory - state - alone, "inputs": alone}
        return Evaluation(
            candidate, degrees, zero, placement, (0, len(self.names)), recompute, seconds, bound * placement.slack, parts,
            (memory,), kinds, self._starts((0, len(self.names))), tuple(p.block for p in self.positions), None, None,
        )

    def _step_alone(self, candidate: Candidate, placement: Placement, units: Units) -> float:
        """Gathers of the step hide behind its first micro-batch's forward, reductions behind the last one's backward, as in
        ``costs``."""
        forward = np.array([placement.rows[row].activations[NONE][0] for row in placement.sequence])
        exposed = self.costs.exposed(units.gather, forward) + self.costs.exposed(units.reduce, units.backward)
        alone = sum(placement.prologue_seconds(candidate.microbatches))
        return float(candidate.microbatches * units.work + exposed.sum() + units.optimizer.sum()) + alone


def _held(candidate: Candidate, placement: Placement) -> float:
    """Bytes that a rank without a pipeline holds beside its units: what is made of inputs alone, and what all micro-batches
    hand back."""
    return placement.handed_back(candidate.microbatches) + placement.made_alone(candidate.microbatches)


def _memory(units: Units) -> float:
    return float(units.state.sum() + units.saved.sum() + units.transient.max())


def _fewest(plain: Units, recomputed: Units, blocks: Sequence[int], capacity: float) -> int | None:
    """How many of the blocks must recompute for all to fit; None if all of them are not enough."""
    low, high = 0, len(blocks)

    def fits(count: int) -> bool:
        where = np.isin(np.arange(len(plain.saved)), blocks[:count])
        return _memory(plain.mixed(recomputed, where)) <= capacity

    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
