"""Which units of a cut recompute, one by one: no more than memory asks for.

A cut is searched with whole stages, or even parts of them, under one option. Then every rank starts again from the fastest
option and takes the changes that free the most bytes for a second until it fits (``intervals.hull``); what turns out not to be
needed is taken back. The better of that and of what the cut had, treated alike, stays. Ranks only have less to do, so the
step hardly becomes longer, and where it does the cut stays as it was.

How long a step becomes depends on which of a rank's stages recompute, too: what the first backwards of a step take longer may
hide behind forwards, and stages next to each other wait the least if they do it on all ranks alike. So there are further ways,
with the changes of one stage first, then of those behind it or before it, and so on: the caller runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from meshwright.compiler.pipeline.intervals import hull
from meshwright.compiler.pipeline.transients import beside_of
from meshwright.ir.schedules import Table

_AT_ONCE = 16
"""So many ways are held against memory in one call, which takes little longer than of one."""


class _Rank:
    """The units of one rank.

    held: bytes [4, options, units] from F to B or I, from I to W, of summed gradients, and over the step
    beside: [16, options, units], what is there of units beside that (``transients.BESIDE``)
    work: [options, units]
    stage: of every unit, of the rank's own
    moments: counts and where each stage's begin, see ``Table.side_by_side``
    """

    def __init__(
        self, held: np.ndarray, beside: np.ndarray, work: np.ndarray, stage: np.ndarray,
        moments: tuple[np.ndarray, np.ndarray], capacity: float,
    ) -> None:
        self.held, self.beside, self.work, self.capacity = held, beside, work, capacity
        (counts, begin), several = moments, len(moments[1])
        self.runs, self.others = np.searchsorted(begin, np.arange(len(counts)), side="right") - 1, counts[:, 3 * several :]
        self.there = counts[:, 2 * several : 3 * several]
        each = counts[:, : 3 * several].reshape(len(counts), 3, several)
        self.weights = np.stack([*each[:, :, stage].transpose(1, 0, 2), np.ones((len(counts), len(stage)))])
        self._counts = self.weights.transpose(1, 0, 2).reshape(len(counts), -1)
        self.units, self.stage = np.arange(len(stage)), stage
        self.begin = np.flatnonzero(np.diff(stage, prepend=-1)).tolist()

    def fits(self, ways: np.ndarray) -> np.ndarray:
        """Whether the rank holds its units so at its fullest moment, of each of the ``ways`` [..., units]."""
        most = self._bytes(ways).max(axis=-1)
        if self.beside[8:11].any():
            saved, _, summed, state = self.held[:, ways, self.units]
            final = beside_of(self.beside[:, ways, self.units], self.begin).final
            last = (np.add.reduceat(saved, self.begin, axis=-1) + final).max(axis=-1)
            most = np.maximum(most, (summed + state).sum(axis=-1) + last)
        return np.asarray(most <= self.capacity)

    def _bytes(self, ways: np.ndarray) -> np.ndarray:
        """What it holds at every moment [..., k], with the transient of the stage that runs, and what the others' reductions
        left."""
        each = np.moveaxis(self.held[:, ways, self.units], 0, -2).reshape(*ways.shape[:-1], self._counts.shape[1])
        held = each @ self._counts.T
        transient, later, left, *_ = beside_of(self.beside[:, ways, self.units], self.begin)
        held += later @ self.there.T + (left - later) @ self.others.T
        return np.asarray(held + transient[..., self.runs])

    def seconds(self, chosen: np.ndarray) -> float:
        """Of a micro-batch."""
        return float(self.work[chosen, self.units].sum())

    def changed(self, order: np.ndarray | None) -> np.ndarray:
        """From the first option of every unit on, changes until all fits, or all changes: the cheapest first, or those of the
        stages as they come in ``order``, the place of each."""
        place = self._places(order)
        changes = sorted((place[unit], ratio, unit, to) for ratio, unit, to in self._changes)
        ways = np.zeros((len(changes) + 1, len(self.units)), dtype=np.int64)
        for number, (_, _, unit, to) in enumerate(changes, 1):
            ways[number:, unit] = to
        for some in np.split(ways, range(_AT_ONCE, len(ways), _AT_ONCE)):
            fits = self.fits(some)
            if fits.any():
                return np.asarray(some[fits.argmax()])
        return np.asarray(ways[-1])

    def _places(self, order: np.ndarray | None) -> np.ndarray:
        """Of every unit."""
        return np.zeros(len(self.units)) if order is None else order[self.stage]

    @cached_property
    def _changes(self) -> list[tuple[float, int, int]]:
        """Changes of units to options, each with its seconds a byte."""
        moment = self._bytes(np.zeros(len(self.units), dtype=np.int64)).argmax()
        bytes_ = np.einsum("cu,cou->ou", self.weights[:, moment], self.held)
        return [(ratio, unit, to) for unit in self.units.tolist()
                for ratio, _, to in hull(bytes_[:, unit].tolist(), self.work[:, unit].tolist())]

    def eased(self, chosen: np.ndarray, order: np.ndarray | None) -> np.ndarray:
        """With every unit, the dearest change first, or that of the last stage in the ``order``, under the fastest option that
        leaves room."""
        chosen, place = chosen.copy(), self._places(order)
        turns = np.lexsort((self.work[0] - self.work[chosen, self.units], -place)).tolist()
        tries = [(unit, option) for unit in turns for option in np.argsort(self.work[:, unit], kind="stable").tolist()
                 if self.work[option, unit] < self.work[chosen[unit], unit]]
        while tries:
            ways = np.tile(chosen, (len(tries[:_AT_ONCE]), 1))
            for way, (unit, option) in zip(ways, tries, strict=False):
                way[unit] = option
            fits = self.fits(ways)
            if not fits.any():
                tries = tries[_AT_ONCE:]
                continue
            first = int(fits.argmax())
            chosen, eased = ways[first], tries[first][0]
            tries = [(unit, option) for unit, option in tries[first + 1 :] if unit != eased]
        return chosen

    def ways(self, given: np.ndarray, orders: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The faster of the cheapest changes and of those that were ``given``, and changes in each of the orders."""
        plain = [self.eased(way, None) for way in (self.changed(None), given) if self.fits(way)]
        least = min(plain, key=self.seconds, default=given)
        return [least, *(self.eased(way, order) if self.fits(way := self.changed(order)) else least for order in orders)]


def _orders(stages: int) -> list[np.ndarray]:
    """Of a rank's stages, if it has several, the place of each: every one first, and round to the next or to the one before."""
    turned = (np.roll(np.arange(stages)[::step], first) for step in (1, -1) for first in range(stages))
    return [np.array(one) for one in dict.fromkeys(tuple(one.tolist()) for one in turned)] if stages > 1 else []


def lighten(
    bytes_: np.ndarray, beside: np.ndarray, work: np.ndarray, table: Table, boundaries: Sequence[int],
    capacity: Sequence[float], chosen: np.ndarray,
) -> np.ndarray:
    """Ways to choose the option of every unit, [ways, n], from one under which a cut fits.

    ``bytes_``: [4, options, n], from F to B or I, from I to W, of summed gradients, and over the step; ``beside``:
    [12, options, n], as of ``_Rank``; ``work``: [options, n], seconds of a micro-batch; ``boundaries``: where stages start, and
    the end; ``capacity``: bytes of every rank [pp].
    """
    orders = _orders(table.stages // table.pp)
    found = np.tile(chosen, (1 + len(orders), 1))
    stage_of, known = np.repeat(np.arange(table.stages), np.diff(boundaries)), dict[bytes, list[np.ndarray]]()
    for rank in range(table.pp):
        own = list(table.stages_of(rank))
        units = np.flatnonzero(np.isin(stage_of, own))
        if not chosen[units].any():
            continue
        stage, moments = np.searchsorted(own, stage_of[units]), table.side_by_side[rank]
        parts = bytes_[:, :, units], beside[:, :, units], work[:, units], stage
        key = b"".join(part.tobytes() for part in (*parts, *moments, chosen[units], np.array(capacity[rank])))
        if key not in known:  # ranks are mostly alike
            known[key] = _Rank(*parts, moments, capacity[rank]).ways(chosen[units], orders)
        found[:, units] = known[key]
    return np.unique(found, axis=0)
