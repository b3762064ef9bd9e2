"""Rewriting a graph op by op.

``rewrite(graph, step)`` walks the ops in order and hands each, its operands already replaced, to ``step(op, edit)``, which
returns None to keep it, or the ops to put in its place (perhaps none). ``edit.replace(old, new)`` makes every later reader
of one value (outputs and mutations too) read another. One pass is linear in the number of ops; the order of the ops, and so
the runs that modules make, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace as replace_fields
from typing import Any

import torch

from meshwright.compiler.rules import default_rules
from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import Graph, Op, Ref, Value, map_refs

Step = Callable[[Op, "Edit"], "Iterable[Op] | None"]


class Edit:
    """What a step sees of the graph in the making: its ``values``, and the ops already rewritten through ``producer``."""

    def __init__(self, graph: Graph) -> None:
        self.values: dict[str, Value] = dict(graph.values)
        self._ops = {op.name for op in graph.ops}
        self._renamed: dict[str, str] = {}
        self._producers: dict[str, Op] = {}

    def replace(self, old: str, new: str) -> None:
        """Later readers of ``old`` read ``new``."""
        self._renamed[old] = self._renamed.get(new, new)

    def producer(self, value: Any) -> Op | None:
        """The op that makes a value (given by Ref or name); None for inputs and parameters."""
        return self._producers.get(value.name if isinstance(value, Ref) else value)

    def made_by(self, value: Any, *targets: str) -> Op | None:
        """The op that makes the value, if it is one of ``targets``."""
        op = self.producer(value) if isinstance(value, Ref | str) else None
        return op if op is not None and op.target in targets else None

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Shape of a value."""
        return self.values[ref.name].shape

    def dtype(self, ref: Ref) -> torch.dtype:
        """Dtype of a value."""
        return self.values[ref.name].dtype

    def new(self, base: str, shape: Iterable[int], dtype: torch.dtype) -> str:
        """Declare a value under a fresh name, which is no operator's either: one that makes several has a name of its own."""
        name, count = base, 0
        while name in self.values or name in self._ops:
            count += 1
            name = f"{base}_{count}"
        self.values[name] = Value(name, tuple(shape), dtype)
        return name

    def op(
        self, like: Op, target: str, args: tuple[Any, ...], shape: Iterable[int], dtype: torch.dtype,
        kwargs: tuple[tuple[str, Any], ...] = (),
    ) -> Op:
        """An op with one new output, of the same module and source line as ``like``."""
        name = self.new(target.split(".")[1], shape, dtype)
        return Op(name, target, args, kwargs, (name,), like.module, like.source)

    def rename(self, tree: Any) -> Any:
        """The tree with replaced values put in."""
        return map_refs(tree, lambda ref: Ref(self._renamed.get(ref.name, ref.name))) if self._renamed else tree

    def renamed(self, name: str) -> str:
        """What readers of ``name`` read now."""
        return self._renamed.get(name, name)

    def record(self, op: Op) -> None:
        """Note an op as placed."""
        for name in op.outputs:
            self._producers[name] = op


def rewrite(graph: Graph, step: Step) -> Graph:
    """The graph after one pass of ``step`` over its ops."""
    edit = Edit(graph)
    ops: list[Op] = []
    changed = False
    for op in graph.ops:
        if edit._renamed and any(name in edit._renamed for name in op.inputs):
            op = replace_fields(op, args=edit.rename(op.args), kwargs=edit.rename(op.kwargs))
        result = step(op, edit)
        changed = changed or result is not None
        for placed in (op,) if result is None else result:
            edit.record(placed)
            ops.append(placed)
    if not changed:
        return graph
    mutations = tuple((buffer, edit.renamed(new)) for buffer, new in graph.mutations)
    loss = edit.renamed(graph.loss) if graph.loss else graph.loss
    return replace_fields(graph, values=edit.values, ops=tuple(ops), output_tree=edit.rename(graph.output_tree), loss=loss,
                          mutations=mutations)


def eliminate_dead_code(graph: Graph) -> Graph:
    """Without the ops that no output or mutation needs, and without the values that nothing names."""
    needed = set(graph.outputs) | ({graph.loss} if graph.loss else set())
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if any(name in needed for name in op.outputs):
            needed.update(op.inputs)
            ops.append(op)
    ops.reverse()
    named = {name for op in ops for name in op.outputs} | set(graph.inputs) | {param.value for param in graph.params}
    values = {name: value for name, value in graph.values.items() if name in named}
    return replace_fields(graph, ops=tuple(ops), values=values)


def mark_differentiable(graph: Graph) -> Graph:
    """Set ``Value.differentiable``: floating, and a function of a trainable parameter."""
    through, operators = {param.value for param in graph.params if param.trainable}, default_rules().operators
    for op in graph.ops:
        if operators[op.target].gradient and any(name in through for name in op.inputs):
            cut = op.target == CUSTOM and [not flag for flag in op.args[0].differentiable]
            through.update(name for i, name in enumerate(op.outputs)
                           if _continuous(graph.values[name].dtype) and not (cut and cut[i]))
    values = dict(graph.values)
    for name, value in graph.values.items():
        if value.differentiable != (name in through):
            values[name] = replace_fields(value, differentiable=name in through)
    return replace_fields(graph, values=values)


def _continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
