"""Hooks of a model, and which of them its graph keeps.

    forward hooks and pre-hooks of modules                        run while the model is captured: what they compute is kept
    full-backward hooks and pre-hooks of modules, hooks of parameters, hooks of every module    would be lost: refused

A graph does not change when the model does, so hooks that come or go afterwards are refused when the parallel module is called
(``HookGuard``). Torch's own hooks on every module (its profilers') compute nothing and are let be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_KEPT: Mapping[str, str] = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}
_LOST: Mapping[str, str] = {"_backward_hooks": "full-backward hook", "_backward_pre_hooks": "full-backward pre-hook"}
_OF_PARAMETERS: Mapping[str, str] = {
    "_backward_hooks": "hook", "_post_accumulate_grad_hooks": "post-accumulate hook",
}
_OF_ALL: Mapping[str, str] = {f"_global{name}": kind for name, kind in {**_KEPT, **_LOST}.items()}


@dataclass(frozen=True)
class Hook:
    """One hook: what it is, on what, and what to do about it."""

    kind: str
    where: str
    name: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where} has a {self.kind} ({self.name})"


def lost_hooks(model: nn.Module) -> Iterator[Hook]:
    """The hooks that act in a training step of the model, and would not in one of its graph."""
    yield from hooks_of_all()
    for path, module in model.named_modules():
        for table, kind in _LOST.items():
            for hook in getattr(module, table).values():
                yield Hook(kind, f"module {path or '(root)'!r} ({type(module).__name__})", _name(hook),
                           "remove it; to change gradients of activations call a torch.autograd.Function in the forward (its "
                           "backward is kept), those of weights between loss.backward() and optimizer.step()")
    for name, parameter in model.named_parameters():
        for table, kind in _OF_PARAMETERS.items():
            for hook in (getattr(parameter, table, None) or {}).values():
                yield Hook(kind, f"parameter {name!r}", _name(hook), "remove it, and change the parallel module's gradient, "
                           "a DTensor, between loss.backward() and optimizer.step()")


def hooks_of_all() -> Iterator[Hook]:
    """Hooks on every module of the process, torch's own left out: they would meet modules that are not the model's."""
    for table, kind in _OF_ALL.items():
        for hook in getattr(nn.modules.module, table).values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                yield Hook(kind, "every module", _name(hook), "remove it, and register it on the modules that it is for")


def _name(hook: Callable[..., Any]) -> str:
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", type(hook).__name__)
    return f"{module}.{name}" if module else str(name)


class HookGuard:
    """Notices hooks that a model gets or loses after it was captured, at little cost (microseconds for every hundred modules).
    Does not keep the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[tuple[str, str, Mapping[int, Any]]] = []
        for path, module in model.named_modules():
            where = f"module {path or '(root)'!r} ({type(module).__name__})"
            self._tables += [(where, kind, getattr(module, table)) for table, kind in {**_KEPT, **_LOST}.items()]
        self._parameters = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
        self._before = self._now()

    def changed(self) -> str | None:
        """What came or went, in words; None if nothing did."""
        for hook in hooks_of_all():
            return str(hook)
        now = self._now()
        for number in now.keys() | self._before.keys():
            if now.get(number) != self._before.get(number):
                where, kind, table = self._tables[number]
                names = ", ".join(_name(hook) for hook in table.values()) or "none left"
                return f"the hooks of {where} changed after it was captured (a {kind}; now {names})"
        for name, reference in self._parameters:
            parameter = reference()
            if parameter is not None and _has_hooks(parameter):
                return f"parameter {name!r} of the model that was captured got a hook, which acts on no gradient here"
        return None

    def _now(self) -> dict[int, tuple[int, ...]]:
        return {number: tuple(table) for number, (_, _, table) in enumerate(self._tables) if table}


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
