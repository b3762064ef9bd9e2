"""What autograd keeps of a graph's operators, and which values lie in the same memory.

What is kept is declared with every operator (``Saves``): operands and results by position (``saved_for_backward``),
bytes beside them such as masks and statistics (``saved_beside``). A tensor that several operators keep counts once, and so do
its views: ``storages`` says in whose memory every value lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.ir.declared.operator import Operator, Operators, Work
from meshwright.ir.graph import Graph, Op


def saved_for_backward(op: Op, graph: Graph, operators: Operators) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(positions in ``op.inputs``, positions in ``op.outputs``) of the tensors that autograd keeps for this call.

    Empty where no gradient flows through the results. A parameter or a view that is kept holds no memory of its own: see
    ``storages``.
    """
    if not any(graph.values[name].differentiable for name in op.outputs):
        return (), ()
    needs = tuple(graph.values[name].differentiable for name in op.inputs)
    return operators[op.target].saved(op.args).kept(needs, len(op.outputs))


def saved_beside(operator: Operator, work: Work) -> float:
    """Bytes that autograd keeps beside operands and results of a call through which a gradient flows."""
    extra = operator.saved(work.args).extra
    return extra(work) if extra is not None else 0.0


@dataclass(frozen=True, slots=True)
class _Layout:
    """Dims in the order they lie in memory, major first; ``dense``: without gaps (a slice of a dim has them)."""

    order: tuple[int, ...]
    dense: bool = True

    @property
    def contiguous(self) -> bool:
        return self.dense and self.order == tuple(range(len(self.order)))


def storages(graph: Graph, operators: Operators) -> dict[str, str]:
    """{value: the value whose memory it shows}.

    A reshape of what a transposition or an expansion left scattered is a copy and has its own; pointwise operators and
    attention lay their result out as their first operand, so that heads transposed before attention are usually joined after it
    without a copy.
    """
    base = {name: name for name in graph.values}
    layouts = {name: _Layout(tuple(range(len(value.shape)))) for name, value in graph.values.items()}
    for op in graph.ops:
        operator = operators[op.target]
        if operator.kind == "view" and op.inputs:
            source, work = op.inputs[0], Work.of(op, graph)
            for out in op.outputs:
                layout = _view(operator, work, graph.values[out].shape, layouts[source])
                if layout is not None:
                    layouts[out] = layout
                    base[out] = out if operator.cost.copies is not None and operator.cost.copies(work) else base[source]
        elif op.inputs and (operator.kind in ("pointwise", "linear", "attention") or operator.cost.layout == "first"):
            first = layouts[op.inputs[0]]
            for out in op.outputs:
                if len(graph.values[out].shape) == len(first.order):
                    layouts[out] = _Layout(first.order)
    return base


def _view(operator: Operator, work: Work, result: tuple[int, ...], before: _Layout) -> _Layout | None:
    """Layout of a view's result; None where torch must move the data."""
    source, cost = work.operands[0], operator.cost
    plain = tuple(range(len(result)))
    if cost.layout in ("reshape", "contiguous"):
        if before.contiguous:
            return _Layout(plain)
        if cost.layout == "contiguous":
            return None
        if source == result:
            return before
        # a slice whose last dim is cut further stays a view of the same memory
        in_order = before.order == tuple(range(len(source)))
        return _Layout(plain, False) if in_order and len(result) > len(source) else None
    if cost.order is not None:
        order = list(cost.order(work))
        return _Layout(tuple(order.index(dim) for dim in before.order), before.dense)
    if len(source) == len(result):  # slices and expansions: gaps, the order kept
        return _Layout(before.order, before.dense and source == result)
    return _Layout(plain, before.contiguous and math.prod(source) == math.prod(result))


def not_repeated(saved: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, frozenset[int]]:
    """Of a block's operators, by what each keeps (``saved_for_backward``), the last one that keeps anything, and those that
    recomputation does not come to: what follows it, and itself where it keeps operands only (they are there before it runs)."""
    keeping = [(i, results) for i, (operands, results) in enumerate(saved) if operands or results]
    if not keeping:
        return -1, frozenset()
    last, results = keeping[-1]
    return last, frozenset(range(last + bool(results), len(saved)))
