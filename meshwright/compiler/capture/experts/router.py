"""Whether a router limits itself to some groups of experts before it chooses (node-limited routing, DeepSeek-V2 and V3).

    best groups = topk(score of every group, g)        [t, G] -> [t, g]
    mask        = scatter of ones at these -> expanded to the experts of every group          [t, G] -> [t, E]
    ids         = topk(scores, with those outside of the mask filled, k)                      [t, E] -> [t, k]

It is found by its data flow, from the ids backwards. Only prices depend on it: to how many devices a token goes
(``ir.declared.routing``).
"""

from __future__ import annotations

from meshwright.ir.graph import Graph, Op

TOPK, RESHAPE = "aten.topk.default", "aten.reshape.default"
SCATTERS = ("aten.scatter.value", "aten.scatter.src")
NO_LIMIT = (1, 1)


def limited(graph: Graph, ids: str, count: int, chosen: int) -> tuple[int, int]:
    """(groups of the ``count`` experts, how many of them the ``chosen`` ones of a token are in); (1, 1) for no limit."""
    best = _behind(graph, ids, RESHAPE)
    if best is None or best.target != TOPK or graph.values[best.inputs[0]].shape[-1] != count:
        return NO_LIMIT
    masked = _maker(graph, best.inputs[0])
    for name in masked.inputs if masked is not None else ():
        scatter = _scattered(graph, name) if graph.values[name].shape[-1:] == (count,) else None
        index = _maker(graph, scatter.inputs[1]) if scatter is not None and len(scatter.inputs) > 1 else None
        if scatter is None or index is None or index.target != TOPK:
            continue
        groups, kept = graph.values[scatter.outputs[0]].shape[-1], graph.values[index.outputs[1]].shape[-1]
        if 1 < groups < count and count % groups == 0 and kept < groups and chosen <= kept * (count // groups):
            return groups, kept
    return NO_LIMIT


def _maker(graph: Graph, name: str) -> Op | None:
    return graph.ops[graph.producers[name]] if name in graph.producers else None


def _behind(graph: Graph, name: str, target: str) -> Op | None:
    """What makes a value, or what it is a reshape of."""
    op = _maker(graph, name)
    while op is not None and op.target == target:
        op = _maker(graph, op.inputs[0])
    return op


def _scattered(graph: Graph, name: str) -> Op | None:
    """The scatter of which a value is made by operators with one operand."""
    op = _maker(graph, name)
    while op is not None and op.target not in SCATTERS:
        op = _maker(graph, op.inputs[0]) if len(op.inputs) == 1 else None
    return op
