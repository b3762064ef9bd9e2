"""How many micro-batches a rank surely holds, before any table is made: what bounds on memory count with.

A count is int [.., 3]: micro-batches between F and B (or I), between I and W, and whether summed gradients are there; at the
end of a step these are, and nothing else. A rank may hold more at other moments; what is listed its table does hold at once
(``tests/test_stages.py``). A schedule without closed forms is taken to hold the least that any must: one micro-batch of
everything, when it comes back to the rank's last stage.
"""

from __future__ import annotations

import numpy as np

from meshwright.ir.schedules import schedule_of

END = np.array([0, 0, 1])[:, None]
"""What a rank holds of every part when a step's backwards are done."""


def in_flight(name: str, pp: int, virtual_stages: tuple[int, int], microbatches: int) -> np.ndarray | None:
    """What ranks hold at some moments, with any number of stages a rank from the first to the second of ``virtual_stages``:
    int [pp, k, 3, parts], of the one stage, of the first and the last, or of the first, each one between and the last. None
    where no closed form says it."""
    closed = schedule_of(name).closed
    if closed is None:
        return None
    if virtual_stages == (1, 1):
        found = None if closed.alone is None else closed.alone(pp, microbatches)[..., None]
    else:
        found = None if closed.in_flight is None else closed.in_flight(pp, microbatches)[..., parts(virtual_stages)]
    return None if found is None else np.concatenate([found, END + 0 * found[:, :1]], axis=1)


def parts(virtual_stages: tuple[int, int]) -> list[int]:
    """Which of a rank's first stage, all between and its last one there are, of ranks of several."""
    return [0, 2] if virtual_stages[1] == 2 else [0, 1, 2]


def least_in_flight(name: str, pp: int, microbatches: int, alone: bool) -> tuple[int, bool]:
    """Micro-batches that every unit is held for at once, wherever it is: at each rank's fullest moment in this sense; whether
    summed gradients of all are there then. ``alone``: of one stage a rank, else of several."""
    closed = schedule_of(name).closed
    counts = in_flight(name, pp, (1, 1) if alone else (2, 2 if closed is not None and closed.turns else 3), microbatches)
    if counts is None:
        return 1, False
    held, summed = counts[:, :, :2].sum(axis=2).min(axis=-1), counts[:, :, 2].min(axis=-1)  # [pp, k] each
    fullest = (2 * held + summed).max(axis=1)
    return int((fullest // 2).min()), bool((fullest % 2).all())


def passed_on(name: str, pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    """Of values and gradients that a rank holds at once, those that come from another rank or go to one, beside what units
    save, at least at each of its moments: int [pp]. They are copies of what the micro-batches in flight handed on, and what was
    received and waits to be read; what they were handed may be among what is saved."""
    schedule = schedule_of(name)
    closed, goes_on = schedule.closed, np.arange(pp) != schedule.stage_rank(pp, virtual_stages)[-1]
    counts = in_flight(name, pp, (virtual_stages, virtual_stages), microbatches)
    if closed is None or counts is None:
        return np.zeros(pp, dtype=np.int64)
    waiting = closed.waiting(pp, virtual_stages, microbatches)
    if virtual_stages == 1:
        return np.asarray(counts[:, :, :2, 0].sum(axis=-1).min(axis=1) * goes_on + waiting)
    full = counts[:, :, 0]
    between = (virtual_stages - 2) * full[..., 1] if virtual_stages > 2 else 0
    return np.asarray((full[..., 0] + between + full[..., -1] * goes_on[:, None]).min(axis=1) + waiting)
