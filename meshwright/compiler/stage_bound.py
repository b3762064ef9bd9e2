"""Bounds on the step of any cut when ranks hold several stages: packing, and a linear program.

Both drop the order of the units, so equal units are one number ("how many of this kind in stage s"):

- ``packing_bound`` keeps units whole: of the k P + 1 longest, some rank has k + 1.
- ``fractional_bound`` lets them be divided, and keeps what the schedule and memory say. With x[s, c, o] units of class c run in
  way o in stage s, all rows of ``cost.timeline.lower_bounds`` (path, rank, return) and the memory of every rank at its
  largest in-flight vectors are linear in x; GLOP minimizes the step T.

Of crossings the cheapest are assumed, transients are left out, both are relaxations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from meshwright.compiler.intervals import Intervals
from meshwright.cost.schedules import SPLIT_BACKWARD
from meshwright.cost.table import Table

_VECTORS = 6
"""In-flight vectors a rank is held to in the linear program, the largest ones; fewer rows only relax it."""


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


def fractional_bound(units: Intervals, table: Table, capacity: np.ndarray) -> float:
    """Seconds that no run can beat whatever the cut; inf if not even divided units fit. ``capacity``: bytes [pp]."""
    classes, first, members = _classes(units)
    shape = (table.stages, len(members), units.ways)
    count = int(np.prod(shape))
    rows = _Rows(count + 3 * table.stages)
    for c, n in enumerate(members.tolist()):
        rows.add(_marked(shape, np.s_[:, c]), float(n), float(n))
    for s in range(table.stages):
        rows.add(_marked(shape, np.s_[s]), 1.0, math.inf)
    for stage, unit in ((0, 0), (-1, units.count - 1)):
        rows.add(_marked(shape, np.s_[stage, first[unit]]), 1.0, math.inf)
    unit_seconds = float(classes[:3].max()) or 1.0
    seconds = classes[:3] / unit_seconds
    for s, k in np.ndindex(table.stages, 3):  # every stage's three sums are variables too: the rows of time stay short
        own_seconds = np.zeros(count + 3 * table.stages)
        own_seconds[:count].reshape(shape)[s] = seconds[k]
        own_seconds[count + 3 * s + k] = -1.0
        rows.add(own_seconds, 0.0, 0.0)
    for coefficients, constant in _time_rows(units, table):
        rows.add(np.append(np.zeros(count), coefficients), -math.inf, -constant / unit_seconds, step=-1.0)
    for rank in range(table.pp):
        own = list(table.stages_of(rank))
        counts = table.in_flight[rank]
        for full, half in counts[np.argsort(-counts.sum(axis=(1, 2)), kind="stable")[:_VECTORS]]:
            held = np.zeros(shape)
            held[own] = classes[3] + full[:, None, None] * classes[4] + half[:, None, None] * classes[5]
            if (held.max(axis=(0, 2)) * members).sum() > capacity[rank]:
                rows.add(held / capacity[rank], -math.inf, 1.0)
    upper = np.append(np.broadcast_to(members[None, :, None], shape).ravel().astype(float), np.full(3 * table.stages, math.inf))
    result = mathopt.solve(rows.model(upper), mathopt.SolverType.GLOP, params=mathopt.SolveParameters(threads=1))
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        return math.inf
    return max(0.0, float(result.dual_bound())) * unit_seconds * (1 - 1e-6)


def _marked(shape: tuple[int, ...], where: Any) -> np.ndarray:
    mask = np.zeros(shape)
    mask[where] = 1.0
    return mask


class _Rows:
    """A linear program row by row: minimize the last of ``variables`` + 1 variables, the step. Written as a proto: building it
    through the modelling classes takes longer than solving it."""

    def __init__(self, variables: int) -> None:
        self.step = variables
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, weights: np.ndarray, lower: float, upper: float, step: float = 0.0) -> None:
        flat = np.zeros(self.step + 1)
        flat[: weights.size], flat[-1] = weights.ravel(), step
        columns = np.flatnonzero(flat)
        self.parts.append((columns, flat[columns]))
        self.lower.append(lower)
        self.upper.append(upper)

    def model(self, bounds: np.ndarray) -> mathopt.Model:
        """``bounds``: the largest value of every variable but the step."""
        proto, count = model_pb2.ModelProto(), self.step + 1
        proto.variables.ids.extend(range(count))
        proto.variables.lower_bounds.extend([0.0] * count)
        proto.variables.upper_bounds.extend([*bounds.tolist(), math.inf])
        proto.variables.integers.extend([False] * count)
        proto.linear_constraints.ids.extend(range(len(self.parts)))
        proto.linear_constraints.lower_bounds.extend(self.lower)
        proto.linear_constraints.upper_bounds.extend(self.upper)
        matrix = proto.linear_constraint_matrix
        for row, (columns, values) in enumerate(self.parts):
            matrix.row_ids.extend([row] * len(columns))
            matrix.column_ids.extend(columns.tolist())
            matrix.coefficients.extend(values.tolist())
        proto.objective.linear_coefficients.ids.append(self.step)
        proto.objective.linear_coefficients.values.append(1.0)
        return mathopt.Model.from_model_proto(proto)


def _classes(units: Intervals) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers of each class of equal units [6, classes, ways], the class of every unit, units per class)."""
    numbers = np.diff(units.prefix, axis=2)
    scale = np.abs(units.prefix).max(axis=(1, 2), keepdims=True) + 1e-300
    keys = np.round(numbers / scale, 12).transpose(2, 0, 1).reshape(units.count, -1)
    _, where, inverse, members = np.unique(keys, axis=0, return_index=True, return_inverse=True, return_counts=True)
    return numbers[:, :, where].transpose(0, 2, 1), inverse.ravel(), members


def _time_rows(units: Intervals, table: Table) -> list[tuple[np.ndarray, float]]:
    """The rows of ``lower_bounds``: (coefficients of forward, backward input, backward weight per stage [S, 3], seconds)."""
    m, split, stages = table.microbatches, table.name in SPLIT_BACKWARD, table.stages
    ranks = np.array(table.stage_rank)
    sends = np.concatenate([[0], np.cumsum(ranks[1:] != ranks[:-1])])  # transfers before each stage
    down, up = (float(x[1:-1].min()) if units.count > 1 else 0.0 for x in (units.value, units.gradient))
    ahead, back, work = np.array([1.0, 0, 0]), np.array([0, 1.0, 0 if split else 1]), np.ones(3)
    through = np.tile(ahead + back, (stages, 1))
    rows = []
    for s in range(stages):
        for slow in (ahead + back,) if table.name == "gpipe" else (ahead, back):
            row = through.copy()
            row[s] += (m - 1) * slow
            rows.append((row, sends[-1] * (down + up)))
    for rank in range(table.pp):
        own = list(table.stages_of(rank))
        head, tail, returned, spent = (np.zeros((stages, 3)) for _ in range(4))
        head[: own[0]], tail[: own[0]] = ahead, back
        returned += ahead
        returned[own[-1] + 1 :] += back
        for s, count in table.warmup(rank).items():
            spent[s] = -count * ahead
        begins = ((head, sends[own[0]] * down), (returned + spent, sends[-1] * down + (sends[-1] - sends[own[-1]]) * up))
        for begin, seconds in begins:
            for kind, end in ((work, not split), (ahead + back, True)):
                row = begin + tail * end
                row[own] += m * kind
                rows.append((row, seconds + sends[own[0]] * up * end))
    return rows
