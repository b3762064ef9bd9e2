"""What communication costs when it runs beside compute: only what stays exposed.

A collective of m seconds beside c seconds of compute slows the compute by the device's ``contention`` k while it runs (it takes
multiprocessors and memory bandwidth), so together they take (``overlapped``)

    max(m, c + m (1 - 1/k))                                   exposed: that minus c

Parameters of blocks 0..n-1 that are gathered before use (ZeRO-3), each while the block before it runs (``prefetched``):

    g_0 + sum_i overlapped(c_i, g_i+1)                            g_n = 0

Gradients reduced as soon as each block's backward is done (``reduced``), one collective at a time on the link:

    max_j (b_0 + ... + b_j + r_j + ... + r_n-1)               the flow of two machines; plus the slowdown of the compute

ZeRO-3's backward gathers the next block and reduces the last one at the same time: both count on the link of that block
(``gathered_and_reduced``). Ring attention over P ranks sends the next keys and values beside each of its P steps but the last
(``ring``). Collectives that overlap each other on one link share it: together they take the sum (``together``).

A planner that prices block by block uses ``overlapped`` for each block with the collectives that run during it. All functions
take numbers or arrays of candidates. Sources: Zhao et al. 2023 (FSDP), Liu et al. 2023 (ring attention); k of A100-like devices
is the 1.1256 that Galvatron measures (``hardware.csv``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Seconds = TypeVar("Seconds", float, NDArray[np.float64])


def overlapped(compute: Seconds, communication: Seconds, contention: float = 1.0) -> Seconds:
    """Seconds of compute and communication that run at the same time.

    >>> float(overlapped(10.0, 4.0)), float(overlapped(10.0, 4.0, 2.0)), float(overlapped(10.0, 40.0, 2.0))
    (10.0, 12.0, 40.0)
    """
    result: Seconds = np.maximum(communication, compute + communication * (1.0 - 1.0 / contention))
    return result


def exposed(compute: Seconds, communication: Seconds, contention: float = 1.0) -> Seconds:
    """Seconds by which communication beside compute makes it longer."""
    return overlapped(compute, communication, contention) - compute


def prefetched(compute: Sequence[Seconds], gathers: Sequence[Seconds], contention: float = 1.0) -> Seconds:
    """Seconds of blocks in the order they run, each gathered while the one before it runs; the first gather waits alone."""
    total = gathers[0]
    for index, block in enumerate(compute):
        after = gathers[index + 1] if index + 1 < len(gathers) else 0.0 * gathers[0]
        total = total + overlapped(block, after, contention)
    return total


def reduced(backward: Sequence[Seconds], reductions: Sequence[Seconds], contention: float = 1.0) -> Seconds:
    """Seconds of blocks' backward, in the order they run, with each block's gradients reduced behind the next blocks."""
    slowed, behind = [], 0.0 * reductions[0]
    for block, reduction in zip(backward, reductions, strict=True):
        hidden = np.minimum(behind, block)
        slowed.append(block + hidden * (1.0 - 1.0 / contention))
        behind = behind - hidden + reduction
    rest = sum(reductions[1:], reductions[0])
    done, total = 0.0 * backward[0], 0.0 * backward[0]
    for block, reduction in zip(slowed, reductions, strict=True):
        done = done + block
        total = np.maximum(total, done + rest)
        rest = rest - reduction
    return total


def gathered_and_reduced(
    backward: Sequence[Seconds], gathers: Sequence[Seconds], reductions: Sequence[Seconds], contention: float = 1.0
) -> Seconds:
    """ZeRO-3's backward, blocks in the order they run: beside each the next gather and the reduction before it."""
    total = gathers[0]
    for index, block in enumerate(backward):
        link = 0.0 * block
        if index + 1 < len(gathers):
            link = link + gathers[index + 1]
        if index:
            link = link + reductions[index - 1]
        total = total + overlapped(block, link, contention)
    return total + reductions[-1]


def ring(compute: Seconds, send: Seconds, ranks: int, contention: float = 1.0) -> Seconds:
    """Ring attention: ``compute`` and ``send`` of one of its ``ranks`` steps."""
    return (ranks - 1) * overlapped(compute, send, contention) + compute


def in_pieces(communication: float, pieces: int, contention: float = 1.0) -> float:
    """Exposed seconds of an all-gather or a reduce-scatter cut into ``pieces``, one a rank, each sent while the product works
    on another: the first (or the last) waits alone, the others only slow the product down.

    >>> in_pieces(8.0, 4), in_pieces(8.0, 4, 2.0)
    (2.0, 5.0)
    """
    return communication * (1 + (pieces - 1) * (1.0 - 1.0 / contention)) / pieces


def together(seconds: Mapping[str, Sequence[float]]) -> float:
    """Seconds of collectives that run at the same time, by the link each uses: those of one link share it.

    >>> together({"nvlink": [1.0, 2.0], "nic": [2.5]})
    3.0
    """
    return max((sum(items) for items in seconds.values()), default=0.0)
