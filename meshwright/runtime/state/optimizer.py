"""An optimizer in a checkpoint: its state by the names of the parameters, and its groups with their options.

State of a parameter's shape lies as the parameter does, and is cut anew under another plan; other tensors (a step count, a
factor's rows) are whole. The groups of all ranks are one list, for a pipeline's ranks hold the parameters of their own stages:

    optimizer.groups = [{"names": parameters, "options": {lr, weight_decay, what schedulers and users add},
                         "states": {parameter: names of its states}}, ...]

Groups are known again by the names in them. Options that are tensors (a ``capturable`` learning rate) are written into in
place, so that a captured graph goes on reading them.

A parameter that never had a gradient, or whose optimizer keeps nothing, is not in ``states``. A checkpoint without one of the
states that it was saved with is refused, and so is one whose states are not what an optimizer of torch's makes of a parameter:
a step of its class is tried on a small one (``complete``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.errors import CheckpointError
from meshwright.ir.program import Stored
from meshwright.ir.sharding import DTYPES
from meshwright.runtime.state.storage import TensorEntry
from meshwright.runtime.whole import adopt, made_from

GROUPS = "optimizer.groups"
_TENSOR = "a tensor"
DTYPES_OF_TORCH: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

Named = Mapping[Tensor, Stored]
"""The optimizer's parameters, and what is stored in them."""

NOTHING = "nothing_to_train"


class Nothing(nn.Parameter):
    """A parameter without elements and without a gradient. Torch's optimizers refuse an empty list; a rank whose stage of a
    pipeline has nothing of a sub-module would raise that alone, while the others train."""


def nothing_on(device: torch.device) -> Nothing:
    """One of them: a matrix, for there are optimizers of matrices alone (Muon)."""
    return Nothing(torch.empty(0, 0, device=device), requires_grad=False)


def with_nothing(
    own: Iterable[tuple[str, nn.Parameter]], nothing: Nothing | None, prefix: str
) -> Iterator[tuple[str, nn.Parameter]]:
    """A rank's parameters; ``nothing`` if it has none."""
    yield from (listed := list(own))
    if nothing is not None and not listed:
        nothing.requires_grad_()
        yield f"{prefix}{'.' if prefix else ''}{NOTHING}", nothing


def named(known: Named, optimizer: torch.optim.Optimizer) -> dict[Tensor, Stored]:
    """The optimizer's parameters. Raises CheckpointError if there are others among them."""
    mine = [p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, Nothing)]
    strangers = [p for p in mine if p not in known]
    if strangers:
        raise CheckpointError(f"the optimizer holds {len(strangers)} parameters that are not this module's; make it of "
                              f"parallel.parameters()")
    return {p: known[p] for p in mine}


def key_of(stored: Stored, name: str) -> str:
    """What a state is called in a checkpoint."""
    return f"optimizer.{stored.fqns[0]}.{name}"


def is_like(parameter: Tensor, name: str, shape: Sequence[int]) -> bool:
    """Whether a state lies as its parameter does. A number's step count has its shape, and is none the less a count."""
    return tuple(shape) == tuple(parameter.shape) and (bool(shape) or name != "step")


def allocate(parameter: Tensor, group: Mapping[str, Any], name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for a state that is read from a checkpoint: of the kind that the optimizer would have made."""
    if is_like(parameter, name, shape):
        return torch.zeros_like(parameter, dtype=dtype).detach()
    if not shape:  # as torch.optim.Optimizer.load_state_dict has it
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else None)
    whole = torch.zeros(tuple(shape), dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return adopt(DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False), made_from(parameter))


# --- what a parameter's state must hold -------------------------------------------------------------------------------------


def savable(optimizer: torch.optim.Optimizer, known: Named) -> dict[Tensor, Stored]:
    """``named``. Raises CheckpointError for state that would not be found again, too."""
    parameters = named(known, optimizer)
    odd = next((key for key in optimizer.state if not isinstance(key, Tensor)), None)
    if odd is not None:
        raise CheckpointError(f"cannot save the optimizer: it keeps state under {odd!r:.60}, which is none of its parameters; "
                              f"keep it in the state of a parameter, or as an option of a group")
    names = (name for state in optimizer.state.values() for name in state)
    wrong = next((name for name in names if not isinstance(name, str) or not name or "." in name), None)
    if wrong is not None:
        raise CheckpointError(f"cannot save the optimizer: a state of a parameter is called {wrong!r:.60}; names of states are "
                              f"texts without dots")
    return parameters


def complete(
    optimizer: torch.optim.Optimizer, parameters: Named, saved: Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise CheckpointError for a parameter of which a checkpoint has other states than it was saved with, or not those that a
    step of one of torch's optimizers makes. Optimizers of others are not judged so: their states may differ by parameter, as
    may what users add. ``saved``: the saved group of each group; ``states``: {what a parameter's begin with: {name: its entry,
    or its value}} in the checkpoint."""
    for group, twin in zip(optimizer.param_groups, saved, strict=True):
        options = {key: _plain(value, None) for key, value in twin["options"].items()}
        everywhere = {name for names in twin["states"].values() for name in names}
        tried: dict[tuple[int, torch.dtype], tuple[bool, Mapping[str, Any]]] = {}
        for parameter in (p for p in group["params"] if p in parameters and p.numel()):
            stored = parameters[parameter]
            found, names = states.get(key_of(stored, ""), {}), twin["states"].get(stored.fqns[0], [])
            if found.keys() != set(names):
                raise CheckpointError(f"the checkpoint is damaged: it has of {stored.fqns[0]!r} the states {sorted(found)}, "
                                      f"and was saved with {names}; take another one")
            kind = parameter.ndim, parameter.dtype
            if kind not in tried:
                tried[kind] = _made(type(optimizer), options, *kind)
            early, wanted = tried[kind]
            own = wanted.keys() & set(names) or (names and not wanted.keys() & everywhere)  # or what a user added alone
            wrong = [name for name, one in wanted.items() if not _as_made(one, found.get(name), parameter)]
            if wrong and (own or early):
                raise CheckpointError(f"the checkpoint has of {stored.fqns[0]!r} the states {sorted(found)}; {wrong[0]!r} is "
                                      f"not what a {type(optimizer).__name__} makes: it was saved by another optimizer, or is "
                                      f"damaged")


def _as_made(one: Any, have: Any, parameter: Tensor) -> bool:
    """Whether an entry or value of a checkpoint is of the kind and shape that was made for a small parameter."""
    if not isinstance(one, Tensor):
        return _alike(have, one)
    if not isinstance(have, TensorEntry):
        return False
    small = _SMALL[:parameter.ndim]
    if one.ndim != parameter.ndim:
        return len(have.shape) == one.ndim
    return have.shape == tuple(n if size == of else size for n, size, of in zip(parameter.shape, one.shape, small, strict=True))


class Tried(list[nn.Parameter]):
    """The parameters of an optimizer that is made to be looked at, and not told of."""


_SMALL = (2, 3, 5, 7, 11, 13)
"""Sizes of a parameter that a step is tried on."""


def _made(
    kind: type[torch.optim.Optimizer], group: Mapping[str, Any], ndim: int, dtype: torch.dtype
) -> tuple[bool, Mapping[str, Any]]:
    """(whether there is some before a step, the state that one of torch's optimizers makes for a parameter); nothing where that
    cannot be tried."""
    if not kind.__module__.startswith("torch.optim.") or ndim > len(_SMALL):
        return False, {}
    accepted = inspect.signature(kind).parameters
    options = {key: value for key, value in group.items() if key in accepted and key not in ("params", "named_parameters")}
    options |= {key: False for key in ("capturable", "differentiable", "foreach", "fused") if key in options}
    small = nn.Parameter(torch.zeros(_SMALL[:ndim], dtype=dtype))
    small.grad = torch.zeros_like(small)
    try:
        with torch.no_grad():
            tried = kind(Tried([small]), **options)
            early = small in tried.state
            inspect.unwrap(kind.step)(tried)  # without the hooks of users
    except Exception:  # it wants a closure, sparse gradients, other shapes: whatever it is, its first step says so too
        return False, {}
    return early, dict(tried.state.get(small, {}))


# --- groups ----------------------------------------------------------------------------------------------------------------


def describe(optimizer: torch.optim.Optimizer, parameters: Named) -> list[dict[str, Any]]:
    """This rank's share of ``optimizer.groups``."""
    return [
        {
            "names": sorted(parameters[p].fqns[0] for p in group["params"] if p in parameters),
            "options": {key: _packed(value) for key, value in group.items() if key not in ("params", "param_names")},
            "states": {parameters[p].fqns[0]: sorted(optimizer.state[p]) for p in group["params"]
                       if p in parameters and optimizer.state.get(p)},
        }
        for group in optimizer.param_groups
    ]


def of_all_ranks(mine: list[dict[str, Any]], same: bool = True) -> list[dict[str, Any]]:
    """``optimizer.groups``, alike on every rank. Raises CheckpointError, on every rank, if the ranks' groups differ in number,
    or (``same``) in their options. Every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for rank, theirs in enumerate(ranks):
        if len(theirs) != len(ranks[0]):
            raise CheckpointError(f"the optimizer has {len(ranks[0])} parameter groups on rank 0 and {len(theirs)} on rank "
                                  f"{rank}: make the same groups everywhere, empty ones where a rank holds none of them")
        odd = next((i for i, (a, b) in enumerate(zip(ranks[0], theirs, strict=True)) if a["options"] != b["options"]), None)
        if odd is not None and same:
            raise CheckpointError(f"parameter group {odd} has {theirs[odd]['options']} on rank {rank} and "
                                  f"{ranks[0][odd]['options']} on rank 0")
    return [
        {
            "names": sorted({name for theirs in ranks for name in theirs[i]["names"]}), "options": group["options"],
            "states": {name: states for theirs in ranks for name, states in theirs[i]["states"].items()},
        }
        for i, group in enumerate(ranks[0])
    ]


def _checked(saved: Any) -> list[Mapping[str, Any]]:
    """The groups of a checkpoint. Raises CheckpointError for what ``describe`` does not write."""

    def group(one: Any) -> bool:
        return (isinstance(one, dict) and one.keys() == {"names", "options", "states"} and texts(one["names"])
                and isinstance(one["options"], dict) and all(isinstance(key, str) for key in one["options"])
                and option(one["options"]) and isinstance(one["states"], dict) and set(one["names"]) >= one["states"].keys()
                and all(map(texts, one["states"].values())))

    def texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(text, str) for text in value)

    def option(value: Any) -> bool:
        if isinstance(value, dict) and _TENSOR in value:
            return value.keys() == {_TENSOR, "dtype"} and value["dtype"] in DTYPES_OF_TORCH and numbers(value[_TENSOR])
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return all(option(item) for item in items)

    def numbers(value: Any) -> bool:
        return isinstance(value, bool | int | float) or (isinstance(value, list) and all(map(numbers, value)))

    if not isinstance(saved, list) or not all(map(group, saved)):
        raise CheckpointError(f"the checkpoint is damaged: {GROUPS} are no parameter groups; take another one")
    return saved


def match(saved: Any, present: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The saved group of every present one, known by the names in it, whose options are of the kinds that the present ones
    have. Raises CheckpointError naming what is in none."""
    if saved is None:
        raise CheckpointError("the checkpoint was saved without an optimizer: load it without one, or save(folder, optimizer)")
    free = list(_checked(saved))
    found: list[Mapping[str, Any]] = []
    for i, group in enumerate(present):
        twin = next((other for other in free if other["names"] == group["names"]), None)
        if twin is None:
            known = {name: j for j, other in enumerate(saved) for name in other["names"]}
            where = {name: known.get(name) for name in group["names"]}
            new = [name for name, at in where.items() if at is None]
            apart = sorted({at for at in where.values() if at is not None})
            reason = f"{new[:3]} are in none of the saved ones" if new else f"the saved run had them in groups {apart}"
            missing = [name for at in apart for name in saved[at]["names"] if name not in where][:3] if not new else []
            also = f", with {missing} beside them" if missing else ""
            raise CheckpointError(f"parameter group {i} of the optimizer ({group['names'][:3]}...: {len(group['names'])} in "
                                  f"all) is not one of the {len(saved)} saved ones: {reason}{also}. Make the groups as in "
                                  f"that run")
        odd = [key for key, value in twin["options"].items() if not _alike(value, group["options"].get(key))]
        if odd:
            raise CheckpointError(f"the checkpoint has {odd[0]}={twin['options'][odd[0]]!r:.60} for parameter group {i}, whose "
                                  f"optimizer has {group['options'][odd[0]]!r:.60}: it was saved by another optimizer")
        free.remove(twin)
        found.append(twin)
    if free:
        raise CheckpointError(f"the saved run had {len(saved)} parameter groups, this optimizer has {len(present)}: none has "
                              f"{free[0]['names'][:3]}. Make the groups as in that run")
    return found


def _alike(value: Any, old: Any) -> bool:
    """Whether an option may take the other's place: numbers for numbers, and as many; anything for None and the reverse."""
    if value is None or old is None:
        return True
    if isinstance(value, list | tuple) or isinstance(old, list | tuple):
        return type(value) is type(old) and len(value) == len(old) and all(map(_alike, value, old))
    if any(isinstance(one, dict) and _TENSOR in one for one in (value, old)):  # a learning rate may be a number or a tensor
        return not isinstance(value, str) and not isinstance(old, str)
    number = isinstance(old, int | float) and not isinstance(old, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) if number else type(value) is type(old)


def restore(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Set the options of every group to those of its saved one."""
    for group, twin in zip(optimizer.param_groups, saved, strict=True):
        for key, value in twin["options"].items():
            group[key] = _plain(value, group.get(key))


def _packed(value: Any) -> Any:
    """Without tensors, which are few numbers here."""
    if isinstance(value, Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return {_TENSOR: whole.detach().cpu().tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return type(value)(_packed(item) for item in value) if type(value) in (list, tuple) else value
    return {key: _packed(item) for key, item in value.items()} if isinstance(value, dict) else value


def _plain(value: Any, old: Any) -> Any:
    """What was packed; into the tensor that is there, if there is one."""
    if isinstance(value, dict) and _TENSOR in value:
        if not isinstance(old, Tensor):
            return torch.tensor(value[_TENSOR], dtype=DTYPES_OF_TORCH[value["dtype"]])
        value = value[_TENSOR]
    if isinstance(old, Tensor) and isinstance(value, bool | int | float | list):
        with torch.no_grad():
            return old.copy_(torch.tensor(value, dtype=old.dtype))
    if isinstance(value, list | tuple):
        others = old if isinstance(old, list | tuple) and len(old) == len(value) else [None] * len(value)
        return type(value)(_plain(item, other) for item, other in zip(value, others, strict=True))
    if isinstance(value, dict):
        return {key: _plain(item, old.get(key) if isinstance(old, dict) else None) for key, item in value.items()}
    return value
