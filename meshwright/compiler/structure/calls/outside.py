"""What forwards read that is no attribute of the model: globals of its source files, closures, attributes of its classes.

A trace sees the values that these had. ``places`` finds them without running anything: from the code of every module's forward,
through the methods, functions and custom Functions that it names, down to names of functions, plain values, tensors,
containers and objects of classes of its own. Code of torch, of the standard library and of other installed packages than the
model's own is not entered. What is found may be read in a branch that is never taken; whoever compares only asks again what the
model computes.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.errors import MeshwrightError

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, partial, SimpleNamespace, Namespace, np.ndarray, np.generic)
_INSTALLED = Path(torch.__file__).parents[1]
_MOST = 10_000
"""Functions that are entered; a model whose forward reaches more is watched as far as that."""


@dataclass(frozen=True)
class OutsidePlace:
    """``name`` in a namespace, or the contents of a closure's cell; ``what``: the same in words."""

    what: str
    holder: Mapping[str, Any] | CellType
    name: str

    def read(self) -> Any:
        """The value that is there now."""
        if not isinstance(self.holder, CellType):
            return self.holder.get(self.name, MeshwrightError)  # a value that no forward reads: the name is gone
        try:
            return self.holder.cell_contents
        except ValueError:
            return MeshwrightError


def places(model: nn.Module, loss_fn: Any = None) -> list[OutsidePlace]:
    """Everything that a forward of the model, or the loss function, may read outside of itself."""
    modules = [*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
    walk = _Walk(frozenset(_top(type(module).__module__) for module in modules))
    walk.held(loss_fn, type(loss_fn))
    for module in modules:
        if walk.enters(type(module).__module__):
            walk.method(type(module), "forward")
        for value in vars(module).values():  # an activation that was given, a forward that was replaced
            walk.held(value, type(module))
    while walk.waiting and len(walk.seen) < _MOST:
        walk.code(*walk.waiting.pop())
    return walk.found


def held_by(function: Any) -> dict[str, Any]:
    """{name: value} of what a callable that is no module reads of the object that it is, or is a method of: the attributes
    that its code names, and that of the methods that it names. Of a function its default arguments."""
    if isinstance(function, FunctionType | partial):  # with what it is given beforehand
        return {**(held_by(function.func) if isinstance(function, partial) else {}), "arguments": function}
    owner = getattr(function, "__self__", function)
    if isinstance(function, nn.Module) or not hasattr(owner, "__dict__"):
        return {}
    waiting, names = ["__call__", *([function.__name__] if isinstance(function, MethodType) else [])], set[str]()
    while waiting:
        name = waiting.pop()
        code = getattr(getattr(type(owner), name, None), "__code__", None)
        if name not in names and code is not None:
            waiting += _names(code)
        names.add(name)
    return {name: value for name, value in vars(owner).items() if name in names}


@dataclass
class _Walk:
    """``packages``: those of the model's classes."""

    packages: frozenset[str]
    seen: set[tuple[int, int]] = field(default_factory=set)
    waiting: list[tuple[FunctionType, type | None]] = field(default_factory=list)
    found: list[OutsidePlace] = field(default_factory=list)
    known: set[tuple[int, str]] = field(default_factory=set)
    entered: set[tuple[int, str]] = field(default_factory=set)
    inside: dict[int, Any] = field(default_factory=dict)

    def enters(self, module: str | None) -> bool:
        """Whether code of a module is the model's own."""
        top = _top(module or "")
        if top in sys.stdlib_module_names or top == "torch":
            return False
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        return top in self.packages or file is None or not Path(file).is_relative_to(_INSTALLED)

    def function(self, function: FunctionType, owner: type | None) -> None:
        """To be entered; ``owner``: the class whose attributes its ``self`` has."""
        key = id(function), id(owner)
        if key not in self.seen and self.enters(function.__module__):
            self.seen.add(key)
            self.waiting.append((function, owner))

    def held(self, value: Any, owner: type) -> None:
        """Functions that a module holds, also in containers, and what objects of its package's classes do when called."""
        if isinstance(value, nn.Module) or id(value) in self.inside:
            return
        self.inside[id(value)] = value
        if isinstance(value, FunctionType):
            self.function(value, owner)
        elif isinstance(value, MethodType):
            self.held(value.__func__, type(value.__self__))
        elif isinstance(value, partial):
            self.held(value.func, owner)
        elif isinstance(value, list | tuple | deque | dict):
            for part in value.values() if isinstance(value, dict) else value:
                self.held(part, owner)
        elif callable(value) and not isinstance(value, type):
            self.method(type(value), "__call__")

    def method(self, owner: type, name: str) -> None:
        """What a class has under a name: code to enter, or a value that may change."""
        for kind in owner.__mro__:
            if name in vars(kind):
                if self.enters(kind.__module__):
                    self.value(OutsidePlace(f"{name!r} of class {kind.__qualname__}", vars(kind), name), id(kind), owner)
                return

    def code(self, function: FunctionType, owner: type | None) -> None:
        """Names that a function mentions, in its globals, its closure and its class."""
        names, known = frozenset(_names(function.__code__)), function.__globals__
        for name in sorted(names):
            if name in known and not name.startswith("__"):
                self.value(OutsidePlace(f"global {name!r} of {function.__module__}", known, name), id(known), None, names)
            if owner is not None:
                self.method(owner, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = OutsidePlace(f"{name!r}, which {function.__qualname__} closes over,", cell, name)
            self.value(place, id(cell), owner, names)
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            self.function(wrapped, owner)

    def value(self, place: OutsidePlace, key: int, owner: type | None, names: frozenset[str] = frozenset()) -> None:
        """One thing that is named: code is entered, values are kept, of modules and classes those that ``names`` has too.
        ``key``: of what holds it."""
        if (key, place.name) in self.known:
            return
        value = place.read()
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, FunctionType):
            self.function(value, owner)
            kept = self.enters(value.__module__)  # another one may be put in its place
        elif isinstance(value, ModuleType | type):
            self._inside(value, names)
            return
        else:
            kept = isinstance(value, (*PLAIN, *_CONTAINERS, torch.Tensor)) or self.enters(type(value).__module__)
        if kept:
            self.known.add((key, place.name))
            self.found.append(place)

    def _inside(self, value: Any, names: frozenset[str]) -> None:
        """A module or a class that is named."""
        of_type = isinstance(value, type)
        if not self.enters(value.__module__ if of_type else value.__name__):
            return
        shown = f"class {value.__qualname__}" if of_type else value.__name__
        every = of_type and issubclass(value, torch.autograd.Function)
        for name in sorted(vars(value) if every else names & vars(value).keys()):
            if not name.startswith("__") and (id(value), name) not in self.entered:
                self.entered.add((id(value), name))
                self.value(OutsidePlace(f"{name!r} of {shown}", vars(value), name), id(value), None, names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _top(module: str) -> str:
    return module.partition(".")[0]
