"""What a backward may ask of a parallel module's outputs: right, or refused on every rank.

    with one micro-batch      every output has its gradient, as in the model
    with several, pipelines   the gradients of the loss are known when the forward returns; the others are gone: asking raises
    torch.utils.checkpoint    around a call: it would be made twice, with other random numbers: raises
    torch.export, fx, jit     around a call: they would record one rank's part: raises
    torch.func                around a call: its transforms do not reach into other processes: raises
    create_graph=True         the gradients have no graph of their own: raises
    weights written between   a forward and its backward: raises, as torch does where it needs the old ones
    weights frozen between    them: raises of those that FSDP2 gathers, with one micro-batch
    torch.autograd.grad       of parameters that FSDP2 gathers, with one micro-batch: raises, for autograd knows their gathered
                              copies only; backward() is right
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from meshwright.errors import RunError

BEYOND_THE_LOSS = (
    "the gradient of an output other than the loss was asked for, but this plan computes that of the loss inside the forward "
    "(micro-batches or a pipeline), and nothing is left to go back through. What to do: make what is differentiated the loss, "
    "with loss_fn= of autoparallel; or take .detach() if only the value is needed; or pin microbatches=1 and pp=1"
)
IN_EVAL = (
    "a pipeline in eval() runs the forward alone, so there is nothing to go back through. What to do: call parallel.train() "
    "before a step that learns"
)
IN_EVALUATION = (
    "in eval() this model computes another graph than in training, which the parallel module runs forward alone, so there is "
    "nothing to go back through. What to do: call parallel.train() before a step that learns"
)


def once() -> None:
    """Raise RunError in a backward that is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RunError("create_graph=True asks for gradients that can be differentiated again; a parallel module computes "
                       "plain gradients only. Leave create_graph out")


def refuse_surroundings() -> None:
    """Raise RunError in a call that torch.utils.checkpoint would make again in the backward: it would draw other random
    numbers, and wait for ranks that are elsewhere in a pipeline; and in one that torch.func transforms, whose tensors have no
    contents that ranks could compare or send."""
    if _transformed():
        raise RunError("the parallel module is called under torch.vmap, torch.func.grad or another transform of torch.func, "
                       "which does not reach into other processes. Call it by itself, with a batch in the place of vmap and "
                       "loss.backward() in the place of grad")
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    checkpointed = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    in_backward = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
    if checkpointed or in_backward:
        raise RunError("the parallel module is called under torch.utils.checkpoint, or within a backward: a call that is made "
                       "again there draws other random numbers, and changes buffers twice. Take the call out of it, and let "
                       "the plan recompute: pins={'recompute': 'full'}")


def refuse_tracing() -> None:
    """Raise RunError in a call that torch.export, torch.fx or torch.jit trace: what this rank sends and receives, and what it
    looks at before it does, is no part of what they record."""
    if torch.compiler.is_exporting() or is_fx_symbolic_tracing() or torch._C._get_tracing_state() is not None:
        raise RunError("the parallel module is called while torch.export, torch.fx or torch.jit traces it, and one rank's "
                       "trace of a program of several is none. Trace the model that was parallelized, or write this module "
                       "by parallel.export(folder)")


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def untransformed() -> AbstractContextManager[Any]:
    """Within, tensors are plain ones, also in a call that ``torch.func`` transforms: for ranks to say that they refuse it."""
    return temporarily_clear_interpreter_stack() if _transformed() else nullcontext()


def whole(grad: Tensor) -> Tensor:
    """The gradient of a number as a plain tensor: a loss that was added to a DTensor gets a DTensor's."""
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def unwritten(parameters: Sequence[Tensor], gathered: bool = False) -> Callable[[], None]:
    """A function that raises RunError once one of the parameters was written into, or, of ``gathered`` ones, frozen: FSDP2 sets
    the gradients of what it gathered before that, where autograd leaves those of frozen leaves out."""

    def versions() -> list[int]:
        return [count for p in parameters for count in (p._version, getattr(p, "_local_tensor", p)._version)]

    before = versions()

    def check() -> None:
        if versions() != before:
            raise RunError("a parameter was written into between a forward and its backward, whose gradients would be of "
                           "neither the old nor the new weights. Call backward() before optimizer.step(), or run the forward "
                           "again")
        if gathered and not all(p.requires_grad for p in parameters):
            raise RunError("a parameter was frozen between a forward and its backward, whose gradients would reach it all the "
                           "same under this plan. Call requires_grad_(False) before the forward, or after the backward")

    return check


class _Number(Function):
    """A number with its gradient; ``check`` is called in the backward; ``gathered``: parameters that autograd does not reach.
    It saves what it needs not: torch raises in a second backward before anything is accumulated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, check: Callable[[], None], *gathered: Tensor) -> Tensor:
        ctx.check = check
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        once()
        ctx.check()
        _ = ctx.saved_tensors
        for node, _ in ctx.next_functions[1:]:
            if node is not None and _asked_for(node):
                raise RunError("torch.autograd.grad of parameters, and backward(inputs=...), are not possible under this plan: "
                               "they are gathered for every layer, and autograd knows the gathered ones only. Call backward() "
                               "and read .grad")
        return (whole(grad), None, *(None for _ in ctx.next_functions[1:]))


def _asked_for(node: Any) -> bool:
    """Whether gradients of some leaves are asked for: this one is to be returned, not accumulated (torch refuses to say so for
    these alone), or left out."""
    try:
        return not torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


def _beside_the_loss(*_: Any, **__: Any) -> Any:
    raise RunError("a hook on an output of a parallel module, or retain_grad, would not see the gradient of the loss: the "
                   "output is made beside the way from the loss to the weights. Differentiate what is computed from the "
                   "output itself (output.full_tensor() may have hooks), or change gradients by a torch.autograd.Function "
                   "in the model")


def unhooked(output: Tensor) -> Tensor:
    """The same output, on which hooks are refused."""
    if output.requires_grad:
        output.register_hook = output.retain_grad = _beside_the_loss  # type: ignore[method-assign, assignment]
    return output


def differentiable(
    outputs: Mapping[str, Tensor], names: Iterable[str], gathered: Sequence[Tensor], check: Callable[[], None]
) -> dict[str, Tensor]:
    """The outputs of a forward with autograd behind it; ``names``: those that leave the program. ``check``: called in the
    backward."""
    def first_order(grad: Tensor) -> None:
        once()
        check()

    found = dict(outputs)
    for name in names:
        value = found.get(name)
        if value is not None and value.requires_grad:
            if value.ndim == 0:
                found[name] = _Number.apply(value, check, *gathered)
            else:
                value.register_hook(first_order)
    return found


class _Refused(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, why: str) -> Tensor:
        ctx.why = why
        return x.view_as(x) if x.ndim else x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RunError(ctx.why)


def refused(x: Tensor, why: str) -> Tensor:
    """The same value; whoever differentiates it gets RunError with ``why``."""
    if not torch.is_grad_enabled() or not x.is_floating_point():
        return x
    result: Tensor = _Refused.apply(x.detach(), torch.zeros((), device=x.device, requires_grad=True), why)
    return result
