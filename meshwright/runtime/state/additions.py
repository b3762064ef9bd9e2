"""What is put into a module that runs a graph: nothing would read it, so it is refused with its name.

``Closed`` is for the parallel module and its sub-modules. Once ``__dict__["_closed"]`` says what to call it, it takes no more
parameters, buffers or sub-modules, no other tensor or module in the place of one that it has, and none can be deleted. What was
written into the dicts of a module directly is found by ``checks.tensors`` and ``Contents``, at the next call.

In a pipeline the other ranks do not come to know of such an error, so each rank must find it by itself, also where another
stage has the tensor: ``OwnTensors`` answers for those with an error, where a plain dict would say that there is no such name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations

from meshwright.errors import AbsentError, RunError


def held_elsewhere(fqn: str, asking: FrameType | None = None) -> RunError:
    """The error that says so. ``asking``: who asks for an attribute. Loops may ask by ``hasattr`` and pass over it; torch's
    parametrizations take what is absent for a module without such a weight, so to them it is no AttributeError."""
    kind = RunError if asking is not None and asking.f_globals.get("__name__") == parametrizations.__name__ else AbsentError
    return kind(f"{fqn!r} is held by another stage of the pipeline, not by this rank; loop over "
                f"parallel.named_parameters() and named_buffers(), which give the rank's own. To tie, replace or "
                f"parametrize it, change the model, before autoparallel")


def other_tensor(name: str, where: str, deleted: bool) -> RunError:
    """The error that refuses one in the place of another, or none."""
    return RunError(f"{name!r} of {where} is {'deleted' if deleted else 'given another tensor'}, and the graph that runs reads "
                    f"the one that it was built with. Write into it (with torch.no_grad(): p.copy_(new), the whole tensor or a "
                    f"DTensor); or tie, replace or parametrize it in the model, before autoparallel")


class OwnTensors(dict[str, Any]):
    """Parameters of a module by name, none of which can be deleted. Asking for one of ``elsewhere``, which other stages of a
    pipeline have, raises."""

    def __init__(self, elsewhere: set[str], path: str) -> None:
        super().__init__()
        self._elsewhere, self._prefix = elsewhere, f"{path}." if path else ""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        if name in self._elsewhere:
            raise held_elsewhere(f"{self._prefix}{name}")
        return False

    def __delitem__(self, name: str) -> None:
        raise other_tensor(f"{self._prefix}{name}", "a parallel module", True) if name in self else KeyError(name)

    def __missing__(self, name: str) -> Any:
        raise held_elsewhere(f"{self._prefix}{name}") if name in self._elsewhere else KeyError(name)


def refuse_attribute(name: str, where: str) -> None:
    """Raises RunError."""
    raise RunError(f"attribute {name!r} is set on {where}, which runs a graph and does not read it: set it on the model, "
                   f"before autoparallel")


class Closed(nn.Module):
    """See the file's head. ``path``: of the module that it stands for."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.__dict__["_elsewhere"] = elsewhere = set[str]()
        self.__dict__["_parameters"] = OwnTensors(elsewhere, path)
        self.__dict__["_tensors"] = []  # names of parameters, those of other stages too, in the model's order

    def _closed_to(self, name: str, table: dict[str, Any]) -> None:
        where = self.__dict__.get("_closed")
        if where is not None and name not in table:
            refuse_attribute(name, where)

    def _keeps(self, name: str, value: Any, tables: Sequence[dict[str, Any]]) -> None:
        """Raise RunError if ``value`` is not the tensor that has this name."""
        where = self.__dict__.get("_closed")
        if where is not None and any(name in table and table[name] is not value for table in tables):
            raise other_tensor(name, where, value is None)

    def _asked_for(self, target: str) -> None:
        """Raise AbsentError if another stage holds the tensor of this path."""
        path, _, name = target.rpartition(".")
        if name in self.get_submodule(path).__dict__.get("_elsewhere", ()):
            raise held_elsewhere(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """As of any module; what other stages of a pipeline hold is said."""
        self._asked_for(target)
        return super().get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """As ``get_parameter``."""
        self._asked_for(target)
        return super().get_buffer(target)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """The one that is there only."""
        self._closed_to(name, self._parameters)
        self._keeps(name, param, (self._parameters,))
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """The one that is there only."""
        self._closed_to(name, self._buffers)
        self._keeps(name, tensor, (self._buffers,))
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused: no module of a parallel module runs."""
        self._closed_to(name, {})
        super().add_module(name, module)

    register_module = add_module

    def __setattr__(self, name: str, value: Any) -> None:
        """No sub-modules: none would run; no other tensors: none would be read."""
        if "_closed" in self.__dict__ and name not in self.__dict__:
            self._keeps(name, value, (self._parameters, self._buffers))
        if (isinstance(value, nn.Module) or name in self._modules) and self._modules.get(name) is not value:
            self._closed_to(name, {})
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """No sub-modules, no tensors."""
        self._keeps(name, None, (self._parameters, self._buffers))
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
