"""The shadow: a copy of a model without its memory, traced in place of it.

``copy.deepcopy`` with a memo that already maps every parameter and buffer to a fake tensor copies the module tree, and
nothing else: tying, sub-module identity and plain attributes are kept, the model itself is neither changed nor allocated
again, and real weights and weights on the meta device look the same (fake, on the CPU). Tensors that a module keeps as plain
attributes become non-persistent buffers of the shadow, so that they are values of the graph and not part of its code.

``trace`` exports the shadow: a wrapper with only tensors as inputs and outputs. The user's containers are opened and closed
inside it in Python, so no container (dataclass, ModelOutput, cache) has to be known to torch.export.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.compiler.capture.chance import ChanceError, generators_unchanged, raised_where_drawn
from meshwright.compiler.capture.watch import CaptureWatch
from meshwright.compiler.structure.calls.outside import PLAIN
from meshwright.errors import CaptureError, NotKeptError
from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import collector_paused
from meshwright.ir.signature import flatten_output, rebuild_arguments, split_arguments

WRAPPED = "model"
"""Name of the user's model inside the wrapper: the first part of every path that the export reports."""


@dataclass(frozen=True)
class ModelTensor:
    """One tensor that the model holds, under all its names, the canonical one first. ``plain``: a plain attribute; ``also``:
    other tensor objects that are the same memory."""

    tensor: torch.Tensor
    fqns: tuple[str, ...]
    buffer: bool
    persistent: bool
    plain: bool = False
    also: tuple[torch.Tensor, ...] = ()


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Parameters, buffers and plain tensor attributes of the model, each once, parameters first."""
    names: dict[int, list[str]] = {}
    first: dict[int, tuple[torch.Tensor, bool, bool, bool]] = {}

    def add(fqn: str, tensor: torch.Tensor, buffer: bool, persistent: bool, plain: bool = False) -> None:
        names.setdefault(id(tensor), []).append(fqn)
        first.setdefault(id(tensor), (tensor, buffer, persistent, plain))

    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules(remove_duplicate=False)]
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                add(prefix + name, parameter, False, True)
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                add(prefix + name, buffer, True, name not in module._non_persistent_buffers_set)
    for prefix, module in modules:
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                add(prefix + name, value, True, False, True)
    return [ModelTensor(tensor, tuple(names[key]), buffer, persistent, plain)
            for key, (tensor, buffer, persistent, plain) in first.items()]


def make_shadow(
    model: nn.Module, owned: Sequence[ModelTensor], mode: FakeTensorMode, dtype: torch.dtype | None, training: bool,
    strays: list[torch.Tensor] | None = None,
) -> nn.Module:
    """The model with fake CPU tensors; floating parameters in ``dtype`` if given. In ``training`` mode or not; a model that
    already is keeps the modes of its sub-modules. ``strays``: takes the tensors that it holds elsewhere than in ``owned``."""
    memo: dict[int, Any] = {}
    for item in owned:
        tensor = item.tensor
        cast = dtype if dtype is not None and not item.buffer and tensor.is_floating_point() else tensor.dtype
        with mode:
            fake = torch.empty(tensor.shape, dtype=cast, device="cpu")
            memo[id(tensor)] = fake if item.buffer else nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo |= dict.fromkeys(map(id, item.also), memo[id(tensor)])
    keep = list(memo.values())
    try:
        with _Strays([] if strays is None else strays):
            shadow = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(f"the model cannot be copied without its memory: copy.deepcopy({type(model).__name__}) raised "
                           f"{type(error).__name__}: {error}. Move what cannot be copied out of the module") from error
    del keep
    for module in shadow.modules():
        for name, value in [(n, v) for n, v in vars(module).items() if isinstance(v, torch.Tensor)]:
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)
    return shadow if shadow.training == training else _set_mode(shadow, training)


def _set_mode(shadow: nn.Module, training: bool) -> nn.Module:
    """``train(training)``, which must leave the tensors alone: that of a parallel module does."""
    before = [*shadow.named_parameters(), *shadow.named_buffers()]
    with _Unwritten(training):
        shadow.train(training)
    after = [*shadow.named_parameters(), *shadow.named_buffers()]
    if [(name, id(x)) for name, x in before] != [(name, id(x)) for name, x in after]:
        raise _writes(training, "puts other tensors in the place of parameters or buffers")
    return shadow


def _writes(training: bool, what: str) -> CaptureError:
    call = "train()" if training else "eval()"
    return CaptureError(
        f"{call} of the model {what}, which {call} of a parallel module does not: it runs a graph of the weights as they are. "
        f"What to do: compute it in the forward (as layers with adapters do that are not merged), or call it before "
        f"autoparallel and leave out the other mode")


class _Unwritten(TorchDispatchMode):
    """Within, writing into a tensor raises CaptureError."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training = training

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func._schema.is_mutable:
            raise _writes(self.training, f"writes into tensors ({func})")
        return func(*args, **(kwargs or {}))


class _Strays(TorchFunctionMode):
    """Within, every tensor that is copied is kept in ``found``: those that the model has in lists, dicts and objects."""

    def __init__(self, found: list[torch.Tensor]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.found += [x for x in args[:1] if isinstance(x, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def fake_inputs(leaves: Sequence[torch.Tensor], mode: FakeTensorMode) -> list[torch.Tensor]:
    """One distinct fake per leaf, on the CPU: the same tensor given twice is two inputs."""
    with mode:
        return [torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in leaves]


Numbers = Mapping[tuple[Any, ...], Any]
"""{path of module, attribute, keys: a plain value} that modules hold: numbers, texts, switches."""


def _numbers(model: nn.Module) -> dict[tuple[Any, ...], tuple[Any, Any]]:
    """{path: (what holds it, under which key)} of the plain values in the attributes of modules, and in what these hold."""
    found: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    seen: set[int] = set()

    def look(path: tuple[Any, ...], table: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            if type(value) in PLAIN or (type(value) is tuple and all(type(item) in PLAIN for item in value)):
                found[*path, key] = table, key
            elif id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, dict):
                    look((*path, key), value, list(value.items()))
                elif isinstance(value, list):
                    look((*path, key), value, list(enumerate(value)))
                elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor):
                    look((*path, key), vars(value), list(vars(value).items()))

    for path, module in model.named_modules():
        look((path,), vars(module), [(name, value) for name, value in vars(module).items() if name not in _INTERNAL])
    return found


def _buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str, torch.Tensor]]:
    """{name: (the module that has it, its name there, the buffer)}."""
    return {f"{path}.{name}" if path else name: (module, name, buffer)
            for path, module in model.named_modules() for name, buffer in module._buffers.items() if buffer is not None}


def _values(model: nn.Module) -> Numbers:
    return {path: table[key] for path, (table, key) in _numbers(model).items()}


def move(shadow: nn.Module, moved: Numbers) -> nn.Module:
    """The shadow with these values, as a forward left them."""
    modules = dict(shadow.named_modules())
    for path, value in moved.items():
        table: Any = vars(modules[path[0]])
        for key in path[1:-1]:
            table = table[key] if isinstance(table, dict | list) else vars(table)[key]
        if isinstance(table, list) and path[-1] >= len(table):
            table.append(value)
        elif isinstance(table, dict | list):
            table[path[-1]] = value
        else:
            vars(table)[path[-1]] = value
    return shadow


_INTERNAL = frozenset(vars(nn.Module()))


@dataclass
class _Seen:
    """What the wrapper saw of the output, in Python, while it was traced; ``moved``: what the forward changed in the model;
    ``assigned``: tensors put in another's place there that have a gradient, or are no buffers."""

    tree: Any = None
    moved: Numbers | None = None
    assigned: set[str] = field(default_factory=set)
    type_: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    classes: dict[str, type] = field(default_factory=dict)


class DataDependentError(Exception):
    """A RuntimeError that says "data-dependent", under another name: of one torch prints the graph so far, on stderr."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error


class _Wrapper(nn.Module):
    """Tensors in, tensors out; everything else happens in Python around the model."""

    def __init__(
        self, model: nn.Module, signature: Mapping[str, Any], named: Mapping[str, Any], positional: int,
        loss_fn: Callable[..., Any] | None, dtype: torch.dtype | None, owned: Sequence[ModelTensor],
    ) -> None:
        super().__init__()
        setattr(self, WRAPPED, model)
        self.call = (signature, named, positional, loss_fn, dtype)
        self.plain = frozenset(name for item in owned if item.plain for name in item.fqns)
        self.seen, self.watch = _Seen(), CaptureWatch(is_user_file, frozenset(id(item.tensor) for item in owned))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.watch.over():
            try:
                return self.watched(*tensors)
            except RuntimeError as error:
                if "data-dependent" in str(error):
                    raise DataDependentError(error) from error
                raise

    def watched(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The forward, in which nothing that changes gradients goes unseen."""
        signature, named, positional, loss_fn, dtype = self.call
        count = len(tensors) - len(signature["targets"])
        inputs = [t.to(dtype) if dtype is not None and t.is_floating_point() else t for t in tensors[:count]]
        args, kwargs = split_arguments(signature, rebuild_arguments(signature, inputs, named), positional)
        model = getattr(self, WRAPPED)
        before, buffers = _values(model), _buffers(model)
        output = model(*args, **kwargs)
        self._write_assigned(buffers)
        if self.seen.moved is None:
            self.seen.moved = {path: value for path, value in _values(model).items()
                               if path not in before or not _same(before[path], value)}
        for given, cast in zip(tensors, inputs, strict=False):
            if cast is not given and cast._version:  # the forward changed it in place, which the caller is to see
                given.copy_(cast)
        if loss_fn is not None:
            output = loss_fn(output, *tensors[count:])
        self.seen.tensors = []  # the export undoes assignments to the module, not to what it holds
        self.seen.tree, self.seen.type_ = flatten_output(output, self._leaf, self.seen.classes)
        return tuple(self.seen.tensors)

    @torch.no_grad()
    def _write_assigned(self, buffers: Mapping[str, tuple[nn.Module, str, torch.Tensor]]) -> None:
        """``self.mean = new``: the export would undo that, so the new value is written into the buffer that was there."""
        found = []
        for fqn, (module, name, old) in buffers.items():
            new = module._buffers.get(name)
            if new is old:
                continue
            if fqn in self.plain or (new is not None and new.requires_grad):
                self.seen.assigned.add(fqn)
            if fqn in self.plain:
                continue
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                now = "nothing" if new is None else f"{new.dtype}{list(new.shape)}"
                raise NotKeptError(f"the forward makes buffer {fqn!r} ({old.dtype}{list(old.shape)}) {now}",
                                   "keep the shape and dtype of buffers, or what is not kept out of them")
            found.append((module, name, old, new.detach().clone()))
        for module, name, old, new in found:
            old.copy_(new)
            module._buffers[name] = old

    def _leaf(self, tensor: torch.Tensor) -> Leaf:
        self.seen.tensors.append(tensor)
        return Leaf(len(self.seen.tensors) - 1)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)


@dataclass(frozen=True)
class Leaf:
    """The ``index``-th tensor of the output."""

    index: int


@dataclass(frozen=True)
class Traced:
    """``program``'s outputs are the leaves of ``tree``; its state names start with ``WRAPPED``. ``classes``: those of the
    output's containers, by name; ``functions``: those that it calls with a backward of their own; ``moved``: plain values of
    the model that the forward changes, as it leaves them; ``assigned``: see ``_Seen``."""

    program: ExportedProgram
    tree: Any
    type_: Any
    classes: Mapping[str, type]
    functions: tuple[CustomFunction, ...] = ()
    moved: Numbers = field(default_factory=dict)
    assigned: frozenset[str] = frozenset()


def trace(
    shadow: nn.Module, tensors: Sequence[torch.Tensor], signature: Mapping[str, Any], named: Mapping[str, Any], positional: int,
    loss_fn: Callable[..., Any] | None, dtype: torch.dtype | None, owned: Sequence[ModelTensor],
) -> Traced:
    """Export the shadow on fake inputs. The process draws afterwards what it would have drawn before. ``positional``: how many
    of the ``named`` arguments come by position; ``owned``: what the model holds."""
    wrapper = _Wrapper(shadow, signature, named, positional, loss_fn, dtype, owned)
    failed: RuntimeError | None = None
    with collector_paused(), _masks_as_given(), _errors_not_logged(), _use_lazy_graph_module(True):  # no code: it is not run
        try:
            with generators_unchanged(is_user_file):
                program = torch.export.export(wrapper, tuple(tensors), strict=False)
        except ChanceError:
            with generators_unchanged(is_user_file), raised_where_drawn():
                torch.export.export(wrapper, tuple(tensors), strict=False)
            raise
        except DataDependentError as told:
            failed = told.error
    if failed is not None:  # raised out here, or each would stand behind the other
        raise failed
    functions = tuple(wrapper.watch.functions.found)
    return Traced(program, wrapper.seen.tree, wrapper.seen.type_, wrapper.seen.classes, functions, wrapper.seen.moved or {},
                  frozenset(wrapper.seen.assigned))


@contextlib.contextmanager
def _errors_not_logged() -> Iterator[None]:
    """What a fake tensor raises it logs too, with its trace; who captures is told by the error, in a line."""
    log = logging.getLogger(FakeTensorMode.__module__)

    def told(record: logging.LogRecord) -> bool:
        return not record.exc_info

    log.addFilter(told)
    try:
        yield
    finally:
        log.removeFilter(told)


@contextlib.contextmanager
def _masks_as_given() -> Iterator[None]:
    """``nn.Transformer`` looks whether a mask is causal, to hint at it. The mask is read whatever the hint says."""
    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect


def behind(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that led to it, each once: raised again in a handler, two may stand behind each other."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def failing_frame(error: BaseException, shadow: nn.Module) -> tuple[str, str]:
    """(path of the innermost module that was running, "file:line" of the innermost line that is not torch's or ours)."""
    paths = {id(module): path for path, module in shadow.named_modules()}
    module = source = ""
    for one in behind(error):
        found = _innermost(one.__traceback__, paths)
        module, source = found[0] or module, found[1] or source
        if source:
            break
    return module, source


def _innermost(traceback: types.TracebackType | None, paths: Mapping[int, str]) -> tuple[str, str]:
    module = source = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        module = paths.get(id(traceback.tb_frame.f_locals.get("self")), "") or module
        if is_user_file(code.co_filename):
            source = f"{code.co_filename.rsplit('/', 1)[-1]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return module, source


def failing_function(error: BaseException, names: Collection[str]) -> str:
    """The outermost function of torch's own that was running, of these names; "" where none was."""
    for one in behind(error):
        for frame, _ in walk_tb(one.__traceback__):
            code = frame.f_code
            if code.co_name in names and "/torch/" in code.co_filename:
                return f"{frame.f_globals['__name__']}.{code.co_name}"
    return ""


def is_user_file(path: str) -> bool:
    """Whether a source file is the model's: not torch, not this package, not generated code."""
    return not (path.startswith(("<", _PACKAGE)) or "/torch/" in path or path in _LIBRARY)


_PACKAGE = __file__.rsplit("/compiler/", 1)[0] + "/"
_LIBRARY = (contextlib.__file__, random.__file__)
