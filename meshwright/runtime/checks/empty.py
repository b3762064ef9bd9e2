"""Optimizers that one process would make otherwise than a rank that holds one stage of a pipeline does.

``AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(parallel.parameters())])`` counts the rank's own parameters, so
every stage begins anew, and no rank can tell. It is known by this (``of_numbers``): groups in the order of the parameters have
the same options, one after the other, on two stages, while parameters of one name (but for its numbers, or without its module's
where it has none) have different ones; or a weight that two stages share has different ones. Options by name, by layer or by
shape are not like that; who has some that are gives the optimizer (name, parameter) pairs.

A plain list of parameters a stage may have none of.

``AdamW([p for name, p in parallel.named_parameters() if "layers.0" in name])`` is given an empty list on the ranks of other
stages. Torch's ``Optimizer`` refuses that, on those ranks alone, while the others train and wait for them, and has no hook that
is asked before. So its constructor is wrapped, as long as there is a parallel module with a pipeline and no longer, and such an
optimizer is given ``Nothing`` instead.

A list that is empty on every rank is a mistake, as on one device. So every rank keeps what the optimizers that were made since
the last call are of (``Made``), and where all ranks have nothing for one, all raise at the next call.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.runtime.state.optimizer import Tried, nothing_on
from meshwright.runtime.whole import role_of

FOR_NOBODY = (
    "an optimizer was made of an empty list of parameters, on every rank; a single process raises as it is made. See which "
    "names parallel.named_parameters() has: they are the model's"
)
BY_NUMBER = (
    "an optimizer's groups have the same options, one after the other, for other parameters on every stage of the pipeline, as "
    "if each stage had counted its own: parallel.parameters() are this rank's alone, so the first of them is another one on "
    "every stage. Choose options by the names in parallel.named_parameters(), which are the model's; where they are chosen so, "
    'give the optimizer (name, parameter) pairs: {"params": [(name, p), ...], "lr": ...}'
)

Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""(options, names of parameters) of each."""


@dataclass(frozen=True)
class OptimizerMade:
    """An optimizer on this rank: ``nothing``: whether there was no parameter for it; ``groups``: without those whose parameters
    the caller has named."""

    nothing: bool
    groups: Groups

    @property
    def told(self) -> bool:
        """Whether the other ranks are to be asked."""
        return self.nothing or len(self.groups) > 1

    def ordered(self, order: Mapping[str, int]) -> OptimizerMade:
        """Without groups, unless these are of the parameters in ``order`` one after the other."""
        at = [order.get(name, -1) for _, names in self.groups for name in names]
        return self if -1 not in at and at == sorted(at) else replace(self, groups=())


class Made:
    """What a parallel module with a pipeline knows of the optimizers that were made since its last call, in their order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.optimizers: list[OptimizerMade] = []
        _telling().add(self)
        weakref.finalize(self, _as_before)

    def take(self) -> list[OptimizerMade]:
        """What is known; it is forgotten here."""
        taken, self.optimizers = self.optimizers, []
        return taken


def of_stages(ranks: Sequence[Sequence[OptimizerMade]]) -> str | None:
    """What is wrong with what all ranks made, if anything is. Ranks that did not make as many are not compared."""
    if len({len(made) for made in ranks}) > 1:
        return None
    for of_ranks in zip(*ranks, strict=True):
        if all(one.nothing for one in of_ranks):
            return FOR_NOBODY
        if any(of_numbers(one.groups, other.groups) for one, other in combinations(of_ranks, 2)):
            return BY_NUMBER
    return None


def of_numbers(one: Groups, other: Groups) -> bool:
    """Whether the groups of two stages seem to count each stage's own parameters."""
    mine, theirs = ({name: options for options, names in groups for name in names} for groups in (one, other))
    if any(mine[name] != theirs[name] for name in mine.keys() & theirs.keys()):
        return True
    options = [[x for x, _ in groups] for groups in (one, other)]
    same = all(x == y for x, y in zip(*options, strict=False))
    if not same or min(map(len, options)) < 2 or any(len({*each}) < len(each) for each in options) or mine == theirs:
        return False
    of_kind: dict[str, set[str]] = {}
    for name, found in {**mine, **theirs}.items():
        kind = re.sub(r"\d+", "#", name)
        of_kind.setdefault(kind if kind != name else name.rpartition(".")[2], set()).add(found)
    return any(len(found) > 1 for found in of_kind.values())


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


def _group(group: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """(options, names of the parameters), without those whose names the caller has given or that are nobody's."""
    options = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()
               if key not in ("params", "param_names")}
    roles = [] if "param_names" in group else [role_of(p) for p in group["params"]]
    return repr(sorted(options.items(), key=repr)), tuple(role.name for role in roles if role is not None)


def _told(init: Callable[..., None], told: WeakSet[Made]) -> Any:
    @functools.wraps(init)
    def started(self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        if told and not isinstance(params, Tensor | Tried):
            params = list(params)
            init(self, params or [nothing_on(next(iter(told)).device).requires_grad_()], *args, **kwargs)
            groups = tuple(found for group in self.param_groups if (found := _group(group))[1])
            for made in told:
                made.optimizers.append(OptimizerMade(not params, groups))
            return
        init(self, params, *args, **kwargs)

    started.told = told  # type: ignore[attr-defined]
    return started
