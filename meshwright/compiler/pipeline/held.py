"""How many micro-batches a rank surely holds, before any table is made: what bounds on memory count with.

A count is int [.., 2]: micro-batches between F and B (or I), and between I and W. A rank may hold more at other moments;
what is listed its table does hold at once (``tests/test_stages.py``).
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.schedules import SPLIT_BACKWARD, V_SHAPED
from meshwright.cost.timeline import warmup_forwards


def held(name: str, pp: int, microbatches: int) -> np.ndarray:
    """Of ranks of several stages at some moments, whatever their number: int [pp, k, 2, 3], of a rank's first stage, each one
    between, and its last one.

    After the warm-up forwards and backwards alternate, and the first backwards are all of the last stage.
    """
    ranks = np.arange(pp)[:, None]
    if name in V_SHAPED:
        warm = warmup_forwards(name, pp, 2, microbatches)
        found = np.zeros((pp, 1, 2, 3), dtype=np.int64)
        found[:, 0, 0, 0], found[:, 0, 0, 2] = warm[:pp], warm[: pp - 1 : -1]
        return found
    split = name in SPLIT_BACKWARD
    in_turn = microbatches // max(1, microbatches // pp)
    done = np.concatenate(np.broadcast_arrays(0 * ranks, np.minimum(ranks, in_turn), in_turn // 2, in_turn), axis=1)
    forwards = (1 if split else 2) * (pp - 1 - ranks) + 1 + done  # since the last stage ran its first
    again = np.clip(forwards - in_turn, 0, in_turn) * (in_turn < microbatches)
    between, last = np.full_like(done, in_turn), np.minimum(forwards, in_turn) - done
    full = np.stack([in_turn + again, between, last], axis=-1)
    half = np.stack([0 * done, 0 * done, np.minimum(done, ranks) * split], axis=-1)
    return np.stack([full, half], axis=2)


def held_alone(name: str, pp: int, microbatches: int) -> np.ndarray:
    """Of ranks of one stage at some moments, the fullest among them: int [pp, k, 2], as in ``Table.in_flight``."""
    if name == "gpipe":
        return np.array([[[microbatches, 0]]] * pp)
    ranks = np.arange(pp)[:, None]
    done = np.concatenate([0 * ranks, np.minimum(ranks, microbatches)], axis=1) if name in SPLIT_BACKWARD else 0 * ranks
    return np.stack([np.minimum(pp - ranks + done, microbatches) - done, done], axis=-1)


def least_held(name: str, pp: int, microbatches: int, alone: bool) -> int:
    """Micro-batches that every unit is held for at once, wherever it is: at each rank's fullest moment in this sense.
    ``alone``: of one stage a rank, else of several."""
    if alone:
        return int(held_alone(name, pp, microbatches).sum(axis=-1).max(axis=1).min())
    counts = held(name, pp, microbatches).sum(axis=2)
    return int(counts[..., [0, 2] if name in V_SHAPED else [0, 1, 2]].min(axis=-1).max(axis=1).min())


def entered(name: str, pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    """Of what a rank holds at once, what came from another rank, at least: int [pp]."""
    later = np.arange(pp) > 0
    if virtual_stages == 1:
        return np.asarray(held_alone(name, pp, microbatches).sum(axis=-1).max(axis=1) * later)
    full = held(name, pp, microbatches)[:, :, 0]
    return np.asarray((full[..., 0] * later[:, None] + (virtual_stages - 2) * full[..., 1] + full[..., 2]).max(axis=1))
