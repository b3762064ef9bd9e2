"""Optimizers of a plain list of parameters, which a stage of a pipeline may have none of.

``AdamW([p for name, p in parallel.named_parameters() if "layers.0" in name])`` is given an empty list on the ranks of other
stages. Torch's ``Optimizer`` refuses that, on those ranks alone, while the others train and wait for them, and has no hook that
is asked before. So its constructor is wrapped, as long as there is a parallel module with a pipeline and no longer, and such an
optimizer is given ``Nothing`` instead.

A list that is empty on every rank is a mistake, as on one device. So every rank keeps for which of the optimizers that were
made since the last call it had nothing (``Made``), and where all ranks have nothing for one, all raise at the next call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.runtime.state.optimizer import Tried, nothing_on

FOR_NOBODY = (
    "an optimizer was made of an empty list of parameters, on every rank; a single process raises as it is made. See which "
    "names parallel.named_parameters() has: they are the model's"
)


class Made:
    """What a parallel module with a pipeline knows of the optimizers that were made since its last call: for each, in their
    order, whether there was nothing for it on this rank."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.of_nothing: list[bool] = []
        _telling().add(self)
        weakref.finalize(self, _as_before)

    def take(self) -> list[bool]:
        """What is known; it is forgotten here."""
        taken, self.of_nothing = self.of_nothing, []
        return taken


def of_nobody(ranks: Sequence[Sequence[bool]]) -> str | None:
    """What is wrong with what all ranks made, if anything is. Ranks that did not make as many are not compared."""
    if len({len(made) for made in ranks}) == 1 and any(all(one) for one in zip(*ranks, strict=True)):
        return FOR_NOBODY
    return None


def _telling() -> WeakSet[Made]:
    """Those that torch's optimizers tell of themselves."""
    init: Any = Optimizer.__init__
    if not hasattr(init, "told"):
        init = _told(init, WeakSet())
        Optimizer.__init__ = init  # type: ignore[method-assign]
    told: WeakSet[Made] = init.told
    return told


def _as_before() -> None:
    """Torch's own again once there is nobody left to tell, unless somebody else put another in its place meanwhile."""
    init: Any = Optimizer.__init__
    if hasattr(init, "told") and not any(True for _ in init.told):
        Optimizer.__init__ = init.__wrapped__  # type: ignore[method-assign]


def _told(init: Callable[..., None], told: WeakSet[Made]) -> Any:
    @functools.wraps(init)
    def started(self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        if told and not isinstance(params, Tensor | Tried):
            params = list(params)
            for made in told:
                made.of_nothing.append(not params)
            params = params or [nothing_on(next(iter(told)).device).requires_grad_()]
        init(self, params, *args, **kwargs)

    started.told = told  # type: ignore[attr-defined]
    return started
