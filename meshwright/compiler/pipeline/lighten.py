"""Which units of a cut recompute, one by one: no more than memory asks for.

A cut is searched with whole stages, or even parts of them, under one option. Then every rank starts again from the fastest
option and takes the changes that free the most bytes for a second until it fits (``intervals.hull``); what turns out not to be
needed is taken back. The better of that and of what the cut had, treated alike, stays. Ranks only have less to do, so the
step hardly becomes longer, and where it does the cut stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.compiler.pipeline.intervals import hull, transient_of
from meshwright.ir.schedules import Table


class _Rank:
    """The units of one rank.

    held: bytes [4, options, units] from F to B or I, from I to W, of summed gradients, and over the step
    transient: [3, options, units], with what is released and what is there for the unit behind (``intervals.transient_of``)
    work: [options, units]
    stage: of every unit, of the rank's own
    counts: [k, 3, stages], see ``Table.moments``
    """

    def __init__(
        self, held: np.ndarray, transient: np.ndarray, work: np.ndarray, stage: np.ndarray, counts: np.ndarray, capacity: float
    ) -> None:
        self.held, self.transient, self.work, self.capacity = held, transient, work, capacity
        self.weights = np.stack([*counts[:, :, stage].transpose(1, 0, 2), np.ones((len(counts), len(stage)))])
        self.units = np.arange(len(stage))
        self.begin = np.flatnonzero(np.diff(stage, prepend=-1)).tolist()

    def fits(self, chosen: np.ndarray) -> bool:
        """Whether the rank holds its units so at its fullest moment."""
        bytes_ = np.einsum("cku,cu->k", self.weights, self.held[:, chosen, self.units])
        transient = transient_of(self.transient[:, chosen, self.units], self.begin)
        return bool(bytes_.max() + transient.max() <= self.capacity)

    def seconds(self, chosen: np.ndarray) -> float:
        """Of a micro-batch."""
        return float(self.work[chosen, self.units].sum())

    def cheapest(self) -> np.ndarray:
        """From the first option of every unit on, the cheapest changes until all fits, or all changes."""
        chosen = np.zeros(len(self.units), dtype=np.int64)
        moment = np.einsum("cku,cu->k", self.weights, self.held[:, 0]).argmax()
        bytes_ = np.einsum("cu,cou->ou", self.weights[:, moment], self.held)
        steps = [(ratio, unit, to) for unit in self.units.tolist()
                 for ratio, _, to in hull(bytes_[:, unit], self.work[:, unit])]
        for _, unit, to in sorted(steps):
            if self.fits(chosen):
                break
            chosen[unit] = to
        return chosen

    def eased(self, chosen: np.ndarray) -> np.ndarray:
        """With every unit, the dearest change first, under the fastest option that leaves room."""
        chosen = chosen.copy()
        for unit in np.argsort(-(self.work[chosen, self.units] - self.work[0]), kind="stable").tolist():
            for option in np.argsort(self.work[:, unit], kind="stable").tolist():
                now = chosen[unit]
                if self.work[option, unit] >= self.work[now, unit]:
                    break
                chosen[unit] = option
                if self.fits(chosen):
                    break
                chosen[unit] = now
        return chosen


def lighten(
    bytes_: np.ndarray, transient: np.ndarray, work: np.ndarray, table: Table, boundaries: Sequence[int],
    capacity: Sequence[float], chosen: np.ndarray,
) -> np.ndarray:
    """The option of every unit [n], from one under which a cut fits.

    ``bytes_``: [4, options, n], from F to B or I, from I to W, of summed gradients, and over the step; ``transient``:
    [3, options, n], as of ``_Rank``, the largest of a rank's stages counts; ``work``: [options, n], seconds of a
    micro-batch; ``boundaries``: where stages start, and the end; ``capacity``: bytes of every rank [pp].
    """
    found = chosen.copy()
    stage_of = np.repeat(np.arange(table.stages), np.diff(boundaries))
    for rank in range(table.pp):
        own = list(table.stages_of(rank))
        units = np.flatnonzero(np.isin(stage_of, own))
        if not chosen[units].any():
            continue
        stage = np.searchsorted(own, stage_of[units])
        one = _Rank(
            bytes_[:, :, units], transient[:, :, units], work[:, units], stage, np.asarray(table.moments[rank]), capacity[rank]
        )
        ways = [one.eased(way) for way in (one.cheapest(), chosen[units]) if one.fits(way)]
        if ways:
            found[units] = min(ways, key=one.seconds)
    return found
