"""Stages under torch's pipeline schedules: ``torch.distributed.pipelining`` moves micro-batches, an ``Engine`` runs a stage.

    step     prologue, once per rank -> the schedule: every micro-batch through every stage and back -> what stages share
    share    gradients of a weight that several stages read are summed; outputs go from the rank that makes them to the others
    stage    crossing values in -> enter -> environment of the micro-batch -> engine -> leave -> crossing values out, or loss

The gradients that the schedule computed are handed out by ``step.Release`` when the caller's backward comes.

What torch asks of a stage, and where it is seen to (silently wrong otherwise, in torch 2.13):

* values cross contiguous and by copy: a stage that hands on what came in would be detached from itself (``_Leave``);
* what leaves with a gradient hangs on what entered with one, used or not: a split backward looks for the weights between the
  two, and drops those that it does not find there (``_Leave``; ``program.THREAD`` where nothing else enters);
* gradients cross contiguous (``_Enter``);
* weights that a split backward reaches on several ways get their gradients together (``_joined``);
* shapes are given, so that torch infers none by running the model;
* a buffer to receive into is made when the receive is posted and let go when it was read: torch makes one for every micro-batch
  and boundary, and keeps them (``_Stage``).

FSDP2: torch would take over the units of a stage that is one, and then never reduces before the last micro-batch and never
frees what was gathered. So torch sees a plain module (``Part``), and the units are told what to do before every backward as
without a pipeline (``Engine.set_microbatch``): every ZeRO level, where the backward is whole. Where it is split in two, torch
calls autograd in ways on which FSDP2's hooks do not count: nothing is reduced or freed until torch's own reduction at the end.

Outputs: the loss and other numbers are the same on every rank. Other outputs of a training step stay on the ranks of the stage
that makes them, and are None elsewhere: sending logits around every step costs more than they are asked for. Without
gradients (``eval()``, ``no_grad``) every rank has every output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from meshwright.errors import InputError
from meshwright.graph import Graph, Value
from meshwright.mesh import PP
from meshwright.program import SEED, THREAD, Port, Program, Stages
from meshwright.runtime.assemble import assemble, data_meshes
from meshwright.runtime.engine import Engine, Environment
from meshwright.runtime.groups import Groups
from meshwright.runtime.layout import local_of
from meshwright.runtime.step import Join, Release, microbatches_of, seed_of
from meshwright.sharding import Sharding

SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved1f1b": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV,
}
ONE_STAGE = ("gpipe", "1f1b")
"""Schedules of one stage a rank: torch's classes take the stage itself."""
SPLIT = ("zb", "zbv", "dualpipev")
"""Schedules that split the backward."""


class _Enter(Function):
    """A value that came in: its gradient goes back contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.contiguous()


class _Leave(Function):
    """Values that go out, by copy; what entered is an operand too, and gets no gradient from here."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.entered = len(tensors) - count
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads, *(None,) * ctx.entered)


class Part(nn.Module):
    """The inside of one stage. ``enters``, ``leaves``: what crosses (the last stage: the loss leaves); ``aside``: outputs that
    are kept here, put together in ``results``."""

    def __init__(
        self, stage: int, engine: Engine, enters: Sequence[Value], leaves: Sequence[Value], aside: Sequence[str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.stage, self.enters, self.leaves, self.aside, self.device = stage, enters, leaves, aside, device
        self.engines = (engine,)  # in a tuple, for only its outermost unit is a sub-module
        if isinstance(engine.root, nn.Module):
            self.units = engine.root
        self.microbatch = 0
        self.environments: Sequence[Mapping[str, Any]] = ()
        self.results: Join | None = None
        of_units = {id(parameter) for parameter in self.parameters()}
        for number, tensor in enumerate(engine.tensors.values()):  # those of no unit: a split backward asks the stage for all
            if isinstance(tensor, nn.Parameter) and id(tensor) not in of_units:
                self.register_parameter(f"loose{number}", tensor)

    @property
    def engine(self) -> Engine:
        """The stage's segments and units."""
        return self.engines[0]

    def begin(self, environments: Sequence[Mapping[str, Any]], results: Join) -> None:
        """What every micro-batch of the coming step reads of the prologue, and where outputs go."""
        self.environments, self.results = environments, results

    def end(self) -> dict[str, Tensor]:
        """The outputs of all micro-batches; forgets the step."""
        found = self.results.values if self.results is not None else {}
        self.environments, self.results = (), None
        return found

    def forward(self, *entering: Tensor) -> tuple[Tensor, ...]:
        entered = {
            value.name: _Enter.apply(x) if value.differentiable else x for value, x in zip(self.enters, entering, strict=True)
        }
        found = self.engine.root(Environment({**self.environments[self.microbatch], **entered}))
        if self.results is not None:
            self.results.add({name: found[name].detach() for name in self.aside})
        hung = [entered[value.name] for value in self.enters if value.differentiable]
        if not hung:  # what leaves takes part in the backward even if no weight here is trained
            hung = [torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())]
        out = [
            torch.zeros(value.shape, dtype=value.dtype, device=self.device) if value.name == THREAD else found[value.name]
            for value in self.leaves
        ]
        places = [place for place, value in enumerate(self.leaves) if value.differentiable]
        copies: dict[int, Tensor] = {}
        if places:
            copies = dict(zip(places, _Leave.apply(len(places), *(out[place] for place in places), *hung), strict=True))
        return tuple(
            copies[place] if place in copies else x.detach().clone(memory_format=torch.contiguous_format)
            for place, x in enumerate(out)
        )


class _Stage(PipelineStage):
    """A stage for torch's schedules, which tells its part the micro-batch and its units what to do after a backward.

    What torch knows of a value to receive is its shape, on the meta device, but for the time from the receive to the read.
    """

    def __init__(self, part: Part, stages: Stages, group: dist.ProcessGroup) -> None:
        inputs, outputs = (tuple(_example(value, part.device) for value in values) for values in (part.enters, part.leaves))
        super().__init__(
            part, part.stage, stages.last + 1, part.device, input_args=inputs, output_args=outputs, group=group
        )
        self.part, self.split = part, stages.schedule in SPLIT

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Buffers made within take no memory. Nothing else is made there: shapes are given."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._make(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        infos = self.grad_recv_info[mb_index]
        self._make([info for info, grad in zip(infos, next_stage_bwd_outputs, strict=True) if grad is None])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _make(self, infos: Iterable[Any]) -> None:
        self._move(infos, self.device)

    def _forget(self, infos: Iterable[Any]) -> None:
        """Whoever still needs what was received holds it."""
        self._move(infos, torch.device("meta"))

    def _move(self, infos: Iterable[Any], device: torch.device) -> None:
        for info in infos:
            buffer = getattr(info, "buffer", None)  # what the caller gives has none
            if buffer is not None and buffer.device != device:
                info.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.part.microbatch = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._forget(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.split:
            self.part.engine.hold_gradients()
        else:
            self.part.engine.set_microbatch(last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._forget(self.grad_recv_info.get(bwd_chunk_id, ()))

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        return grads, _joined(groups) if groups else groups

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After a split backward torch reduces what the units hold, if the stage is a unit to it."""
        root = self.part.engine.root
        if not self.split or not isinstance(root, FSDPModule):
            return
        self.submod = root
        try:
            super().perform_reduce_grad(1)
        finally:
            self.submod = self.part


def _joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of weights whose gradients torch computes one after the other, each with a walk that frees what it passes.

    The walk of weights that reach the stage's inputs at several places (read twice; ahead of all inputs) passes others' nodes.
    So where there are such weights all are one group: one walk, in which torch holds every place to the gradient that it had
    when the inputs' gradients were made.
    """
    if all(len(group["intermediates"]) < 2 for group in groups):
        return groups
    places = {
        node: grads
        for group in groups for node, grads in zip(group["intermediates"], group.get("grads", ()), strict=False)
        if grads is not None
    }
    weights = set().union(*(group["params"] for group in groups))
    return [{"params": weights, "intermediates": list(places), "grads": list(places.values())}]


def _example(value: Value, device: torch.device) -> Tensor:
    """What torch reads shape, dtype and the need of a gradient from."""
    return torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(value.differentiable)


def _given(output: tuple[Tensor, ...], _: Tensor) -> Tensor:
    """The loss of a micro-batch is what the last stage returns."""
    return output[0]


@dataclass(frozen=True)
class Copy:
    """A weight that two stages of one rank read: FSDP2 gathers it for each of them from a tensor of its own."""

    original: Tensor
    copy: Tensor


def _move_gradient(pair: Copy) -> None:
    """Add the copy's gradient to the original's."""
    grad, pair.copy.grad = pair.copy.grad, None
    if grad is not None and pair.original.grad is not None:
        local_of(pair.original.grad).add_(local_of(grad))
    elif grad is not None:
        pair.original.grad = grad


def _sum(local: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce in place."""
    whole = local.contiguous()
    dist.all_reduce(whole, group=group)
    if whole is not local:
        local.copy_(whole)


class Pipeline:
    """All stages of this rank. ``tensors``: every stored tensor of the rank at rest, by value name."""

    def __init__(self, program: Program, groups: Groups) -> None:
        assert program.stages is not None
        assert groups.pipeline is not None
        self.program, self.groups, self.stages, self.group = program, groups, program.stages, groups.pipeline
        self.rank = groups.coordinates[PP]
        self.loss = next((port for port in program.outputs if port.name == program.loss), None)
        self.tensors: dict[str, Tensor] = {}
        self.copies: list[Copy] = []
        meshes = data_meshes(self.stages.stored, groups)
        mine = [stage for stage, at in enumerate(self.stages.stage_rank) if at == self.rank]
        self.parts = [self._part(stage, meshes, first=stage == mine[0]) for stage in mine]
        stages = [_Stage(part, self.stages, self.group) for part in self.parts]
        make = SCHEDULES[self.stages.schedule]
        self.schedule = make(
            stages[0] if self.stages.schedule in ONE_STAGE else stages, program.microbatches, loss_fn=_given, scale_grads=False
        )

    def _part(self, stage: int, meshes: Any, first: bool) -> Part:
        """A stage's share of the program, assembled. The rank's first also runs the prologue, and keeps what nobody reads."""
        program, stages = self.program, self.stages
        segments = tuple(s for s in program.segments if (first if s.prologue else s.stage == stage))
        everywhere = {name for s in program.segments for name in _reads(s.graph)}
        read = {name for s in segments for name in _reads(s.graph)}
        aside = tuple(name for name, at in stages.made.items() if at == stage)
        read |= set(aside) | (set() if not first else {s.value for s in program.stored} - everywhere)
        enters = stages.crossing[stage - 1] if stage else ()
        if stage < stages.last:
            leaves = stages.crossing[stage]
        else:
            aside = tuple(dict.fromkeys((*aside, *([program.loss] if program.loss else []))))
            leaves = (Value(self.loss.name, (), self.loss.dtype, True),) if self.loss else ()
        ports = tuple(
            Port(name, (), torch.float32, Sharding.whole(0))
            for name in dict.fromkeys((*aside, *(value.name for value in leaves))) if name != THREAD
        )
        share = replace(
            program, segments=segments, stored=tuple(s for s in program.stored if s.value in read), outputs=ports,
            output_tree=(), loss=None, mutations=(),
        )
        engine = assemble(share, self.groups, meshes, self.tensors)
        if stages.schedule in SPLIT:
            engine.split_backward()
        for stored in share.stored:
            known = self.tensors.setdefault(stored.value, engine.tensors[stored.value])
            if known is not engine.tensors[stored.value]:
                self.copies.append(Copy(known, engine.tensors[stored.value]))
        return Part(stage, engine, enters, leaves, aside, self.groups.device)

    def train(self, mode: bool) -> None:
        """Dropout and batch statistics on or off."""
        for part in self.parts:
            part.engine.train(mode)

    def reshard(self) -> None:
        """Free what was gathered."""
        for part in self.parts:
            part.engine.reshard()

    # --- a step --------------------------------------------------------------------------------------------------------

    def begin(self, values: dict[str, Any], seed: tuple[int, int]) -> None:
        """Run the prologue and cut what it made; let copies follow their originals."""
        with torch.no_grad():
            for step in self.parts[0].engine.prologue:
                step(values)
            for pair in self.copies:
                local_of(pair.copy).copy_(local_of(pair.original))
        environments = microbatches_of(self.program, values, seed)
        for part in self.parts:
            part.begin(environments, Join(self.program))

    def forward_backward(self) -> Tensor:
        """The schedule, and what stages do together after it: every gradient is in place when it returns the loss."""
        target = torch.zeros(self.program.microbatches)
        with torch.enable_grad():
            self.schedule.step(target=target, losses=[], return_outputs=False)
        for pair in self.copies:
            _move_gradient(pair)
        for stored in self.program.stored:
            if stored.trainable and len(stored.holders) > 1:
                parameter = self.tensors[stored.value]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                group = self.groups.sharing[stored.holders]
                assert group is not None
                _sum(local_of(parameter.grad), group)
        port, last = self.loss, self.parts[-1]
        assert port is not None
        mine = last.results.values[port.name] if last.results is not None and last.stage == self.stages.last else None
        return self._from(self.stages.stage_rank[-1], mine, (), port.dtype)

    def forward(self) -> None:
        """Every micro-batch through this rank's stages, without gradients.

        Stage by stage, so that a rank is free for its next stage when that has something to do. Where ranks hold several stages
        in a loop, a stage sends when it has seen all micro-batches: sends and receives of two ranks never wait for each other.
        """
        local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        at, sent = self.stages.stage_rank, []
        at_once = len(self.parts) == 1 or at[0] == at[-1]
        for part in self.parts:
            waiting: list[tuple[Tensor, ...]] = []
            for microbatch in range(self.program.microbatches):
                if part.stage and at[part.stage - 1] == self.rank:
                    entering = local.pop((part.stage, microbatch))
                else:
                    entering = self._receive(part)
                part.microbatch = microbatch
                leaving = part(*entering)
                if part.stage == self.stages.last:
                    continue
                if at[part.stage + 1] == self.rank:
                    local[part.stage + 1, microbatch] = leaving
                else:
                    waiting.append(leaving)
                if at_once:
                    sent += self._send(part, waiting)
            sent += self._send(part, waiting)
        for work, _ in sent:
            work.wait()

    def _receive(self, part: Part) -> tuple[Tensor, ...]:
        buffers = tuple(torch.empty(value.shape, dtype=value.dtype, device=part.device) for value in part.enters)
        source = self.stages.stage_rank[part.stage - 1]
        for work in [dist.irecv(buffer, group=self.group, group_src=source) for buffer in buffers]:
            assert work is not None
            work.wait()
        return buffers

    def _send(self, part: Part, waiting: list[tuple[Tensor, ...]]) -> list[tuple[Any, Tensor]]:
        """Send what waits; the tensors live until the returned work is done."""
        to = self.stages.stage_rank[part.stage + 1] if waiting else 0
        works = [(dist.isend(x, group=self.group, group_dst=to), x) for leaving in waiting for x in leaving]
        waiting.clear()
        return works

    # --- outputs -------------------------------------------------------------------------------------------------------

    def outputs(self, values: Mapping[str, Any], everywhere: bool) -> dict[str, Tensor]:
        """Local values of outputs and of buffers' new contents. ``everywhere``: of outputs of other stages too; else only
        numbers, without the loss."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            found |= part.end()
        mesh, made = self.program.mesh, self.stages.made
        for port in self.program.outputs:
            if port.name not in made:
                found[port.name] = values[port.name]
            elif everywhere or not (port.shape or port == self.loss):
                shape = port.sharding.local_shape(port.shape, mesh, self.groups.coordinates)
                source = self.stages.stage_rank[made[port.name]]
                found[port.name] = self._from(source, found.get(port.name), shape, port.dtype)
        return found | {new: values[new] for _, new in self.program.mutations if new not in made}

    def _from(self, source: int, mine: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A value that the source rank of the pipeline has, on all of them."""
        here = torch.empty(shape, dtype=dtype, device=self.groups.device) if mine is None else mine.contiguous()
        dist.broadcast(here, group=self.group, group_src=source)
        return here


def _reads(graph: Graph) -> set[str]:
    return {*graph.inputs, *(param.value for param in graph.params)}


def run_pipeline(
    pipeline: Pipeline, inputs: Mapping[str, Tensor], parameters: Callable[[], Sequence[Tensor]], seed: tuple[int, int],
    training: bool,
) -> dict[str, Tensor]:
    """As ``step.run_step``; outputs that this rank does not have are left out."""
    program = pipeline.program
    learns = torch.is_grad_enabled() and training
    if learns and program.loss is None:
        raise InputError("a pipeline runs the backward together with the forward, so the loss must be part of the program: the "
                         "model's output has none; plan with loss_fn=, or call under torch.no_grad()")
    values: dict[str, Any] = {**inputs, SEED: seed_of(seed, 0)}
    pipeline.begin(values, seed)
    if not learns:
        with torch.no_grad():
            pipeline.forward()
            pipeline.reshard()
        return pipeline.outputs(values, everywhere=True)
    anchor = torch.zeros((), device=pipeline.groups.device, requires_grad=True)  # a rank may hold nothing that is trained
    loss: Tensor = Release.apply(pipeline.forward_backward, anchor, *parameters())
    assert program.loss is not None
    return {**pipeline.outputs(values, everywhere=False), program.loss: loss}
