"""One call of a program: the prologue, then every micro-batch through the engine, then the epilogue.

With one micro-batch autograd is left alone: the caller's ``loss.backward()`` runs the backward. With several, each
micro-batch runs forward and backward here, so that only one of them keeps activations. What the backward of that call
should have done is then already known: the gradients are taken aside, and ``Release`` hands them out, times the gradient of
the loss, when the caller's backward comes. So accumulation over calls, ``zero_grad`` and ``torch.autograd.grad`` work
as with one micro-batch; only the loss is differentiable, the other outputs refuse a backward (``runtime.checks.gradients``).

A loss that the epilogue makes of all micro-batches is gone back through twice: from the loss to what was collected of them
(``loss_gradients``), and from there through every micro-batch. What its gradients depend on must be known before, so it is made
ahead of all, without gradients; random numbers are the same then, as every micro-batch has its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.errors import RunError
from meshwright.ir.plan import PlanError
from meshwright.ir.program import SEED, Collected, Program
from meshwright.runtime.checks.gradients import BEYOND_THE_LOSS, once, refused, unwritten, whole
from meshwright.runtime.engine import Engine, Environment, SegmentStep
from meshwright.runtime.state.late import sum_late
from meshwright.runtime.state.layout import local_of


def run_step(
    engine: Engine, inputs: Mapping[str, Tensor], parameters: Callable[[], Sequence[Tensor]], seed: tuple[int, int],
    training: bool,
) -> dict[str, Tensor]:
    """Local values of the program's outputs and of the buffers' new contents, by name.

    ``inputs``: this rank's pieces of the whole batch, by port. ``parameters``: gives those that take gradients. ``seed``:
    of the run, and the number of this call.
    """
    program = engine.program
    values: dict[str, Any] = {**inputs, SEED: seed_of(seed, 0)}
    with torch.no_grad():
        for step in engine.prologue:
            step(values)
    if program.microbatches == 1:
        outputs: dict[str, Any] = engine.root(Environment(values))
    elif torch.is_grad_enabled() and training and program.loss is not None and (trained := parameters()):
        outputs = _forward_backward(engine, values, trained, seed)
    else:
        engine.set_microbatch(last=True)
        join = Join(program)
        for index, batch in enumerate(microbatches_of(program, values, seed)):
            join.add(engine.root(Environment(batch)), index)
        outputs = closed(engine, values, join)
    if not torch.is_grad_enabled():
        engine.reshard()  # no backward will, and the parameters may be written before the next forward
    return outputs


def seed_of(seed: tuple[int, int], microbatch: int) -> Tensor:
    """What random operators draw from, by step and by micro-batch; on the CPU, where they read it."""
    return torch.tensor([random.Random(f"{seed} {which}").getrandbits(62) for which in ("step", microbatch)])


def microbatches_of(program: Program, values: Mapping[str, Any], seed: tuple[int, int]) -> list[dict[str, Any]]:
    """The environment of every micro-batch: pieces of what is cut along a dim, the rest as it is."""
    count = program.microbatches
    cuts = {port.name: port.time for port in program.inputs if isinstance(port.time, int)} | dict(program.cuts)
    batches = [dict(values) for _ in range(count)]
    for name, dim in cuts.items():
        for batch, piece in zip(batches, values[name].tensor_split(count, dim), strict=True):
            batch[name] = piece
    for index, batch in enumerate(batches):
        batch[SEED] = seed_of(seed, index)
    return batches


class Join:
    """Outputs of micro-batches, put together as their ports say, in whatever order they come. What is joined along a dim lies
    there whole from the first one on, so that it never takes twice its memory."""

    def __init__(self, program: Program) -> None:
        self.how = {port.name: port.time for port in program.outputs} | {one.value: one.time for one in program.collected}
        self.count = program.microbatches
        self.values: dict[str, Any] = {}

    def add(self, outputs: Mapping[str, Any], microbatch: int) -> None:
        """Of one micro-batch."""
        for name, value in outputs.items():
            how = self.how.get(name)
            if isinstance(how, int) and self.count > 1:
                self._place(name, value, how, microbatch)
            elif how == "sum":
                self.values[name] = self.values[name] + value if name in self.values else value
            elif microbatch == self.count - 1:
                self.values[name] = value

    def _place(self, name: str, value: Tensor, dim: int, microbatch: int) -> None:
        """Micro-batches are of one size."""
        if name not in self.values:
            self.values[name] = value.new_empty([n * self.count if d == dim else n for d, n in enumerate(value.shape)])
        size = value.shape[dim]
        self.values[name].narrow(dim, microbatch * size, size).copy_(value)


def closed(engine: Engine, values: Mapping[str, Any], join: Join) -> dict[str, Any]:
    """What leaves a step: of all micro-batches, and what the epilogue makes of them. ``values``: what the prologue left."""
    env = {**values, **{one.whole: join.values[one.value] for one in engine.program.collected}}
    for step in engine.epilogue:
        step(env)
    return join.values | {name: env[name] for step in engine.epilogue for name in step.outputs}


def known_ahead(engine: Engine, batches: Sequence[Mapping[str, Any]]) -> Mapping[str, Tensor]:
    """What must be known of all micro-batches before any goes back."""
    join = Join(engine.program)
    if engine.ahead:
        with torch.no_grad():
            for index, batch in enumerate(batches):
                join.add(engine.look_ahead(Environment(batch)), index)
    return join.values


def loss_gradients(
    program: Program, epilogue: Sequence[SegmentStep], values: Mapping[str, Any], known: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """{value of micro-batches: the gradient of a loss that the epilogue makes of them all, in what is collected of it}. No
    gradient depends on what is not ``known``, so zeros stand for it."""
    assert program.loss is not None
    env, leaves = dict(values), dict[str, Tensor]()
    for one in program.collected:
        value = next(step.runner.segment.graph.values[one.whole] for step in epilogue if one.whole in step.inputs)
        found = known.get(one.value)
        if found is None:
            found = torch.zeros(value.shape, dtype=value.dtype, device=epilogue[0].runner.groups.device)
        if value.differentiable:
            found = leaves[one.value] = found.detach().requires_grad_()
        env[one.whole] = found
    with torch.enable_grad():
        for step in epilogue:
            step(env)
        return dict(zip(leaves, torch.autograd.grad(env[program.loss], list(leaves.values()), allow_unused=True), strict=True))


def part_of(gradient: Tensor, one: Collected, microbatch: int, count: int) -> Tensor:
    """Of the gradient of what is collected, that of what one micro-batch made. What all make alike has an equal share in each:
    FSDP2 adds up the gradients of a unit's parameters over micro-batches as one tensor before it sums them over replicas."""
    if isinstance(one.time, int):
        return gradient.tensor_split(count, one.time)[microbatch].contiguous()
    return gradient if one.time == "sum" else gradient / count


def _forward_backward(
    engine: Engine, values: Mapping[str, Any], parameters: Sequence[Tensor], seed: tuple[int, int]
) -> dict[str, Any]:
    program, join = engine.program, Join(engine.program)
    loss_name, count = program.loss, program.microbatches
    assert loss_name is not None
    late = any(loss_name in step.outputs for step in engine.epilogue)
    given = join.how.get(loss_name)
    if given != ("sum" if not late else None):
        raise PlanError(f"loss {loss_name!r} over {count} micro-batches must be their sum, or made of them all, not {given!r}")

    left: dict[str, Any] = {}

    def goes_back(outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None], microbatch: int) -> None:
        if not late:
            torch.autograd.backward(outputs[loss_name])
            return
        starts = [
            (outputs[one.value], part_of(whole, one, microbatch, count)) for one in program.collected
            if (whole := gradients.get(one.value)) is not None and outputs[one.value].requires_grad
        ]
        torch.autograd.backward([tensor for tensor, _ in starts], [part for _, part in starts])

    def run() -> Tensor:
        batches = microbatches_of(program, values, seed)
        gradients = loss_gradients(program, engine.epilogue, values, known_ahead(engine, batches)) if late else {}
        engine.sum_later(True)
        try:
            for index, batch in enumerate(batches):
                engine.set_microbatch(last=index == len(batches) - 1)
                with torch.enable_grad():
                    outputs = engine.root(Environment(batch))
                    goes_back(outputs, gradients, index)
                join.add({name: value.detach() for name, value in outputs.items()}, index)
                outputs.clear()
        finally:
            engine.sum_later(False)
        sum_late(engine.late, engine.tensors)
        left.update(closed(engine, values, join))
        loss: Tensor = left[loss_name]
        return loss.clone()

    loss: Tensor = Release.apply(run, *parameters)
    learned = {value.name for segment in program.segments for value in segment.graph.values.values() if value.differentiable}
    others = {name: refused(value, BEYOND_THE_LOSS) if name in learned else value for name, value in left.items()}
    return {**others, loss_name: loss}


class Release(Function):
    """Run a step's backwards in the forward; hand its gradients out in the backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], *parameters: Tensor) -> Tensor:
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            loss = run()
            ctx.grads = [parameter.grad for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
        ctx.check = unwritten(parameters)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        once()
        ctx.check()
        if ctx.grads is None:
            raise RunError("the gradients of this loss were already handed out; run the forward again")
        grads, ctx.grads = ctx.grads, None
        held = [local_of(grad) for grad in grads if grad is not None]
        if held:
            torch._foreach_mul_(held, whole(dloss).to(held[0].device))
        return (None, *grads)
