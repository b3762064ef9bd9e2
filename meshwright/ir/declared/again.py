"""What each stage of a pipeline makes for itself instead of being sent it, micro-batch after micro-batch.

T5's and Swin's position biases are looked up in small tables and added to the scores of every layer: [heads, S, S] made of
[buckets, heads]. Sent, they would weigh more than the hidden states. A stage that reads such a value makes it again from the
table, which it then stores too; its gradient is summed over these stages once a step, as that of any weight of several stages.
"""

from __future__ import annotations

from meshwright.ir.declared.draws import draws
from meshwright.ir.declared.operator import Operators
from meshwright.ir.graph import Graph

LIGHT = frozenset({"view", "pointwise", "linear", "gather"})
"""Kinds of operators that take no longer than writing their results does."""


def made_again(graph: Graph, operators: Operators) -> frozenset[str]:
    """Values made of parameters by light operators alone, maybe with what is made of inputs alone (a mask), that have more
    elements in a sample than the parameters they are made of."""
    weights = {param.value for param in graph.params if not param.buffer}
    sampled = set(graph.inputs)
    for op in graph.ops:
        if not sampled.isdisjoint(op.inputs):
            sampled.update(op.outputs)
    made: dict[str, frozenset[str]] = {}
    heavy: set[str] = set()
    for op in graph.ops:
        if op.name in graph.parameter_free:
            continue
        operator = operators[op.target]
        light = operator.kind in LIGHT and operator.recompute == "allowed" and not draws(op)
        if not light or not heavy.isdisjoint(op.inputs):
            heavy.update(op.outputs)
            continue
        whole = frozenset().union(*(made.get(name, frozenset({name} & weights)) for name in op.inputs))
        made.update(dict.fromkeys(op.outputs, whole))
    batch = next((graph.values[name].shape[0] for name in graph.inputs if graph.values[name].shape), 1)

    def pays(name: str, whole: frozenset[str]) -> bool:
        size = graph.values[name].numel / (batch if name in sampled else 1)
        return bool(whole) and sum(graph.values[one].numel for one in whole) < size

    return frozenset(name for name, whole in made.items() if pays(name, whole))
