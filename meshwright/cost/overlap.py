"""What communication costs when it runs beside compute: only what stays exposed.

A collective of m seconds beside c seconds of compute slows the compute by the device's ``contention`` k while it runs (it takes
multiprocessors and memory bandwidth), so together they take (``overlapped``)

    max(m, c + m (1 - 1/k))                                   exposed: that minus c

Ring attention over P ranks sends the next keys and values beside each of its P steps but the last (``ring``). The planner
prices block by block: ``overlapped`` for each block with the collectives that run during it. Tensor-parallel collectives in
pieces (``in_pieces``) are those of Transformer Engine's ring exchange (``comm_gemm_overlap.cpp``, split_overlap_ag and
split_overlap_rs).

Sources: Liu et al. 2023 (ring attention); k of A100-like devices is the 1.1256 that Galvatron measures (``hardware.csv``).
"""

from __future__ import annotations

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


def ring(compute: Seconds, send: Seconds, ranks: int, contention: float = 1.0) -> Seconds:
    """Ring attention: ``compute`` and ``send`` of one of its ``ranks`` steps."""
    return (ranks - 1) * overlapped(compute, send, contention) + compute


def in_pieces(communication: float, sums: float = 0.0, contention: float = 1.0) -> float:
    """Exposed seconds of an all-gather or a reduce-scatter cut into pieces, one a rank, and exchanged in a ring beside the
    product: a rank works on its own piece while the first of the others comes (of a reduce-scatter last, while the last one
    leaves), so that each of the transfers has a product beside it and only slows that down. ``sums``: seconds in which a
    reduce-scatter's pieces are added up at the end.

    >>> in_pieces(8.0), in_pieces(8.0, 1.0, 2.0)
    (0.0, 5.0)
    """
    return communication * (1.0 - 1.0 / contention) + sums
