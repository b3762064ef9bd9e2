"""Which storages the operators of a lowered segment make and let go, forward and backward, as torch runs them eagerly.

A value lives from the operator that makes it to its last reader in the segment; longer if it leaves the segment, entered it
(the caller holds it), or is kept for the backward (``memory.saved_for_backward``, each storage once). In the backward the
operators come in reverse order. One

    reads the gradients of its results, makes those of its operands, then lets go of the former and of what it had kept;

an operand that several operators read sums theirs. Gradients of views and of plain sums are the gradient they come from.
Beside that an operator needs work space while it runs (``_FORWARD_SPACE``, ``_BACKWARD_SPACE``): copies of the logits in
cross entropy, the buffer that a gather along an inner dim is put in order from.

Recomputation: "full" keeps the segment's inputs and runs its forward again before its backward, up to the last operator that
keeps anything; torch stops before that one if it keeps operands only. "selective" also keeps the results of matrix products and
reductions between ranks, and does not run those again; what it stopped short of stays until the segment's backward is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from meshwright.cost.memory.memory import extra_saved_bytes, saved_for_backward, storages
from meshwright.cost.operators import operator, packet
from meshwright.ir.graph import Graph, Op

WORK, ACTIVATIONS, GRADIENTS = "transient", "activations", "gradients"


class Storage:
    """A piece of memory: bytes, what it is for, and how many hold it."""

    __slots__ = ("bytes", "holders", "kind")

    def __init__(self, bytes_: float, kind: str) -> None:
        self.bytes, self.kind, self.holders = bytes_, kind, 1


class Heap:
    """The storages alive: their sum by kind, and as it was when the sum was highest."""

    def __init__(self, standing: Mapping[str, float]) -> None:
        self.kinds = dict(standing)
        self.total = sum(standing.values())
        self.peak, self.at_peak = self.total, dict(standing)

    def new(self, bytes_: float, kind: str) -> Storage:
        """A storage with one holder."""
        self.kinds[kind] = self.kinds.get(kind, 0.0) + bytes_
        self.total += bytes_
        self._mark()
        return Storage(bytes_, kind)

    def drop(self, storage: Storage) -> None:
        """One holder fewer; the last one frees it."""
        storage.holders -= 1
        if not storage.holders:
            self.kinds[storage.kind] -= storage.bytes
            self.total -= storage.bytes

    def become(self, storage: Storage, kind: str) -> None:
        """The same memory, from now on for something else."""
        self.kinds[storage.kind] -= storage.bytes
        self.kinds[kind] = self.kinds.get(kind, 0.0) + storage.bytes
        storage.kind = kind

    def space(self, bytes_: float) -> None:
        """Memory taken and given back at once."""
        if bytes_:
            self.drop(self.new(bytes_, WORK))

    def _mark(self) -> None:
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.kinds)


def hold(storage: Storage) -> Storage:
    """One holder more."""
    storage.holders += 1
    return storage


@dataclass(frozen=True)
class Script:
    """A segment as the replay needs it: what each operator keeps, and after which one a value is let go."""

    graph: Graph
    base: Mapping[str, str]
    kept: tuple[tuple[tuple[str, ...], float], ...]  # per op: (values, bytes beside them)
    last: Mapping[int, tuple[str, ...]]  # op -> roots nobody in the segment reads after it
    weights: frozenset[str]  # parameters and what shows their storage
    dear: frozenset[int]  # what selective recomputation keeps
    gradients: tuple[tuple[tuple[str, float, bool], ...], ...]  # per op: (operand, bytes, whether it is the result's)
    spaces: tuple[tuple[float, float], ...]  # per op: bytes beside what it reads and makes, forward and backward


_DEAR = ("mw.all_reduce", "mw.reduce_scatter", "mw.all_to_all", "aten._grouped_mm")


def script_of(graph: Graph, held: Iterable[str]) -> Script:
    """``held``: the stored values, whose memory is accounted for elsewhere."""
    base = _bases(graph)
    held = set(held)
    weights = frozenset(name for name, root in base.items() if root in held)
    last: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        last.update((base[name], index) for name in (*op.inputs, *op.outputs))
    leaving = {base[name] for name in graph.outputs}
    going: dict[int, list[str]] = {}
    for root, index in last.items():
        if root not in leaving and root not in weights:
            going.setdefault(index, []).append(root)
    kept = tuple(_kept(op, graph, weights) for op in graph.ops)
    products = ("aten.linear", "aten.mm", "aten.addmm", "mw.linear", "mw.fused_linear", "mw.gather_linear")
    dear = frozenset(
        i for i, op in enumerate(graph.ops)
        if packet(op.target) in (*products, *_DEAR) or packet(op.target).startswith("aten.conv")
    )
    spaces = tuple((forward_space(op, graph), backward_space(op, graph)) for op in graph.ops)
    gradients = tuple(_gradients(op, graph) for op in graph.ops)
    return Script(graph, base, kept, {index: tuple(roots) for index, roots in going.items()}, weights, dear, gradients, spaces)


def _bases(graph: Graph) -> dict[str, str]:
    """``memory.storages``; a slice along an inner dim is a copy here, as ``mw.slice`` makes it."""
    base = storages(graph)
    for op in graph.ops:
        if op.target == "mw.slice" and op.args[1] != 0:
            root, out = base[op.outputs[0]], op.outputs[0]
            base.update((name, out) for name, other in base.items() if other == root and _after(name, out, graph))
            base[out] = out
    return base


def _after(name: str, source: str, graph: Graph) -> bool:
    """Whether a value is reached from another through single-operand operators."""
    while name != source:
        if name not in graph.producers or not (inputs := graph.ops[graph.producers[name]].inputs):
            return False
        name = inputs[0]
    return True


def _kept(op: Op, graph: Graph, weights: frozenset[str]) -> tuple[tuple[str, ...], float]:
    operands, results = saved_for_backward(op, graph)
    names = [op.inputs[at] for at in operands] + [op.outputs[at] for at in results]
    if not any(graph.values[name].differentiable for name in op.outputs):
        return (), 0.0
    shapes = [graph.values[name].shape for name in op.inputs], [graph.values[name].shape for name in op.outputs]
    dtype = graph.values[op.inputs[0]].dtype if op.inputs else torch.float32
    needs = [graph.values[name].differentiable for name in op.inputs]
    extra = extra_saved_bytes(op.target, *shapes, dtype, op.args, needs=needs)
    return tuple(name for name in names if name not in weights), float(extra)


@dataclass
class Tape:
    """What one run of a segment left for its backward: storages kept by each operator."""

    script: Script
    inputs: dict[str, Storage]
    recompute: str
    kept: dict[int, list[Storage]] = field(default_factory=dict)
    dear: dict[int, list[Storage]] = field(default_factory=dict)


def forward(script: Script, heap: Heap, env: Mapping[str, Storage], recompute: str = "none") -> tuple[Tape, dict[str, Storage]]:
    """Run a segment: its tape, and its outputs' storages (held once each)."""
    inputs = {name: env[name] for name in script.graph.inputs if name in env}
    tape = Tape(script, inputs, recompute)
    if recompute != "none":
        for storage in inputs.values():
            hold(storage)
    return tape, _run(tape, heap, keep=recompute == "none", stop=len(script.graph.ops))


def _run(tape: Tape, heap: Heap, keep: bool, stop: int, idle: int = -1) -> dict[str, Storage]:
    """Operators before ``stop``; of ``idle`` only what it keeps of its operands."""
    script, frame = tape.script, {name: hold(storage) for name, storage in tape.inputs.items()}
    values = script.graph.values
    for index, op in enumerate(script.graph.ops[:stop]):
        again = tape.dear.get(index)
        for name in op.outputs if index != idle else ():
            root = script.base[name]
            if root == name and name not in script.weights:
                frame[name] = again.pop(0) if again else heap.new(float(values[name].bytes_), ACTIVATIONS)
        heap.space(script.spaces[index][0] if index != idle else 0.0)
        names, extra = script.kept[index]
        if keep and (names or extra):
            roots = dict.fromkeys(script.base[name] for name in names)
            tape.kept[index] = [hold(frame[root]) for root in roots if root in frame]
            tape.kept[index] += [heap.new(extra, ACTIVATIONS)] if extra else []
        if not keep and tape.recompute == "selective" and index in script.dear:
            tape.dear[index] = [hold(frame[name]) for name in op.outputs if script.base[name] == name and name in frame]
        for root in script.last.get(index, ()):
            if root in frame and root not in tape.inputs:
                heap.drop(frame.pop(root))
    outputs = {name: hold(frame[script.base[name]]) for name in script.graph.outputs if script.base[name] in frame}
    for storage in frame.values():
        heap.drop(storage)
    return outputs


def backward(
    tape: Tape, heap: Heap, grads: dict[str, Storage], weights: dict[str, Storage], copies: frozenset[str] = frozenset()
) -> None:
    """Run a segment's backward. ``grads``: by value; those of the results are taken, those of the inputs added.
    ``weights``: gradients of parameters so far; ``copies``: parameters whose gradient is copied on its way there."""
    script = tape.script
    if tape.recompute != "none":
        end = max((i for i, (names, extra) in enumerate(script.kept) if names or extra), default=-1)
        idle = end if end >= 0 and _keeps_operands(script, end) else -1
        for storage in _run(tape, heap, keep=True, stop=end + 1, idle=idle).values():
            heap.drop(storage)
        for storage in tape.inputs.values():
            heap.drop(storage)
    for index in reversed(range(len(script.graph.ops))):
        op = script.graph.ops[index]
        made = {name: grads.pop(name) for name in op.outputs if name in grads}
        if made:
            heap.space(script.spaces[index][1])
            first = next(iter(made.values()))
            found = [(name, hold(first) if same else heap.new(bytes_, WORK)) for name, bytes_, same in script.gradients[index]]
            for name, storage in found:
                if name in script.weights and name not in script.graph.producers:
                    _add(heap, weights, name, storage, name in copies)
                    heap.become(weights[name], GRADIENTS)
                else:
                    _add(heap, grads, name, storage, False)
        for storage in made.values():
            heap.drop(storage)
        for storage in tape.kept.pop(index, ()):
            heap.drop(storage)
    for left in tape.dear.values():  # what recomputation stopped short of
        for storage in left:
            heap.drop(storage)


def _keeps_operands(script: Script, index: int) -> bool:
    """Whether an operator keeps nothing that it makes: then recomputation stops before it runs."""
    names, extra = script.kept[index]
    return not extra and not set(names).intersection(script.graph.ops[index].outputs)


def _add(heap: Heap, sums: dict[str, Storage], name: str, storage: Storage, copied: bool) -> None:
    """One more gradient of a value."""
    if copied:
        other = heap.new(storage.bytes, storage.kind)
        heap.drop(storage)
        storage = other
    if name not in sums:
        sums[name] = storage
        return
    if sums[name].holders == 1:  # added in place
        heap.drop(storage)
        return
    total = heap.new(storage.bytes, storage.kind)
    heap.drop(sums[name])
    heap.drop(storage)
    sums[name] = total


# --------------------------------------------------------------------------------------------- gradients of one operator


def _gradients(op: Op, graph: Graph) -> tuple[tuple[str, float, bool], ...]:
    """(operand, bytes of the gradient that this operator makes for it, whether it is that of the result)."""
    operands = ((at, name, graph.values[name]) for at, name in enumerate(op.inputs))
    return tuple((name, float(value.bytes_), _passes(op, at, graph)) for at, name, value in operands if value.differentiable)


_PASSING = frozenset({
    "add", "clone", "cat", "stack", "contiguous", "mw.all_reduce", "mw.identity", "mw.unvary",
})


def _passes(op: Op, at: int, graph: Graph) -> bool:
    """Whether the operand's gradient is the result's, or a view of it."""
    name = packet(op.target).removeprefix("aten.")
    operand, result = graph.values[op.inputs[at]], graph.values[op.outputs[0]]
    if operand.dtype != result.dtype:
        return False
    if operator(op.target).kind == "view" and not op.target.startswith("mw."):
        return len(op.outputs) == 1 and operand.numel == result.numel
    if name in ("sum", "mw.mean"):
        return True  # an expansion of the result's
    if name == "add":
        return operand.shape == result.shape and "alpha" not in dict(op.kwargs)
    if name == "sub":
        return at == 0 and operand.shape == result.shape
    return name in _PASSING


def _local(op: Op, graph: Graph, at: int = 0) -> float:
    return float(graph.values[op.inputs[at]].bytes_)


def _result(op: Op, graph: Graph) -> float:
    return float(sum(graph.values[name].bytes_ for name in op.outputs))


def _wide(op: Op, graph: Graph) -> float:
    """Bytes of the logits in fp32."""
    value = graph.values[op.inputs[0]]
    return float(value.numel * max(4, value.dtype.itemsize))


def forward_space(op: Op, graph: Graph) -> float:
    """Bytes that an operator needs beside its operands and results while it runs."""
    name = packet(op.target)
    if name == "mw.cross_entropy":  # the logits in fp32 where they are not, and their exponentials
        return _wide(op, graph) * (1 + (graph.values[op.inputs[0]].dtype.itemsize < 4))
    if name in ("mw.all_gather", "mw.gather_vary"):
        return _result(op, graph) if _inner(op) else 0.0
    if name == "mw.reduce_scatter":
        return _local(op, graph) if _inner(op) else 0.0
    if name == "mw.all_to_all":
        return _local(op, graph) + _result(op, graph)
    if name == "mw.gather_linear":
        return _gathered(op, graph) * 2
    if name in ("mw.embedding", "mw.dropout"):
        return _result(op, graph)
    return 0.0


def backward_space(op: Op, graph: Graph) -> float:
    """Bytes that the backward of an operator needs beside the gradients while it runs."""
    name = packet(op.target)
    if name == "mw.cross_entropy":  # the gradient in fp32 where the logits are not
        return _wide(op, graph) if graph.values[op.inputs[0]].dtype.itemsize < 4 else 0.0
    if name == "mw.gather_vary":
        return _result(op, graph) if _inner(op) else 0.0
    if name in ("mw.reduce_scatter", "mw.slice"):
        return _local(op, graph) if _inner(op) else 0.0
    if name == "mw.all_to_all":
        return _local(op, graph) + _result(op, graph)
    if name == "mw.gather_linear":
        return _gathered(op, graph) * 4
    if name in ("aten.pow", "aten.rsqrt", "mw.embedding"):
        return 2 * _result(op, graph)
    if name in ("aten.div", "aten.sub"):
        return _result(op, graph)
    return 0.0


def _inner(op: Op) -> bool:
    return len(op.args) > 1 and op.args[1] != 0


def _gathered(op: Op, graph: Graph) -> float:
    """Bytes of the whole activation that ``mw.gather_linear`` gathers."""
    shard, first = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
    return float(math.prod(first.shape[:-1]) * shard.shape[-1] * shard.dtype.itemsize)
