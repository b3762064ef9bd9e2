"""Models of ``tests.strangers`` on four processes, planned by prices that are drawn: layouts are taken that no real prices
would choose, and are to be as right as others. Equal, or refused on every rank in words that a user can act on.

    python -m tests.noisy                   every model under every way of WAYS, a line for each that did not come out so
    python -m tests.noisy --drawn 3 norm    each model whose name holds a word under one way
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from numpy.typing import NDArray

from meshwright.compiler.placement.blockmodel import Builder
from meshwright.compiler.placement.costs import FORWARD, Costs
from meshwright.compiler.structure.structure import Structure
from meshwright.ir.graph import Op
from tests.strangers import MODELS, judge, tried
from tests.trials import report

WAYS: Mapping[str, Mapping[str, Any]] = {
    "anything": {}, "anything, in micro-batches": {"microbatches": 4}, "anything, zero 3": {"zero": 3},
    "dp": {"dp": 4, "zero": 2, "microbatches": 2, "recompute": "full"},
    "hsdp": {"dp": 4, "shard": 2, "zero": 3, "microbatches": 2},
    "tp": {"dp": 1, "tp": 4}, "tp, sequence": {"tp": 4, "sequence_parallel": True, "recompute": "full"},
    "cp": {"dp": 1, "cp": 4}, "dp x cp": {"dp": 2, "cp": 2, "zero": 3, "microbatches": 2},
    "dp x tp": {"dp": 2, "tp": 2, "zero": 3, "microbatches": 4, "recompute": "selective"},
    "dp x tp, sequence": {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2, "sequence_parallel": True},
    "cp x tp": {"dp": 1, "cp": 2, "tp": 2},
    "cp x tp, sequence": {"cp": 2, "tp": 2, "microbatches": 2, "sequence_parallel": True},
    "pp x cp": {"pp": 2, "cp": 2, "dp": 1, "microbatches": 2},
    "pp x tp": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "zb"},
    "pp x dp": {"pp": 2, "dp": 2, "tp": 1, "zero": 1, "microbatches": 4, "schedule": "zbv"},
}


@contextmanager
def drawn_prices(seed: object) -> Iterator[None]:
    """Within, what an operator takes under each of its choices is drawn, and collectives take next to nothing."""
    priced, collective = Builder._prices, Costs.collective

    def prices(self: Builder, op: Op, found: Sequence[dict[str, str]], placed: Any) -> NDArray[Any]:
        unary = priced(self, op, found, placed)
        unary[:, FORWARD] += [zlib.crc32(f"{seed} {op.name} {sorted(one.items())}".encode()) / 2**42 for one in found]
        return unary

    with (
        mock.patch.object(Builder, "_prices", prices),
        mock.patch.object(Structure, "twin", lambda self, op: op.name),
        mock.patch.object(Costs, "collective", lambda self, *what: collective(self, *what) / 10_000),
    ):
        yield


def trials(rank: int, way: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """(model, what came out) under a way."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        with drawn_prices(f"{way} {name}"):
            found.append((name, tried(name, WAYS[way])))
    return found


def main(arguments: Sequence[str]) -> int:
    """Print what is neither equal nor refused on every rank in words that a user can act on."""
    from tests import noisy

    return report(__doc__, arguments, noisy.trials, MODELS, WAYS, usual=WAYS, four=tuple(WAYS), judge=judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
