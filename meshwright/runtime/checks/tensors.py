"""Whether the tensors that a parallel module shows still are those that the engine reads.

The engine reads its own tensors, and the module shows the same ones as parameters and buffers. Writing into them is seen by
both. A tensor put in the place of one (``parallel.weight = nn.Parameter(...)``, a parametrization, a deleted buffer) would be
read by nobody, and for a parameter that the plan knows as frozen the program computes no gradient: both are found at the next
call, and raised on every rank. A parameter that is frozen after the build takes no gradient, as in one process, and may be
thawed again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import RunError, StageWarning
from meshwright.ir.program import Stored
from meshwright.runtime.checks import edits
from meshwright.runtime.checks.empty import Made, of_stages, warning_of
from meshwright.runtime.groups import Groups
from meshwright.runtime.verdict import interrupting


@dataclass(frozen=True)
class TensorPlace:
    """Where the module shows a tensor of the engine: under ``key`` of one of a sub-module's dicts."""

    fqn: str
    stored: Stored
    tensor: Tensor
    table: Mapping[str, Any]
    key: str


@dataclass(frozen=True)
class Original:
    """A parameter of the model that was parallelized, as it was then."""

    fqn: str
    parameter: weakref.ref[nn.Parameter]
    trained: bool


def originals(model: nn.Module | None) -> list[Original]:
    """The parameters of the model, not kept alive."""
    named = () if model is None else model.named_parameters()
    return [Original(fqn, weakref.ref(parameter), parameter.requires_grad) for fqn, parameter in named]


def check_tensors(
    places: Sequence[TensorPlace], before: Sequence[Original], shared: Sequence[Stored], groups: Groups, known: list[str],
    made: Made | None,
) -> None:
    """Raise RunError, on every rank, if what the module shows is not what the engine reads. In a pipeline all ranks call this.
    ``shared``: the trained weights that several stages hold, the same list on every rank. ``known``: faults that this rank
    found since the last call, which are said once. ``made``: the optimizers that it made since, in a pipeline."""
    fault = known[0] if known else _fault(places, before)
    known.clear()
    if groups.pipeline is not None and made is not None:
        fault = _of_all_stages(places, fault, shared, groups, made)
    if fault is not None:
        raise RunError(fault)


def _fault(places: Sequence[TensorPlace], before: Sequence[Original]) -> str | None:
    for place in places:
        shown = place.table.get(place.key)
        if shown is not place.tensor:
            kind = "buffer" if place.stored.buffer else "parameter"
            what = "removed or parametrized" if shown is None else "replaced by another tensor"
            return (f"{kind} {place.fqn!r} of the parallel module was {what} after it was built, and the forward goes on "
                    f"with the old one. Write into it (with torch.no_grad(): p.copy_(new), the whole tensor or a DTensor), or "
                    f"change the model and call autoparallel again")
        if shown.requires_grad and not place.stored.trainable:
            if place.stored.buffer:
                return (f"buffer {place.fqn!r} of the parallel module now requires a gradient, and nothing computes one: make "
                        f"it a parameter of the model and call autoparallel again")
            return (f"parameter {place.fqn!r} was frozen when the model was parallelized and now requires a gradient, for "
                    f"which the program has no way: call autoparallel with every parameter trainable that ever will be, and "
                    f"freeze (requires_grad_(False)) on the parallel module what is not to be trained yet")
    for original in before:
        parameter = original.parameter()
        if parameter is not None and parameter.requires_grad != original.trained:
            done, after = ("frozen", "") if original.trained else ("thawed", ", after an autoparallel in which it is trainable")
            return (f"parameter {original.fqn!r} of the model that was parallelized was {done}; the parallel module has "
                    f"parameters of its own: call requires_grad_ on parallel.get_parameter({original.fqn!r}){after}")
    return None


def _of_all_stages(
    places: Sequence[TensorPlace], fault: str | None, shared: Sequence[Stored], groups: Groups, made: Made,
) -> str | None:
    """The first stage's fault, on all of them; it is one too if they disagree whether a weight that they share is frozen, or
    if all had nothing for one of the optimizers that they made, or counted parameters (``checks.empty``)."""
    trained = {place.stored.value: place.tensor.requires_grad for place in places}
    frozen = [int(trained.get(stored.value) is False) for stored in shared]
    unfrozen = [int(trained.get(stored.value) is True) for stored in shared]
    trainable = {one.stored.fqns[0]: one.tensor.requires_grad for one in places if one.stored.trainable}
    edited = edits.taken({one.stored.fqns[0]: one.tensor for one in places if one.stored.trainable})
    chosen = made.take(trainable, {stored.fqns[0] for stored in shared}, edited)
    alarm = [int(fault is not None), int(any(one.new for one in chosen)), *unfrozen, *frozen]
    found = torch.tensor(alarm, device=groups.device)
    with interrupting():  # a stage that failed in the step before is no longer there
        dist.all_reduce(found, dist.ReduceOp.MAX, groups.pipeline)
    alarms = found.tolist()
    if alarms[1]:
        of_ranks: list[Any] = [None] * dist.get_world_size(groups.pipeline)
        dist.all_gather_object(of_ranks, chosen, groups.pipeline)
        fault = fault or of_stages(of_ranks)
        alarms[0] = alarms[0] or of_stages(of_ranks) is not None
        if warning := warning_of(of_ranks):
            warnings.warn(StageWarning(warning), stacklevel=2)
    if alarms[0]:
        faults: list[Any] = [None] * dist.get_world_size(groups.pipeline)
        dist.all_gather_object(faults, fault, groups.pipeline)
        return str(next(one for one in faults if one is not None))
    for stored, is_trained, is_frozen in zip(shared, alarms[2:], alarms[2 + len(shared):], strict=False):
        if is_trained and is_frozen:
            return (f"parameter {stored.fqns[0]!r} is shared by stages of the pipeline and frozen on some of them only: call "
                    f"requires_grad_ on it on every rank that holds it")
    return None
