"""Projections fused in one weight, taken apart again.

A linear whose weight holds several projections one after the other, and whose result is only ever read part by part,

    linear(x, w)  ->  split, chunk, glu or slices of the last dim in equal parts               q, k, v of GPT-2; gate and up
    linear(x, w)  ->  reshape [*b, parts, *rest], permuted; select or unbind of the parts      nn.MultiheadAttention

becomes ``p0, p1, .. = mw.fused_linear(x, w, bias, parts, transposed)``, each part [*b, n]. Splitting w's dim in one run would
cut across the parts: each rank would hold some heads' queries and others' keys. The operator's rule splits n within every part
instead, so heads go to ranks as they do with a weight for each. What else is needed for that: the weight is a parameter that
nothing else reads, for it lies differently in a program than at rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.compiler.capture.movement import PERMUTE, RESHAPE, TRANSPOSE, TURN
from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, rewrite
from meshwright.ir.graph import Graph, Op, Ref

LINEAR, FUSED = "aten.linear.default", "mw.fused_linear"
SPLIT = "aten.split.Tensor"
SPLITS = frozenset({SPLIT, "aten.split_with_sizes.default", "aten.chunk.default"})


@dataclass(frozen=True)
class _Taken:
    """One value read from a fused projection: a part as [*b, *rest], its dims permuted."""

    value: str
    part: int
    shape: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Fusion:
    """A linear that is ``parts`` projections: how its weight lies, and the ops between it and what is read of it."""

    weight: Ref
    transposed: bool
    parts: int
    between: tuple[int, ...]
    readers: tuple[int, ...]
    taken: tuple[_Taken, ...]


def fuse_projections(graph: Graph) -> Graph:
    """Linears that are split into equal parts as ``mw.fused_linear``."""
    graph = rewrite(graph, _gate)
    search = _FusedProjections(graph)
    found = {op.name: fusion for op in graph.ops if op.target == LINEAR and (fusion := search.fusion(op)) is not None}
    dropped = {graph.ops[at].name for fusion in found.values() for at in (*fusion.between, *fusion.readers)}

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        if op.name in found:
            return _fused(op, found[op.name], edit)
        return () if op.name in dropped else None

    return eliminate_dead_code(rewrite(graph, step))


def _gate(op: Op, edit: Edit) -> Iterable[Op] | None:
    """The gated unit of a linear's result as its two halves: a * sigmoid(b)."""
    if op.target != "aten.glu.default" or edit.made_by(op.args[0], LINEAR) is None:
        return None
    x, out = op.args[0], edit.values[op.outputs[0]]
    dim = (*op.args, -1)[1] % len(out.shape)
    halves = tuple(edit.new(f"{op.name}_{half}", out.shape, out.dtype) for half in range(2))
    cut = Op(halves[0], SPLIT, (x, out.shape[dim], dim), (), halves, op.module, op.source)
    gate = edit.op(op, "aten.sigmoid.default", (Ref(halves[1]),), out.shape, out.dtype)
    return cut, gate, replace(op, target="aten.mul.Tensor", args=(Ref(halves[0]), Ref(gate.outputs[0])), kwargs=())


def _fused(op: Op, fusion: _Fusion, edit: Edit) -> Iterable[Op]:
    """The operator, and the views that make of a part what was read."""
    whole = edit.values[op.outputs[0]]
    shape = (*whole.shape[:-1], whole.shape[-1] // fusion.parts)
    outputs = tuple(edit.new(f"{op.name}_{part}", shape, whole.dtype) for part in range(fusion.parts))
    bias = op.args[2] if len(op.args) > 2 else None
    args = (op.args[0], fusion.weight, bias, fusion.parts, fusion.transposed)
    ops = [replace(op, target=FUSED, args=args, kwargs=(), outputs=outputs)]
    for taken in fusion.taken:
        name = outputs[taken.part]
        if taken.shape not in ((), shape):
            ops.append(edit.op(op, RESHAPE, (Ref(name), taken.shape), taken.shape, whole.dtype))
            name = ops[-1].outputs[0]
        if taken.order != tuple(range(len(taken.order))):
            moved = tuple(taken.shape[dim] for dim in taken.order)
            ops.append(edit.op(op, PERMUTE, (Ref(name), taken.order), moved, whole.dtype))
            name = ops[-1].outputs[0]
        wanted = edit.values[taken.value].shape
        if wanted != edit.values[name].shape:
            ops.append(edit.op(op, RESHAPE, (Ref(name), wanted), wanted, whole.dtype))
            name = ops[-1].outputs[0]
        edit.replace(taken.value, name)
    return ops


class _FusedProjections:
    """Finds fusions by following what reads a linear."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.readers = graph, graph.consumers()
        self.params = {param.value for param in graph.params} - {old for old, _ in graph.mutations}
        self.leaving = set(graph.outputs)

    def fusion(self, op: Op) -> _Fusion | None:
        """What the linear is, if it is several projections."""
        held = self._weight(op.args[1])
        bias = op.args[2] if len(op.args) > 2 else None
        if held is None or (bias is not None and not self._read_once(bias)) or op.outputs[0] in self.leaving:
            return None
        weight, transposed = held
        found = self._direct(op) or self._viewed(op)
        if found is None:
            return None
        parts, between, taken = found
        readers = tuple(dict.fromkeys(self.graph.producers[item.value] for item in taken))
        return _Fusion(weight, transposed, parts, between, readers, taken)

    def _weight(self, ref: Ref) -> tuple[Ref, bool] | None:
        """(parameter, whether it is turned), if the linear alone reads it."""
        at = self.graph.producers.get(ref.name)
        if at is None:
            return (ref, False) if self._read_once(ref) else None
        turn = self.graph.ops[at]
        turned = turn.target == TURN
        alone = len(self.readers[ref.name]) == 1 and ref.name not in self.leaving
        return (turn.args[0], True) if turned and alone and self._read_once(turn.args[0]) else None

    def _read_once(self, ref: Ref) -> bool:
        return ref.name in self.params and len(self.readers[ref.name]) == 1 and ref.name not in self.leaving

    def _direct(self, op: Op) -> tuple[int, tuple[int, ...], tuple[_Taken, ...]] | None:
        """Parts cut from the result's last dim."""
        name = op.outputs[0]
        shape = self.graph.values[name].shape
        cuts = [cut for reader in self._ops(name) for cut in self._cuts(reader, len(shape) - 1)]
        lengths = {length for _, _, length in cuts}
        if None in lengths or len(lengths) != 1:
            return None
        length = lengths.pop() or 1
        parts, rest = divmod(shape[-1], length)
        if rest or parts < 2 or any(start % length for _, start, _ in cuts):
            return None
        return parts, (), tuple(_Taken(value, start // length) for value, start, _ in cuts)

    def _cuts(self, reader: Op, dim: int) -> list[tuple[str, int, int | None]]:
        """(value, start, length) of what a reader cuts out of a dim; length None if it does something else."""
        if reader.target == "aten.slice.Tensor" and reader.args[1] == dim and reader.args[4] == 1:
            return [(reader.outputs[0], reader.args[2], reader.args[3] - reader.args[2])]
        if reader.target in SPLITS and (reader.args[2] if len(reader.args) > 2 else 0) == dim:
            lengths = [self.graph.values[name].shape[dim] for name in reader.outputs]
            return [(name, sum(lengths[:i]), lengths[i]) for i, name in enumerate(reader.outputs)]
        return [(reader.outputs[0], 0, None)]

    def _viewed(self, op: Op) -> tuple[int, tuple[int, ...], tuple[_Taken, ...]] | None:
        """Parts that became a dim of their own, taken one by one after some permutations."""
        name, batch = op.outputs[0], len(self.graph.values[op.outputs[0]].shape) - 1
        between: list[int] = []
        dims: list[int] = []  # of the value followed: dims of [*b, parts, *rest]; a new one of size 1 is -1
        while len(self.readers[name]) == 1 and name not in self.leaving:
            at = self.readers[name][0]
            reader = self.graph.ops[at]
            after = self._start(op, reader, batch) if not dims else _moved(reader, dims)
            if after is None:
                break
            dims, name = after, reader.outputs[0]
            between.append(at)
        if not dims or name in self.leaving:
            return None
        shape = self.graph.values[self.graph.ops[between[0]].outputs[0]].shape
        taken = []
        for reader in self._ops(name):
            single = reader.target == "aten.select.int"
            if not (single or reader.target == "aten.unbind.int") or dims[(*reader.args, 0)[1]] != batch:
                return None
            first = reader.args[2] % shape[batch] if single else 0
            order = tuple(dim - (dim > batch) for dim in dims if dim not in (-1, batch))
            rest = shape[:batch] + shape[batch + 1 :]
            order = (*order, *(dim for dim in range(len(rest)) if dim not in order))  # squeezed dims have size 1
            taken += [_Taken(value, first + i, rest, order) for i, value in enumerate(reader.outputs)]
        return (shape[batch], tuple(between), tuple(taken)) if taken else None

    def _start(self, op: Op, reader: Op, batch: int) -> list[int] | None:
        """The dims after the reshape that gives the parts a dim of their own."""
        before, after = self.graph.values[op.outputs[0]].shape, self.graph.values[reader.outputs[0]].shape
        apart = reader.target == RESHAPE and len(after) > batch + 1 and after[:batch] == before[:-1] and after[batch] > 1
        return list(range(len(after))) if apart and math.prod(after[batch:]) == before[-1] else None

    def _ops(self, name: str) -> list[Op]:
        return [self.graph.ops[at] for at in self.readers[name]]


def _moved(op: Op, dims: Sequence[int]) -> list[int] | None:
    """The dims after a view that only orders them, or adds or drops one of size 1."""
    views: dict[str, Callable[[], list[int]]] = {
        PERMUTE: lambda: [dims[dim] for dim in op.args[1]],
        TRANSPOSE: lambda: _swapped(dims, op.args[1], op.args[2]),
        "aten.unsqueeze.default": lambda: [*dims[: op.args[1]], -1, *dims[op.args[1] :]],
        "aten.squeeze.dim": lambda: [*dims[: op.args[1]], *dims[op.args[1] + 1 :]],
    }
    return views[op.target]() if op.target in views else None


def _swapped(dims: Sequence[int], one: int, other: int) -> list[int]:
    swapped = list(dims)
    swapped[one], swapped[other] = dims[other], dims[one]
    return swapped
