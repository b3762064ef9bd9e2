"""The reshards between every two of some shardings, as arrays: found once, priced for each mesh and each size.

The steps from one sharding to another depend on neither, and the tables of a search ask for the same ones thousands of times:
of other layers, of other numbers of samples, on meshes of other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.reshard import reshard
from meshwright.ir.sharding import Sharding, ShardingError

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Paths:
    """From sources to targets.

    steps: (kind, axis, axes that split the collective's full buffer), each once
    counts: [sources, targets, steps] how often a reshard has the step
    impossible: [sources, targets] no steps lead there
    same: [sources, targets] both lie in the same place
    gathered: [sources, targets] what lies split is read differently on each rank
    """

    steps: tuple[tuple[str, str, tuple[str, ...]], ...]
    counts: NDArray[np.int8]
    impossible: Flags
    same: Flags
    gathered: Flags


@lru_cache(maxsize=1 << 12)
def paths(sources: tuple[Sharding, ...], targets: tuple[Sharding, ...]) -> Paths:
    """The reshards of all pairs."""
    known: dict[tuple[str, str, tuple[str, ...]], int] = {}
    found: list[tuple[int, int, int]] = []
    shape = len(sources), len(targets)
    impossible, same, gathered = (np.zeros(shape, dtype=bool) for _ in range(3))
    resting = [target.at_rest() for target in targets]
    for a, source in enumerate(sources):
        here = source.at_rest()
        for b, target in enumerate(targets):
            try:
                steps = reshard(source, target)
            except ShardingError:
                impossible[a, b] = True
                continue
            for step in steps:
                side = step.after if step.kind in ("all_gather", "gather_vary") else step.before
                found.append((a, b, known.setdefault((step.kind, step.axis, side.split_axes), len(known))))
            same[a, b] = here == resting[b]
            gathered[a, b] = not same[a, b] and bool(target.varying) and not source.partial
    counts = np.zeros((*shape, len(known)), dtype=np.int8)
    for at in found:
        counts[at] += 1
    return Paths(tuple(known), counts, impossible, same, gathered)
