"""``mw.mlp``: the inner values of some rows at a time, made again in the backward (``compiler.rules.mlp``).

    piece of x -> linears -> steps, element by element -> linear        each piece by itself; nothing inner outlives it

``steps`` are calls of operators, (target, args, kwargs), in which ("at", i) is the i-th inner value: first what the linears
make, in order, then what each step makes; the last one is what the last linear reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from meshwright.ir.operators import overload

AT = "at"
Step = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def _inner(x: Tensor, given: Sequence[Tensor | None], steps: Sequence[Step]) -> Tensor:
    """What the last linear reads. ``given``: the weights of the linears, then their biases."""
    count = len(given) // 2
    made = [F.linear(x, weight, bias) for weight, bias in zip(given[:count], given[count:], strict=True) if weight is not None]

    def read(arg: Any) -> Any:
        return made[arg[1]] if isinstance(arg, tuple) and len(arg) == 2 and arg[0] == AT else arg

    for target, args, kwargs in steps:
        made.append(overload(target)(*map(read, args), **{name: read(arg) for name, arg in kwargs}))
    return made[-1]


class _Mlp(Function):
    """Gradients of the weights are summed over the pieces in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, rows: int, steps: Sequence[Step], x: Tensor, weight: Tensor, *given: Tensor | None) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        out = weight.new_empty((len(flat), weight.shape[0]))  # steps may change the dtype
        for at in range(0, len(flat), rows):
            torch.mm(_inner(flat[at : at + rows], given, steps), weight.t(), out=out[at : at + rows])
        ctx.save_for_backward(x, weight, *given)
        ctx.how = rows, steps
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, weight, *given), (rows, steps) = ctx.saved_tensors, ctx.how
        of_x, *needs = ctx.needs_input_grad[2:]
        flat, dflat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = torch.empty_like(flat) if of_x else None
        sums = {place: torch.zeros_like(one, dtype=torch.promote_types(one.dtype, torch.float32))
                for place, (one, need) in enumerate(zip((weight, *given), needs, strict=True)) if need}
        for at in range(0, len(flat), rows):
            some, grad = flat[at : at + rows].detach().requires_grad_(of_x), dflat[at : at + rows]
            leaves = [None if one is None else one.detach().requires_grad_(need)
                      for one, need in zip(given, needs[1:], strict=True)]
            with torch.enable_grad():
                inner = _inner(some, leaves, steps)
            if 0 in sums:
                sums[0].add_(grad.t() @ inner.detach().conj())
            wanted = [one for one in (some, *leaves) if one is not None and one.requires_grad]
            found = list(torch.autograd.grad(inner, wanted, grad @ weight.conj())) if wanted else []
            del inner
            if dx is not None:
                dx[at : at + rows] = found.pop(0)
            for place in (place for place in sums if place):
                sums[place].add_(found[0])
                del found[0]
        grads = [sums.pop(place).to(one.dtype) if place in sums else None for place, one in enumerate((weight, *given))]
        return None, None, None if dx is None else dx.view(x.shape), *grads


def mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], steps: Sequence[Step], weight: Tensor, rows: int = 1
) -> Tensor:
    """``linear(steps(linear(x, weights[0], biases[0]), ...), weight)`` with the inner values of ``rows`` rows at a time."""
    result: Tensor = _Mlp.apply(max(1, rows), steps, x, weight, *weights, *biases)
    return result
