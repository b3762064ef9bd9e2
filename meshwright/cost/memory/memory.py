"""What a training step keeps on one device: state by ZeRO level, and what autograd saves.

State, in bytes per parameter of the model (``states``), for parameters kept in ``precision`` over s ranks that share them:

    level   parameters      gradients           optimizer   gathered while a block runs   accumulated between micro-batches
    0       m               g                   o           c if c < m                    in gradients
    1       m / s           g / s               o / s       c, from forward to step       g
    2       m / s           g / s               o / s       c, from forward to step       in gradients
    3       m / s           g / s               o / s       c, of the blocks at work      in gradients

m: master copy, c: what compute reads, g: gradient, o: optimizer state (AdamW: two fp32 numbers). "fp32": m = c = g = 4, so
16 bytes with AdamW; "bf16": m = 4, c = 2, g = 4. This is what FSDP2 keeps. ``zero_table`` is the papers' own count with
16-bit parameters and gradients and 12 bytes of fp32 state: 16, 4 + 12/s, 2 + 14/s, 16/s (Rajbhandari et al. 2020).

Activations: ``saved_for_backward`` says which operands and results of an operator autograd keeps, ``extra_saved_bytes`` what it
keeps beside them (masks, statistics). ``storages`` tells which values share storage, so that a tensor which several
operators save counts once. ``activation_bytes`` sums all of it over a graph. On the layer of Korthikanti et al. 2022 it
gives their s b h (34 + 5 a s / h) with fp16 values and one-byte masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.cost.operators import of_call, operator, packet
from meshwright.ir.gradients.custom import CUSTOM, CustomFunction
from meshwright.ir.graph import Graph, Op

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element: ``master`` copy at rest, ``compute`` copy that is read, ``gradient`` kept and reduced."""

    master: int
    compute: int
    gradient: int


PRECISIONS: Mapping[str, Precision] = {"fp32": Precision(4, 4, 4), "bf16": Precision(4, 2, 4)}
OPTIMIZERS: Mapping[str, float] = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "momentum": 4.0, "adafactor": 0.1, "none": 0.0}
"""Bytes of optimizer state per parameter, kept in fp32."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes per parameter on one device. ``gathered``: the compute copy, while its block (level 3) or the step (1, 2) runs;
    ``accumulated``: whole gradients held between micro-batches."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    accumulated: float

    @property
    def at_rest(self) -> float:
        """Held over the whole step."""
        return self.parameters + self.gradients + self.optimizer


def optimizer_bytes(optimizer: str | float) -> float:
    """Bytes of state per parameter from a name or a number."""
    if isinstance(optimizer, int | float):
        return float(optimizer)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}, or give bytes per parameter")
    return OPTIMIZERS[optimizer]


def states(zero: int, precision: str = "fp32", optimizer: str | float = "adamw", shards: int = 1) -> States:
    """State of one parameter whose state is split over ``shards`` ranks under ZeRO level ``zero``."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO level {zero} is not one of 0, 1, 2, 3")
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    size, state = PRECISIONS[precision], optimizer_bytes(optimizer)
    parts = shards if zero else 1
    gathered = float(size.compute) if parts > 1 or size.compute != size.master else 0.0
    return States(
        parameters=size.master / parts, gradients=size.gradient / parts, optimizer=state / parts, gathered=gathered,
        accumulated=float(size.gradient) if zero == 1 and parts > 1 else 0.0,
    )


def zero_table(zero: int, shards: int, parameter: float = 2, gradient: float = 2, state: float = 12) -> float:
    """Bytes per parameter at rest by the ZeRO paper's count: each level splits one more of state, gradient, parameter.

    >>> [zero_table(level, 64) for level in range(4)]
    [16.0, 4.1875, 2.21875, 0.25]
    """
    split = [size / shards if zero >= level else size for level, size in ((3, parameter), (2, gradient), (1, state))]
    return float(sum(split))


# -------------------------------------------------------------------------------------------------- activations


def saved_for_backward(op: Op, graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(positions in ``op.inputs``, positions in ``op.outputs``) of the tensors that autograd keeps for this call.

    Empty where no gradient flows through the results. A parameter or a view that is kept holds no storage of its own: see
    ``storages``.
    """
    if not any(graph.values[name].differentiable for name in op.outputs):
        return (), ()
    needs = [graph.values[name].differentiable for name in op.inputs]
    declared = of_call(op)
    operands = tuple(
        at for at, wanted in declared.operands
        if at < len(needs) and (not wanted or any(other < len(needs) and needs[other] for other in wanted))
    )
    return operands, tuple(at for at in declared.results if at < len(op.outputs))


def extra_saved_bytes(
    target: str, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape], dtype: torch.dtype,
    args: Sequence[object] = (), mask_bytes: int | None = None, needs: Sequence[bool] = (),
) -> int:
    """Bytes that autograd keeps beside operands and results, on LOCAL shapes.

    Masks of dropout (``mask_bytes`` per element; None: as wide as the data, which ``mw.dropout`` keeps), the log-sum-exp of
    attention, mean and deviation of norms, the log-probabilities of a plain cross entropy. ``needs``: which operands take a
    gradient; attention whose mask does (T5's position bias) keeps its probabilities.
    """
    name = packet(target)
    rows = [math.prod(shape[:-1]) for shape in operand_shapes[:1]] or [0]
    if name == CUSTOM:  # what is neither operand nor result, as large a part of the whole as the first result
        function = args[0]
        assert isinstance(function, CustomFunction)
        part = math.prod(result_shapes[0]) / max(1, function.forward.values[function.results[0].name].numel)
        return math.ceil(part * sum(value.bytes_ for value in function.kept[2]))
    if name in ("aten.dropout", "mw.dropout"):
        rate = args[1] if len(args) > 1 else 0.5
        active = rate != 0 and (name == "mw.dropout" or len(args) < 3 or bool(args[2]))
        return math.prod(result_shapes[0]) * (dtype.itemsize if mask_bytes is None else mask_bytes) if active else 0
    if name in ("aten.scaled_dot_product_attention", "mw.sdpa"):
        scores = rows[0] * operand_shapes[1][-2] * dtype.itemsize if len(needs) > 3 and needs[3] else 0
        return rows[0] * 4 + scores
    if name in ("aten.layer_norm", "aten.native_layer_norm"):
        return rows[0] * 2 * 4
    if name == "aten.rms_norm":
        return rows[0] * 4
    if name in ("aten.group_norm", "aten.native_group_norm"):
        return operand_shapes[0][0] * 2 * 4
    if name in ("mw.batch_norm", "aten.batch_norm") and len(operand_shapes[0]) > 1:
        return operand_shapes[0][1] * 2 * 4
    if name == "mw.cross_entropy":
        return rows[0] * (4 + 8 + 1 + 1)
    if name == "aten.cross_entropy_loss":
        return math.prod(operand_shapes[0]) * dtype.itemsize
    if name.startswith("aten.max_pool"):
        return math.prod(result_shapes[0]) * 8
    return 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """Dims in the order they lie in memory, major first; ``dense``: without gaps (a slice of a dim has them)."""

    order: tuple[int, ...]
    dense: bool = True

    @property
    def contiguous(self) -> bool:
        return self.dense and self.order == tuple(range(len(self.order)))


def storages(graph: Graph) -> dict[str, str]:
    """{value: the value whose storage it shows}. A reshape of what a transposition or an expansion left scattered is a copy
    and has its own; pointwise operators and attention lay their result out as their first operand, so that heads transposed
    before attention are usually joined after it without a copy."""
    base = {name: name for name in graph.values}
    layouts = {name: _Layout(tuple(range(len(value.shape)))) for name, value in graph.values.items()}
    for op in graph.ops:
        kind, name = operator(op.target).kind, packet(op.target).removeprefix("aten.")
        if kind == "view" and op.inputs:
            source = op.inputs[0]
            for out in op.outputs:
                layout = _view(name, op, graph, layouts[source])
                if layout is not None:
                    layouts[out], base[out] = layout, base[source]
        elif op.inputs and (kind in ("pointwise", "linear", "attention") or name == "clone"):
            first = layouts[op.inputs[0]]
            for out in op.outputs:
                if len(graph.values[out].shape) == len(first.order):
                    layouts[out] = _Layout(first.order)
    return base


def _view(name: str, op: Op, graph: Graph, before: _Layout) -> _Layout | None:
    """Layout of a view's result; None where torch must move the data."""
    source, result = (graph.values[names[0]].shape for names in (op.inputs, op.outputs))
    plain = tuple(range(len(result)))
    if name in ("reshape", "view", "_unsafe_view", "flatten", "contiguous"):
        if before.contiguous:
            return _Layout(plain)
        if name != "contiguous" and source == result:
            return before
        in_order = before.order == tuple(range(len(source)))
        # a slice whose last dim is cut further stays a view of the same storage
        return _Layout(plain, False) if name != "contiguous" and in_order and len(result) > len(source) else None
    if name in ("transpose", "swapaxes", "t", "permute", "mT", "numpy_T"):
        permutation = _permutation(name, op, len(source))
        return _Layout(tuple(permutation.index(dim) for dim in before.order), before.dense)
    if len(source) == len(result):  # slices and expansions: gaps, the order kept
        return _Layout(before.order, before.dense and source == result)
    return _Layout(plain, before.contiguous and math.prod(source) == math.prod(result))


def _permutation(name: str, op: Op, dims: int) -> list[int]:
    """Which dim of the source each dim of the result is."""
    if name == "permute":
        return [int(dim) % dims for dim in op.args[1]]
    swap = [int(dim) % dims for dim in op.args[1:3]] if name in ("transpose", "swapaxes") else [dims - 2, dims - 1]
    result = list(range(dims))
    if dims > 1:
        result[swap[0]], result[swap[1]] = swap[1], swap[0]
    return result


def activation_bytes(
    graph: Graph, ops: Iterable[int] | None = None, shapes: Mapping[str, Shape] | None = None, mask_bytes: int | None = None
) -> int:
    """Bytes that autograd keeps for the backward of ``ops`` (default all), each storage once, parameters not counted.

    ``shapes``: LOCAL shapes of values that differ from the graph's.
    """
    base, shapes = storages(graph), shapes or {}
    held = {param.value for param in graph.params}
    kept: dict[str, int] = {}
    extra = 0

    def shape(name: str) -> Shape:
        return shapes.get(name, graph.values[name].shape)

    for index in range(len(graph.ops)) if ops is None else ops:
        op = graph.ops[index]
        operands, results = saved_for_backward(op, graph)
        for name in [op.inputs[at] for at in operands] + [op.outputs[at] for at in results]:
            root = base[name]
            if root not in held:
                kept[root] = math.prod(shape(root)) * graph.values[root].dtype.itemsize
        if any(graph.values[name].differentiable for name in op.outputs):
            dtype = graph.values[op.inputs[0]].dtype if op.inputs else torch.float32
            needs = [graph.values[name].differentiable for name in op.inputs]
            operands_, results_ = [shape(name) for name in op.inputs], [shape(name) for name in op.outputs]
            extra += extra_saved_bytes(op.target, operands_, results_, dtype, op.args, mask_bytes, needs)
    return sum(kept.values()) + extra
