"""What positions hold beside what they keep of a micro-batch while a stage of a pipeline runs backward: what runs in them, and
what FSDP2 gathers and reduces of their weights (``pipeline.transients``, ``cost.memory.fsdp``).

    each micro-batch   a block's gradients, made in the compute dtype, are reduced behind it, or added to sums; the root's, of
                       its stage, when all of that is done
    the last one       what was gathered is let go, and sums are reduced too: to pieces, if they are split
    one alone          the same, and gradients come in the place of what the units behind let go of

Gradients of weights that FSDP2 does not take are widened and copied to their sums when their readers' backward is done. Where
a backward is split nothing is reduced before the schedule is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshwright.compiler.pipeline.degrees import Degrees, renamed
from meshwright.compiler.pipeline.transients import BESIDE
from meshwright.compiler.placement.costs import GRADIENTS, SAVED, TRANSIENT, Variant
from meshwright.compiler.placement.rows import PlacedPosition, Placement, Use

Array = np.ndarray
_FP32 = 4
"""Bytes of an element of what FSDP2 reduces."""


class ReducedTogether(NamedTuple):
    """Gradients of a row that are reduced over one set of ranks: bytes as they are ``made``, and of the buffer that is
    ``reduced``, of which a rank keeps one of so many ``shards``, under a ``zero`` level; whether they are ``copied`` when all
    of the row's are there, where ranks hold DTensors."""

    made: float
    reduced: float
    shards: int
    zero: int
    copied: bool = False

    @property
    def gathered(self) -> float:
        """Bytes of its weights that are there until the last micro-batch's backward."""
        return self.made * (self.zero < 3)


@dataclass(frozen=True)
class RowGradients:
    """Of a row, in a step of ``several`` micro-batches or one. ``loose``: bytes of those that FSDP2 does not take, as they are
    made; ``wide``: by how much a gradient grows on its way to its sum."""

    families: Sequence[ReducedTogether]
    loose: float
    wide: float
    several: bool

    @cached_property
    def made(self) -> float:
        """Bytes as they are made."""
        return sum(one.made for one in self.families) + self.loose

    @cached_property
    def whole(self) -> float:
        """Bytes of their sums where nothing is reduced."""
        return self.made * self.wide

    @cached_property
    def stays(self) -> float:
        """Bytes of those that are there as they are made until the backward is done: the rest is added to sums."""
        adds = self.several and self.wide == 1.0
        return sum(one.made for one in self.families if one.zero >= 2 or not adds or one.copied) + self.loose

    @cached_property
    def copies(self) -> float:
        """Bytes of copies of these when all are there."""
        return sum(one.made for one in self.families if one.copied)

    @cached_property
    def reduced(self) -> tuple[float, float]:
        """Bytes of the buffers that are reduced behind every micro-batch, of all sets of ranks but the last, and of that, which
        stays until another one is needed."""
        *before, last = [one.reduced for one in self.families if one.zero >= 2 or not self.several] or [0.0]
        return sum(before), last

    @cached_property
    def last(self) -> float:
        """Bytes at most as the last micro-batch's are reduced, beside what is there over the step: in the place of what was
        gathered, beside their sums, to which they were added; then in the place of these, too, beside a rank's piece, which is
        copied where it is all."""
        own = sum(one.made for one in self.families) * (not self.several)
        begun = max((one.reduced - one.gathered for one in self.families), default=0.0)
        done = [one.reduced * (1 + 1 / one.shards + (one.shards == 1)) - one.gathered - self._sum(one) for one in self.families]
        return max(own + begun, *done, 0.0) + 2 * self.loose * self.wide

    @cached_property
    def left(self) -> float:
        """Bytes that the last micro-batch's backward leaves, beside what is there over the step."""
        found = sum(one.reduced / one.shards - one.gathered - self._sum(one) for one in self.families)
        return found + self.loose * self.wide * (not self.several)

    def _sum(self, one: ReducedTogether) -> float:
        """Bytes of those over the step."""
        whole = one.made * self.wide if one.zero < 2 else one.reduced / one.shards
        return whole * self.several


class _RowInW(NamedTuple):
    """Bytes of a row beside what is kept, at most: ``last``, ``first``, ``early``, ``began`` (``transients.BESIDE``); ``made``
    when nothing is kept any more, at the end of the block, of ``first`` and of ``began``; and ``stays``."""

    last: float
    first: float
    early: float
    began: float
    made: tuple[float, float]
    stays: float


class _OnItsWay(NamedTuple):
    """Bytes of a weight's gradient and of its copies on its way to a sum where a backward is split: if there is a sum already,
    to which FSDP2 adds it as it is; if it becomes that sum, the largest; and of the sum. In a W that is a whole backward, as it
    is ``made``, and of it until it is added up (0: at once); ``loose``: without FSDP2."""

    added: float = 0.0
    new: float = 0.0
    summed: float = 0.0
    made: float = 0.0
    waits: float = 0.0
    loose: bool = False


_NOTHING = _OnItsWay()
_SPLIT = ("transient", "released", "last", "freed", "first", "early", "began", "came", "stays")
"""Those of ``BESIDE`` that there are where some backward is split."""


@dataclass(frozen=True)
class StageMemory:
    """Remembers the gradients of placements, which are the same whatever is recomputed. ``itemsize``: bytes of an element in
    compute; ``wide``: by how much a gradient grows on its way to its sum."""

    itemsize: int
    wide: float
    _rows: dict[tuple[int, Degrees, Variant, bool], Sequence[RowGradients]] = field(default_factory=dict)
    _weights: dict[tuple[int, Degrees, Variant], Sequence[_RowInW]] = field(default_factory=dict)

    def beside(
        self, placement: Placement, degrees: Degrees, variant: Variant, several: bool, run: Array, once: Array,
        pending: Array | None,
    ) -> dict[str, Array]:
        """``pipeline.transients.BESIDE`` of every position. ``run``: resources of a micro-batch [rows]; ``once``: of the step;
        ``pending``: bytes from I to W where some backward is split."""
        nothing, at = np.zeros(len(run)), list(placement.sequence)
        if pending is not None:
            alone = self._halves(placement, degrees, variant, run, pending, several)
            return {name: alone.get(name, nothing)[at] for name in BESIDE}
        each = self.rows(placement, degrees, variant, several)
        roots, saved = np.array([not row.block for row in placement.rows]), run[:, SAVED]
        reduced = np.array([one.reduced for one in each])
        running = self._running(placement, degrees, variant, run, once, each)
        made, loose, stays, copies = np.array([(one.made, one.loose, one.stays, one.copies) for one in each]).T
        if not variant.data_axes:
            ended = once[:, GRADIENTS] * (2 if degrees.pp > 1 else 1 + several)
        else:
            ended = stays + copies + loose * (self.wide * (2 if degrees.pp > 1 else 1 + several) - 1)
        if degrees.pp == 1:
            alone = {"transient": np.maximum(running, np.where(roots, 0.0, ended) - saved), "released": saved}
            return {name: alone.get(name, nothing)[at] for name in BESIDE}
        running = np.maximum(running, np.where(roots, stays, ended) - saved)
        behind = np.where(copies > 0.0, np.where(roots, 0.0, reduced[:, 1]).max(), 0.0)  # is reduced as the root's are copied
        last, left = np.array([(one.last, one.left) for one in each]).T
        gone, done = saved - np.where(roots, made, left), np.where(roots, last - made, 0.0)
        found = {
            "transient": running, "released": saved - stays * roots,
            "ended": np.where(roots, 0.0, ended + reduced[:, 1] - saved),
            "closed": np.where(roots, ended - copies - stays + np.maximum(reduced.sum(axis=1), copies + behind), 0.0),
        } | dict.fromkeys(("last", "freed", "finished", "first", "early", "began", "came", "stays"), nothing)
        if variant.data_axes and not several:
            found |= {"released": gone, "ended": np.where(roots, 0.0, last - saved), "closed": done}
        elif not several:
            found |= {"released": gone}
        elif variant.data_axes and variant.zero < 2:
            found |= {"last": np.where(roots, 0.0, last - saved), "freed": gone, "finished": done}
        found = {name: column[at] for name, column in found.items()}
        gathered = np.array([sum(one.made for one in each[row].families if one.zero == 3) * (not roots[row]) for row in at])
        before = np.cumsum(~roots[at]) - ~roots[at] > 0  # none is ahead of the first block
        received, of_block = _received(placement, each, several)
        found |= {"transient": found["transient"] - gathered * ~before + received, "gathered": gathered * before + of_block}
        runs = np.cumsum(made[at]) > 0.0  # nothing takes a gradient before the first that is trained
        found |= {name: column * runs for name, column in _reducing(roots[at], reduced[at], several).items()}
        # what a stage makes again for all of its blocks, as a bias of a table of a few rows, is reduced last
        found["reduced"] *= [placement.repeated(start)[1] == 0.0 for start in range(len(at))]
        return found

    def rows(self, placement: Placement, degrees: Degrees, variant: Variant, several: bool) -> Sequence[RowGradients]:
        """Of the weights of every row of a placement."""
        key = id(placement), degrees, variant, several
        if key not in self._rows:
            self._rows[key] = [self.gradients(row.uses, degrees, variant, several) for row in placement.rows]
        return self._rows[key]

    def gradients(self, uses: Sequence[Use], degrees: Degrees, variant: Variant, several: bool) -> RowGradients:
        """Of the weights of a row."""
        found, loose = dict[tuple[str, ...], ReducedTogether](), 0.0
        for bytes_, split in self._made(uses, degrees):
            own = variant.of(split)
            if not own.data_axes:
                loose += bytes_
                continue
            made, reduced, *_ = found.get(own.data_axes, (0.0, 0.0))
            shards = degrees.mesh.size(own.shard_axes) if own.zero else 1
            total, copied = reduced + bytes_ / self.itemsize * _FP32, degrees.mesh.distributes(own.data_axes)
            found[own.data_axes] = ReducedTogether(made + bytes_, total, shards, own.zero, copied)
        return RowGradients(tuple(found.values()), loose, self.wide, several)

    def _running(
        self, placement: Placement, degrees: Degrees, variant: Variant, run: Array, once: Array,
        each: Sequence[RowGradients],
    ) -> Array:
        """Bytes beside what is kept while each row runs, in a pipeline without what reductions have left."""
        experts = np.array([self._of_experts(row, degrees, variant) for row in placement.rows])
        made = np.array([row.made for row in placement.rows]) + experts[:, 0]  # as they come, among what runs
        kept = np.maximum(once[:, TRANSIENT] - made, 0.0)
        working: Array = run[:, TRANSIENT] + experts.sum(axis=1) + kept
        if degrees.pp == 1:
            working += [row.beside_output for row in placement.rows]
        else:
            working -= np.minimum([sum(one.reduced) for one in each], kept)
        if degrees.pp == 1:
            return working
        more = [row.with_weights[one.stays <= one.loose]
                for row, one in zip(placement.rows, each, strict=True)]
        if not each[0].several:  # outputs of one micro-batch are handed back as they are, and stay
            more = np.maximum(more, [row.beside_output for row in placement.rows]).tolist()
        working += more
        head = placement.sequence[-1]
        working[head] = max(working[head], self._head(placement, each[head].several))
        return working

    def _head(self, placement: Placement, several: bool) -> float:
        """Bytes of the last position while its forward runs: outputs of its micro-batch are not yet among those collected."""
        return placement.rows[placement.sequence[-1]].forward + placement.at_work(1 + several)

    def _halves(
        self, placement: Placement, degrees: Degrees, variant: Variant, run: Array, pending: Array, several: bool
    ) -> dict[str, Array]:
        """Of every row where some backward is split. What a mixture's backward needs is there in both halves."""
        key = id(placement), degrees, variant
        if key not in self._weights:
            self._weights[key] = [self._made_in_w(row, degrees, variant) for row in placement.rows]
        found, each = [], zip(placement.rows, self._weights[key], self.rows(placement, degrees, variant, several), strict=True)
        for (row, made, one), resources, waits in zip(each, run, pending.tolist(), strict=True):
            kept, space = float(resources[SAVED]), 0.0
            if row.mixtures:
                space = float(resources[TRANSIENT]) + sum(self._of_experts(row, degrees, variant))
            came = max(space, one.whole) * bool(row.mixtures)
            gone = kept - waits - row.halves.above
            first, began = (max(most, end - kept) for most, end in zip((made.first, made.began), made.made, strict=True))
            found.append((max(row.halves.inputs, space), gone, max(made.last, space), row.halves.released,
                          max(first, space), max(made.early, came), max(began, came), one.whole, made.stays * several))
        columns, head = np.array(found).T, placement.sequence[-1]
        columns[[0, 4, 6], head] = np.maximum(columns[[0, 4, 6], head], self._head(placement, several))  # it runs before
        columns[1, head] += placement.outputs_kept * (not several)  # they wait, but are kept already
        return dict(zip(_SPLIT, columns, strict=True))

    def _made_in_w(self, row: PlacedPosition, degrees: Degrees, variant: Variant) -> _RowInW:
        """Of a row, as W comes to its weights one after the other. A W that is a whole backward adds up the gradients of a
        block behind it, those of the root behind the stage; of those that FSDP2 takes only such as grow on their way."""
        apart, own = self._apart(row, degrees, variant), row.halves
        most = max((one.new for one in apart.values()), default=0.0) * bool(row.mixtures)
        last = first = early = began = most
        there = come = stay = 0.0
        waits = list[_OnItsWay]()
        for name, gone, beside, since in own.weights:
            one = apart.get(name, _NOTHING)
            last, early = max(last, one.added - gone), max(early, there + one.new - gone)
            whole = max(one.made + beside, since)
            first, began = max(first, stay + whole), max(began, come + whole)
            there += one.summed
            stay, come = stay + one.waits, come + (one.waits or one.summed)
            waits += [one] * (one.waits > 0.0)
        first, began = max(first, stay + own.after), max(began, come + own.after)
        sums, loose = sum(one.summed for one in waits), [one.summed for one in waits if one.loose]
        copy = max(loose, default=0.0)
        ended = max(come, come - stay + sums + max(copy, waits[-1].waits if waits else 0.0))
        return _RowInW(last, first, early, began, (max(stay, sum(loose) + copy), ended), stay * (not row.block))

    def _apart(self, row: PlacedPosition, degrees: Degrees, variant: Variant) -> dict[str, _OnItsWay]:
        """Of the gradient of each weight of a row where a backward is split: it is summed over ranks that read it differently,
        in fp32, and copied where ranks hold DTensors."""
        wide, mesh, each = self.wide, degrees.mesh, dict[str, _OnItsWay]()
        live = {axis for axis in mesh.axes if mesh.size(axis) > 1}
        for use in row.uses:
            need = renamed(use.need, degrees)
            own = variant.of(need.split_axes).data_axes
            start = now = use.value.numel / mesh.size(need.split_axes) * self.itemsize * bool(use.trainable)
            made = now * (1 + (not need.varying & live <= {*own}))  # the sum over ranks beside what it is made of
            copied = mesh.distributes(own)
            found = new = made
            copies = [[(wide, not own)] * (wide > 1.0), [(1.0, True)] * copied]
            for times, added in itertools.chain(*copies[:: -1 if own else 1]):
                new, made, now = max(new, made + now * times), now * times, now * times
                found = max(found, new) if added else found
            whole = max(start * (1 + (not need.varying & live <= {*own})), start * (1 + bool(own and copied)))
            waits = start * (wide > 1.0 or not own)
            each[use.value.name] = _OnItsWay(found, new, now, whole, waits, not own)
        return each

    def _of_experts(self, row: PlacedPosition, degrees: Degrees, variant: Variant) -> tuple[float, float]:
        """Bytes of the gradients of a mixture's weights in the compute dtype, which come before those of the rest of its block,
        and of a copy of the largest, of which FSDP2 takes a piece, beyond what its backward needed before."""
        names = {name for mixture in row.mixtures for name in mixture.op.inputs}
        made = self._made([use for use in row.uses if use.value.name in names], degrees)
        copied = max((bytes_ for bytes_, split in made if split and variant.of(split).data_axes), default=0.0)
        space = max((mixture.space for mixture in row.mixtures), default=0.0)
        return sum(bytes_ for bytes_, _ in made), max(0.0, copied - space)

    def _made(self, uses: Sequence[Use], degrees: Degrees) -> Sequence[tuple[float, tuple[str, ...]]]:
        """Bytes of every gradient of a weight in the compute dtype, and the axes that split it."""
        needs = [(use.value.numel, renamed(use.need, degrees).split_axes) for use in uses if use.trainable]
        return [(numel / degrees.mesh.size(split) * self.itemsize, tuple(split)) for numel, split in needs]


def _reducing(roots: Array, reduced: Array, several: bool) -> dict[str, Array]:
    """Of every position what is being reduced ``behind`` it while it runs, the root's of the micro-batch before where no block
    is, and what is reduced last where a stage begins with it, a block's or the ``root``'s. ``reduced``: [n, 2], of all sets of
    ranks but the last and of that."""
    last, root = np.where(roots, 0.0, reduced[:, 1]), np.where(roots, reduced.sum(axis=1), 0.0) * several
    behind, first, there, ends = np.zeros(len(roots)), np.zeros(len(roots)), 0.0, True
    for at in reversed(range(len(roots))):
        behind[at] = there
        if last[at]:
            there, ends = last[at], False
        there += root[at] * ends
        first[at] = there * (several and not ends)
    return {"behind": behind, "reduced": first, "root": root}


def _received(placement: Placement, rows: Sequence[RowGradients], several: bool) -> tuple[Array, Array]:
    """Bytes of every position outside of the blocks while it runs: of what the last gather before it received, which stays to
    the end of the forward, and of that what is there only if the block ahead of it is in its stage, whose next gather begins
    with the backward. With one micro-batch the root's is there where no block is; it counts as no more than the block's."""
    found, block = np.zeros((2, len(placement.sequence))), 0.0
    for at, row in enumerate(placement.sequence):
        own = sum(one.made for one in rows[row].families if one.shards > 1 and (one.zero == 3 or not several))
        if placement.rows[row].block:
            block = own
        else:
            found[:, at] = block, block - min(own, block) * (not several)
    return found[0], found[1]
