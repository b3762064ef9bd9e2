"""Which indices must lie in which range, to be checked before a step: a split look-up would make a number of a wrong one.

One process raises where an id or a label is out of range. A rank that holds other rows of a table, or other classes, would pass
over it, and the rank that does raise would leave the others waiting. So what follows from the inputs by whole-number operators
(ids; labels, shifted and padded) is made on every rank from the whole batch and compared with the tables' sizes:

    Bounds.graph      inputs -> the indices, a graph of its own
    Bounds.limits     what they must be

Indices that the model draws, computes from floating-point values, or reads of its buffers, are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from meshwright.ir.declared.operator import PIECES
from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.operators import find
from meshwright.ir.program import InputRanges, Limit

_FROM_THE_END = frozenset({"index", "index_put", "index_fill", "take", "put"})
"""Operators whose negative indices count from the end."""
_FLAT = frozenset({"take", "put"})
"""Operators that look up in all elements of a tensor."""
_ROUND = frozenset({"take_along_dim"})
"""Operators that take indices modulo the size: none is out of range."""
_ROWS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})
"""Operators that look up along the first dim of a weight."""
_CLASSES: Mapping[str, tuple[int, int]] = {
    "cross_entropy": (-1, 0), "cross_entropy_loss": (1, 0), "nll_loss": (1, 0), "nll_loss_nd": (1, 0), "nll_loss2d": (1, 0),
    "multi_margin_loss": (1, 0), "multilabel_margin_loss": (1, -1), "multilabel_margin_loss_forward": (1, -1),
}
"""{loss of (scores, labels, ...): (dim of the classes, the least label)}; scores of one sample have one dim."""


def find_bounds(graph: Graph) -> InputRanges | None:
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
    constants = {name: tensor for name, tensor in graph.constants.items() if name in needed}
    params = tuple(param for param in graph.params if param.value in constants)
    inputs = tuple(name for name in graph.inputs if name in needed)
    cut = Graph(values, inputs, params, tuple(ops[::-1]), tree, constants=constants)
    return InputRanges(cut, tuple(replace(limit, source=_source(limit.value, cut)) for limit in limits))


def _limits(op: Op, graph: Graph) -> list[Limit]:
    """By the names of the operator's arguments: ``dim`` with ``index`` or ``indices`` is a look-up whoever does it."""
    library, _, name = op.target.partition(".")
    name = name.partition(".")[0]
    what = f"{name} of {op.module or 'the model'}" + (f" ({op.source})" if op.source else "")
    given = _arguments(op)

    def shape_of(ref: Ref) -> tuple[int, ...]:
        return graph.values[ref.name].shape

    def limit(index: Any, size: int, least: int = 0, ignored: int | None = None) -> list[Limit]:
        integer = isinstance(index, Ref) and not graph.values[index.name].dtype.is_floating_point
        least = -size if name in _FROM_THE_END else least
        return [Limit(index.name, least, size, ignored, what, "")] if integer else []

    if op.target == PIECES:
        return limit(given["labels"], shape_of(given["weight"])[0], 0, int(given["ignore_index"]))
    if name in _CLASSES and library in ("aten", "mw"):
        (dim, least), (scores, labels) = _CLASSES[name], op.args[:2]
        shape = shape_of(scores)
        ignored = None if "margin" in name else int(given.get("ignore_index", -100))
        return limit(labels, shape[dim if len(shape) > 1 else 0], least, ignored)
    if library != "aten":
        return []
    if name == "one_hot":
        return limit(given["self"], given.get("num_classes", -1)) if given.get("num_classes", -1) > 0 else []
    table = given.get("weight" if name in _ROWS else "self")
    index = given.get("index", given.get("indices"))
    if not isinstance(table, Ref) or index is None:
        return []
    shape = shape_of(table)
    if name in _ROWS:
        offsets = given.get("offsets")
        bags = [] if offsets is None else limit(offsets, shape_of(index)[0] + 1)
        return [*limit(index, shape[0]), *(replace(one, what=f"offsets of {what}") for one in bags)]
    if isinstance(index, tuple):
        whole = [(dim, ref) for dim, ref in enumerate(index) if isinstance(ref, Ref)]
        return [found for dim, ref in whole if graph.values[ref.name].dtype.itemsize > 1  # a mask is no index
                for found in limit(ref, shape[dim])]
    if name in _FLAT:
        return limit(index, math.prod(shape))
    if isinstance(given.get("dim"), int) and name not in _ROUND:
        return limit(index, shape[given["dim"]] if shape else 1)
    return []


def _arguments(op: Op) -> dict[str, Any]:
    """{name in the schema: what is given}; of meshwright's own operators by position; none of what torch does not know here."""
    if op.target == PIECES:
        return dict(zip(("x", "weight", "bias", "labels", "ignore_index"), op.args, strict=False))
    if op.target.startswith("mw."):
        return dict(zip(("scores", "labels", "ignore_index"), op.args, strict=False)) | dict(op.kwargs)
    found = find(op.target)
    formal = found._schema.arguments if found is not None else ()
    return {argument.name: value for argument, value in zip(formal, op.args, strict=False)} | dict(op.kwargs)


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
            found = find(op.target) if op.target.startswith("aten.") else None
            if found is None or torch.Tag.nondeterministic_seeded in found.tags:
                return False
            wanted += op.inputs
        elif current not in graph.constants:
            return False  # a buffer
    return any_input


def _source(name: str, graph: Graph) -> str:
    """The input that an index comes from, for the message: of several the first on the way back."""
    wanted, seen = [name], set[str]()
    while wanted:
        current = wanted.pop()
        if current in graph.inputs:
            return current
        if current in graph.producers and current not in seen:
            seen.add(current)
            wanted += graph.ops[graph.producers[current]].inputs[::-1]
    return ""
