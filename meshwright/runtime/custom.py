"""``mw.custom_function``: a function with a backward of its own, run from its two graphs (see ``ir.gradients.custom``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import Graph, arguments
from meshwright.ir.operators import overload
from meshwright.runtime.draws import Draw, lent
from meshwright.runtime.ops import OPS


class _Custom(Function):
    @staticmethod
    def forward(ctx: Any, function: CustomFunction, draw: Draw | None, *operands: Tensor) -> tuple[Tensor, ...]:
        with _drawing(draw, operands, 0):
            found = _run(function.forward, dict(zip(function.forward.inputs, operands, strict=True)))
        results = [found[ref.name] for ref in function.results]
        ctx.function, ctx.draw = function, draw
        ctx.save_for_backward(*(found[ref.name] for ref in function.saved))
        ctx.mark_non_differentiable(*(x for x, flag in zip(results, function.differentiable, strict=True) if not flag))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        function: CustomFunction = ctx.function
        incoming = [grad for grad, flag in zip(grads, function.differentiable, strict=True) if flag]
        with _drawing(ctx.draw, incoming, 1):
            found = _run(function.backward, dict(zip(function.backward.inputs, (*ctx.saved_tensors, *incoming), strict=True)))
        return (None, None, *(None if ref is None else found[ref.name] for ref in function.gradients))


def custom_function(function: CustomFunction, operands: Sequence[Tensor], draw: Draw | None = None) -> tuple[Tensor, ...]:
    """The results of ``function``; their gradients are what its backward says. ``draw``: what operators inside draw from."""
    results: tuple[Tensor, ...] = _Custom.apply(function, draw, *operands)
    return results


def _drawing(draw: Draw | None, tensors: Sequence[Tensor], number: int) -> AbstractContextManager[None]:
    """Within, the tensors' device draws from ``draw``, in each direction (0: forward, 1: backward) something else."""
    return nullcontext() if draw is None else lent(tensors[0].device, (draw[0], draw[1] + number, draw[2]))


def _run(graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every value of a graph of operators without communication."""
    device = next(iter(given.values())).device
    values: dict[str, Any] = {**{name: tensor.to(device) for name, tensor in graph.constants.items()}, **given}
    for op in graph.ops:
        args, kwargs = arguments(op, lambda ref: values[ref.name])
        if op.target in OPS:
            result = OPS[op.target](*args, **kwargs)
        else:
            function = overload(op.target)
            if not op.inputs and any(argument.name == "device" for argument in function._schema.arguments):
                kwargs["device"] = device
            result = function(*args, **kwargs)
        values.update(zip(op.outputs, result if isinstance(result, tuple | list) else (result,), strict=False))
    return values
