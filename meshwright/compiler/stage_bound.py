"""Bounds on the step of any cut when ranks hold several stages: packing, and a linear program.

Both drop the order of the units, so equal units are one number ("how many of this kind in stage s"):

- ``packing_bound`` keeps units whole: of the k P + 1 longest, some rank has k + 1.
- ``fractional_bound`` lets them be divided, and keeps what the schedule and memory say. With x[s, c, o] units of class c run in
  way o in stage s, all rows of ``cost.timeline.lower_bounds`` (path, rank, return) and the memory of every rank at some moments
  of its order (``held``) are linear in x; GLOP minimizes the step T.

The program knows a rank's first stage, its last one, and all between together: these enter the rows alike, and the slowest of
them takes no less than their mean. So its size does not grow with the stages of a rank, and one program bounds a whole range of
their numbers: what grows with it (transfers, a unit in every stage) is counted for the fewest, the mean for the most.

Divided units fit where whole ones do not, so of the most frequent class a rank takes no more than the whole units that fit it
(``_Program.whole``). Of crossings the cheapest are assumed, of transients the least that a rank cannot avoid: relaxations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from meshwright.compiler.intervals import Ends, Intervals
from meshwright.cost.schedules import SPLIT_BACKWARD, V_SHAPED
from meshwright.cost.timeline import warmup_forwards


def packing_bound(units: Intervals, name: str, pp: int, microbatches: int) -> float:
    """Seconds that no run can beat whatever the cut, several stages a rank: units packed onto ranks.

    Of the k pp + 1 longest units some rank has k + 1, at least the shortest of them; and a micro-batch goes through
    everything while the longest unit does all the others.
    """
    work = np.sort(np.diff(units.prefix[:3].sum(axis=0), axis=1).min(axis=0))[::-1]
    shares = [work[k * pp - k : k * pp + 1].sum() for k in range((len(work) - 1) // pp + 1)]
    least = units.cheapest()
    ahead, back = least[0], least[1] if name in SPLIT_BACKWARD else least[1] + least[2]
    longest = max(np.diff(ahead).max(), np.diff(back).max())
    path = ahead[-1] + back[-1] + (microbatches - 1) * longest
    return float(max(microbatches * max(shares), path))


def held(name: str, pp: int, microbatches: int, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Micro-batches that a rank of several stages surely holds at some moments, whatever their number: (between F and B or I,
    between I and W), each int [3] of its first stage, each one between, and its last one.

    After the warm-up forwards and backwards alternate, and the first backwards are all of the last stage.
    """
    none = np.zeros(3, dtype=np.int64)
    if name in V_SHAPED:
        counts = warmup_forwards(name, pp, 2, microbatches)
        return [(np.array([counts[rank], 0, counts[2 * pp - 1 - rank]]), none)]
    split = name in SPLIT_BACKWARD
    in_turn = microbatches // max(1, microbatches // pp)
    moments = []
    for done in sorted({0, min(rank, in_turn), in_turn // 2, in_turn}):
        forwards = (1 if split else 2) * (pp - 1 - rank) + 1 + done  # since the last stage ran its first
        again = min(max(forwards - in_turn, 0), in_turn) if in_turn < microbatches else 0
        full = np.array([in_turn + again, in_turn, min(forwards, in_turn) - done])
        moments.append((full, np.array([0, 0, min(done, rank)]) if split else none))
    return moments


def held_alone(name: str, pp: int, microbatches: int, rank: int) -> np.ndarray:
    """What a rank of one stage holds at some moments, the fullest among them: int [k, 2] as in ``Table.in_flight``."""
    if name == "gpipe":
        return np.array([[microbatches, 0]])
    moments = (0, min(rank, microbatches)) if name in SPLIT_BACKWARD else (0,)
    return np.array([(min(pp - rank + done, microbatches) - done, done) for done in moments])


def least_held(name: str, pp: int, microbatches: int, alone: bool) -> int:
    """Micro-batches that every unit is held for at once, wherever it is: at each rank's fullest moment in this sense."""
    if alone:
        return int(min(held_alone(name, pp, microbatches, rank).sum(axis=1).max() for rank in range(pp)))
    parts = [0, 2] if name in V_SHAPED else [0, 1, 2]
    moments = (held(name, pp, microbatches, rank) for rank in range(pp))
    return int(min(max((full + half)[parts].min() for full, half in own) for own in moments))


def entered(name: str, pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    """Of what a rank holds at once, what came from another rank, at least: int [pp]."""
    if virtual_stages == 1:
        return np.array([held_alone(name, pp, microbatches, rank).sum(axis=1).max() * (rank > 0) for rank in range(pp)])
    moments = [held(name, pp, microbatches, rank) for rank in range(pp)]
    most = [max(np.array([rank > 0, virtual_stages - 2, 1]) @ full for full, _ in own) for rank, own in enumerate(moments)]
    return np.array(most)


def fractional_bound(
    units: Intervals, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int, capacity: np.ndarray,
    ends: Ends | None = None,
) -> float:
    """Seconds that no run can beat whatever the cut, with any number of stages a rank from the first of ``virtual_stages``, at
    least 2, to the second; inf if not even divided units fit. ``capacity``: bytes [pp]. With ``ends``: no step."""
    nothing = np.zeros(units.count)
    program = _Program(units, name, pp, virtual_stages, microbatches, ends or Ends(nothing, nothing, nothing, 1.0))
    room = capacity - program.transient()
    if room.min() <= 0:
        return math.inf
    program.place()
    if program.memory(room) and not program.whole():
        return math.inf
    program.all()
    program.time()
    program.outside()
    result = program.solved({0: 1.0})
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        return math.inf
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return 0.0
    return max(0.0, float(result.dual_bound())) * program.scale * (1 - 1e-6)


ITERATIONS, SECONDS = 20_000, 2.0
"""Limits of one program, which takes 10 to 40 ms; but GLOP has been seen to go on for minutes. What it did not finish bounds
nothing."""
Term = tuple[np.ndarray, np.ndarray | float]
"""Variables and their weights."""


class _Rows:
    """A linear program row by row, over variables that are no less than 0; number 0 is the step. Written as a proto: building
    it through the modelling classes takes longer than solving it."""

    def __init__(self) -> None:
        self.count = 1
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def variables(self, *shape: int) -> np.ndarray:
        """New variables, as their numbers."""
        first, self.count = self.count, self.count + math.prod(shape)
        return np.arange(first, self.count).reshape(shape)

    def add(self, terms: Sequence[Term], lower: float, upper: float = math.inf) -> None:
        """A row: the sum of weights x variables, each of which is named once, is within the limits."""
        values = [np.empty(columns.shape) for columns, _ in terms]
        for value, (_, weights) in zip(values, terms, strict=True):
            value[...] = weights
        columns = np.concatenate([columns.ravel() for columns, _ in terms])
        self.parts.append((columns, np.concatenate([value.ravel() for value in values])))
        self.lower.append(lower)
        self.upper.append(upper)

    def solved(self, objective: Mapping[int, float], wanted: np.ndarray | None = None) -> mathopt.SolveResult:
        """Minimize the sum of weights x variables; read the values of those that are wanted, which takes a while."""
        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(self.count))
        proto.variables.lower_bounds.extend([0.0] * self.count)
        proto.variables.upper_bounds.extend([math.inf] * self.count)
        proto.variables.integers.extend([False] * self.count)
        proto.linear_constraints.ids.extend(range(len(self.parts)))
        proto.linear_constraints.lower_bounds.extend(self.lower)
        proto.linear_constraints.upper_bounds.extend(self.upper)
        matrix = proto.linear_constraint_matrix
        for row, (columns, values) in enumerate(self.parts):
            order = columns.argsort()
            matrix.row_ids.extend([row] * len(columns))
            matrix.column_ids.extend(columns[order].tolist())
            matrix.coefficients.extend(values[order].tolist())
        proto.objective.linear_coefficients.ids.extend(sorted(objective))
        proto.objective.linear_coefficients.values.extend(objective[variable] for variable in sorted(objective))
        model = mathopt.Model.from_model_proto(proto)
        read = {} if wanted is None else {"filtered_items": [model.get_variable(int(variable)) for variable in wanted.ravel()]}
        none = mathopt.SparseVectorFilter(filtered_items=[])
        only = mathopt.ModelSolveParameters(
            variable_values_filter=mathopt.SparseVectorFilter(**read) if read else none, reduced_costs_filter=none,
            dual_values_filter=none,
        )
        params = mathopt.SolveParameters(threads=1, iteration_limit=ITERATIONS, time_limit=timedelta(seconds=SECONDS))
        return mathopt.solve(model, mathopt.SolverType.GLOP, params=params, model_params=only)


class _Program(_Rows):
    """The program of one schedule. A *part* [kind, rank] is a rank's first stage, all between, or its last one. Seconds are in
    units of the longest class (``scale``)."""

    def __init__(
        self, units: Intervals, name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int, ends: Ends
    ) -> None:
        super().__init__()
        self.units, self.name, self.pp, self.microbatches = units, name, pp, microbatches
        self.least, self.most = virtual_stages
        self.chosen = [0, 2] if self.most == 2 else [0, 1, 2]  # of first, between, last
        self.turns = name in V_SHAPED
        self.slowed = ends.slowed
        self.classes, self.first, self.members = _classes(units, ends)
        self.scale = float(self.classes[:3].max()) or 1.0
        self.amounts = self.variables(len(self.chosen), pp, len(self.members), units.ways)
        self.seconds = self.variables(len(self.chosen), pp, 3)
        self.gather, self.optimizer = self.variables(2, 1)
        self.left = self.variables(pp, 1)

    def end(self, rank: int, terms: Sequence[Term], seconds: float) -> None:
        """The rank's last action ends no sooner than after this sum and these seconds."""
        step = [(np.zeros(1, dtype=np.int64), 1.0), (self.gather, -1.0), (self.optimizer, -1.0), (self.left[rank], -1.0)]
        self.add([*step, *((columns, -weights) for columns, weights in terms)], seconds)

    def outside(self) -> None:
        """What comes before and after the micro-batches."""
        gather, reduce, optimizer = self.classes[6:] / self.scale
        self.add([(self.gather, 1.0), (self.amounts[:, 0], -gather)], 0.0)
        for rank in range(self.pp):
            amounts, left = self.amounts[:, rank], (self.left[rank], 1.0)
            self.add([(self.optimizer, 1.0), (amounts, -optimizer)], 0.0)
            self.add([left, (amounts, -self.slowed * reduce)], 0.0)
            self.add([left, (amounts, -reduce), (self.seconds[:, rank, 1:], 1.0)], 0.0)

    def place(self) -> None:
        """One or more units in every stage, the first and the last at the ends; seconds of every part."""
        work, fewest = self.classes[:3] / self.scale, np.array([1, self.least - 2, 1])[self.chosen]
        for kind, rank in np.ndindex(len(self.chosen), self.pp):
            amounts = self.amounts[kind, rank]
            self.add([(amounts, 1.0)], float(fewest[kind]))
            for column, seconds in zip(work, self.seconds[kind, rank, :, None], strict=True):
                self.add([(amounts, column), (seconds, -1.0)], 0.0, 0.0)
        self.add([(self.amounts[0, 0, self.first[0]], 1.0)], 1.0)
        self.add([(self.amounts[-1, 0 if self.turns else -1, self.first[-1]], 1.0)], 1.0)

    def time(self) -> None:
        """The rows of ``cost.timeline.lower_bounds``; what many of them share is a variable."""
        pp, m, split = self.pp, self.microbatches, self.name in SPLIT_BACKWARD
        crossings = self.units.value, self.units.gradient
        down, up = (float(x[1:-1].min()) / self.scale if self.units.count > 1 else 0.0 for x in crossings)
        sends = 2 * pp - 2 if self.turns else self.least * pp - 1
        ahead, back = self.seconds[:, :, :1], self.seconds[:, :, 1:2] if split else self.seconds[:, :, 1:]
        forwards, backwards, slowest = self.variables(3, 1)
        self.add([(forwards, 1.0), (ahead, -1.0)], 0.0)
        self.add([(backwards, 1.0), (back, -1.0)], 0.0)
        for kind, rank in np.ndindex(len(self.chosen), pp):
            share = self.most - 2 if self.chosen[kind] == 1 else 1
            for part in (ahead, back):
                self.add([(slowest, float(share)), (part[kind, rank], -1.0)], 0.0)
        self.end(0, [(forwards, 1.0), (backwards, 1.0), (slowest, m - 1)], sends * (down + up))
        head, tail = self._sums(ahead[0], range(pp)), self._sums(back[0], range(pp))
        behind = self._sums(back[-1], range(pp) if self.turns else range(pp)[::-1])
        warm = warmup_forwards(self.name, pp, len(self.chosen), m).reshape(-1, pp)
        for rank in range(pp):
            own, after = self.seconds[:, rank], rank if self.turns else pp - 1 - rank
            spent = np.zeros(own.shape)
            spent[:, 0] = warm[:, rank]
            if self.turns:
                spent[-1, 0] = warm[-1, -1 - rank]
            work = np.full(own.shape, float(m))
            turned = work * [1.0, 1.0, not split]
            arrived: list[Term] = [(head[rank], 1.0)]
            returned: list[Term] = [(forwards, 1.0), (behind[rank], 1.0)]
            for begin, done, seconds in ((arrived, 0.0, rank * down), (returned, spent, sends * down + after * up)):
                self.end(rank, [*begin, (own, work - done)], seconds)
                self.end(0, [*begin, (own, turned - done), (tail[rank], 1.0)], seconds + rank * up)

    def _sums(self, seconds: np.ndarray, order: Iterable[int]) -> np.ndarray:
        """Variables [pp, 1]: at each rank the seconds [pp, k] of those before it in an order."""
        sums, before = self.variables(self.pp, 1), None
        for rank in order:
            if before is not None:
                self.add([(sums[rank], 1.0), (sums[before], -1.0), (seconds[before], -1.0)], 0.0)
            before = rank
        return sums

    def transient(self) -> np.ndarray:
        """Bytes of transients that a rank cannot avoid [pp]: of the least of its units, of the one that it must have."""
        each = np.array([self.units.transient[:, i, i + 1].min() for i in range(self.units.count)])
        least = np.full(self.pp, each[1:-1].min() if len(each) > 2 else 0.0)
        least[0] = max(least[0], each[0])
        end = 0 if self.turns else -1
        least[end] = max(least[end], each[-1])
        return least

    def memory(self, room: np.ndarray) -> bool:
        """Every rank holds at its moments no more than ``room`` bytes; whether that keeps anything from a rank."""
        rows = len(self.parts)
        state, saved, pending = self.classes[3:6]
        for rank in range(self.pp):
            for full, half in held(self.name, self.pp, self.microbatches, rank):
                counts = np.array([full, half])[:, self.chosen, None, None]
                bytes_ = (state + counts[0] * saved + counts[1] * pending) / room[rank]
                if (bytes_.max(axis=(0, 2)) * self.members).sum() > 1.0:
                    self.add([(self.amounts[:, rank], bytes_)], -math.inf, 1.0)
        return len(self.parts) > rows

    def whole(self) -> bool:
        """Of the most frequent class a rank runs no more than the whole units that fit it: false if that leaves some over. To
        be asked when nothing joins the ranks yet, so that one program finds how many fit each."""
        common = int(self.members.argmax())
        amounts = self.amounts[:, :, common]
        for rank in range(self.pp):
            self.add([(amounts[:, rank], 1.0)], 0.0, float(self.members[common]))
        result = self.solved(dict.fromkeys(amounts.ravel().tolist(), -1.0), amounts)
        if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
            return False
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return True
        values = {variable.id: value for variable, value in result.variable_values().items()}
        fit = np.array([values[variable] for variable in amounts.ravel().tolist()]).reshape(amounts.shape)
        most = np.floor(fit.sum(axis=(0, 2)) + 1e-6)
        for rank in range(self.pp):
            self.add([(amounts[:, rank], 1.0)], 0.0, most[rank])
        return bool(most.sum() >= self.members[common])

    def all(self) -> None:
        """Every unit is somewhere."""
        for number, count in enumerate(self.members.tolist()):
            self.add([(self.amounts[:, :, number], 1.0)], count, count)


def _classes(units: Intervals, ends: Ends) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers of each class of equal units [6 as in ``Intervals`` + 3 as in ``Ends``, classes, ways], the class of every unit,
    units per class)."""
    once = np.array([ends.gather, ends.reduce, ends.optimizer])[:, None].repeat(units.ways, axis=1)
    numbers = np.concatenate([np.diff(units.prefix, axis=2), once])
    scale = np.abs(numbers).sum(axis=2).max(axis=1)[:, None, None] + 1e-300
    keys = np.round(numbers / scale, 12).transpose(2, 0, 1).reshape(units.count, -1)
    _, where, inverse, members = np.unique(keys, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return numbers[:, :, where].transpose(0, 2, 1), inverse.ravel(), members
