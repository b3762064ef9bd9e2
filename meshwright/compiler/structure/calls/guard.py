"""What the forward decided in Python when it was captured, watched at every call of the parallel module.

A graph holds one outcome of ``if self.training``, and the numbers that attributes had. So

    mode          the first call in eval(), and under no_grad, captures the model so and compares it with the training graph
                  (in evaluation: without dropout and batch statistics), which is what runs; where the forward does something
                  else, that graph runs instead
    attributes    plain Python values of the model's modules, and of objects they hold (a config): when one has changed, the
                  forward is captured again; a graph that comes out otherwise is refused, by the attribute's name
    globals       and closures and class attributes that forwards name (``outside``), in the same way
    loss_fn       what it reads: of its object or module, globals, closures, in the same way
    default dtype of tensors that a forward makes, in the same way
    modules       swapped or added ones, and sub-modules set to another mode, are refused
    autocast      around a call is refused: ``precision`` decides
    call          one that gives by name what was given by position, or the other way round, is captured so and compared, if
                  hooks or a wrapper of the forward could tell

The model is held weakly, so that its memory can be given back: when it is gone nobody can change it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.compiler.structure.calls.outside import PLAIN, held_by, places
from meshwright.compiler.structure.evaluation import difference, in_evaluation
from meshwright.errors import CaptureError, InputError, MeshwrightError, RunError
from meshwright.ir.graph import Graph
from meshwright.ir.signature import example_of

Capture = Callable[..., Graph]
"""(model, args, kwargs, targets, training, functional) -> graph."""

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_MISSING = "no such attribute"
_MOST_NUMBERS = 4096
"""Elements of a NumPy array that are compared; of a larger one, evenly spaced ones."""
_SURROUNDINGS: Mapping[str, Callable[[], Any]] = {"torch.get_default_dtype()": torch.get_default_dtype}
"""What no name in a forward tells of, and may decide what it makes."""
_OPAQUE = frozenset({"torch", *sys.stdlib_module_names})


Mode = tuple[bool, bool]
"""(training, gradients enabled)."""
EVALUATION = (False, False), (False, True)


@dataclass(frozen=True)
class OtherMode:
    """A graph that is not the one captured in training, and the first thing that differs, in words."""

    difference: str
    graph: Graph


class CallWatch:
    """See the file's head. Called at the beginning of every call of the parallel module."""

    def __init__(self, model: nn.Module, graph: Graph, capture: Capture, positional: int, loss_fn: Any = None) -> None:
        """``positional``: how many arguments the captured call gave by position."""
        self.model, self.capture, self.loss_fn = weakref.ref(model), capture, loss_fn
        constants = {name: tensor.clone() for name, tensor in graph.constants.items()}  # which the model may write into
        self.graph = replace(graph, constants=constants)
        self.modes_seen: dict[Mode, OtherMode | None] = {(True, True): None}
        self.outside = places(model, loss_fn)
        self.state, self.outside_state = self._state(model), self._outside_state()
        self.modes = _modes(model) if model.training else None
        self.modules = _modules(model)
        self.forms = {((True, True), positional)}

    def __call__(self, training: bool, *call: Any) -> OtherMode | None:
        """What the model computes in this mode where that is another graph than in training. ``call``: args, kwargs, targets.
        Raises RunError if a graph is no longer what the model computes."""
        refuse_autocast()
        model = self.model()
        if model is not None:
            self._unchanged(model, training, *call)
        mode = training, torch.is_grad_enabled()
        form = mode, len(call[0])
        if mode in self.modes_seen:
            if form not in self.forms and model is not None and _tells_forms_apart(model):
                self._same_form(model, mode, *call)
            self.forms.add(form)
            return self.modes_seen[mode]
        if model is None:
            raise RunError("the first call in eval(), and the first under no_grad, capture the model so, and the model is "
                           "gone; keep it until then, or call the parallel module so once before it is deleted")
        found = self.modes_seen[mode] = self._differs(model, mode, *call)
        self.forms.add(form)
        return found

    def _same_form(self, model: nn.Module, mode: Mode, *call: Any) -> None:
        """Raise RunError if the model computes something else of the same arguments given by position, or by name."""
        found = self._differs(model, mode, *call)
        if found is not None:
            known = " or ".join(str(count) for seen, count in sorted(self.forms) if seen == mode)
            raise RunError(f"a hook or a wrapper of the model's forward looks at how arguments are given: with {len(call[0])} "
                           f"by position it computes something else ({found.difference}) than with {known}, as it was "
                           f"captured; give as many by position as the example did, the others by name")

    def unexportable(self) -> str | None:
        """Why nobody can say that the graph is the model's in eval(), None if it is: found out now if no call did."""
        model, missing = self.model(), [mode for mode in EVALUATION if mode not in self.modes_seen]
        if missing and model is None:
            return "the model was gone before the parallel module was called in eval() or exported"
        if missing and self.graph.signature is None:
            return "the plan does not say what a call looks like"
        for mode in missing:
            assert model is not None
            assert self.graph.signature is not None
            try:
                self.modes_seen[mode] = self._differs(model, mode, *example_of(self.graph.signature))
            except MeshwrightError as error:
                return str(error)
        others = [other for mode in EVALUATION if (other := self.modes_seen[mode]) is not None]
        return f"it computes something else there than in training: {others[0].difference}" if others else None

    def _unchanged(self, model: nn.Module, training: bool, *call: Any) -> None:
        if (found := _modules(model)) != self.modules:
            changed = [name for name in (*self.modules, *found) if self.modules.get(name) != found.get(name)]
            raise RunError(f"module {changed[0]!r} of the model was added, removed or replaced after it was made parallel; "
                           f"make it parallel again")
        if training and model.training and self.modes is not None and (modes := _modes(model)) != self.modes:
            path = next(path for path in modes if modes[path] != self.modes.get(path))
            raise RunError(f"module {path!r} of the model is {'in' if modes[path] else 'out of'} training mode, and was not "
                           f"when the model was captured; set it back, or make the model parallel again")
        state, outside_state = self._state(model), self._outside_state()
        if state == self.state and outside_state == self.outside_state:
            return
        mode = training, torch.is_grad_enabled()  # of one that was not seen yet there is no graph that it could differ from
        if self._differs(model, mode if mode in self.modes_seen else (True, True), *call) is not None:
            what, *both = next(self._changes(state, outside_state))
            before, now = _apart(*both)
            raise RunError(f"{what} {'holds what ' * (now is not both[1])}was {_shown(before)} when the model was captured and "
                           f"is {_shown(now)}, and its forward computes something else with it; set it back, or make the "
                           f"model parallel again")
        self.outside = places(model, self.loss_fn)  # a function that was replaced may read others
        self.state, self.outside_state = state, self._outside_state()

    def _state(self, model: nn.Module) -> dict[str, Any]:
        """{what: its value, comparable} of the model and of the loss function."""
        found = {f"attribute {name!r} of the model": value for name, value in _state(model).items()}
        if isinstance(self.loss_fn, nn.Module):
            seen: dict[int, Any] = {}
            tensors = {name: _frozen(buffer, seen) for name, buffer in self.loss_fn.named_buffers()}
            held = {**_state(self.loss_fn), **tensors}
        else:
            seen = {id(part): ("module", id(part)) for part in (model, *model.modules())}
            held = {name: _frozen(value, seen) for name, value in held_by(self.loss_fn).items()}
        return found | {f"attribute {name!r} of loss_fn": value for name, value in held.items()}

    def _outside_state(self) -> list[Any]:
        seen: dict[int, Any] = {}
        return [*(read() for read in _SURROUNDINGS.values()), *(_frozen(place.read(), seen) for place in self.outside)]

    def _changes(self, state: Mapping[str, Any], outside_state: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
        """(what has changed, its value before, and now)."""
        for name in dict.fromkeys((*state, *self.state)):
            before, now = self.state.get(name, _MISSING), state.get(name, _MISSING)
            if before != now:
                yield name, before, now
        names = (*_SURROUNDINGS, *(place.what for place in self.outside))
        for what, before, now in zip(names, self.outside_state, outside_state, strict=True):
            if before != now:
                yield what, before, now

    def _differs(self, model: nn.Module, mode: Mode, *call: Any) -> OtherMode | None:
        """The graph of the model as it is now, if it is not the one that runs in this mode."""
        training, gradients = mode
        known = self.modes_seen.get(mode)
        wanted = known.graph if known is not None else self.graph if training else in_evaluation(self.graph)
        first: OtherMode | None = None
        for functional in (False, True):  # the same model is spelled in two ways, depending on whether it updates something
            try:
                with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                    graph = self.capture(model, *call, training, functional)
            except (CaptureError, InputError) as error:
                how = f"{'train' if training else 'eval'}(), gradients {'on' if gradients else 'off'}"
                raise RunError(f"the model cannot be captured as it is called now ({how}): {error}") from error
            found = difference(wanted, graph, gradients)
            if found is None:
                return None
            first = first or OtherMode(found, graph)
        return first


def _tells_forms_apart(model: nn.Module) -> bool:
    """Whether something sees which arguments come by position: hooks of the whole model, and what wraps its forward."""
    return bool(model._forward_hooks or model._forward_pre_hooks or hasattr(model.forward, "__wrapped__"))


def refuse_autocast() -> None:
    """Raise RunError in an autocast context."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise RunError("autocast is on around the call; the parallel module computes in the precision of its plan: take "
                       "the call out of the autocast context, and plan with precision='bf16'")


def _apart(before: Any, now: Any) -> tuple[Any, Any]:
    """What differs of two frozen values, as far inside as they are alike around it."""
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        parts = [(one, two) for one, two in zip(before, now, strict=True) if one != two]
        return _apart(*parts[0]) if len(parts) == 1 else (before, now)
    return before, now


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _modules(model: nn.Module) -> dict[str, Any]:
    """{path: which module}, and the parameters and buffers each has."""
    return {
        path: (id(module), type(module), *(
            (name, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
        ))
        for path, module in model.named_modules()
    }


def _modes(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


def _state(model: nn.Module) -> dict[str, Any]:
    """{path of an attribute: its value, comparable}, without what torch's modules have of their own."""
    found: dict[str, Any] = {}
    modules = dict(model.named_modules())
    seen: dict[int, Any] = {id(module): ("module", id(module)) for module in modules.values()}
    for path, module in modules.items():
        for name, value in module.__dict__.items():
            if name not in _INTERNAL and name != "training":
                found[f"{path}.{name}" if path else name] = value if type(value) in PLAIN else _frozen(value, seen)
    return found


def _frozen(value: Any, seen: dict[int, Any]) -> Any:
    """A value that can be compared later: containers and objects by their contents, tensors by identity and version."""
    if type(value) in PLAIN:
        return value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = ("again", id(value))
    if isinstance(value, torch.Tensor):
        result: Any = ("tensor", id(value), value._version if not value.is_inference() else 0)
    elif isinstance(value, FunctionType):
        result = ("function", value.__qualname__, id(value), id(value.__code__),
                  _frozen(value.__defaults__, seen), _frozen(value.__kwdefaults__, seen))
    elif isinstance(value, set | frozenset):
        result = ("set", frozenset(_frozen(item, seen) for item in value))
    elif isinstance(value, np.ndarray | np.generic):
        step = max(1, value.size // _MOST_NUMBERS)
        result = ("array", value.shape, str(value.dtype), value.ravel()[::step].tobytes())
    else:
        result = (type(value).__name__, *(_frozen(part, seen) for part in _parts(value)))
    seen[id(value)] = result
    return result


def _parts(value: Any) -> Iterator[Any]:
    """What a container or an object holds; of what is none, and of objects of torch and the standard library, which it is."""
    known = isinstance(value, list | tuple | deque | dict | partial | MethodType | staticmethod | classmethod
                       | nn.Module)
    own = hasattr(value, "__dict__") or hasattr(value, "__slots__")
    top = type(value).__module__.partition(".")[0]
    if isinstance(value, type) or not (known or own) or (callable(value) and not known and top in _OPAQUE):
        yield id(value)
        return
    if isinstance(value, Enum):
        yield value.name
        return
    if isinstance(value, list | tuple | deque):
        yield from value
    if isinstance(value, dict):
        yield from (part for item in value.items() for part in item)
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    if isinstance(value, MethodType | staticmethod | classmethod):
        yield from (value.__func__, id(getattr(value, "__self__", None)))
        return
    if isinstance(value, nn.Module):  # that is no sub-module of the model
        yield from (id(value), value.training, value._modules)
    for name, part in getattr(value, "__dict__", {}).items():
        if not (isinstance(value, nn.Module) and name in _INTERNAL):
            yield from (name, part)
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (getattr(value, name, _MISSING) for name in ((slots,) if isinstance(slots, str) else slots)
                    if not name.startswith("__"))
