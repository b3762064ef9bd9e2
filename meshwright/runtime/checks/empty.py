"""Parameters that are chosen by their numbers, which a rank that holds one stage of a pipeline counts for itself.

``AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(parallel.parameters())])`` counts the rank's own parameters, so
every stage begins anew, and no rank can tell. So it is with groups that are added later, with options that are changed later,
with an optimizer of ``list(parallel.parameters())[-2:]``, and with ``requires_grad_(False)`` of the others. A choice is what
becomes of each of a rank's parameters, in their order (``Choice``). It may be one by numbers in two cases:

    ``may_be_numbered``    on every stage each option has one run of parameters, and the runs of all stages have the same
                           options, one after the other, from the front or from the back
    ``of_numbers``         so from the front on two stages, whatever the others have, while parameters of one name (but for its
                           numbers, or without its module's where it has none) have different options; or a weight that two
                           stages share has different ones

The first is refused although it may have been chosen by names that are alike on every stage (one layer on each, say): nobody
can tell. Who chooses by names gives the optimizer (name, parameter) pairs, and freezes the model before it is parallelized.
What numbers choose in steps (every second one) is warned of: two stages have the same options from the front, parameter by
parameter, while parameters of one name but for its numbers have different ones (``in_steps``).

A plain list of parameters a stage may have none of.

``AdamW([p for name, p in parallel.named_parameters() if "layers.0" in name])`` is given an empty list on the ranks of other
stages. Torch's ``Optimizer`` refuses that, on those ranks alone, while the others train and wait for them, and has no hook that
is asked before. So its constructor is wrapped, as long as there is a parallel module with a pipeline and no longer, and such an
optimizer is given ``Nothing`` instead.

A list that is empty on every rank is a mistake, as on one device. So every rank knows the optimizers that
were made (``Made``), and where all ranks have nothing for one, all raise at the next call.

A rank that has one parameter shows nothing of what was counted. It is warned of where the others choose so that they may have
counted (``of_one``), and when the module is built where every rank has one (``all_of_one``).

The numbers of one stage are in the state dict of an optimizer, too: it says the parameters' names beside (``_NAMES``), and that
of other parameters is not loaded.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, starmap
from operator import eq
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.ir.program import Stored
from meshwright.runtime.checks import edits
from meshwright.runtime.checks.edits import role_of
from meshwright.runtime.state.optimizer import NOTHING, Nothing, Tried, nothing_on
from meshwright.runtime.verdict import interrupting

FOR_NOBODY = (
    "an optimizer was made of an empty list of parameters, on every rank; a single process raises as it is made. See which "
    "names parallel.named_parameters() has: they are the model's"
)
BY_NUMBER = (
    "an optimizer's options follow one after the other in the same way on every stage of the pipeline, as if each stage had "
    "counted its own parameters: parallel.parameters() are this rank's alone, so the first of them is another one on every "
    "stage. Choose by the names in parallel.named_parameters(), which are the model's; where it is chosen so, give the "
    'optimizer (name, parameter) pairs: {"params": [(name, p), ...], "lr": ...}'
)
FROZEN_BY_NUMBER = (
    "parameters were frozen that follow one after the other in the same way on every stage of the pipeline, as if each stage "
    "had counted its own: parallel.parameters() are this rank's alone, so the first of them is another one on every stage. "
    "Freeze parameters of the model, before autoparallel"
)
OF_ONE = (
    "a stage of the pipeline has one parameter to train, {}. What a loop chooses by numbers of parameters (a learning "
    "rate for the first, say), which every stage counts for itself, cannot be told there from what it does to all. If it was "
    "chosen by names or shapes, all is well; else go by the names in parallel.named_parameters(), which are the model's"
)
IN_STEPS = (
    "{} in the same order on every stage of the pipeline, as if each stage had counted its own: parallel.parameters() are this "
    "rank's alone, so the first of them is another one on every stage. If it was chosen by names or shapes, all is well; else "
    "go by the names in parallel.named_parameters(), which are the model's"
)
ALL_OF_ONE = OF_ONE.format("and so has every other")
_NAMES = "meshwright.names"

Groups = tuple[tuple[str, tuple[str, ...]], ...]
"""(options, names of parameters) of each."""
Choice = tuple[str, ...]
"""What is chosen for each of a rank's parameters, in their order; each run of one option once."""


@dataclass(frozen=True)
class Chosen:
    """What this rank chose for ``of`` parameters, as the other ranks are told. ``nothing``: whether an optimizer was made that
    there was no parameter for; ``groups``: an optimizer's, without those whose parameters the caller has named and where these
    are not in order; ``choice``: empty where it was not made by numbers; ``new``: whether it is another one than at the last
    call; ``made``: before which call the optimizer was made; ``each``: the option of each parameter, in their order, where
    options have several runs and the caller has not named the parameters."""

    nothing: bool = False
    groups: Groups = ()
    choice: Choice = ()
    new: bool = False
    made: int = 0
    of: int = 0
    each: Groups = ()


def all_of_one(stored: Sequence[Stored]) -> bool:
    """Whether every rank of a pipeline that has parameters to train has one alone."""
    held = [rank for one in stored if one.trainable for rank in one.holders]
    return len(held) > 1 and len({*held}) == len(held)


def runs(options: Sequence[str]) -> Choice:
    """Each run once; empty if an option has several runs, which numbers that are counted do not make."""
    found = tuple(option for option, _ in groupby(options))
    return found if len({*found}) == len(found) else ()


def _each(options: Mapping[str, str]) -> Groups:
    """Of {name: option}; empty where options have one run each."""
    return () if runs([*options.values()]) else tuple((option, (name,)) for name, option in options.items())


def may_be_numbered(stages: Sequence[Choice]) -> bool:
    """Whether the options of all stages are the same, from the front or from the back; one option tells nothing."""
    return sum(len(one) > 1 for one in stages) > 1 and _alike(stages)


def _alike(stages: Sequence[Choice]) -> bool:
    def alike(one: Choice, other: Choice) -> bool:
        return all(map(eq, one, other)) or all(map(eq, reversed(one), reversed(other)))

    return all(stages) and all(starmap(alike, combinations(stages, 2)))


class _Known:
    """An optimizer that was ``made`` before that call, and what was known of it at the last call."""

    def __init__(self, optimizer: Optimizer, nothing: bool, made: int) -> None:
        self.optimizer, self.nothing, self.made = weakref.ref(optimizer), nothing, made
        self.before: tuple[Any, ...] = ()

    def chosen(self, order: Sequence[str], shared: Collection[str]) -> Chosen:
        """What it is now, of parameters that lie in this ``order`` on this rank. Those that stages share are the same ones
        everywhere, and not chosen by number."""
        nothing, self.nothing = self.nothing, False
        optimizer, before = self.optimizer(), self.before
        if optimizer is None or before == (_sizes(optimizer), 0):  # as most optimizers always are
            return Chosen(nothing, new=nothing, made=self.made, of=len(order))
        groups = tuple(found for group in optimizer.param_groups if (found := _group(group))[1])
        by_name = {name: options for options, names in groups for name in names}
        at = {name: i for i, name in enumerate(order)}
        places = [at.get(name, -1) for _, names in groups for name in names]
        known = places and -1 not in places
        options = {name: by_name.get(name, "") for name in order if name not in shared} if known else {}
        kinds = [_group(group)[0] for group in optimizer.param_groups]
        self.before = _sizes(optimizer), *map(kinds.index, kinds)  # rates that all fall are no news
        ordered = -1 not in places and places == sorted(places)
        choice = runs([*options.values()])
        new = nothing or (before != self.before and bool(places))
        return Chosen(nothing, groups if ordered else (), choice, new, self.made, len(order), _each(options))


def _sizes(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


class Made:
    """What a parallel module with a pipeline knows of the optimizers that were made since it was built, in their order, and of
    what was frozen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.optimizers: list[_Known] = []
        self.calls = 0
        self._frozen: tuple[bool, ...] | None = None
        self._edited: Mapping[str, str] = {}
        _telling().add(self)
        weakref.finalize(self, _as_before)

    def take(
        self, trained: Mapping[str, bool], shared: Collection[str] = (), edited: Mapping[str, str] | None = None,
    ) -> list[Chosen]:
        """What is to be compared with what the other ranks have: what is frozen, what was edited, each optimizer. ``trained``:
        {name of a parameter that was trainable when the module was built, in their order: whether it is}; ``shared``: those
        that several stages hold; ``edited``: what was done to each since the last call."""
        frozen, before = tuple(trained.values()), self._frozen
        self._frozen, self.calls = frozen, self.calls + 1
        options = {name: str(one) for name, one in trained.items() if name not in shared}
        thawed = Chosen(choice=runs([*options.values()]), new=before != frozen and not all(frozen), of=len(frozen),
                        each=_each(options))
        edited, earlier = edited or {}, self._edited
        self._edited = edited
        done = Chosen(groups=edits.groups(edited), choice=runs([one for name, one in edited.items() if name not in shared]),
                      new=len({*edited.values()}) > 1 and edited != earlier, of=len(edited))
        return [thawed, done, *(one.chosen([*trained], shared) for one in self.optimizers)]


def of_stages(ranks: Sequence[Sequence[Chosen]]) -> str | None:
    """What is wrong with what all ranks chose, if anything is. Where
    ranks did not make as many optimizers before a call, these are not compared."""
    if may_be_numbered([chosen[0].choice for chosen in ranks]):
        return FROZEN_BY_NUMBER
    for stages in _optimizers(ranks):
        if all(one.nothing for one in stages):
            return FOR_NOBODY
        if _numbered(stages):
            return BY_NUMBER
    return None


def warning_of(ranks: Sequence[Sequence[Chosen]]) -> str | None:
    """What may be wrong with what all ranks chose and did, if anything may be."""
    edited = [chosen[1] for chosen in ranks]
    if _numbered(edited):
        return edits.BY_NUMBER
    frozen, optimizers = [chosen[0] for chosen in ranks], [*_optimizers(ranks)]
    if _in_steps(frozen):
        return IN_STEPS.format("parameters were frozen")
    if any(map(_in_steps, optimizers)):
        return IN_STEPS.format("an optimizer's parameters have different options")
    every = [frozen, edited, *optimizers]
    return OF_ONE.format("and others choose one after the other") if any(map(_of_one, every)) else None


def _optimizers(ranks: Sequence[Sequence[Chosen]]) -> Iterator[Sequence[Chosen]]:
    """What all ranks chose for each optimizer."""
    for call in sorted({one.made for chosen in ranks for one in chosen[2:]}):
        optimizers = [[one for one in chosen[2:] if one.made == call] for chosen in ranks]
        if len({*map(len, optimizers)}) == 1:
            yield from zip(*optimizers, strict=True)


def _numbered(stages: Sequence[Chosen]) -> bool:
    pairs = combinations([one.groups for one in stages], 2)
    return may_be_numbered([one.choice for one in stages]) or any(starmap(of_numbers, pairs))


def _in_steps(stages: Sequence[Chosen]) -> bool:
    return any(starmap(in_steps, combinations([one.each for one in stages], 2)))


def _of_one(stages: Sequence[Chosen]) -> bool:
    """Whether a stage of one parameter may have counted as others did, which have several."""
    choices = [one.choice for one in stages]
    return any(one.of == 1 for one in stages) and any(len(one) > 1 for one in choices) and _alike(choices)


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


def in_steps(one: Groups, other: Groups) -> bool:
    """Whether each parameter of a stage has the option of the other stage's of its number, and kinds do not say so."""
    both = [(mine, theirs) for (mine, _), (theirs, _) in zip(one, other, strict=False)]
    if any(mine != theirs for mine, theirs in both) or len({*both}) < 2:
        return False
    of_kind: dict[str, set[str]] = {}
    for option, names in (*one, *other):
        of_kind.setdefault(re.sub(r"\d+", "#", names[0]), set()).add(option)
    return any(len(found) > 1 for found in of_kind.values())


def _telling() -> WeakSet[Made]:
    """Those that torch's optimizers tell of themselves."""
    init: Any = Optimizer.__init__
    if not hasattr(init, "told"):
        init = _told(init, WeakSet())
        Optimizer.__init__ = init  # type: ignore[method-assign]
        Optimizer.add_param_group = _adding(Optimizer.add_param_group)  # type: ignore[method-assign]
    told: WeakSet[Made] = init.told
    return told


def _as_before() -> None:
    """Torch's own again once there is nobody left to tell, unless somebody else put another in its place meanwhile."""
    init: Any = Optimizer.__init__
    if hasattr(init, "told") and not any(True for _ in init.told):
        Optimizer.__init__ = init.__wrapped__  # type: ignore[method-assign]
        add: Any = Optimizer.add_param_group
        if hasattr(add, "beside_empty"):
            Optimizer.add_param_group = add.__wrapped__  # type: ignore[method-assign]


def _adding(add: Callable[..., None]) -> Any:
    """Torch refuses groups with names beside groups without, and would take one that is empty on this stage for one without."""
    @functools.wraps(add)
    def added(self: Optimizer, param_group: Any) -> None:
        if isinstance(param_group, dict) and not isinstance(param_group["params"], Tensor | set):
            group, names = {**param_group, "params": list(param_group["params"])}, "param_names"
            if not group["params"] and any(names in one for one in self.param_groups):
                group[names] = []
            if names in group or any(isinstance(one, tuple) for one in group["params"]):
                for one in self.param_groups:
                    if all(isinstance(p, Nothing) for p in one["params"]):
                        one.setdefault(names, [NOTHING for _ in one["params"]])
            param_group = group
        add(self, param_group)

    added.beside_empty = True  # type: ignore[attr-defined]
    return added


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
            for made in told:
                made.optimizers.append(_Known(self, not params, made.calls))
            self.register_state_dict_post_hook(_named)
            self.register_load_state_dict_pre_hook(_check_names)
            return
        init(self, params, *args, **kwargs)

    started.told = told  # type: ignore[attr-defined]
    return started


def _names_of(optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of each group; of one that no parallel module holds ""."""
    roles = [[role_of(p) for p in group["params"]] for group in optimizer.param_groups]
    return [["" if role is None else role.name for role in group] for group in roles]


def _named(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict[_NAMES] = _names_of(optimizer)


def _check_names(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise CheckpointError for a state dict of other parameters than the optimizer's."""
    saved, own = state_dict.get(_NAMES), _names_of(optimizer)
    if saved is not None and saved != own:
        with interrupting():
            raise CheckpointError("the state dict of an optimizer is that of other parameters: it knows them by their numbers, "
                                  "and in a pipeline a rank has those of its own stages. What goes from any plan to any other "
                                  "is parallel.save(folder, optimizer) and parallel.load(folder, optimizer)")
