"""Published models with dropout, attention that drops and drop paths, on four processes, planned by prices that are drawn as
those of ``tests.noisy`` are: what was drawn is shown, and one process that is given it trains alike.

    python -m tests.dropped                   every family of ``tests.vision`` that draws so, under every way of ``tests.noisy``
    python -m tests.dropped --drawn 3 bert    each whose name holds a word under one way
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence

import torch

from meshwright.errors import MeshwrightError
from tests.drawing import published, trained
from tests.noisy import WAYS, drawn_prices
from tests.strangers import judge
from tests.trials import report
from tests.vision import FAMILIES


def trials(rank: int, way: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """(family, what came out) under a way."""
    torch.set_num_threads(1)
    return [(name, _unseen(name) or _tried(rank, way, name)) for name in names]


def _unseen(name: str) -> str:
    """Why a family cannot be tried: one process that is given the numbers draws others."""
    model, batch = published(name)
    given = model(batch)["drawn"]
    if not given:
        return "refused: nothing is drawn"
    before = torch.get_rng_state()
    copy.deepcopy(model)(batch, given)
    return "" if torch.equal(before, torch.get_rng_state()) else "refused: not all that is drawn is shown"


def _tried(rank: int, way: str, name: str) -> str:
    try:
        with drawn_prices(f"{way} {name}"):
            problems, _ = trained(rank, name, [WAYS[way]])
    except MeshwrightError as error:
        return f"refused: {type(error).__name__}: {error}"
    return "; ".join(problems[:3]) or "equal"


def main(arguments: Sequence[str]) -> int:
    """Print what is neither equal nor refused on every rank in words that a user can act on."""
    from tests import dropped

    return report(__doc__, arguments, dropped.trials, FAMILIES, WAYS, usual=WAYS, four=tuple(WAYS), judge=judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
