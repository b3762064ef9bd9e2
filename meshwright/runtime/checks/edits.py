"""What a loop makes of a rank's gradients and weights, one after the other, as every stage of a pipeline would count them.

``for i, p in enumerate(parallel.parameters()): p.grad.mul_(w[i])`` counts the rank's own parameters, so that every stage begins
anew with ``w[0]``. What is written into a parameter, or into what was made from one, is remembered until the next call as
an ``Edit``: a checksum of operators and of their numbers, those of the values that are written too. There
the stages compare what they did to each of their parameters, as they compare options of optimizers (``checks.empty``). What an
optimizer does is not an edit: its options say it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright.runtime.checks.order import GatherOrder

BY_NUMBER = (
    "gradients or weights were changed one after the other in the same way on every stage of the pipeline, as if each stage "
    "had counted its own: parallel.parameters() are this rank's alone, so the first of them is another one on every stage. If "
    "it was done by names or shapes, all is well; else go by the names in parallel.named_parameters(), which are the model's"
)
_SAMPLED = 256
"""Elements of a plain tensor that are read to tell it from another."""


@dataclass(frozen=True)
class Role:
    """What a tensor is to a parallel module: of which parameter or buffer it is or was made; whether that belongs to one stage
    of a pipeline; ``held``: ``id`` of the tensor that the module itself holds (a copy of it is not held); ``how``: it was made,
    as a checksum; ``edits``: what was written into the parameter and what was made from it since the last call; ``order``: what
    the module's ranks gather."""

    name: str
    staged: bool
    held: int = 0
    how: int = 0
    edits: list[int] = field(default_factory=list, compare=False, repr=False)
    order: GatherOrder | None = field(default=None, compare=False, repr=False)

    def made(self, how: int | None = None) -> Role:
        """Of what is made from the tensor."""
        return self if not self.held and how is None else replace(self, held=0, how=self.how if how is None else how)


def role_of(tensor: Tensor) -> Role | None:
    """The role that ``runtime.whole.adopt`` gave."""
    found: Role | None = tensor.__dict__.get("_role")
    return found


def before_sending(tensor: DTensor, dims: Sequence[int]) -> None:
    """A tensor is about to be gathered or summed over ``dims`` of its mesh; see ``checks.order``."""
    if dims and (role := role_of(tensor)) is not None and role.order is not None:
        role.order.before(role.name, tensor.device_mesh, dims, tensor._local_tensor.device)


def checksum(name: str, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Of an operator and the numbers among its operands: those of plain tensors, and how the others were made."""
    known = [name, *map(_number, pytree.tree_leaves((args, dict(kwargs))))]
    return zlib.crc32(repr(known).encode())


def _number(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x if isinstance(x, bool | int | float | complex | str) else str(x)
    if (role := role_of(x)) is not None:
        return role.how
    alone = x.numel() == 1 and not x.is_meta  # others on a GPU, for which all would wait, are not looked at
    if isinstance(x, DTensor) or x.layout is not torch.strided or not (alone or x.device.type == "cpu"):
        return "a tensor"
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].tolist()


def written(tensors: Iterable[Tensor], how: int) -> None:
    """Remember what was written into tensors of a stage."""
    for x in tensors:
        if (role := role_of(x)) is not None and role.staged:
            role.edits.append(how)


def taken(named: Mapping[str, Tensor]) -> dict[str, str]:
    """{name of a parameter: what was done to it since this was asked before}, "" where nothing was."""
    found = {}
    for name, tensor in named.items():
        role = role_of(tensor)
        done = [] if role is None else role.edits
        found[name] = str(zlib.crc32(repr(done).encode())) if done else ""
        done.clear()
    return found


def groups(edited: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(what was done, names of the parameters that it was done to), in the order of the first of each."""
    kinds = dict.fromkeys(edited.values())
    return tuple((what, tuple(name for name, one in edited.items() if one == what)) for what in kinds)
