"""The engine: a program's segments as code, over parameters that FSDP2 gathers, frees and reduces.

One ``Gathered`` module is one FSDP2 unit: parameters that are gathered together, and what runs while they are. A block's
segment is the inside of its unit; the parameters of root segments, and those that several segments read, belong to the
root unit, which is around everything. A unit holds tensors of one dtype whose gradients are summed over the same axes:
where a segment mixes them, its units are nested.

    root unit( segment, unit( block's segment ), unit( unit( block's segment )), segment )

The ZeRO levels are FSDP2's knobs:

    level  at rest     after forward  gradient
    0      replicated  kept           reduced at the last micro-batch (the unit's shard group is one rank)
    1      split       kept           reduced at the last micro-batch
    2      split       kept           reduced at every micro-batch
    3      split       freed          reduced at every micro-batch

Gradients are sums over the data axes, not means. The units' modules are not the user's: ``runtime.module`` shows their
parameters, which stay sharded there, under the model's names. What FSDP2 does not take (frozen parameters, buffers, what
no data axis reads differently, numbers without dims) is *loose*: held as it is, read directly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.ir.declared.operator import Operators
from meshwright.ir.program import Program, Segment
from meshwright.runtime.codegen import generate
from meshwright.runtime.collectives import Group
from meshwright.runtime.communication import vary
from meshwright.runtime.groups import Groups
from meshwright.runtime.state.late import vary_together
from meshwright.runtime.state.layout import Locals, Parts, local_of, split_parts


class Environment:
    """Named values between segments. No dict, so that FSDP2 leaves its tensors where they are (the seed on the CPU)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)


class Gathered(nn.Module):
    """Parameters gathered together, around what reads them."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], inside: Callable[..., Any] | None, units: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.inside = inside
        self.units = nn.ModuleList(units)

    def forward(self, *args: Any) -> Any:
        assert self.inside is not None, "parameters that no segment reads are never gathered"
        result = self.inside(*args)
        gathered = {_storage(getattr(one, "_local_tensor", one)) for one in self.parameters(recurse=False)}
        if isinstance(result, dict):
            return {name: _own(value, gathered) for name, value in result.items()}
        return tuple(_own(value, gathered) for value in result)


def _storage(x: Tensor) -> int:
    """Where a tensor lies, the same for its views (a tensor without memory has a storage too)."""
    return int(x.untyped_storage()._cdata)


def _own(value: Any, gathered: Collection[int]) -> Any:
    """A tensor that is no view. Of what was gathered it is a copy: others read it after the unit has freed that (ZeRO-3). Else
    FSDP2 hangs its backward hook on a unit's outputs and warns that in-place operators (there are none here) would drop it from
    a view."""
    if isinstance(value, Tensor) and _storage(value) in gathered:
        return value.clone()
    return _Own.apply(value) if isinstance(value, Tensor) and value.requires_grad and value._is_view() else value


class _Own(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Casts:
    """Copies in the compute dtype of loose parameters, which the micro-batches of a pipeline's step share: otherwise there
    would be one for every micro-batch in flight. Nothing writes parameters while they are shared."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], Tensor] | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """One copy of each, from its first reader on."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def of(self, slot: Slot, local: Tensor) -> Tensor:
        """A slot's tensor in its dtype; autograd follows it back to ``local``."""
        if self._kept is None:
            return local.to(slot.dtype)
        key = id(slot), slot.dtype
        if key not in self._kept:
            self._kept[key] = local.detach().to(slot.dtype)
        found: Tensor = _Cast.apply(local, self._kept[key])
        return found


class _Cast(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = local.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.to(ctx.dtype), None


@dataclass(frozen=True)
class Slot:
    """Where a stored value is read: an attribute of a unit, or a loose tensor; and what turns it into what segments use."""

    holder: nn.Module | None
    name: str
    loose: Tensor | None
    dtype: torch.dtype
    parts: Parts | None
    vary: Group | None  # over which a loose parameter's gradient is summed
    late: Group | None = None  # over which it is summed together with others'
    lent: Callable[[], Tensor] | None = None  # gives what another program holds
    casts: Casts | None = None  # of a loose tensor

    def tensor(self) -> Tensor:
        if self.lent is not None:
            return self.lent()
        found = self.loose if self.holder is None else getattr(self.holder, self.name)
        assert isinstance(found, Tensor)
        return found

    def finish(self, local: Tensor) -> Tensor:
        if self.vary is not None:
            local = vary(local, axis=self.vary)
        if local.dtype != self.dtype and local.is_floating_point():
            local = local.to(self.dtype) if self.casts is None else self.casts.of(self, local)
        return local if self.parts is None else split_parts(local, self.parts)


def read(slots: Sequence[Slot], apart: bool = False, later: bool = False) -> list[Tensor]:
    """The values segments use, as local tensors that autograd follows back to the parameters. ``apart``: to each on its own
    way, so that gradients of weights can be computed one by one, after those of inputs. ``later``: gradients that are summed
    together are so at the end of the step (``late.sum_late``), not here."""
    tensors = [slot.tensor() for slot in slots]
    if apart and torch.is_grad_enabled():
        locals_ = [Locals.apply(t)[0] if isinstance(t, DTensor) else t for t in tensors]
    elif any(isinstance(t, DTensor) for t in tensors):
        locals_ = Locals.apply(*tensors) if torch.is_grad_enabled() else [local_of(t) for t in tensors]
    else:
        locals_ = list(tensors)
    if not later and torch.is_grad_enabled():
        locals_ = vary_together(locals_, [slot.late for slot in slots])
    return [slot.finish(local) for slot, local in zip(slots, locals_, strict=True)]


class Runner:
    """A segment: reads its parameters and runs its code, twice where it is recomputed in the backward."""

    def __init__(self, segment: Segment, groups: Groups, operators: Operators) -> None:
        self.segment, self.groups, self.operators = segment, groups, operators
        self.kept = operators.kept_by(segment.graph, segment.recompute)
        self.arguments: tuple[str, ...] = ()  # names in the order of the call, those that the slots bring last
        self.slots: Sequence[Slot] = ()
        self.training = True
        self.apart = self.later = False
        self._code: dict[bool, Callable[..., tuple[Any, ...]]] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.segment.recompute == "none" or not torch.is_grad_enabled():
            return self._run(*inputs)
        contexts: dict[str, Any] = {"context_fn": self._keeping} if self.kept else {}
        # the program's random operators are functions of a seed: nothing to preserve
        result: tuple[Any, ...] = checkpoint(self._run, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)
        return result

    def _keeping(self) -> Any:
        """Contexts of a checkpoint that keeps the results of what is declared costly, or must not run twice."""
        return create_selective_checkpoint_contexts(self._policy)

    def _policy(self, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if str(op) in self.kept else CheckpointPolicy.PREFER_RECOMPUTE

    def _run(self, *inputs: Any) -> tuple[Any, ...]:
        if self.training not in self._code:
            self._code[self.training] = generate(
                self.segment.graph, self.arguments, self.groups, self.training, self.operators)
        return self._code[self.training](*inputs, *read(self.slots, self.apart, self.later))


@dataclass(frozen=True)
class SegmentStep:
    """A segment in its place: what it reads from the environment and adds to it, what nobody reads afterwards."""

    runner: Runner
    call: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    drops: tuple[str, ...] = ()

    def __call__(self, values: dict[str, Any]) -> None:
        values.update(zip(self.outputs, self.call(*(values[name] for name in self.inputs)), strict=True))
        for name in self.drops:
            del values[name]


class Engine:
    """The program's segments, wired by ``runtime.assemble``. ``tensors``: every stored tensor at rest, by value name."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        self.program, self.tensors = program, tensors
        self.prologue: Sequence[SegmentStep] = ()
        self.main: Sequence[SegmentStep] = ()
        self.epilogue: Sequence[SegmentStep] = ()
        self.ahead: Sequence[SegmentStep] = ()  # the part of ``main`` that makes what must be known ahead
        self.looks_ahead = False
        self.shared: Mapping[str, Slot] = {}  # what the root owns
        self.leaving: Sequence[str] = ()  # what a micro-batch hands back or on to the epilogue
        self.grounds: Sequence[str] = ()  # what must be known ahead
        self.late: Mapping[str, Group] = {}  # stored values whose gradients are summed together
        self.apart = self.later = False
        self.casts = Casts()
        self.root: Callable[[Environment], dict[str, Any]] = self.body
        self.units: Sequence[tuple[FSDPModule, int]] = ()  # (unit, its ZeRO level), the root first

    def train(self, mode: bool) -> None:
        """Dropout and batch statistics on or off."""
        for step in (*self.prologue, *self.main, *self.ahead, *self.epilogue):
            step.runner.training = mode

    def split_backward(self) -> None:
        """Keep the ways of gradients to the weights apart: torch computes those of what shares one together."""
        self.apart = True
        for step in self.main:
            step.runner.apart = True

    def sum_later(self, later: bool) -> None:
        """Whether what is summed together (``late``) is left to whoever runs all micro-batches of a step."""
        self.later = later
        for step in self.main:
            step.runner.later = later

    def body(self, environment: Environment) -> dict[str, Any]:
        """One micro-batch, inside the root unit: every value that leaves it."""
        values = environment.values
        values.update(zip(self.shared, read(list(self.shared.values()), self.apart, self.later), strict=True))
        for step in self.ahead if self.looks_ahead else self.main:
            step(values)
        return {name: values[name] for name in (self.grounds if self.looks_ahead else self.leaving)}

    def look_ahead(self, environment: Environment) -> dict[str, Any]:
        """What must be known of a micro-batch ahead."""
        self.looks_ahead = True
        try:
            return self.root(environment)
        finally:
            self.looks_ahead = False

    def set_microbatch(self, last: bool) -> None:
        """Tell FSDP2 whether gradients are reduced and parameters freed after the coming backward."""
        for index, (unit, zero) in enumerate(self.units):
            unit.set_requires_gradient_sync(last or zero >= 2, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or zero == 3, recurse=False)
            if index == 0:
                unit.set_is_last_backward(last)

    def hold_gradients(self) -> None:
        """Tell FSDP2 to reduce and free nothing after a backward: some other call will (a split backward of a pipeline)."""
        for index, (unit, _) in enumerate(self.units):
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            if index == 0:
                unit.set_is_last_backward(False)

    def reshard(self) -> None:
        """Free what was gathered: after a forward without a backward, and before the parameters are written."""
        for unit, _ in self.units:
            unit.reshard()
