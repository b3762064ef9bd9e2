"""What is put into a module that runs a graph: nothing would read it, so it is refused with its name.

``Closed`` is for the parallel module and its sub-modules. Once ``__dict__["_closed"]`` says what to call it, it takes no more
parameters, buffers or sub-modules, nor another module in a sub-module's place, and its sub-modules cannot be deleted. A tensor
in the place of one of its own is taken, for that may be put back: ``checks.tensors`` looks at them in every call. ``Contents``
finds what was written into the dicts of a module directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.errors import RunError


def refuse_attribute(name: str, where: str) -> None:
    """Raises RunError."""
    raise RunError(f"attribute {name!r} is set on {where}, which runs a graph and does not read it: set it on the model, "
                   f"before autoparallel")


class Closed(nn.Module):
    """See the file's head."""

    def _closed_to(self, name: str, table: dict[str, Any]) -> None:
        where = self.__dict__.get("_closed")
        if where is not None and name not in table:
            refuse_attribute(name, where)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """In a tensor's place only."""
        self._closed_to(name, self._parameters)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """In a tensor's place only."""
        self._closed_to(name, self._buffers)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused: no module of a parallel module runs."""
        self._closed_to(name, {})
        super().add_module(name, module)

    register_module = add_module

    def __setattr__(self, name: str, value: Any) -> None:
        """No sub-modules: none would run."""
        if (isinstance(value, nn.Module) or name in self._modules) and self._modules.get(name) is not value:
            self._closed_to(name, {})
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """No sub-modules."""
        if name in self._modules:
            where = self.__dict__.get("_closed")
            raise RunError(f"sub-module {name!r} of {where} is deleted, and the graph that runs has it: delete it from the "
                           f"model, before autoparallel")
        super().__delattr__(name)


@dataclass(frozen=True)
class Contents:
    """A module as it was built: its path, and what it has."""

    path: str
    module: nn.Module
    had: frozenset[tuple[str, int]]

    @staticmethod
    def of(path: str, module: nn.Module) -> Contents:
        """As it is now."""
        return Contents(path, module, _held(module))


def check_contents(contents: Sequence[Contents]) -> None:
    """Raise RunError if a module has other sub-modules, or tensors under other names, than it was built with."""
    for one in contents:
        if (found := _held(one.module)) != one.had:
            name = min(found ^ one.had)[0]
            where = "the parallel module" if not one.path else f"sub-module {one.path!r} of the parallel module"
            raise RunError(f"{name!r} was put into {where}, or taken out of it, after it was built. It runs a graph that does "
                           f"not see that: change the model, before autoparallel")


def _held(module: nn.Module) -> frozenset[tuple[str, int]]:
    """Names of tensors that are there (not which: that is looked at elsewhere) and of sub-modules, with which they are."""
    tensors = (name for table in (module._parameters, module._buffers) for name in table)
    return frozenset((*((name, 0) for name in tensors), *((name, id(part)) for name, part in module._modules.items())))
