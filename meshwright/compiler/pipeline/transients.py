"""What a stage holds beside what its units keep of the micro-batches in flight, while it runs backward.

Units run from the last to the first. While one runs, those behind it have let go of what they ``released``; the gradients of
the one behind it are being reduced, in one buffer of the stage, and the parameters of the one before it are gathered. At the
end the root's gradients are reduced, and their buffer stays until the next micro-batch's backward reduces another unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BESIDE = (
    "transient", "released", "behind", "gathered", "ended", "reduced", "root", "closed", "last", "freed", "finished", "first",
    "early", "began", "came", "stays",
)
"""Bytes of units:

transient: there only while the unit runs
released: of those it saves, what is not there while an earlier unit runs, less what comes in their place
behind: there too while it runs, if another one of its stage comes behind it, whose gradients are still being reduced
gathered: of ``transient``, what is there for one before it
ended: alive as its own gradients are reduced, in the place of all these
reduced: what a stage's last reduction leaves that begins with it, and has no root
root: what the reduction of the root's gradients leaves, at the end of the stage
closed: alive as these are reduced
last: alive as the gradients of a step's last micro-batch are reduced with their sums
freed: as ``released``, of that micro-batch
finished: as ``closed``, of that micro-batch
first: alive in W in a stage that has all of a split backward there, as the first: no gradient leaves it
early: as ``last``, in a stage's first W, with those of the unit's sums that are there by then
began: as ``first``, in such a W
came: sums that such a W makes
stays: gradients of later such Ws that are there as they were made to the end of the stage

Where a backward is split ``transient`` and ``released`` are those of I, ``last`` and ``freed`` those of W.
"""


class Transients(NamedTuple):
    """Bytes of stages beside what their units keep.

    transient: the most while one runs backward for the first time
    later: so much more afterwards, when what its last reduction left is still there
    left: what that leaves while other stages of the rank run
    final: the most while it runs backward for the last time, with one micro-batch in flight, or a W
    early: the same of its first W, with the sums that come meanwhile
    """

    transient: np.ndarray
    later: np.ndarray
    left: np.ndarray
    final: np.ndarray
    early: np.ndarray


def beside_of(columns: np.ndarray, begin: Sequence[int]) -> Transients:
    """Of the stages that begin at each of ``begin``. ``columns``: ``BESIDE`` [16, ..., n] of units that follow each other."""
    peak, _, last = alive_at_most(columns, begin)
    released, root, closed, freed, finished = np.add.reduceat(columns[[1, 6, 7, 9, 10]], begin, axis=-1)
    most, left = np.maximum(peak, closed - released), np.where(root > 0.0, root, columns[5][..., begin])
    final = np.zeros(most.shape)
    if columns[8:11].any():
        final = np.maximum(alive_at_most(at_last(columns), begin)[0], finished - freed)
    early = alive_at_most(at_first(columns), begin)[0] if columns[12].any() else final
    return Transients(most, np.maximum(last + left - most, 0.0), left, final, early)


def at_last(columns: np.ndarray) -> np.ndarray:
    """The columns that ``alive_at_most`` reads, of a step's last micro-batch."""
    nothing = np.zeros(columns.shape[1:])
    return np.stack([columns[8], columns[9], nothing, nothing, nothing])


def at_first(columns: np.ndarray) -> np.ndarray:
    """The same, of a stage's first W."""
    nothing = np.zeros(columns.shape[1:])
    return np.stack([columns[12], columns[9] - columns[14], nothing, nothing, nothing])


def alive_at_most(columns: np.ndarray, begin: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of ``beside_of`` at the moments of units, without what the stage's last reduction left: if the stage ends with
    those that begin at each of ``begin``, if others follow, and as the last unit runs."""
    running, released, behind, gathered, ended = columns[:5]
    sums = np.cumsum(released, axis=-1)
    last = np.array([*begin[1:], released.shape[-1]], dtype=np.int64) - 1
    running = running.copy()
    running[..., begin] -= gathered[..., begin]
    alive = np.maximum(running + behind, ended)
    runs = running[..., last]
    alive[..., last] = np.maximum(runs, ended[..., last])
    peak = np.maximum.reduceat(alive + sums, begin, axis=-1) - sums[..., last]
    return peak, np.maximum(peak, runs + behind[..., last]), runs
