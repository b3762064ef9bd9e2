"""Which indices must lie in which range, to be checked before a step: a split look-up would make a number of a wrong one.

One process raises where an id or a label is out of range. A rank that holds other rows of a table, or other classes, would pass
over it, and the rank that does raise would leave the others waiting. So what follows from the inputs by whole-number operators
(ids; labels, shifted and padded) is made on every rank from the whole batch and compared with the tables' sizes:

    Bounds.graph      inputs -> the indices, a graph of its own
    Bounds.limits     what they must be

Indices that the model computes from floating-point values, or reads of its buffers, are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.program import Bounds, Limit

_TABLES: Mapping[str, tuple[int, int | None, int, bool]] = {
    "aten.embedding.default": (0, 0, 1, False),
    "aten.index_select.default": (0, None, 2, False),
    "aten.gather.default": (0, None, 2, False),
    "aten.scatter.src": (0, None, 2, False),
    "aten.scatter.value": (0, None, 2, False),
    "aten.scatter_add.default": (0, None, 2, False),
}
"""{operator: (position of the table, the dim that is looked up (None: the argument at position 1), position of the indices,
whether negative ones count from the end)}."""
_CLASSES: Mapping[str, tuple[int, int, int]] = {
    "mw.cross_entropy": (-1, 2, -100), "aten.nll_loss_nd.default": (1, 4, -100), "aten.nll_loss.default": (1, 4, -100),
    "aten.nll_loss2d.default": (1, 4, -100), "aten.cross_entropy_loss.default": (1, 4, -100),
}
"""{loss of (scores, labels, ...): (dim of the classes, position of the label that is ignored, its default)}."""


def find_bounds(graph: Graph) -> Bounds | None:
    """What to check before a step; None if there is nothing."""
    limits = [limit for op in graph.ops for limit in _limits(op, graph) if _from_inputs(limit.value, graph)]
    limits = list(dict.fromkeys(limits))
    if not limits:
        return None
    needed, ops = {limit.value for limit in limits}, []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            ops.append(op)
    tree = tuple(Ref(name) for name in dict.fromkeys(limit.value for limit in limits))
    values = {name: value for name, value in graph.values.items() if name in needed or any(name in op.outputs for op in ops)}
    cut = Graph(values, tuple(name for name in graph.inputs if name in needed), (), tuple(ops[::-1]), tree)
    return Bounds(cut, tuple(replace(limit, source=_source(limit.value, cut)) for limit in limits))


def _limits(op: Op, graph: Graph) -> list[Limit]:
    what = f"{op.target.split('.')[1]} of {op.module or 'the model'}" + (f" ({op.source})" if op.source else "")
    if op.target in _TABLES:
        table, dim, indices, wraps = _TABLES[op.target]
        at = op.args[1] if dim is None else dim
        shape = graph.values[op.args[table].name].shape
        size = shape[at] if shape else 1
        return [Limit(op.args[indices].name, -size if wraps else 0, size, None, what, "")]
    if op.target in _CLASSES:
        dim, position, default = _CLASSES[op.target]
        scores, labels = (graph.values[ref.name] for ref in op.args[:2])
        if labels.dtype.is_floating_point:
            return []
        given: Any = op.args[position] if len(op.args) > position else dict(op.kwargs).get("ignore_index", default)
        size = scores.shape[dim if len(scores.shape) > 1 else 0]
        return [Limit(labels.name, 0, size, int(given), what, "")]
    if op.target == "aten.index.Tensor":
        shape = graph.values[op.args[0].name].shape
        whole = [(dim, ref.name) for dim, ref in enumerate(op.args[1]) if isinstance(ref, Ref)]
        return [
            Limit(name, -shape[dim], shape[dim], None, what, "") for dim, name in whole
            if graph.values[name].dtype.itemsize > 1  # a mask is no index
        ]
    return []


def _from_inputs(name: str, graph: Graph) -> bool:
    """Whether whole-number operators on inputs alone make it, of one input at least."""
    wanted, seen, any_input = [name], set[str](), False
    while wanted:
        current = wanted.pop()
        if current in seen:
            continue
        seen.add(current)
        if graph.values[current].dtype.is_floating_point or graph.values[current].dtype.is_complex:
            return False
        if current in graph.inputs:
            any_input = True
        elif current in graph.producers:
            op = graph.ops[graph.producers[current]]
            if not op.target.startswith("aten."):
                return False
            wanted += op.inputs
        else:
            return False  # a buffer
    return any_input


def _source(name: str, graph: Graph) -> str:
    """The input that an index comes from, for the message."""
    while name in graph.producers:
        inputs = graph.ops[graph.producers[name]].inputs
        name = next((n for n in inputs if n in graph.inputs or n in graph.producers), "")
    return name
