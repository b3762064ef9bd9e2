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

Model FLOPs by the field's definition are 6 N per token for N parameters that take part in matrix products, plus 12 L h s per
token for attention (half of that counts where causal); recomputation is not part of them, and MFU = model FLOPs / (seconds x
peak). They are counted operator by operator (``search.prediction.step_flops``). HFU counts the forward that full recomputation
repeats: 4/3 of it.

Sources: Narayanan et al. 2021 (FLOPs of a step), Chowdhery et al. 2022 appendix B (MFU), Dao 2022 and 2023 (flash
attention), calibration and known error in docs/costs.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.cost.cluster import Device
from meshwright.cost.tables import falls
from meshwright.ir.declared.operator import Operator, Operators, Work
from meshwright.ir.graph import Graph
from meshwright.ir.sharding import DTYPE_NAMES

_LOSS_FUSED = (2.0, 3.0)
"""Passes over the logits in fp32 of a compiled cross entropy: read and write the log-probabilities; read them and the gradient,
write it."""
_LOSS_EAGER = (6.0, 10.0)
"""Passes of one kernel a step: the maximum, the difference (2), its exponential (2) and their sum; a copy, the difference, the
exponential, the factor and the mask (2 each). Logits of 16 bits are cast before and the gradient after, each a pass and a
half."""
_LOSS_SHARDED = (8.0, 2.0)
"""Passes of Megatron-LM's own cross entropy over a split vocabulary and its kin's, which work in place and keep the softmax:
the maximum, the difference (2), its exponential (2), their sum and the softmax (2); the factor (2). Casts as above."""
_LOSS_MERGED = (1.0, 2.0)
"""Passes over the logits in their own format of a cross entropy that is one kernel each way: read; read, and written as the
gradient in their place."""
_CAST: Mapping[str, int] = {"f8e4m3": 1}
"""Formats whose operands are read and written once more before a product, and the bytes of an element in them."""
_ROW = 8
"""16-bit numbers in the 16 bytes that a kernel for tensor cores reads of a row at a time."""
_RAMP = (150.0, 450.0)
"""Keys at which attention, not causal and causal, reaches half of its efficiency: the rise from 512 to 16,384 in the figures of
Dao 2023 (FlashAttention-2), from memory (trust D)."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What one operator of a fused kernel reads from and writes to memory: one flag per tensor operand and per result."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]


def seconds(operator: Operator, work: Work, device: Device, fused: Fused | None = None) -> tuple[float, float]:
    """(forward, backward) seconds of one call on LOCAL shapes; the backward is 0 where no operand takes a gradient.

    ``fused``: see ``fusion``; it counts for nothing on a device that runs eager.
    """
    if operator.kind == "view":
        return 0.0, 0.0
    if operator.kind == "matmul":
        return _matmul(operator, work, device)
    if operator.kind == "attention":
        forward, backward = _attention(operator, work, device)
    elif operator.kind == "loss":
        forward, backward = _loss(work, device)
    else:
        forward, backward = _traffic(operator, work, device, fused if device.fused else None)
    return forward, backward if any(work.gradients) else 0.0


def started(operator: Operator, work: Work, device: Device, fused: Fused | None = None) -> tuple[float, float]:
    """(forward, backward) seconds that the host takes to start an operator's kernels: one each way; of a product's backward one
    for each operand that takes a gradient; none for views and for gradients that are passed on; a fused kernel starts once."""
    if operator.kind == "view" or (fused is not None and device.fused and not any(fused.writes)):
        return 0.0, 0.0
    if operator.kind == "matmul":
        ahead, back = _kernels(operator, work)
    else:
        ahead = 1
        traffic = seconds(operator, work, device, fused)[1]
        back = int(operator.kind == "attention" or traffic > 0) if any(work.gradients) else 0
    return ahead * device.kernel_seconds, back * device.kernel_seconds


def flops(operator: Operator, work: Work) -> float:
    """FLOPs of the forward of matrix products and attention (a multiplication and an addition are two); 0 for the rest."""
    if operator.kind == "matmul":
        return sum(2.0 * batch * m * n * k for batch, m, n, k in products(operator, work))
    return attention_flops(work, operator) if operator.kind == "attention" else 0.0


def mfu(model_flops_: float, seconds_: float, devices: int, device: Device, dtype: torch.dtype) -> float:
    """Model FLOPs utilization: a fraction of the devices' peak, in the format of the products where it is another."""
    peak = device.peak[device.products] if device.products else device.flops(dtype)
    return model_flops_ / (seconds_ * devices * peak)


def memory_speed(device: Device) -> float:
    """Bytes per second that a memory-bound kernel reaches."""
    return device.memory_bandwidth * device.memory_efficiency


# ---------------------------------------------------------------------------------------------- matrix products


def products(operator: Operator, work: Work) -> Sequence[tuple[int, int, int, int]]:
    """(batch, M, N, K) of every matrix product that a call consists of."""
    return operator.cost.products(work) if operator.cost.products is not None else ()


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


def _product(batch: int, m: int, n: int, k: int, dtype: torch.dtype, device: Device, aligned: bool = True) -> float:
    """Seconds of one product: as measured where the device's table has it, else the formula scaled as the table's products of
    about as many FLOPs are."""
    if min(batch, m, n, k) == 0:
        return 0.0
    points = _products(DTYPE_NAMES.get(dtype), device)
    if not points:
        return _by_formula(batch, m, n, k, dtype, device, aligned)
    known = dict(points)
    if batch == 1 and (m, n, k) in known:
        return known[m, n, k]
    return _ratio(math.log(batch * m * n * k), _over_formula(points, dtype, device)) * _by_formula(
        batch, m, n, k, dtype, device, aligned
    )


def _products(name: str | None, device: Device) -> list[tuple[tuple[int, int, int], float]]:
    """(shape, seconds) of the products that were measured in a dtype; none where they run in another format."""
    return [row for table in device.measured if table.dtype == name and not device.products
            for row in zip(table.shapes, table.seconds, strict=True)]


def _over_formula(
    points: Iterable[tuple[tuple[int, int, int], float]], dtype: torch.dtype, device: Device
) -> list[tuple[float, float]]:
    """(logarithm of the size, measured over formula) of products."""
    return [(math.log(math.prod(shape)), seconds_ / _by_formula(1, *shape, dtype, device, _aligned(*shape[1:], dtype)))
            for shape, seconds_ in points]


def least_measured(device: Device) -> float:
    """The least of measured over formula in the device's tables of products, at most 1."""
    curves = [_over_formula(_products(name, device), dtype, device) for dtype, name in DTYPE_NAMES.items()]
    return min([1.0, *(ratio for curve in curves for _, ratio in curve)])


def unevenly_measured(device: Device) -> float:
    """By how much more of its share than a smaller one a large call takes at most, by the device's tables: 1 where small ones
    take no less than the formula has it, as without any."""
    streams = {(table.kind, table.dtype) for table in device.streams}
    attentions = {(table.dtype, table.causal) for table in device.attentions}
    curves = [_over_formula(_products(name, device), dtype, device) for dtype, name in DTYPE_NAMES.items()]
    curves += [_streamed(*key, device) for key in streams]
    curves += [curve for name, causal in attentions for curve in _attended(name, causal, device)]
    return max(map(falls, curves), default=1.0)


def _ratio(size: float, points: Iterable[tuple[float, float]]) -> float:
    """Measured over formula at the logarithm of a size, between its neighbours by their logarithms, beyond the ends as there;
    the geometric mean of several of one size; 1 without points."""
    logs: dict[float, list[float]] = {}
    for at, ratio in sorted(points):
        logs.setdefault(at, []).append(math.log(ratio))
    if not logs:
        return 1.0
    return math.exp(float(np.interp(size, list(logs), [sum(same) / len(same) for same in logs.values()])))


def _moved(kind: str, bytes_: float, dtype: torch.dtype, device: Device) -> float:
    """Seconds to read and write so many bytes: as measured for this kind of work, else over the bandwidth of the memory."""
    plain = bytes_ / memory_speed(device)
    if not device.streams or not bytes_:
        return plain
    return plain * _ratio(math.log(bytes_), _streamed(kind, DTYPE_NAMES.get(dtype), device))


def _streamed(kind: str, name: str | None, device: Device) -> list[tuple[float, float]]:
    """(logarithm of bytes, measured over formula) of a kind of work that is bound by memory."""
    speed = memory_speed(device)
    return [(math.log(size), seconds_ * speed / size)
            for table in device.streams if table.kind == kind and table.dtype == name
            for size, seconds_ in zip(table.bytes_, table.seconds, strict=True)]


def _by_formula(batch: int, m: int, n: int, k: int, dtype: torch.dtype, device: Device, aligned: bool = True) -> float:
    """Seconds of one product by the formula."""
    peak = device.peak[device.products] if device.products else device.flops(dtype)
    efficiency = matmul_efficiency(batch, m, n, k, device)
    work = 2.0 * batch * m * n * k / (peak * (efficiency if aligned else min(efficiency, device.unaligned)))
    if device.products in _CAST:
        work += batch * (m * k + k * n) * (dtype.itemsize + _CAST[device.products]) / memory_speed(device)
    stream = batch * (m * k + k * n + m * n) * dtype.itemsize / memory_speed(device)
    return max(work, stream)


def _matmul(operator: Operator, work: Work, device: Device) -> tuple[float, float]:
    forward = backward = 0.0
    left, right = _sides(operator, work)
    for batch, m, n, k in products(operator, work):
        aligned = _aligned(n, k, work.reads)
        forward += _product(batch, m, n, k, work.reads, device, aligned)
        backward += _product(batch, m, k, n, work.reads, device, aligned) if left else 0.0
        backward += _product(batch, k, n, m, work.reads, device, aligned) if right else 0.0
    if operator.cost.again is not None and (left or right):
        backward += sum(_product(*one, work.reads, device, _aligned(*one[2:], work.reads)) for one in operator.cost.again(work))
    if operator.cost.moves is not None:
        ahead, back = (bytes_ / memory_speed(device) for bytes_ in operator.cost.moves(work))
        forward, backward = forward + ahead, backward + (back if left else 0.0)
    return forward, backward


def _aligned(n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether rows of the operands and of the result, k and n long, are multiples of what a kernel for 16-bit numbers reads at
    a time; others need none."""
    return dtype.itemsize != 2 or not (n % _ROW or k % _ROW)


def _sides(operator: Operator, work: Work) -> tuple[bool, bool]:
    """Whether the left and the right side of a product take a gradient."""
    needs, left = work.gradients, operator.cost.left
    return needs[left], any(needs[left + 1 :])


def _kernels(operator: Operator, work: Work) -> tuple[int, int]:
    """Kernels of a product, forward and backward."""
    if operator.cost.kernels is not None:
        ahead, back = operator.cost.kernels(work)
        return ahead, back if any(work.gradients) else 0
    count = len(products(operator, work))
    sides = sum(_sides(operator, work))
    again = len(operator.cost.again(work)) if operator.cost.again is not None and sides else 0
    return count, count * sides + again


# ---------------------------------------------------------------------------------------------------- attention


def attention_flops(work: Work, operator: Operator | None = None) -> float:
    """Forward FLOPs: q k^T and p v, half where causal, of a window what it looks at."""
    return _attention_flops(work, None if operator is None else operator.cost.looked)


def _attention_flops(work: Work, looked: Callable[[Work], float] | None) -> float:
    query, key, value = work.operands[:3]
    keys = looked(work) if looked is not None else key[-2] * (0.5 if is_causal(work) else 1.0)
    return 2.0 * math.prod(query[:-1]) * keys * (query[-1] + value[-1])


def is_causal(work: Work) -> bool:
    """The argument of that name: (q, k, v, mask, dropout_p, is_causal, ...)."""
    return bool(work.literal(5, "is_causal", False))


def _attention(operator: Operator, work: Work, device: Device) -> tuple[float, float]:
    """As measured where a table has that shape, else the formula scaled as the table's calls of about as many FLOPs are; what
    looks through a window counts as causal."""
    forward, backward = _attention_by_formula(operator.cost.looked, work, device)
    name, causal = DTYPE_NAMES.get(work.makes), operator.cost.looked is not None or is_causal(work)
    tables = [table for table in device.attentions if table.dtype == name and table.causal == causal]
    if not tables or not forward:
        return forward, backward
    query, key, value = work.operands[:3]
    if operator.cost.looked is None and len(query) == 4 and key == value == (*query[:2], key[2], query[3]):
        own = (*query[:3], *key[2:])
        for table in tables:
            if own in table.shapes:
                at = table.shapes.index(own)
                return table.forward[at], table.backward[at]
    size, (ahead, back) = math.log(attention_flops(work, operator)), _attended(name, causal, device)
    return forward * _ratio(size, ahead), backward * _ratio(size, back)


def _attended(name: str | None, causal: bool, device: Device) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(logarithm of FLOPs, measured over formula) of attention, forward and backward."""
    dtype = next((one for one, known in DTYPE_NAMES.items() if known == name), torch.float32)
    ahead, back = list[tuple[float, float]](), list[tuple[float, float]]()
    for table in device.attentions:
        rows = zip(table.shapes, table.forward, table.backward, strict=True)
        for (batch, heads, queries, keys, head), *measured in rows if (table.dtype, table.causal) == (name, causal) else ():
            sides = ((batch, heads, queries, head), (batch, heads, keys, head), (batch, heads, keys, head))
            call = Work(sides, sides[:1], dtype, dtype, args=(None,) * 5 + (causal,))
            formula, size = _attention_by_formula(None, call, device), math.log(attention_flops(call))
            ahead.append((size, measured[0] / formula[0]))
            back.append((size, measured[1] / formula[1]))
    return ahead, back


def _attention_by_formula(
    looked: Callable[[Work], float] | None, work: Work, device: Device
) -> tuple[float, float]:
    query, key, value = work.operands[:3]
    busy = _attention_flops(work, looked) / device.flops(work.makes)
    stream = sum(map(math.prod, (query, key, value, query))) * work.makes.itemsize / memory_speed(device)
    head, blocks = query[-1], math.prod(query[:-2]) * math.ceil(query[-2] / device.tile)
    shape = head / (head + device.tile / 4) * 1.25  # 1 at a head of ``tile``, less below it
    waves = blocks / device.units
    shape *= waves / math.ceil(waves) if blocks else 1.0
    keys, ramp = (2 * looked(work), _RAMP[1]) if looked is not None else (key[-2], _RAMP[is_causal(work)])  # half of them seen
    shape *= keys / (keys + ramp) if keys else 1.0
    forward = max(busy / (device.attention_forward * shape), stream) if busy else 0.0
    backward = max(2.5 * busy / (device.attention_backward * shape), 2.5 * stream) if busy else 0.0
    return forward, backward


# ----------------------------------------------------------------------------------------------------- the rest


def _loss(work: Work, device: Device) -> tuple[float, float]:
    """Passes over the logits in fp32; casts to it and back where they are narrower."""
    if device.merged_loss:
        pass_ = math.prod(work.operands[0]) * work.reads.itemsize
        ahead, back = (_moved("loss", passes * pass_, work.reads, device) for passes in _LOSS_MERGED)
        return ahead, back
    width = max(4, work.makes.itemsize)
    pass_ = math.prod(work.operands[0]) * width
    cast = (1 + work.reads.itemsize / width) * pass_ if work.reads.itemsize < width and not device.fused else 0.0
    eager = _LOSS_SHARDED if device.sharded_loss else _LOSS_EAGER
    ahead, back = (passes * pass_ + cast for passes in (_LOSS_FUSED if device.fused else eager))
    return _moved("loss", ahead, work.reads, device), _moved("loss", back, work.reads, device)


def _traffic(operator: Operator, work: Work, device: Device, fused: Fused | None) -> tuple[float, float]:
    """Memory-bound operators: bytes over bandwidth."""
    inputs = [math.prod(shape) for shape in work.operands]
    outputs = [math.prod(shape) for shape in work.results]
    if operator.kind == "gather":  # only the rows that are picked are read
        forward, backward = 2.0 * sum(outputs), 2.0 * sum(outputs) + (inputs[0] if inputs else 0)
    elif fused is not None:
        read = sum(size for size, flag in zip(inputs, fused.reads, strict=True) if flag)
        written = sum(size for size, flag in zip(outputs, fused.writes, strict=True) if flag)
        forward, backward = read + written, 2.0 * read + written
        if not forward:
            return 0.0, 0.0
    else:
        forward = float(sum(inputs) + sum(outputs))
        saved = sum(inputs[at] for at, _ in operator.saves.operands if at < len(inputs))
        saved += sum(outputs[at] for at in operator.saves.results if at < len(outputs))
        whole = all(size == outputs[0] for size in inputs) or sum(inputs) == outputs[0]  # no broadcast to sum; or a cat
        passes = operator.kind == "factory" or (operator.kind == "linear" and whole)
        backward = 0.0 if passes else float(sum(outputs) + saved + sum(inputs))
    forward, backward = (_moved(operator.kind, size * work.makes.itemsize, work.makes, device) for size in (forward, backward))
    return forward, backward


def fusion(graph: Graph, operators: Operators) -> tuple[Fused | None, ...]:
    """For every op of the graph what its fused kernel makes it read and write; None for views and ops that do not fuse.

    The level of an op is the largest number of unfusable ops on a way to it; fusable ops of one level that feed each other
    share a kernel. Views are looked through, and what is made from literals is made again where it is used, if all that use it
    fuse; else it is written.
    """
    base, made = _bases(graph, operators)
    level: dict[str, int] = {}
    kernels = list(range(len(graph.ops)))

    def root(index: int) -> int:
        while kernels[index] != index:
            kernels[index] = index = kernels[kernels[index]]
        return index

    for index, op in enumerate(graph.ops):
        declared = operators[op.target]
        if declared.kind == "view":
            continue
        at = max((level.get(base[name], 0) for name in op.inputs), default=0)
        level.update((name, at if declared.fuses else at + 1) for name in op.outputs)
        for name in op.inputs if declared.fuses else ():
            if made.get(base[name], -1) >= 0 and level[base[name]] == at:
                kernels[root(index)] = root(made[base[name]])
    return _boundaries(graph, operators, base, made, [root(index) for index in range(len(graph.ops))])


def _bases(graph: Graph, operators: Operators) -> tuple[dict[str, str], dict[str, int]]:
    """({value: the value whose storage it shows}, {value: fusable op that makes it; -2 if made from literals})."""
    base = {name: name for name in graph.values}
    made: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        declared = operators[op.target]
        if declared.kind == "view" and op.inputs:
            base.update((name, base[op.inputs[0]]) for name in op.outputs)
        elif declared.kind == "factory":
            made.update((name, -2) for name in op.outputs)
        elif declared.fuses:
            made.update((name, index) for name in op.outputs)
    return base, made


def _boundaries(
    graph: Graph, operators: Operators, base: Mapping[str, str], made: Mapping[str, int], kernel: Sequence[int]
) -> tuple[Fused | None, ...]:
    """Which operands enter and which results leave each op's kernel."""
    leaving = {base[name] for name in graph.outputs}
    users: dict[str, set[int]] = {}
    unfused = set(leaving)
    for index, op in enumerate(graph.ops):
        if operators[op.target].kind != "view":
            for name in op.inputs:
                users.setdefault(base[name], set()).add(kernel[index])
            unfused.update(base[name] for name in op.inputs if not operators[op.target].fuses)
    seen: set[tuple[int, str]] = set()
    result: list[Fused | None] = []
    for index, op in enumerate(graph.ops):
        declared = operators[op.target]
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
            name in unfused if declared.kind == "factory" else name in leaving or bool(users.get(name, set()) - {kernel[index]})
            for name in op.outputs
        )
        result.append(Fused(tuple(reads), writes))
    return tuple(result)
