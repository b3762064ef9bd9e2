"""``Readable``: what is read from a DTensor outside of operators is that of the whole: as numbers, as an array, in a text.

``data_ptr`` stays torch's, 0: by that ``copy.deepcopy`` knows that it must clone.

Torch before 2.13 runs operators on DTensors of any class past its ``__torch_dispatch__``; the rules that are registered for an
operator and a class it asks first. So every operator gets one (``let_operators_know``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from meshwright.errors import RunError
from meshwright.runtime.checks.edits import before_sending


def torch_dtensor(x: DTensor) -> DTensor:
    """Torch's own DTensor on the same memory."""
    with torch.no_grad():
        return DTensor.from_local(
            x._local_tensor.detach(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )


class Readable(DTensor):
    """What is read from a DTensor outside of operators: numbers of the whole."""

    __slots__ = ()

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """As of any DTensor; ranks that come to it with tensors of different parameters are told so."""
        wanted = kwargs.get("placements", args[1] if len(args) > 1 else None) or self.placements
        before_sending(self, [dim for dim, (old, new) in enumerate(zip(self.placements, wanted, strict=False))
                              if old != new and not isinstance(old, Replicate)])
        return super().redistribute(*args, **kwargs)

    def tolist(self) -> Any:
        """The numbers of the whole tensor; torch gives those of no subclass."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor, to read: what is written into a copy would reach no piece."""
        array = self.full_tensor().detach().requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def __format__(self, form: str) -> str:
        """A number as a number, as torch does it for no subclass."""
        return object.__format__(self, form) if self.ndim else format(self.detach().item(), form)

    def __dlpack__(self, **_: Any) -> Any:
        """Raises RunError: torch would give memory that is not there."""
        raise RunError("DLPack shares a tensor's memory, and a rank has a piece of this one (a DTensor). Take .full_tensor() "
                       "first, on every rank")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as torch's own DTensor, which loads anywhere."""
        return torch_dtensor(self).requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def let_operators_know(kind: type[Readable]) -> None:
    """Have every operator that there is by now run by the ``__torch_dispatch__`` of the class."""
    if torch.__version__ < "2.13":  # compared as versions
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("prim::"):
                _know(kind, name)


@cache
def _know(kind: type[Readable], name: str) -> None:
    torch.library.register_torch_dispatch(name, kind, _rule, lib=_library(name.partition("::")[0]))


def _rule(kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The first of the classes among the operands that does it."""
    for one in (kind, *types):
        if issubclass(one, Readable):
            result = one.__torch_dispatch__(func, types, args, kwargs or {})
            if result is not NotImplemented:
                return result
    return NotImplemented


@cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")
