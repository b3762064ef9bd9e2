"""What a forward does to gradients besides computing: kept in the graph, or refused with its name.

A trace sees operators only. Within ``CaptureWatch`` (around the traced forward and loss function) these are seen as well:

    autograd.Function                              an operator of its own                        (``functions``)
    x.data                                         x.detach()
    torch.inference_mode                           torch.no_grad
    Module.to of a module that is so already       the module
    x.random_(low, high)                           x.random_(high - low).add_(low), for no name may end in ".from"
    a branch on torch.rand that is certain          its outcome                                 (``chance``)
    requires_grad_ on an activation, save_on_cpu, checkpoint, detach, no_grad                    change no gradient of a weight
    register_hook and its kin, grad_fn, retain_grad, autograd.grad, backward, requires_grad_ on a parameter, x.grad,
    saved_tensors_hooks, generator=, a tensor that takes gradients and is not the model's, is_inference_mode_enabled,
    Module.to otherwise                                                                          refused: NotKeptError

Everything else that a tensor can be asked goes on as it is; an error that it ends in has the name of the function as a note. A
refusal that the forward catches is raised after it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.overrides import TorchFunctionMode, resolve_name

from meshwright.compiler.capture.chance import Drawn
from meshwright.compiler.capture.functions import Functions, tracing
from meshwright.errors import NotKeptError

IN_FUNCTION = "in "
"""How the note of an error begins that says in which function of torch it arose."""
OWN_GENERATOR = ("the forward draws from a torch.Generator of its own, whose state no graph holds",
                 "drop generator=, so that it draws from torch's (torch.manual_seed before autoparallel makes a run "
                 "repeatable)")
"""What is refused, and what to do."""
_BESIDE = "change gradients in the forward by a torch.autograd.Function (its backward is kept)"
_WRITTEN_OUT = "write the derivative out in operators, or do without this term"
_Attributes: Any = Tensor
"""Its attributes as what reads and writes them."""
_REFUSED: Mapping[Any, tuple[str, str]] = {
    Tensor.register_hook: ("a tensor.register_hook", _BESIDE),
    Tensor.register_post_accumulate_grad_hook: (
        "a register_post_accumulate_grad_hook", "change the gradient between loss.backward() and optimizer.step()"),
    Tensor.retain_grad: ("a retain_grad", _BESIDE),
    Tensor.backward: ("a backward", "return the loss and call backward on it outside"),
    torch.autograd.backward: ("a backward", "return the loss and call backward on it outside"),
    torch.autograd.grad: ("a torch.autograd.grad (a gradient penalty, say)", _WRITTEN_OUT),
    _Attributes.grad.__get__: ("x.grad, the gradient of an earlier step", "pass it to the forward as an argument"),
    _Attributes.grad.__set__: ("an assignment to x.grad", "assign it outside of the forward"),
    _Attributes.data.__set__: ("an assignment to x.data", "compute a new tensor instead"),
}
"""What is called on a tensor: its name in words, and what to do instead. It would run once, while the model is captured."""

_GRAD_FN, _DATA = _Attributes.grad_fn.__get__, _Attributes.data.__get__
_CONVERSIONS: Mapping[str, tuple[Any, ...]] = {
    "to": (), "float": (torch.float32,), "double": (torch.float64,), "half": (torch.float16,), "bfloat16": (torch.bfloat16,),
    "cpu": ("cpu",), "cuda": ("cuda",)}
"""Methods of a module that convert its tensors in place, and to what."""
_SWITCHES = (Tensor.requires_grad_, _Attributes.requires_grad.__set__)


class CaptureWatch(TorchFunctionMode):
    """See the file's head. ``is_user_file``: whether a source file is the model's; ``owned``: ids of the model's real tensors
    (``importer`` tells how these are reached); ``functions``: the custom functions that were called; ``refused``: the first
    refusal."""

    def __init__(self, is_user_file: Callable[[str], bool], owned: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.is_user_file = cache(is_user_file)
        self.owned = owned
        self.functions = Functions()
        self.drawn = Drawn()
        self.refused: NotKeptError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _REFUSED and (func != _Attributes.grad.__get__ or isinstance(args[0], nn.Parameter)):
            what, remedy = _REFUSED[func]
            raise self.refuse(f"the forward calls for {what}, which would be lost", remedy)
        if func == _DATA:
            return args[0].detach()
        if func == _GRAD_FN:
            node = func(*args, **kwargs)
            return node if node is None else _Node(node, self)
        if func in _SWITCHES and isinstance(args[0], nn.Parameter):
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if wanted != args[0].requires_grad:
                raise self.refuse(f"the forward sets requires_grad={wanted} on a parameter",
                                  "set it before autoparallel; the plan depends on what is trained")
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor) or not leaf.requires_grad or id(leaf) in self.owned:
                continue
            if torch._C._functorch.is_gradtrackingtensor(leaf):
                raise self.refuse("the forward differentiates by torch.func, which a graph does not keep", _WRITTEN_OUT)
            if not torch._C._functorch.is_functorch_wrapped_tensor(leaf):
                raise self.refuse(f"the forward reads a tensor of shape {list(leaf.shape)} that takes gradients and is no "
                                  f"parameter of the model: it would be a constant of the graph",
                                  "register it as a parameter of the model (of a module that holds the model and the loss)")
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise self.refuse(*OWN_GENERATOR)
        if func is Tensor.random_ and _count_of_bounds(args, kwargs) == 2:
            return self._within(*args, **kwargs)
        if func is Tensor.__bool__ and (outcome := self.drawn.outcome(args[0])) is not None:
            return outcome
        set_stack_trace(self._line())
        try:
            made = func(*args, **kwargs)
            self.drawn.note(func, args, made)
            return made
        except Exception as error:
            error.add_note(f"{IN_FUNCTION}{resolve_name(func) or func}")
            raise
        finally:
            set_stack_trace([])

    def _line(self) -> list[str]:
        """The line of the model's forward that runs, as a stack trace of it, which the nodes of the trace have from here: torch
        would write the whole stack of every node down to find it. Nothing where no forward runs."""
        frame: FrameType | None = None if torch.compiler.is_dynamo_compiling() else sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and self.is_user_file(code.co_filename):
                return [f'File "{code.co_filename}", line {frame.f_lineno}, in forward']
            frame = frame.f_back
        return []

    def _within(self, tensor: Tensor, *bounds: int, **named: Any) -> Tensor:
        """``tensor.random_(low, high)``."""
        given = [*bounds, *(named.pop(name) for name in ("from", "to") if name in named)]
        low, high = given
        if high is None:
            raise self.refuse(f"the forward calls for x.random_({low}, None)", "name the number that it draws below")
        drawn = tensor.random_(high - low, **named)
        return drawn.add_(low) if low else drawn

    def refuse(self, what: str, remedy: str) -> NotKeptError:
        """The error to raise, remembered."""
        error = NotKeptError(what, remedy)
        self.refused = self.refused or error
        return error

    @contextmanager
    def over(self) -> Iterator[None]:
        """Around the forward, in which tensors are traced."""
        with ExitStack() as stack:
            for context in (self.functions.kept(), preserve_node_meta(), *self._patches(), self):
                stack.enter_context(context)
            yield
        if self.refused is not None:
            raise self.refused

    def _patches(self) -> list[Any]:
        """Of what no tensor is asked about. Process-wide while a model is captured, in effect only where one is traced."""
        saving, inference = torch.autograd.graph.saved_tensors_hooks, torch.inference_mode
        enter_saving, enter, leave = saving.__enter__, inference.__enter__, inference.__exit__

        def saved(hooks: Any) -> Any:
            own = type(hooks).__module__.startswith("torch.") and type(hooks) is not saving
            if tracing() and not own:
                raise self.refuse(f"the forward runs under {type(hooks).__qualname__}, which may change what a backward reads",
                                  "leave it out, or put it around the call of the parallel module")
            return enter_saving(hooks)

        def begin(context: Any) -> Any:
            if not tracing():
                return enter(context)
            context.instead = torch.no_grad() if context.mode else torch.enable_grad()
            return context.instead.__enter__()

        def end(context: Any, *error: Any) -> Any:
            instead = context.__dict__.pop("instead", None)
            return leave(context, *error) if instead is None else instead.__exit__(*error)

        asked = torch.is_inference_mode_enabled

        def answer() -> bool:
            if tracing() and not str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch"):
                raise self.refuse("the forward asks whether inference mode is on (torch.is_inference_mode_enabled), which is "
                                  "entered and left after it is captured",
                                  "ask torch.is_grad_enabled(): each answer is captured")
            return asked()

        def converting(name: str) -> Any:
            convert: Callable[..., nn.Module] = getattr(nn.Module, name)

            def converted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
                if not tracing():
                    return convert(module, *args, **kwargs)
                wanted = (*_CONVERSIONS[name], *args, *kwargs.values())
                held = (*module.parameters(), *module.buffers())
                if not all(_is_already(tensor, one) for tensor in held for one in wanted):
                    raise self.refuse(f"the forward converts a module (Module.{name}), which would change its weights once",
                                      "convert it before autoparallel, or convert what it reads and gives")
                return module

            return _replaced(nn.Module, name, converted)

        return [*map(converting, _CONVERSIONS), _replaced(torch, "is_inference_mode_enabled", answer),
                _replaced(saving, "__enter__", saved), _replaced(inference, "__enter__", begin),
                _replaced(inference, "__exit__", end)]


def _count_of_bounds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many of its bounds a call of ``random_`` gives."""
    return len(args) - 1 + len(kwargs.keys() & {"from", "to"})


def _is_already(tensor: Tensor, wanted: Any) -> bool:
    """If ``Module.to`` leaves a parameter or buffer as it is for this one of its arguments; a number is a device's."""
    if isinstance(wanted, Tensor):
        return _is_already(tensor, wanted.dtype) and _is_already(tensor, wanted.device)
    if isinstance(wanted, torch.dtype):
        return wanted == tensor.dtype or not tensor.is_floating_point()
    if isinstance(wanted, str | torch.device):
        return torch.device(wanted).type == tensor.device.type
    return wanted is None or isinstance(wanted, bool | int)


@contextmanager
def _replaced(holder: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, function)
    try:
        yield
    finally:
        setattr(holder, name, before)


class _Node:
    """A tensor's ``grad_fn``, without its hooks."""

    def __init__(self, node: Any, watch: CaptureWatch) -> None:
        self._node, self._watch = node, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def _hook(self, *_: Any) -> Callable[..., Any]:
        raise self._watch.refuse("the forward registers a hook on grad_fn, which would be lost", _BESIDE)

    register_hook = register_prehook = _hook
