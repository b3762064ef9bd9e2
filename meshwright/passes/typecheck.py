"""The gradient types of a rank's program, checked by ``spmd_types``: a second opinion that shares no code with ``verify``.

Every value has one of four types over each axis, named by value and gradient: I invariant (gradient complete), R replicated
(gradient a pending sum), V varying (each rank its own), P a pending sum. ``spmd_types`` infers them through the operators,
which run here on meta tensors of the local shapes, so that wrong literals show too:

    enters    what is split V; a parameter R over the axes FSDP2 sums its gradient over, else I; what takes no gradient R
    mw.*      the type-only collectives of ``spmd_types.rules``; a V becomes P just before it is reduced
    leaves    split outputs V, or R where a rank makes its own piece of a whole (``repeat``), whose gradient is a pending sum
              as well; the others not V; what a gradient starts from I, the loss first of all

It sees a missing reduction of a gradient or of a value that is then used as if complete, whatever dims are split; not a dim
mistaken for another, nor a pending sum used as a split (both are V here): that is ``verify``'s part.

The axes are ``MeshAxis`` descriptions of ranks, so no process group is made or needed, and one that exists is left alone. While
it runs, ``spmd_types`` hooks ``torch.autograd.Function`` process-wide: check before other threads use autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import spmd_types
import spmd_types.checker
import torch
from spmd_types.types import SpmdTypeError
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.errors import VerifyError
from meshwright.ir.graph import Op, Ref, Value, arguments
from meshwright.ir.operators import overload
from meshwright.ir.program import DRAW, SEED, SEEDS, Program, Segment
from meshwright.ir.sharding import Sharding, format_sharding

spmd: Any = spmd_types
"""Its names are re-exports that a type checker does not see."""

Types = dict[Any, Any]
"""{MeshAxis: R, I, V or P}."""


def typecheck(program: Program) -> None:
    """Raise VerifyError unless the gradient types of this rank's program are right. Needs no processes."""
    mesh, strides = program.mesh, program.mesh.strides()
    axes = {axis: spmd.MeshAxis.of(mesh.size(axis), strides[axis]) for axis in mesh.axes if mesh.size(axis) > 1}
    if not axes:
        return
    with torch.enable_grad(), spmd.set_current_mesh(axes), spmd.checker.typecheck("strict", local=True):
        _Checker(program, axes).run()


@dataclass
class _Checker:
    """The walk: a typed meta tensor for every local value so far."""

    program: Program
    axes: Mapping[str, Any]
    env: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[Any, tuple[tuple[Types, bool], ...]] = field(default_factory=dict)
    """What segments that were checked make of what they read: equal blocks are checked once."""
    made: dict[Any, Tensor] = field(default_factory=dict)
    known: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)
    """What operators gave: a call of the same one, with operands of the same shapes and types, is not run again."""

    def run(self) -> None:
        self.cuts = dict(self.program.cuts)
        self._enter()
        for segment in self.program.segments:
            if segment.epilogue:
                self._collect(segment)
            self._segment(segment)
        self._leave()

    def _collect(self, segment: Segment) -> None:
        """What micro-batches made is to the epilogue what it was to them, but for its shape."""
        for one in self.program.collected:
            if one.whole in segment.graph.values and one.value in self.env:
                made = self.env[one.value]
                value = replace(segment.graph.values[one.whole], differentiable=made.requires_grad)
                self.env[one.whole] = self._typed(value, spmd.get_local_type(made))

    # what enters and leaves

    def _enter(self) -> None:
        local = {name: value for segment in self.program.segments for name, value in segment.graph.values.items()}
        self.env[SEED] = self._typed(Value(SEED, (SEEDS,), torch.int64), self._types(Sharding.whole(1), spmd.R))
        for port in self.program.inputs:
            value = Value(port.name, self._local_shape(port.sharding, port.shape), port.dtype)
            self.env[port.name] = self._typed(value, self._types(port.sharding, spmd.R))
        for item in self.program.stored:
            if item.value not in local:
                continue
            value = local[item.value]
            types = self._types(item.tensor, spmd.I if value.differentiable else spmd.R)
            types |= {self.axes[axis]: spmd.R for axis in (*item.data_axes, *item.late_axes) if axis in self.axes}
            self.env[item.value] = self._typed(value, types)

    def _local_shape(self, sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
        mesh = self.program.mesh
        return sharding.local_shape(shape, mesh, mesh.coordinates(self.program.rank))

    def _types(self, sharding: Sharding, otherwise: Any) -> Types:
        return {at: spmd.V if axis in sharding.split_axes else otherwise for axis, at in self.axes.items()}

    def _typed(self, value: Value, types: Types) -> Tensor:
        """A meta tensor of a local value; like ones are one tensor, as nothing writes into any."""
        key = value.shape, value.dtype, value.differentiable, tuple(types.items())
        if key not in self.made:
            tensor = torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.differentiable)
            self.made[key] = _stamp(tensor, types)
        return self.made[key]

    def _leave(self) -> None:
        for port in self.program.outputs:
            self._leaves(port.name, f"output %{port.name}", port.sharding)
        for old, new in self.program.mutations:
            placed = next(item.tensor for item in self.program.stored if item.value == old)
            self._leaves(new, f"the new value of buffer %{old}", placed)

    def _leaves(self, name: str, node: str, sharding: Sharding) -> None:
        tensor = self.env[name]
        found = spmd.get_local_type(tensor)
        for axis, at in self.axes.items():
            split = axis in sharding.split_axes
            # an R that is a piece: of what has no operands (see ``_collective``), or of copies of a whole, one on each rank
            allowed = (spmd.V, spmd.R) if split else (spmd.I,) if tensor.requires_grad else (spmd.I, spmd.R)
            if found.get(at) not in allowed:
                loss = " (the loss)" if name == self.program.loss else ""
                raise VerifyError(
                    f"{node}{loss}, {format_sharding(sharding)}", self._maker(name),
                    f"type {' or '.join(str(t.value) for t in allowed)} over {axis!r}", f"type {self._shown(tensor)}",
                )

    def _maker(self, name: str) -> str:
        """The module of the op that makes an environment value."""
        made = [op for segment in self.program.segments for op in segment.graph.ops if name in op.outputs]
        return made[0].module if made else ""

    # segments

    def _segment(self, segment: Segment) -> None:
        inside: dict[str, Tensor] = {}
        for name in (*segment.graph.inputs, *(param.value for param in segment.graph.params)):
            if name not in self.env:
                raise VerifyError(f"segment {segment.path!r}", segment.path, f"%{name} of an earlier segment", "nothing")
            inside[name] = self.env[name]
            if name in self.cuts and not segment.prologue:
                inside[name] = self._typed(segment.graph.values[name], spmd.get_local_type(self.env[name]))
        key = _structure(segment, inside)
        types = self.seen.get(key)
        if types is None:
            read = {*segment.graph.outputs, *(name for op in segment.graph.ops for name in op.inputs)}
            for op in segment.graph.ops:
                self._op(op, inside, segment, read)
            types = tuple((spmd.get_local_type(inside[n]), inside[n].requires_grad) for n in segment.graph.outputs)
            self.seen[key] = types
        for name, (found, grad) in zip(segment.graph.outputs, types, strict=True):
            self.env[name] = self._typed(replace(segment.graph.values[name], differentiable=grad), found)

    def _op(self, op: Op, inside: dict[str, Tensor], segment: Segment, read: set[str]) -> None:
        module = op.module or _reader(op, segment) or segment.path
        call = _call(op, inside, [segment.graph.values[name] for name in op.outputs])
        try:
            results = self.known[call] if call in self.known else self._run(op, inside, segment)
        except SpmdTypeError as error:
            found = ", ".join(f"%{name}: {self._shown(inside[name])}" for name in dict.fromkeys(op.inputs))
            want = "operands whose types go together"
            raise VerifyError(str(op), module, want, f"{found} ({self._named(error)})") from error
        self.known[call] = results
        for name, tensor in zip(op.outputs, results, strict=False):
            shape = segment.graph.values[name].shape
            cut = segment.prologue and name in self.cuts  # declared as the piece that a micro-batch reads
            if tuple(tensor.shape) != shape and not cut and name in read:  # what nobody reads differs from device to device
                raise VerifyError(str(op), module, f"a result of local shape {list(shape)}", f"{list(tensor.shape)}")
            inside[name] = tensor

    def _run(self, op: Op, inside: Mapping[str, Tensor], segment: Segment) -> tuple[Tensor, ...]:
        """An operator on typed meta tensors."""
        if op.target in COLLECTIVES:
            return (self._collective(op, inside[op.inputs[0]], segment.graph.values[op.outputs[0]]),)
        if op.target in FORMS:
            return FORMS[op.target](self, op, inside, segment)
        declared = tuple(segment.graph.values[name] for name in op.outputs)
        drawing = op.target.startswith("aten.") and DRAW in dict(op.kwargs)  # which draws what does not matter to the types
        if op.target.startswith("mw.") or drawing:
            return self._opaque(op, inside, declared)
        args, kwargs = arguments(op, lambda ref: inside[ref.name])
        kwargs.pop(DRAW, None)
        operator = overload(op.target)
        if not op.inputs and any(argument.name == "device" for argument in operator._schema.arguments):
            kwargs["device"] = torch.device("meta")
        try:
            result = operator(*args, **kwargs)
        except NotImplementedError:
            return self._opaque(op, inside, declared)  # an operator without a meta kernel: its declared shape is believed
        except SpmdTypeError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            module = op.module or segment.path
            raise VerifyError(str(op), module, "a call that fits its local operands", str(error).splitlines()[0]) from error
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        return results if op.inputs else tuple(self._replicated(tensor) for tensor in results)

    def _replicated(self, tensor: Tensor) -> Tensor:
        """What an operator without operands makes."""
        return _stamp(tensor, self._types(Sharding.whole(tensor.ndim), spmd.R))

    def _collective(self, op: Op, x: Tensor, declared: Value) -> Tensor:
        axis = str(dict(op.kwargs).get("axis"))
        types = spmd.get_local_type(x)
        if axis in self.axes:
            at, operand = self.axes[axis], x
            alike = (spmd.R,) if x.requires_grad else (spmd.R, spmd.I)
            if op.target in (PIECES if x.requires_grad else FROM_VARYING) and types[at] in alike:
                # a piece that an operator without operands made, or one that repeats a whole, or of what was looked up at its
                # places, whose gradient is a pending sum as a piece's is: nothing here says whether it is one, ``verify`` does
                operand = spmd.rules.reinterpret(x, at, src=types[at], dst=spmd.V)
            types = spmd.get_local_type(COLLECTIVES[op.target](operand, at))
        return self._like(x, declared, types)

    def _like(self, x: Tensor, declared: Value, types: Types) -> Tensor:
        """A typed tensor of the declared shape through which gradients flow as through ``x``."""
        tensor = torch.empty(declared.shape, dtype=declared.dtype, device="meta", requires_grad=x.requires_grad)
        return _stamp(tensor, types)

    def _fused_linear(self, op: Op, inside: Mapping[str, Tensor], segment: Segment) -> tuple[Tensor, ...]:
        """Several weights in one: a product of typed tensors as any other."""
        x, weight, bias, *how = op.args
        return _linear(inside[x.name], inside[weight.name], None if bias is None else inside[bias.name], *how[:2])

    def _gather_linear(self, op: Op, inside: Mapping[str, Tensor], segment: Segment) -> tuple[Tensor, ...]:
        """A gather of what is read differently, and the linears that read it."""
        ref, weights, biases, dim = op.args
        x, kwargs = inside[ref.name], dict(op.kwargs)
        shape = list(x.shape)
        shape[dim] = kwargs["size"]
        gathered = Op("gathered", "mw.gather_vary", (ref, dim), op.kwargs, ("gathered",))
        whole = self._collective(gathered, x, Value("gathered", tuple(shape), x.dtype))
        forms = kwargs.get("parts", ((1, False),) * len(weights))
        return tuple(
            part for weight, bias, how in zip(weights, biases, forms, strict=True)
            for part in _linear(whole, inside[weight.name], None if bias is None else inside[bias.name], *how)
        )

    def _opaque(self, op: Op, inside: Mapping[str, Tensor], declared: tuple[Value, ...]) -> tuple[Tensor, ...]:
        """An operator known by its operands' types only; what it reduces inside comes out complete."""
        tensors = [inside[name] for name in op.inputs]
        if not tensors:
            return tuple(self._replicated(torch.empty(value.shape, dtype=value.dtype, device="meta")) for value in declared)
        results = _local_operator(declared, *tensors)
        if op.target == "mw.batch_norm":  # the new statistics live as the old ones do
            statistics = [inside[ref.name] for ref in op.args[3:5] if ref is not None]
            pairs = zip(statistics, declared[1:], strict=False)
            return results[0], *(self._like(x, value, spmd.get_local_type(x)) for x, value in pairs)
        for axis in dict(op.kwargs).get("axes") or ():
            if axis in self.axes:
                results = tuple(
                    self._like(x, value, spmd.get_local_type(COLLECTIVES["mw.all_reduce"](x, self.axes[axis])))
                    for x, value in zip(results, declared, strict=True)
                )
        return results

    def _shown(self, tensor: Tensor) -> str:
        types = spmd.get_local_type(tensor)
        return " ".join(f"{types[at].value}@{axis}" for axis, at in self.axes.items() if at in types) or "none"

    def _named(self, error: SpmdTypeError) -> str:
        """The first line of spmd_types' message, axes by name."""
        text = str(error).splitlines()[0]
        for axis, at in self.axes.items():
            text = text.replace(repr(at), axis)
        return text


FORMS: Mapping[str, Callable[[_Checker, Op, Mapping[str, Tensor], Segment], tuple[Tensor, ...]]] = {
    "mw.gather_linear": _Checker._gather_linear, "mw.fused_linear": _Checker._fused_linear,
}
"""Operators of meshwright's own whose insides the checker sees; all others it knows by their operands' types."""


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, transposed: bool) -> tuple[Tensor, ...]:
    """The parts of a linear; how many terms of a sum it is makes no difference to the types."""
    aten: Any = torch.ops.aten
    y = aten.linear.default(x, aten.t.default(weight) if transposed else weight, bias)
    return (y,) if parts == 1 else tuple(aten.split.Tensor(y, y.shape[-1] // parts, y.ndim - 1))


def _structure(segment: Segment, inside: Mapping[str, Tensor]) -> Any:
    """A segment up to the names of its values, with the types of what it reads."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def plain(arg: Any) -> Any:
        return _plain(arg, lambda name: ("%", number(name)))

    reads = tuple((number(name), _kind(tensor)) for name, tensor in inside.items())
    ops = []
    for op in segment.graph.ops:
        opaque = op.target.startswith("mw.") and op.target not in COLLECTIVES and op.target not in FORMS
        args = tuple(("%", number(name)) for name in op.inputs) if opaque else plain(op.args)
        values = tuple((number(n), segment.graph.values[n].shape, segment.graph.values[n].dtype) for n in op.outputs)
        kwargs = tuple((key, plain(arg) if key != DRAW else "") for key, arg in op.kwargs)
        ops.append((op.target, args, kwargs, values))
    return segment.prologue, reads, tuple(ops), tuple(number(name) for name in segment.graph.outputs)


def _call(op: Op, inside: Mapping[str, Tensor], declared: Sequence[Value]) -> Any:
    """An operator up to the names of its operands and results: what these are to the checker, and all else it is given."""
    args = _plain(op.args, lambda name: _kind(inside[name]))
    kwargs = tuple((key, _plain(arg, lambda name: _kind(inside[name]))) for key, arg in op.kwargs)
    return op.target, args, kwargs, tuple((value.shape, value.dtype, value.differentiable) for value in declared)


def _kind(tensor: Tensor) -> Any:
    """What a value is to the checker."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, frozenset(spmd.get_local_type(tensor).items())


def _plain(arg: Any, named: Callable[[str], Any]) -> Any:
    """An argument that can be looked up, with what ``named`` says of values."""
    if isinstance(arg, Ref):
        return named(arg.name)
    return tuple(_plain(one, named) for one in arg) if isinstance(arg, tuple | list) else repr(arg)


def _reader(op: Op, segment: Segment) -> str:
    """The module of the first reader of an op's results."""
    return next((other.module for other in segment.graph.ops if set(op.outputs) & set(other.inputs) and other.module), "")


def _stamp(tensor: Tensor, types: Types) -> Tensor:
    spmd.assert_type(tensor, types)
    return tensor


def _local_operator(declared: tuple[Value, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Any operator on local tensors, to the checker; it infers the results' types from the operands' alone."""
    if has_torch_function(tensors):
        found: tuple[Tensor, ...] = handle_torch_function(_local_operator, tensors, declared, *tensors)
        return found
    grad = any(tensor.requires_grad for tensor in tensors)
    return tuple(
        torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=grad and v.differentiable) for v in declared
    )


COLLECTIVES: Mapping[str, Callable[[Tensor, Any], Any]] = {
    "mw.slice": lambda x, axis: spmd.rules.convert(x, axis, src=spmd.I, dst=spmd.V),
    "mw.vary": lambda x, axis: spmd.rules.convert(x, axis, src=spmd.I, dst=spmd.R),
    "mw.unvary": lambda x, axis: spmd.rules.convert(x, axis, src=spmd.R, dst=spmd.I),
    "mw.all_gather": lambda x, axis: spmd.rules.all_gather(x, axis, src=spmd.V, dst=spmd.I),
    "mw.gather_vary": lambda x, axis: spmd.rules.all_gather(x, axis, src=spmd.V, dst=spmd.R),
    "mw.reduce_scatter": lambda x, axis: spmd.rules.reduce_scatter(x, axis, src=spmd.V, dst=spmd.V),
    "mw.all_reduce": lambda x, axis: spmd.rules.all_reduce(x, axis, src=spmd.V, dst=spmd.I),
    "mw.all_to_all": lambda x, axis: spmd.rules.all_to_all(x, axis, src=spmd.V, dst=spmd.V),
    "mw.mirror": lambda x, axis: spmd.rules.all_to_all(x, axis, src=spmd.V, dst=spmd.V),
    "mw.term": lambda x, axis: spmd.rules.convert(x, axis, src=spmd.I, dst=spmd.V),
    "mw.identity": lambda x, axis: x,
}
"""The types around each collective; a pending sum is a V until here. Of what these return only the types are used: the V forms
of ``all_gather`` and ``reduce_scatter`` stack ranks in a dim of their own."""

PIECES = ("mw.all_gather", "mw.gather_vary", "mw.all_to_all", "mw.mirror")
FROM_VARYING = (*PIECES, "mw.reduce_scatter", "mw.all_reduce")
