"""Custom backwards: every ``torch.autograd.Function`` that the forward calls becomes one operator of the graph.

torch.export traces through ``apply`` as if the backward were the forward's derivative. ``Functions.apply`` stands in for it
during the trace. A call that takes a gradient is traced on its own, forward and backward together, by torch's own autograd
(``_joint``): so ``setup_context`` or not, materialized gradients and what ``needs_input_grad`` says are as they are in the
model. The result is cut in two (``custom.split_joint``), and the outer trace gets one node,

    meshwright::custom_function(tensors, index of the function, dtypes and shapes of its results) -> results

which ``importer`` reads as ``mw.custom_function``. A call without gradients is an ordinary forward and traced through.

Torch's re-entrant checkpoint is such a function too. Its backward is the derivative: what it checkpoints is called directly.
The other one calls a function (of torch 2.11) whose result says only whether gradients are computed: it gets one that says no.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.function import FunctionCtx, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from meshwright.compiler.capture.exported.dense import lay_out
from meshwright.compiler.capture.normalize import clean
from meshwright.errors import NotKeptError
from meshwright.ir.gradients.custom import CustomFunction, split_joint
from meshwright.ir.graph import FILL, Graph, Op, Param, Ref, Value
from meshwright.ir.sharding import DTYPE_NAMES, DTYPES

_AS_OPERATOR = ("register it as an operator: torch.library.custom_op with register_fake and register_autograd (and "
                "meshwright.register_rule, to have it split)")


def tracing() -> bool:
    """Whether the forward is being traced here, outside of the operators that it calls."""
    return get_proxy_mode() is not None


class Functions:
    """The custom functions of one trace: ``found`` by index."""

    def __init__(self) -> None:
        self.found: list[CustomFunction] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within, ``Function.apply`` is ``apply``, also where it was bound before (``f = MyFunction.apply``)."""
        _operator()

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self.apply(cls, args, kwargs) if tracing() else _apply(cls, *args, **kwargs)

        base: Any = _SingleLevelFunction
        base.apply = classmethod(apply)
        try:
            yield
        finally:
            del base.apply

    def apply(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``cls.apply`` gives, as one node of the trace if it takes a gradient."""
        direct = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in direct)
        if cls is CheckpointFunction:
            with torch.set_grad_enabled(differentiable):
                return args[0](*args[2:])
        if cls is getattr(checkpoint, "_NoopSaveInputs", None):
            return torch.empty(0)
        if not differentiable:
            return _apply(cls, *args, **kwargs)
        name = f"{cls.__module__}.{cls.__qualname__}"
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        needs = [any(leaves[i] is x for x in direct) and leaves[i].requires_grad for i in places]

        def call(tensors: Sequence[torch.Tensor]) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            operands, named = pytree.tree_unflatten(filled, spec)
            return _apply(cls, *operands, **named)

        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            function, output = _joint(call, [leaves[i] for i in places], needs, name)
        if function is None:  # nothing that it returns takes a gradient
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, _apply(cls, *args, **kwargs))
        results, output_spec = pytree.tree_flatten(output)
        self.found.append(function)
        declared = ";".join(_declared(x) for x in results if isinstance(x, torch.Tensor))
        operands = [leaf if gradient is not None or not need else leaf.detach()  # its backward has none for it, not zeros
                    for leaf, gradient, need in zip((leaves[i] for i in places), function.gradients, needs, strict=True)]
        made = iter(_operator()(operands, len(self.found) - 1, declared))
        flags = iter(function.differentiable)
        found = [_marked(next(made), next(flags)) if isinstance(x, torch.Tensor) else x for x in results]
        return pytree.tree_unflatten(found, output_spec)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's own."""
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)


def _marked(made: torch.Tensor, differentiable: bool) -> torch.Tensor:
    return made if differentiable else made.detach()


def _declared(x: torch.Tensor) -> str:
    return f"{DTYPE_NAMES[x.dtype]}:{','.join(map(str, x.shape))}"


@lru_cache(maxsize=1)
def _operator() -> Callable[..., Any]:
    """The node of a call. Torch knows operators by name, process-wide, so it is registered once."""
    library = torch.library.Library("meshwright", "FRAGMENT")
    library.define("custom_function(Tensor[] tensors, int index, str results) -> Tensor[]")

    def fake(tensors: Sequence[torch.Tensor], index: int, results: str) -> list[torch.Tensor]:
        made = []
        for text in results.split(";"):
            dtype, _, shape = text.partition(":")
            made.append(tensors[0].new_empty([int(n) for n in shape.split(",") if n], dtype=DTYPES[dtype]))
        return made

    torch.library.register_fake("meshwright::custom_function", fake, lib=library)
    packet: Any = torch.ops.meshwright.custom_function
    packet.library = library  # lives as long as the operator
    return packet.default  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------- both directions
def _joint(
    call: Callable[[Sequence[torch.Tensor]], Any], examples: Sequence[torch.Tensor], needs: Sequence[bool], name: str
) -> tuple[CustomFunction | None, Any]:
    """The function of one call (None: without any gradient), and what the call returned, on fakes of its own. Raises
    NotKeptError, naming the function."""
    mode = next(x.fake_mode for x in examples if isinstance(x, FakeTensor))
    with mode:
        operands = [torch.empty(x.shape, dtype=x.dtype) for x in examples]

    def run(tensors: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
        before = [x._version for x in leaves]
        output = call(leaves)
        if before != [x._version for x in leaves]:
            raise NotKeptError(f"autograd.Function {name} changes an operand in place", "return a new tensor instead")
        return output, leaves, [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]

    unmade: list[bool] = []
    try:
        with _as_they_are(), _noting(unmade):
            output, _, results = run(operands)
    except NotKeptError:
        raise
    except Exception as error:
        raise _failed(name, "forward", error) from error
    flags = tuple(x.requires_grad for x in results)
    if not any(flags):
        return None, output
    if unmade and sum(flags) > 1:
        raise NotKeptError(f"autograd.Function {name} sets set_materialize_grads(False) and has several results, so its "
                           f"backward may do something else for a result that nobody uses; a graph's gets zeros for it",
                           "leave set_materialize_grads out, or return that result from a Function of its own")
    with mode:
        tangents = [torch.empty(x.shape, dtype=x.dtype) for x, flag in zip(results, flags, strict=True) if flag]

    def both(tensors: list[torch.Tensor], incoming: list[torch.Tensor]) -> list[torch.Tensor | None]:
        _, leaves, made = run(tensors)
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(
                [x for x, flag in zip(made, flags, strict=True) if flag], wanted, incoming, allow_unused=True
            ))
        return [*made, *(next(found) if need else None for need in needs)]

    try:
        with _as_they_are():
            module = make_fx(both, tracing_mode="real")(operands, tangents)
        if any(_mutable(node) for node in module.graph.nodes):
            functional = torch.func.functionalize(module, remove="mutations")
            module = make_fx(functional, tracing_mode="real")(operands, tangents)
    except NotKeptError:
        raise
    except Exception as error:
        raise _failed(name, "backward", error) from error
    graph = lay_out(clean(_graph(module, name)))
    return split_joint(graph, len(results), len(tangents), flags, name), output


@contextmanager
def _as_they_are() -> Iterator[None]:
    """Saved tensors are kept, whatever hooks are around: a checkpoint's would run the forward again."""
    torch._C._autograd._push_saved_tensors_default_hooks(_itself, _itself)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def _noting(found: list[bool]) -> Iterator[None]:
    """Within, every ``set_materialize_grads(False)`` adds to ``found``."""
    before = FunctionCtx.set_materialize_grads

    def noted(ctx: Any, value: bool) -> None:
        found.extend([True] * (not value))
        before(ctx, value)

    context: Any = FunctionCtx
    context.set_materialize_grads = noted
    try:
        yield
    finally:
        context.set_materialize_grads = before


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _failed(name: str, which: str, error: Exception) -> NotKeptError:
    text = str(error).strip().split("\n")[0][:300]
    return NotKeptError(f"the {which} of autograd.Function {name} cannot be traced ({type(error).__name__}: {text})",
                        _AS_OPERATOR)


def _mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def uniform(tensor: torch.Tensor) -> int | float | bool | complex | None:
    """The number that stands in every element of a literal; None if several do. An empty one holds 0."""
    with unset_fake_temporarily():
        flat = tensor.detach().flatten()
        number: int | float | bool | complex | None = 0
        if flat.numel():
            number = flat[0].item() if bool((flat == flat[0]).all()) else None
    return number


def _graph(module: fx.GraphModule, name: str) -> Graph:
    """The joint trace as a graph: operands and gradients in, results and gradients out."""
    values: dict[str, Value] = {}
    env: dict[fx.Node, Any] = {}
    inputs: list[str] = []
    params: list[Param] = []
    constants: dict[str, torch.Tensor] = {}
    ops: list[Op] = []

    def declare(own: str, tensor: torch.Tensor) -> Ref:
        values[own] = Value(own, tuple(tensor.shape), tensor.dtype)
        return Ref(own)

    def argument(tree: Any) -> Any:
        if isinstance(tree, fx.Node):
            return env[tree]
        return tuple(argument(item) for item in tree) if isinstance(tree, list | tuple) else tree

    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = declare(node.name, node.meta["val"])
            inputs.append(node.name)
        elif node.op == "get_attr":
            held = getattr(module, node.target)
            if isinstance(held, FakeTensor) or held.requires_grad:
                raise NotKeptError(f"autograd.Function {name} reads a tensor of the model that is not among the arguments of "
                                   f"apply()", "give it every tensor that it reads as an argument of apply()")
            env[node] = declare(node.name, held)
            number = uniform(held)
            if number is None:
                params.append(Param(node.name, (node.name,), False, buffer=True, persistent=False))
                with unset_fake_temporarily():
                    constants[node.name] = held.detach()
            else:
                dtype = (("dtype", held.dtype),)
                ops.append(Op(node.name, FILL, (tuple(held.shape), number), dtype, (node.name,)))
        elif node.op == "call_function" and node.target is not operator.getitem:
            if not isinstance(node.target, torch._ops.OpOverload):
                raise NotKeptError(f"autograd.Function {name} uses {node.target}, which is no plain tensor operator",
                                   _AS_OPERATOR)
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise NotKeptError(f"autograd.Function {name} draws random numbers ({node.target})",
                                   "draw them outside and give them to apply() as an argument")
            val = node.meta.get("val")
            many = isinstance(val, tuple | list)
            if not many and not isinstance(val, torch.Tensor):
                raise NotKeptError(f"autograd.Function {name} calls {node.target}, which makes no tensor, so that nothing in a "
                                   f"graph would read what it does", "call it outside, before apply(), or leave it out")
            made = [declare(f"{node.name}_{i}", x if isinstance(x, torch.Tensor) else torch.empty(0, device="meta"))
                    for i, x in enumerate(val)] if many else [declare(node.name, val)]
            env[node] = tuple(made) if many else made[0]
            kwargs = tuple((key, argument(value)) for key, value in node.kwargs.items())
            outputs = tuple(ref.name for ref in made)
            ops.append(Op(outputs[0], str(node.target), tuple(argument(arg) for arg in node.args), kwargs, outputs))
        elif node.op == "call_function":
            env[node] = env[node.args[0]][node.args[1]]
        else:
            tree = argument(node.args[0])
    return Graph(values, tuple(inputs), tuple(params), tuple(ops), tree, constants=constants)
