"""Pending sums that meet: operators through which they go on, so that several are made whole together.

    x + attention(norm(x)) + mlp(norm(x))          GPT-J, GPT-NeoX, Phi, Falcon: two row parallel products meet before x
    routed(x) + shared(x)                          mixtures with an expert that every token has

A product whose contracted dim is split leaves a pending sum. An operator that needs its values needs it whole, but one that is
linear in it passes it on: two such sums added are one, and one collective makes it whole where each would have had its own
(Black et al. 2022, GPT-NeoX-20B, section 2.1). On the way there are views, casts, dropouts (every rank drops the same of its
term) and products with what is whole. A sum that anything else reads too is whole there anyway, and nothing is won. What is
added and is no such sum (a stream of residuals) stays whole: a term of it on one rank would be rounded with every other rank's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from meshwright.ir.graph import Graph, Op
from meshwright.ir.rule import OpRule


def meeting(graph: Graph, rules: Mapping[str, OpRule], contracted: Callable[[Op], Collection[str]]) -> dict[str, str]:
    """{operator on the way of pending sums to where they meet, or where they do: its choice that passes them on ("+0")}.
    ``contracted``: factors of weights that an operator sums away."""
    readers = Counter(name for op in graph.ops for name in set(op.inputs)) + Counter(graph.outputs)
    pending, passing, merging = set[str](), dict[str, str](), set[str]()
    for op in graph.ops:
        rule = rules[op.name]
        if any(factor in rule.splittable and rule.dim(factor, 0, True) is None for factor in contracted(op)):
            pending.update(name for name in op.outputs if readers[name] == 1)
            continue
        for number, group in enumerate(rule.linear):
            read = {op.inputs[at] for at in group}
            if read <= pending and pending.isdisjoint(name for at, name in enumerate(op.inputs) if at not in group):
                pending.update(name for name in op.outputs if readers[name] == 1)
                passing[op.name] = f"+{number}"
                merging.update([op.name] * (len(read) > 1))
                break
    return {op.name: passing[op.name] for op in _leading(graph, passing, merging)}


def _leading(graph: Graph, passing: Collection[str], merging: Collection[str]) -> list[Op]:
    """The operators that merge, and those that pass on what reaches one of them."""
    found, wanted = list[Op](), set[str]()
    for op in reversed(graph.ops):
        if op.name in passing and (op.name in merging or not wanted.isdisjoint(op.outputs)):
            found.append(op)
            wanted.update(op.inputs)
    return found
