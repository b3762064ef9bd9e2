"""A stage as torch's pipeline schedules see it: ``torch.distributed.pipelining`` moves micro-batches, an ``Engine`` runs them.

    crossing values in -> enter -> environment of the micro-batch -> engine -> leave -> crossing values out, or loss

What torch asks of a stage, and where it is seen to (silently wrong otherwise, or refused, in torch 2.11 to 2.13):

* values cross contiguous and by copy: a stage that hands on what came in would be detached from itself (``_Leave``);
* what leaves with a gradient hangs on what entered with one, used or not: a split backward looks for the weights between the
  two, and drops those that it does not find there (``_Leave``; ``program.DEPENDENCY`` where nothing else enters);
* gradients cross contiguous (``_Enter``);
* weights that a split backward reaches on several ways get their gradients together (``_joined``, ``_backward_weights``);
* shapes are given, so that torch infers none by running the model;
* a buffer to receive into is made when the receive is posted and let go when it was read: torch makes one for every micro-batch
  and boundary, and keeps them (``Stage``);
* what crosses without a gradient gets none: torch 2.11 knows gradients of all or none (``Stage``).

FSDP2: torch would take over the units of a stage that is one, and then never reduces before the last micro-batch and never
frees what was gathered. So torch sees a plain module (``StageModule``), and the units are told what to do before every backward
as without a pipeline (``Engine.set_microbatch``): every ZeRO level, where the backward is whole. Where it is split in two,
torch calls autograd in ways on which FSDP2's hooks do not count: nothing is reduced or freed until torch's own reduction at the
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from meshwright.ir.graph import Value
from meshwright.ir.program import DEPENDENCY, Stages
from meshwright.runtime.engine import Engine, Environment
from meshwright.runtime.step import Join, part_of

BACK = "__back__"
"""What leaves the last stage where no micro-batch has a loss of its own: what it goes back from."""


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


class _Back(Function):
    """Nothing, made of values whose gradients are known. A backward that is split may come through here twice."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], dtype: torch.dtype, device: torch.device, *values: Tensor) -> Tensor:
        ctx.save_for_backward(*grads)
        return torch.zeros((), dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.saved_tensors)


class StageModule(nn.Module):
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
        self.back_from: Mapping[str, Tensor | None] = {}
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
        self.environments, self.results, self.back_from = (), None, {}
        return found

    def known_ahead(self, entering: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """What must be known of a micro-batch ahead of all."""
        entered = {value.name: x for value, x in zip(self.enters, entering, strict=True)}
        found: Mapping[str, Tensor] = self.engine.look_ahead(Environment({**self.environments[self.microbatch], **entered}))
        return found

    def _back(self, found: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """A number of the loss's type, which torch 2.11 looks at, from which a micro-batch goes back from the gradients in
        what is collected of it."""
        program = self.engine.program
        pairs = [
            (found[one.value], part_of(whole, one, self.microbatch, program.microbatches)) for one in program.collected
            if (whole := self.back_from.get(one.value)) is not None and found[one.value].requires_grad
        ]
        number: Tensor = _Back.apply([part for _, part in pairs], dtype, self.device, *(value for value, _ in pairs))
        return number

    def forward(self, *entering: Tensor) -> tuple[Tensor, ...]:
        entered = {
            value.name: _Enter.apply(x) if value.differentiable else x for value, x in zip(self.enters, entering, strict=True)
        }
        found = self.engine.root(Environment({**self.environments[self.microbatch], **entered}))
        for dtype in (value.dtype for value in self.leaves if value.name == BACK):
            found[BACK] = self._back(found, dtype)
        if self.results is not None:
            self.results.add({name: found[name].detach() for name in self.aside}, self.microbatch)
        hung = [entered[value.name] for value in self.enters if value.differentiable]
        if not hung:  # what leaves takes part in the backward even if no weight here is trained
            hung = [torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())]
        out = [
            torch.zeros(value.shape, dtype=value.dtype, device=self.device) if value.name == DEPENDENCY else found[value.name]
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


class Stage(PipelineStage):
    """A stage for torch's schedules, which tells its part the micro-batch and its units what to do after a backward.

    What is received is held here, by micro-batch, from the receive to the read: ``arrived`` values and ``returned`` gradients
    (None: there is none). Torch's own buffers, one for every micro-batch and boundary, stay on the meta device. ``losses`` of
    the last stage are held from the forward to the backward.

    What is sent is sent here, and held (``sent``) until it has surely been received: a value until its gradient has come back,
    a gradient until the next one goes. Torch would hold all of a step until its end.
    """

    def __init__(self, part: StageModule, stages: Stages, group: dist.ProcessGroup) -> None:
        inputs, outputs = (tuple(_example(value, part.device) for value in values) for values in (part.enters, part.leaves))
        super().__init__(
            part, part.stage, stages.last + 1, part.device, input_args=inputs, output_args=outputs, group=group
        )
        self.part, self.split = part, stages.table.split
        self.arrived: dict[int, tuple[Tensor, ...]] = {}
        self.returned: dict[int, tuple[Tensor | None, ...]] = {}
        self.losses: dict[int, Tensor] = {}
        self.sent: dict[tuple[str, int], list[dist.Work]] = {}

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Buffers made within take no memory and no gradient (torch 2.11 asks for one of whole numbers too). Nothing else is
        made there: shapes are given."""
        device, self.device = self.device, torch.device("meta")
        backward, self.has_backward = self.has_backward, False
        try:
            yield
        finally:
            self.device, self.has_backward = device, backward

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets the neighbours, also a stage of this very rank, which gloo refuses."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    # --- values, forward -----------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.arrived[fwd_chunk_id] = tuple(_example(value, self.device) for value in self.part.enters)
        return [self._p2p(dist.irecv, buffer, self.stage_index - 1) for buffer in self.arrived[fwd_chunk_id]]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        pairs = zip(self.part.enters, prev_stage_outputs, strict=True)
        self.arrived[mb_index] = tuple(x.detach().requires_grad_(value.differentiable) for value, x in pairs)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        return self.arrived.pop(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._send("F", fwd_chunk_id, self.fwd_cache[fwd_chunk_id][0], self.stage_index + 1)
        return []

    # --- gradients, backward -------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        buffers = [_example(value, self.device).detach() if value.differentiable else None for value in self.part.leaves]
        self.returned[bwd_chunk_id] = tuple(buffers)
        return [self._p2p(dist.irecv, buffer, self.stage_index + 1) for buffer in buffers if buffer is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        grads = self._whole(self.part.enters, self.bwd_cache.pop(bwd_chunk_id))
        self._send("B", bwd_chunk_id, [grad for grad in grads if grad is not None], self.stage_index - 1)
        for direction, microbatch in [key for key in self.sent if key[0] == "B" and key[1] != bwd_chunk_id]:
            self._received(direction, microbatch)
        return []

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        self.returned[mb_index] = self._whole(self.part.leaves, next_stage_bwd_outputs)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return self.returned.pop(bwd_chunk_id)

    def _whole(self, values: Sequence[Value], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """A gradient for everything that crosses with one: zeros where nothing came."""
        return tuple(
            (torch.zeros(value.shape, dtype=value.dtype, device=self.device) if grad is None else grad)
            if value.differentiable else None
            for value, grad in zip(values, grads, strict=True)
        )

    def _p2p(self, op: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, group=self.group, group_peer=self.stage_index_to_group_rank[stage])

    def _send(self, direction: str, microbatch: int, tensors: Iterable[Tensor], stage: int) -> None:
        posted = (self._p2p(dist.isend, tensor.detach(), stage) for tensor in tensors)
        self.sent[direction, microbatch] = [
            post.op(post.tensor, group=post.group, group_dst=post.group_peer) for post in posted
        ]

    def _received(self, direction: str, microbatch: int) -> None:
        """Let go of what was sent, when it was received."""
        for work in self.sent.pop((direction, microbatch), ()):
            work.wait()

    def end(self) -> None:
        """Let go of everything that was sent in a step."""
        for key in list(self.sent):
            self._received(*key)

    # --- one micro-batch -----------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.part.microbatch = fwd_chunk_id
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:  # torch says which stage and what went in; one process raises what is under it
            raise error.__cause__ or error from None
        if self.is_last:
            self.losses[fwd_chunk_id] = output[0]
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._received("F", bwd_chunk_id)  # its gradient came back
        if self.split:
            self.part.engine.hold_gradients()
        else:
            self.part.engine.set_microbatch(last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        if backward_type == "weight":
            _backward_weights(_joined(bwd_kwargs["param_groups"]), self._units_parameters())
            return (), None
        if backward_type == "input":
            return self._backward_inputs(bwd_kwargs, last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _backward_inputs(
        self, bwd_kwargs: dict[str, Any], last_backward: bool
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Torch is given what has a gradient only, on either side.

        It lets go of the outputs. In torch 2.11 that is the end of every node of a custom function, held or not: where the
        weights' walks begin at such a node, edges to the outputs keep it.
        """
        outputs, grads, inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
        places = [place for place, output in enumerate(outputs) if output.requires_grad]
        edges = [get_gradient_edge(outputs[place]) for place in places]
        found, groups = super().backward_maybe_with_nosync("input", {
            "stage_output": tuple(outputs[place] for place in places),
            "output_grads": None if grads is None else tuple(grads[place] for place in places),
            "input_values": [x for x in inputs if x.requires_grad],
        }, last_backward)
        if any(isinstance(node, BackwardCFunction) for group in groups or () for node in group["intermediates"]):
            groups = [{**group, "edges": edges} for group in groups or ()]
        each = iter(found)
        return tuple(next(each) if x.requires_grad else None for x in inputs), groups

    def _units_parameters(self) -> dict[int, Any]:
        """What FSDP2 knows of its units' parameters, by the identity of what is read of each."""
        root, found = self.part.engine.root, dict[int, Any]()
        states: Sequence[Any] = ()
        if isinstance(root, FSDPModule):
            states = fully_shard.state(root)._state_ctx.all_states  # type: ignore[attr-defined]
        for state in states:
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
            for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
                found.update((id(one._unsharded_param), one) for one in group.fsdp_params if hasattr(one, "_unsharded_param"))
        return found

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


def _joined(groups: Sequence[Mapping[str, Any]]) -> list[tuple[set[Node], dict[Node, tuple[Tensor | None, ...]]]]:
    """Of torch's groups of weights, whose gradients are computed one after the other: the nodes of the weights, and where the
    walk to them begins with what gradients.

    Each walk frees what it passes. That of weights that reach the stage's inputs at several places (read twice; ahead of all
    inputs) passes others' nodes, so where there are such weights all are one group.
    """
    found = [
        (set(group["params"]), {
            node: grads
            for node, grads in zip(group["intermediates"], group.get("grads") or (), strict=False) if grads is not None
        })
        for group in groups
    ]
    if all(len(group["intermediates"]) < 2 for group in groups):
        return found
    places = {node: grads for _, begins in found for node, grads in begins.items()}
    return [(set().union(*(weights for weights, _ in found)), places)]


def _backward_weights(
    groups: Iterable[tuple[set[Node], Mapping[Node, tuple[Tensor | None, ...]]]], units: Mapping[int, Any]
) -> None:
    """Gradients of weights, from those that the inputs' backward left at the nodes between. Those of ``units`` are added up in
    the type that FSDP2 reduces in, as behind a backward that is one, each as it comes: a group may be all weights of a stage.

    (torch 2.11's own takes the gradients of a node's several results for one, and adds what flows on from one place to what
    another one has.)
    """
    for nodes, places in groups:
        starts = {
            GradientEdge(node, at): grad
            for node, grads in places.items() for at, grad in enumerate(grads) if grad is not None
        }
        if not starts:
            continue
        held = places if len(places) > 1 else {}
        weights = [cast(Any, node).variable for node in nodes]  # what they accumulate into
        handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in held.items()]
        handles += [weight.register_post_accumulate_grad_hook(partial(_add_up, units[id(weight)]))
                    for weight in weights if id(weight) in units]
        try:
            torch.autograd.backward(list(starts), list(starts.values()), inputs=weights)
        finally:
            for handle in handles:
                handle.remove()


def _add_up(of: Any, _: Tensor) -> None:
    of.accumulate_unsharded_grad_if_needed()
    of.to_accumulated_grad_if_needed()


def _example(value: Value, device: torch.device) -> Tensor:
    """What torch reads shape, dtype and the need of a gradient from."""
    return torch.empty(value.shape, dtype=value.dtype, device=device).requires_grad_(value.differentiable)
