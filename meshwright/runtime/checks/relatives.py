"""Who else has the parameters that a parallel module was built of: in one process all would use one set, here each has its own.

The model itself has them: see ``checks.written``.

Other parallel modules have them too: of models that share layers (an actor and its critic), or of one model that is
parallelized twice (for two lengths). A call of one of these is refused, unless something was written into it since both are
there (who copies weights from one to the other writes), if a call of the other one recorded gradients since, and what both have

- has changed there, or
- belongs to two models, and is trained there: their gradients would be added up.

Their contents are compared by digests of evenly spaced elements, and only as long as there is such another module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.errors import RunError
from meshwright.runtime.checks.calls import digest
from meshwright.runtime.checks.strangers import watch_optimizers
from meshwright.runtime.checks.tensors import Original, TensorPlace
from meshwright.runtime.checks.written import TensorsOfModel
from meshwright.runtime.groups import Groups
from meshwright.runtime.state.layout import local_of
from meshwright.runtime.state.optimizer import Nothing


class Relatives:
    """What one parallel module knows of the others."""

    def __init__(
        self, parallel: nn.Module, model: nn.Module | None, before: Sequence[Original], places: Sequence[TensorPlace],
        groups: Groups,
    ) -> None:
        """``before``: the parameters of ``model``, of which ``parallel`` was built; ``places``: what this rank has of them."""
        at_work = list[str]()
        watch_optimizers(parallel, before, at_work)
        self._written = TensorsOfModel(model, {place.fqn: place for place in places}, groups, at_work)
        self._parallel, self._model, self._before = parallel, None if model is None else weakref.ref(model), before
        self._met: list[_Met] = []
        self._recorded = 0
        mine = self._origins()
        for other in [*_LIVING] if mine else ():
            its = other._origins()
            shared = sorted(mine.keys() & its.keys(), key=mine.__getitem__)
            for one, two, names in ((self, other, its), (other, self, mine)) if shared else ():
                there = [names[key] for key in shared]
                one._met.append(_Met(weakref.ref(two), there, one._contents(), two._contents(there), two._recorded))
        if mine:
            _LIVING.add(self)

    def check(self, recording: bool) -> None:
        """Raise RunError if the model or one of the others was used as if both had the same weights. ``recording``: whether
        the coming call records gradients."""
        self._written.check()
        for met in [*self._met]:
            other = met.other()
            if other is None or self._contents() != met.mine:
                self._met.remove(met)
                continue
            if other._recorded == met.recorded:
                continue
            apart = self._model is None or other._model is None or self._model() is not other._model()
            if (apart and other._trains(met.names)) or other._contents(met.names) != met.its:
                raise RunError(
                    f"another parallel module was built of the same parameters ({met.names[0]!r} and {len(met.names) - 1} "
                    f"more) and was trained since. In one process both would train the same weights; here each has its own. "
                    f"What to do: make one module of them, whose forward does what both do; or copy the weights to this one "
                    f"before its call (load_state_dict); or, if they are to be apart, build this one of a copy.deepcopy of its "
                    f"model")
        self._recorded += recording

    def _origins(self) -> dict[int, str]:
        """Names by the identities of the model's parameters that are there."""
        return {id(parameter): one.fqn for one in self._before if (parameter := one.parameter()) is not None}

    def _trains(self, names: Iterable[str]) -> bool:
        held = dict(self._parallel.named_parameters())
        return any(name in held and held[name].requires_grad for name in names)

    def _contents(self, names: Iterable[str] | None = None) -> int:
        """A digest of what this rank holds of these parameters, or of all."""
        held = {name: p for name, p in self._parallel.named_parameters() if not isinstance(p, Nothing)}
        chosen = held if names is None else [name for name in names if name in held]
        return hash(tuple(digest(local_of(held[name]), everything=False) for name in chosen))


@dataclass(frozen=True)
class _Met:
    """Another module of the same parameters, as both were when the later one was built."""

    other: weakref.ref[Relatives]
    names: list[str]
    """Of what both have, in the other one."""
    mine: int
    its: int
    recorded: int


_LIVING: weakref.WeakSet[Relatives] = weakref.WeakSet()
