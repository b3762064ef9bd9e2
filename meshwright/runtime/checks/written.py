"""What is done to the tensors of the model that was parallelized, which the parallel module does not read.

In one process the model and what is trained are the same. Here the parallel module has parameters and buffers of its own, so
that a checkpoint loaded into the model, another initialization of it, buffers that are set or statistics that a call of the
model in ``train()`` collects would reach nobody. They are refused at the next call, unless the parallel module holds the same,
or the model is trained by an optimizer for itself.

A tensor counts as touched if it is another one in its place, was converted, has other memory (``p.data = new``), or was written
into as torch counts it. Torch does not count what is written through ``.data``: evenly spaced elements are compared for that,
in the calls of which each is twice as late as the one before (1, 2, 4, 8, ...), so that a long run does not pay for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.errors import RunError
from meshwright.runtime.checks.calls import digest
from meshwright.runtime.checks.tensors import TensorPlace
from meshwright.runtime.groups import Groups
from meshwright.runtime.state.layout import box, local_of, take


class TensorsOfModel:
    """The tensors of the model, as they were when the parallel module last held the same."""

    def __init__(
        self, model: nn.Module | None, places: Mapping[str, TensorPlace], groups: Groups, at_work: Sequence[str],
    ) -> None:
        """``places``: what this rank has of them; ``at_work``: names of parameters that an optimizer trains in the model."""
        self._places, self._groups, self._at_work, self._checks = places, groups, at_work, 0
        self._known = [] if model is None else [*_all(model)]

    def check(self) -> None:
        """Raise RunError if something was done to them that the parallel module does not know of."""
        self._checks += 1
        thorough = self._checks & (self._checks - 1) == 0
        for index, known in enumerate(self._known):
            now = known.place.now()
            if now is None or known.is_still(now, thorough):
                continue
            held = self._places.get(known.place.fqn)
            if held is not None and not self._at_work and (now.dtype != known.dtype or not _same(now, held, self._groups)):
                kind = "parameter" if isinstance(now, nn.Parameter) else "buffer"
                raise RunError(
                    f"{kind} {known.place.fqn!r} of the model that was parallelized was "
                    f"{'written' if now.dtype == known.dtype else f'converted to {now.dtype}'} since, and the parallel module "
                    f"has {kind}s of its own, which it reads instead. What to do: write into the parallel module "
                    f"(parallel.load_state_dict, parallel.load), or before autoparallel; if the model is for a use of its own"
                    f"{'' if kind == 'parameter' else ' (a call in train() writes buffers)'}, parallelize a copy.deepcopy of "
                    f"it")
            self._known[index] = _Known.of(known.place, now)


@dataclass(frozen=True)
class _Place:
    """Where the model has a tensor, which is not kept alive."""

    fqn: str
    module: weakref.ref[nn.Module]
    key: str

    def now(self) -> Tensor | None:
        """What is there; None of what the model itself is asked for elsewhere, or can tell nothing of."""
        module = self.module()
        found = None if module is None else module._parameters.get(self.key, module._buffers.get(self.key))
        if found is None or type(found) not in (Tensor, nn.Parameter) or found.layout is not torch.strided:
            return None
        return None if found.is_meta else found


@dataclass(frozen=True)
class _Known:
    """A tensor as it was."""

    place: _Place
    tensor: weakref.ref[Tensor]
    dtype: torch.dtype
    version: int
    storage: StorageWeakRef
    sample: int
    """A digest of evenly spaced elements."""

    @classmethod
    def of(cls, place: _Place, tensor: Tensor) -> _Known:
        """As it is now."""
        return cls(place, weakref.ref(tensor), tensor.dtype, _version(tensor), StorageWeakRef(tensor.untyped_storage()),
                   digest(tensor, everything=False))

    def is_still(self, now: Tensor, thorough: bool) -> bool:
        """Whether it seems untouched."""
        return (
            self.tensor() is now and self.version == _version(now) and self.dtype == now.dtype
            and self.storage.cdata == now.untyped_storage()._cdata
            and (not thorough or self.sample == digest(now, everything=False))
        )


def _all(model: nn.Module) -> Iterator[_Known]:
    for path, module in model.named_modules():
        for key in (*module._parameters, *module._buffers):
            place = _Place(f"{path}.{key}" if path else key, weakref.ref(module), key)
            if (now := place.now()) is not None:
                yield _Known.of(place, now)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same(whole: Tensor, place: TensorPlace, groups: Groups) -> bool:
    """Whether this rank holds what lies there of the whole tensor, but for its dtype."""
    local = local_of(place.tensor)
    if whole.shape != place.stored.shape:
        return True
    there = take(whole.detach(), box(place.stored, groups.mesh, groups.coordinates)).to(local.device)
    return there.shape != local.shape or torch.allclose(local.to(there.dtype), there, rtol=0, atol=0, equal_nan=True)
