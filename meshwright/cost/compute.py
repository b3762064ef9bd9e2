"""What an operator costs on one device: a roofline with efficiency as a function of shape.

    seconds = max(FLOPs / (peak x efficiency), bytes / (bandwidth x efficiency))

* The host starts kernels one after the other (``started``), ahead of the device while those take longer than their start; where
  they are shorter (small micro-batches, many ways of tensor parallelism) the sum of the starts is the time of the layer.
* A matrix product of M x K by K x N (``_product``) works on tiles of ``tile`` x ``tile`` by ``units`` multiprocessors in waves:
  efficiency = matmul_efficiency x (useful part of the tiles) x (useful part of the waves) x K / (K + depth).
  Its backward is two products of the same size with the roles of M, N and K exchanged.
* Attention (flash): 4 b h s_q s_k d FLOPs forward, 2.5 times that backward (five products for two), half of it where causal;
  its efficiency grows with the keys that a query sees (``_RAMP``) and with the heads.
* Everything else is bound by memory: forward = operands read + results written; backward = gradients of the results and
  what was saved read, gradients of the operands written. Sums (``linear``) pass their gradient on for nothing.
* Fusion (``fusion``): under torch.compile chains of pointwise operators and reductions become one kernel. A value made and
  used inside one kernel is neither written nor read; a value that enters a kernel is read once. Two operators share a kernel
  if one feeds the other (through views) and no other kind of operator lies on a way between them.

Model FLOPs by the field's definition (``model_flops``): 6 N per token for N parameters that take part in matrix products,
plus 12 L h s per token for attention (half of that counts where causal); recomputation is not part of it, and MFU =
model FLOPs / (seconds x peak). HFU counts the forward that full recomputation repeats: 4/3 of it.

Sources: Narayanan et al. 2021 (FLOPs of a step), Chowdhery et al. 2022 appendix B (MFU), Dao 2022 and 2023 (flash
attention), calibration and known error in docs/costs.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.cost.cluster import Device
from meshwright.cost.operators import operator, packet
from meshwright.ir.graph import Graph

Shape = Sequence[int]
_LOSS_PASSES = (2.0, 3.0)
"""Passes over the logits of cross entropy: read and write the log-probabilities; read them and the gradient, write it."""
_RAMP = (150.0, 450.0)
"""Keys at which attention, not causal and causal, reaches half of its efficiency: the rise from 512 to 16,384 in the figures of
Dao 2023 (FlashAttention-2), from memory (trust D)."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What one operator of a fused kernel reads from and writes to memory: one flag per tensor operand and per result."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]


def seconds(
    target: str,
    operand_shapes: Sequence[Shape],
    result_shapes: Sequence[Shape],
    dtype: torch.dtype,
    device: Device,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    fused: Fused | None = None,
    needs: Sequence[bool] | None = None,
) -> tuple[float, float]:
    """(forward, backward) seconds of one operator on LOCAL shapes.

    ``operand_shapes`` are those of the tensor operands in the order of ``Op.inputs``; ``dtype`` is that of the data (not of
    indices). ``needs``: which operands take a gradient (default all); with none the backward is 0. ``fused``: see ``fusion``;
    it counts for nothing on a device that runs eager.
    """
    declared = operator(target)
    needs = tuple(needs) if needs is not None else (True,) * len(operand_shapes)
    if declared.kind == "view":
        return 0.0, 0.0
    if declared.kind == "matmul":
        return _matmul(target, operand_shapes, result_shapes, dtype, device, needs)
    if declared.kind == "attention":
        forward, backward = _attention(operand_shapes, dtype, device, args, kwargs)
    elif declared.kind == "loss":
        stream = math.prod(operand_shapes[0]) * dtype.itemsize / memory_speed(device)
        forward, backward = (passes * stream for passes in _LOSS_PASSES)
    else:
        forward, backward = _traffic(target, operand_shapes, result_shapes, dtype, device, fused if device.fused else None)
    return forward, backward if any(needs) else 0.0


def started(
    target: str, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape], dtype: torch.dtype, device: Device,
    fused: Fused | None = None, needs: Sequence[bool] | None = None,
) -> tuple[float, float]:
    """(forward, backward) seconds that the host takes to start an operator's kernels: one each way; of a product's backward one
    for each operand that takes a gradient; none for views and for gradients that are passed on; a fused kernel starts once."""
    kind, needs = operator(target).kind, tuple(needs) if needs is not None else (True,) * len(operand_shapes)
    if kind == "view" or (fused is not None and device.fused and not any(fused.writes)):
        return 0.0, 0.0
    if kind == "matmul":
        ahead, back = _kernels(target, operand_shapes, result_shapes, needs)
    else:
        ahead = 1
        traffic = seconds(target, operand_shapes, result_shapes, dtype, device, fused=fused, needs=needs)[1]
        back = int(kind == "attention" or traffic > 0) if any(needs) else 0
    return ahead * device.kernel_seconds, back * device.kernel_seconds


def flops(
    target: str, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape], args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
) -> float:
    """FLOPs of the forward of matrix products and attention (a multiplication and an addition are two); 0 for the rest."""
    kind = operator(target).kind
    if kind == "matmul":
        return sum(2.0 * batch * m * n * k for batch, m, n, k in products(target, operand_shapes, result_shapes))
    return attention_flops(operand_shapes, args, kwargs) if kind == "attention" else 0.0


def model_flops(parameters: float, tokens: float, layers: int, hidden: int, seq_len: int, causal: bool = False) -> float:
    """Model FLOPs of one training step, forward and backward, without recomputation: tokens x (6 N + 12 L h s), with half the
    attention term where only the causal half counts. ``parameters``: those in matrix products (head, not embedding)."""
    return tokens * (6.0 * parameters + 12.0 * layers * hidden * seq_len * (0.5 if causal else 1.0))


def mfu(model_flops_: float, seconds_: float, devices: int, device: Device, dtype: torch.dtype) -> float:
    """Model FLOPs utilization: a fraction of the devices' peak."""
    return model_flops_ / (seconds_ * devices * device.flops(dtype))


def memory_speed(device: Device) -> float:
    """Bytes per second that a memory-bound kernel reaches."""
    return device.memory_bandwidth * device.memory_efficiency


def optimizer_seconds(parameter_bytes: float, gradient_bytes: float, state_bytes: float, device: Device) -> float:
    """Seconds of one fused optimizer step: parameters and state are read and written, gradients read. LOCAL bytes."""
    return max((2 * parameter_bytes + gradient_bytes + 2 * state_bytes) / memory_speed(device), device.kernel_seconds)


# ---------------------------------------------------------------------------------------------- matrix products


def products(
    target: str, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> tuple[tuple[int, int, int, int], ...]:
    """(batch, M, N, K) of every matrix product an operator consists of."""
    name = packet(target)
    if name == "mw.gather_linear":
        rows = math.prod(result_shapes[0][:-1])
        return tuple((1, rows, shape[-1], operand_shapes[0][-1]) for shape in result_shapes)
    result = result_shapes[0]
    if name.startswith("aten.conv"):
        weight = operand_shapes[1]
        channels = result[1] if len(result) > 1 else 1
        return ((1, math.prod(result) // max(channels, 1), channels, math.prod(weight[1:])),)
    left, right = operand_shapes[-2:] if name in ("aten.addmm", "aten.baddbmm") else operand_shapes[:2]
    if name in ("aten.linear", "mw.linear", "mw.fused_linear"):
        return ((1, math.prod(left[:-1]), math.prod(right) // max(left[-1], 1), left[-1]),)
    if name == "aten._grouped_mm":
        groups = right[0] if len(right) == 3 else 1
        return ((groups, -(-left[0] // max(groups, 1)), right[-1], left[-1]),)
    if len(left) <= 1 or len(right) <= 1:
        return ((1, math.prod(left[:-1]), 1 if len(right) <= 1 else right[-1], left[-1] if left else 1),)
    if len(right) == 2:
        return ((1, math.prod(left[:-1]), right[-1], left[-1]),)
    return ((math.prod(result[:-2]), left[-2], right[-1], left[-1]),)


def matmul_efficiency(batch: int, m: int, n: int, k: int, device: Device) -> float:
    """Fraction of the peak that a product reaches: the best of three tile sizes.

    Smaller tiles waste less at the edges and in the last wave, but reuse less of what they load.
    """
    best = 0.0
    for tile_m, tile_n, reuse in ((1, 2, 1.0), (1, 1, 0.94), (0.5, 0.5, 0.7)):
        rows, columns = device.tile * tile_m, device.tile * tile_n
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        filled = batch * m * n / (tiles * rows * columns)
        waves = tiles / device.units
        best = max(best, reuse * filled * waves / math.ceil(waves))
    return device.matmul_efficiency * best * k / (k + device.depth)


def _product(batch: int, m: int, n: int, k: int, dtype: torch.dtype, device: Device) -> float:
    """Seconds of one product."""
    if min(batch, m, n, k) == 0:
        return 0.0
    work = 2.0 * batch * m * n * k / (device.flops(dtype) * matmul_efficiency(batch, m, n, k, device))
    stream = batch * (m * k + k * n + m * n) * dtype.itemsize / memory_speed(device)
    return max(work, stream)


def _matmul(
    target: str, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape], dtype: torch.dtype, device: Device,
    needs: Sequence[bool],
) -> tuple[float, float]:
    forward = backward = 0.0
    left, right = _gradients(target, needs)
    for batch, m, n, k in products(target, operand_shapes, result_shapes):
        forward += _product(batch, m, n, k, dtype, device)
        backward += _product(batch, m, k, n, dtype, device) if left else 0.0
        backward += _product(batch, k, n, m, dtype, device) if right else 0.0
    return forward, backward


def _gradients(target: str, needs: Sequence[bool]) -> tuple[bool, bool]:
    """Whether the left and the right operand of a product take a gradient."""
    if packet(target) in ("aten.addmm", "aten.baddbmm"):
        return needs[-2], needs[-1]
    return needs[0], any(needs[1:])


def _kernels(
    target: str, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape], needs: Sequence[bool]
) -> tuple[int, int]:
    """Kernels of a product, forward and backward."""
    count = len(products(target, operand_shapes, result_shapes))
    return count, count * sum(_gradients(target, needs))


# ---------------------------------------------------------------------------------------------------- attention


def attention_flops(
    operand_shapes: Sequence[Shape], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
) -> float:
    """Forward FLOPs: q k^T and p v, half where causal."""
    query, key, value = operand_shapes[:3]
    full = 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return full * (0.5 if is_causal(args, kwargs) else 1.0)


def is_causal(args: Sequence[Any], kwargs: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> bool:
    """The argument of that name: (q, k, v, mask, dropout_p, is_causal, ...)."""
    return bool(dict(kwargs).get("is_causal", args[5] if len(args) > 5 else False))


def _attention(
    operand_shapes: Sequence[Shape], dtype: torch.dtype, device: Device, args: Sequence[Any],
    kwargs: Mapping[str, Any] | Sequence[tuple[str, Any]],
) -> tuple[float, float]:
    query, key, value = operand_shapes[:3]
    work = attention_flops(operand_shapes, args, kwargs) / device.flops(dtype)
    stream = sum(map(math.prod, (query, key, value, query))) * dtype.itemsize / memory_speed(device)
    head, blocks = query[-1], math.prod(query[:-2]) * math.ceil(query[-2] / device.tile)
    shape = head / (head + device.tile / 4) * 1.25  # 1 at a head of ``tile``, less below it
    waves = blocks / device.units
    shape *= waves / math.ceil(waves) if blocks else 1.0
    shape *= key[-2] / (key[-2] + _RAMP[is_causal(args, kwargs)]) if key[-2] else 1.0
    forward = max(work / (device.attention_forward * shape), stream) if work else 0.0
    backward = max(2.5 * work / (device.attention_backward * shape), 2.5 * stream) if work else 0.0
    return forward, backward


# ----------------------------------------------------------------------------------------------------- the rest


def _traffic(
    target: str, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape], dtype: torch.dtype, device: Device,
    fused: Fused | None,
) -> tuple[float, float]:
    """Memory-bound operators: bytes over bandwidth."""
    declared = operator(target)
    inputs = [math.prod(shape) for shape in operand_shapes]
    outputs = [math.prod(shape) for shape in result_shapes]
    if declared.kind == "gather":  # only the rows that are picked are read
        forward, backward = 2.0 * sum(outputs), 2.0 * sum(outputs) + (inputs[0] if inputs else 0)
    elif fused is not None:
        read = sum(size for size, flag in zip(inputs, fused.reads, strict=True) if flag)
        written = sum(size for size, flag in zip(outputs, fused.writes, strict=True) if flag)
        forward, backward = read + written, 2.0 * read + written
        if not forward:
            return 0.0, 0.0
    else:
        forward = float(sum(inputs) + sum(outputs))
        saved = sum(inputs[at] for at, _ in declared.operands if at < len(inputs))
        saved += sum(outputs[at] for at in declared.results if at < len(outputs))
        whole = all(size == outputs[0] for size in inputs) or sum(inputs) == outputs[0]  # no broadcast to sum; or a cat
        passes = declared.kind == "factory" or (declared.kind == "linear" and whole)
        backward = 0.0 if passes else float(sum(outputs) + saved + sum(inputs))
    speed = memory_speed(device) / dtype.itemsize
    return forward / speed, backward / speed


def fusion(graph: Graph) -> tuple[Fused | None, ...]:
    """For every op of the graph what its fused kernel makes it read and write; None for views and ops that do not fuse.

    The level of an op is the largest number of unfusable ops on a way to it; fusable ops of one level that feed each other
    share a kernel. Views are looked through, and what is made from literals is made again where it is used.
    """
    base, made = _bases(graph)
    level: dict[str, int] = {}
    kernels = list(range(len(graph.ops)))

    def root(index: int) -> int:
        while kernels[index] != index:
            kernels[index] = index = kernels[kernels[index]]
        return index

    for index, op in enumerate(graph.ops):
        declared = operator(op.target)
        if declared.kind == "view":
            continue
        at = max((level.get(base[name], 0) for name in op.inputs), default=0)
        level.update((name, at if declared.fuses else at + 1) for name in op.outputs)
        for name in op.inputs if declared.fuses else ():
            if made.get(base[name], -1) >= 0 and level[base[name]] == at:
                kernels[root(index)] = root(made[base[name]])
    return _boundaries(graph, base, made, [root(index) for index in range(len(graph.ops))])


def _bases(graph: Graph) -> tuple[dict[str, str], dict[str, int]]:
    """({value: the value whose storage it shows}, {value: fusable op that makes it; -2 if made from literals})."""
    base = {name: name for name in graph.values}
    made: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        declared = operator(op.target)
        if declared.kind == "view" and op.inputs:
            base.update((name, base[op.inputs[0]]) for name in op.outputs)
        elif declared.kind == "factory":
            made.update((name, -2) for name in op.outputs)
        elif declared.fuses:
            made.update((name, index) for name in op.outputs)
    return base, made


def _boundaries(
    graph: Graph, base: Mapping[str, str], made: Mapping[str, int], kernel: Sequence[int]
) -> tuple[Fused | None, ...]:
    """Which operands enter and which results leave each op's kernel."""
    leaving = {base[name] for name in graph.outputs}
    users: dict[str, set[int]] = {}
    for index, op in enumerate(graph.ops):
        if operator(op.target).kind != "view":
            for name in op.inputs:
                users.setdefault(base[name], set()).add(kernel[index])
    seen: set[tuple[int, str]] = set()
    result: list[Fused | None] = []
    for index, op in enumerate(graph.ops):
        declared = operator(op.target)
        if declared.kind == "view" or not declared.fuses:
            result.append(None)
            continue
        reads = []
        for name in op.inputs:
            source = made.get(base[name], -1)
            inside = source == -2 or (source >= 0 and kernel[source] == kernel[index])
            reads.append(not inside and (kernel[index], base[name]) not in seen)
            seen.add((kernel[index], base[name]))
        writes = tuple(
            declared.kind != "factory" and (name in leaving or bool(users.get(name, set()) - {kernel[index]}))
            for name in op.outputs
        )
        result.append(Fused(tuple(reads), writes))
    return tuple(result)
