"""What must be known of all micro-batches before any of them can go back.

A loss that is no sum over micro-batches is L = g(S_1 .. S_k): each S_j is a sum over the micro-batches, or what they made,
joined, and g is the *epilogue*, which runs once a step. Micro-batch m goes back from <dL/dS_j, a_jm>, where a_jm is its part of
S_j. The gradient dL/dS_j is made of those values that the operators between S_j and L multiply by:

    an operator that is linear in a group of its operands    those of the other operands
    any other operator                                       those of all its operands

Of S_j on which none of these depend the value is not needed: a sum that is only added to others (a mean cross entropy). The
rest are the *grounds*; what makes them runs *ahead*, once more, over all micro-batches. If there are none, one pass is enough.
(For joined embeddings and a contrastive loss this is gradient caching: Gao et al. 2021.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshwright.ir.graph import Graph
from meshwright.ir.rule import OpRule


def collected(graph: Graph, epilogue: Collection[str], prologue: Collection[str]) -> tuple[str, ...]:
    """Values that micro-batches make and the epilogue reads, in the order of the graph."""
    once = {name for op in graph.ops if op.name in prologue for name in op.outputs} | {p.value for p in graph.params}
    made = {name for op in graph.ops if op.name in epilogue for name in op.outputs}
    read = (name for op in graph.ops if op.name in epilogue for name in op.inputs)
    return tuple(dict.fromkeys(name for name in read if name not in made | once and name not in graph.inputs))


def grounds(graph: Graph, rules: Mapping[str, OpRule], epilogue: Collection[str], prologue: Collection[str]) -> frozenset[str]:
    """The collected values on which the gradients of the loss in collected values depend."""
    depends = {name: frozenset({name}) for name in collected(graph, epilogue, prologue)}
    late = [op for op in graph.ops if op.name in epilogue]
    for op in late:
        of_all = frozenset[str]().union(*(depends.get(name, frozenset()) for name in op.inputs))
        depends.update(dict.fromkeys(op.outputs, of_all))
    found, flows = set[str](), {graph.loss}
    for op in reversed(late):
        if flows.isdisjoint(op.outputs):
            continue
        for position, name in enumerate(op.inputs):
            if not graph.values[name].differentiable:
                continue
            flows.add(name)
            together = next((group for group in rules[op.name].linear if position in group), frozenset())
            found.update(*(depends.get(other, ()) for at, other in enumerate(op.inputs) if at not in together))
    return frozenset(found)


def run_ahead(
    graph: Graph, rules: Mapping[str, OpRule], epilogue: Collection[str], prologue: Collection[str]
) -> frozenset[str]:
    """The operators of the micro-batches that make the grounds."""
    wanted, ahead = set(grounds(graph, rules, epilogue, prologue)), set[str]()
    for op in reversed(graph.ops):
        if op.name not in epilogue and op.name not in prologue and not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
            ahead.add(op.name)
    return frozenset(ahead)
