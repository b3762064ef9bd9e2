"""The edge of a program: tensors of a call become this rank's pieces, and results what the caller sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError
from meshwright.ir.program import SEED, Port, Program
from meshwright.ir.sharding import DTYPE_NAMES, format_sharding, piece, to_placements
from meshwright.ir.signature import bind
from meshwright.runtime.checks.elsewhere import Elsewhere
from meshwright.runtime.checks.gradients import unhooked
from meshwright.runtime.checks.outputs import as_output
from meshwright.runtime.groups import Groups
from meshwright.runtime.interpret import run as interpret
from meshwright.runtime.state.layout import global_stride, local_of
from meshwright.runtime.whole import plain


@dataclass(frozen=True)
class Ports:
    """The edge of programs on ``groups``."""

    groups: Groups

    def given(self, program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """{port: the tensor of the call}. Raises InputError for a call that is not as planned."""
        kwargs = dict(kwargs)
        ports = [port for port in program.inputs if port.name != SEED]
        if program.signature is not None:
            targets = kwargs.pop("targets", ()) if program.signature.get("targets") else ()
            given = bind(program.signature, args, kwargs, targets if isinstance(targets, tuple | list) else (targets,))
        else:
            names = [port.name for port in ports]
            if args or set(kwargs) != set(names):
                raise InputError(f"the call gives {len(args)} positional arguments and {sorted(kwargs)}; this program takes "
                                 f"{names} by name")
            given = [kwargs[name] for name in names]
        for port, tensor in zip(ports, given, strict=True):
            _check(port, tensor)
        return {port.name: tensor if isinstance(tensor, DTensor) else tensor.as_subclass(Tensor)
                for port, tensor in zip(ports, given, strict=True)}

    def bind(
        self, program: Program, by_name: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """{port: this rank's piece}, and the tensors that the forward changes in place, with what they will hold."""
        pieces = {port.name: self._piece(port, by_name[port.name]) for port in program.inputs if port.name != SEED}
        if program.changes is None:
            return pieces, []
        needed = {name: by_name[name].detach() for name in program.changes.inputs}
        if not program.changes.output_tree:  # it asserts, and changes nothing
            interpret(program.changes, {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                                        for name, tensor in needed.items()})
            return pieces, []
        if any(isinstance(tensor, DTensor) for tensor in needed.values()):
            raise InputError(f"the forward changes inputs in place, from {sorted(needed)}: give these as plain tensors, the "
                             f"same on every rank, not as DTensors")
        for name in program.changes.output_tree:
            memory = {other: local_of(tensor).untyped_storage().data_ptr() for other, tensor in by_name.items()}
            twin = next((other for other in memory if other != name and memory[other] == memory[name]), None)
            if twin is not None:
                raise InputError(f"the forward changes its input {name!r} in place, and {twin!r} is given the same memory; the "
                                 f"plan was made for separate tensors: give one of them a .clone()")
        new = interpret(program.changes, needed)
        changes = [(needed[name], new[ref.name]) for name, ref in program.changes.output_tree.items()]
        return {name: piece.clone() if name in needed else piece for name, piece in pieces.items()}, changes

    def _piece(self, port: Port, tensor: Tensor) -> Tensor:
        groups = self.groups
        if isinstance(tensor, DTensor):
            mine = groups.device_mesh
            if mine is None or not torch.equal(tensor.device_mesh.mesh, mine.mesh):
                raise InputError(f"input {port.name!r} is a DTensor on {tensor.device_mesh}; the plan runs on {groups.mesh}: "
                                 f"make it on parallel.device_mesh, best as "
                                 f"{format_sharding(port.sharding, port.shape, port.dtype)}")
            wanted = to_placements(port.sharding, groups.mesh, groups.axes)
            return tensor.redistribute(placements=wanted).to_local()
        for dim, axes in enumerate(port.sharding.dims):
            if axes:
                tensor = tensor.narrow(dim, *piece(port.shape[dim], groups.mesh, axes, groups.coordinates))
        return tensor.to(groups.device, non_blocking=True)

    def present(self, value: Tensor | None, port: Port, program: Program) -> Tensor:
        """As the caller sees it. ``value``: None if another stage of a pipeline has it (see ``runtime.pipeline.pipeline``)."""
        mesh = self.groups.device_mesh
        if value is None:
            return Elsewhere.of(port, program)
        if mesh is not None and not port.shape and value.requires_grad:
            value.register_hook(plain)  # where the loss was added to what was made from parameters
        if mesh is None or not port.shape:
            return value
        placements = to_placements(port.sharding, self.groups.mesh, self.groups.axes)
        return unhooked(as_output(DTensor.from_local(
            value, mesh, placements, run_check=False, shape=torch.Size(port.shape), stride=global_stride(port.shape)
        )))


def _check(port: Port, tensor: Tensor) -> None:
    if tensor.is_inference() and torch.is_grad_enabled():
        raise InputError(f"input {port.name!r} was made under torch.inference_mode(), so that no backward can read it; give "
                         f"{port.name}.clone(), or make it under torch.no_grad()")
    inside = getattr(type(tensor), "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    if tensor.layout != torch.strided or (inside and not isinstance(tensor, DTensor | FakeTensor)):
        raise InputError(f"input {port.name!r} is a {type(tensor).__name__} (layout {tensor.layout}), which the program cannot "
                         f"cut into pieces; give a plain dense tensor (.to_dense())")
    if tuple(tensor.shape) != port.shape or tensor.dtype != port.dtype:
        name = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        raise InputError(f"input {port.name!r} is {name}{list(tensor.shape)}; the plan was made for "
                         f"{DTYPE_NAMES[port.dtype]}{list(port.shape)}. Pass that shape and dtype (the GLOBAL batch), or plan "
                         f"again")
