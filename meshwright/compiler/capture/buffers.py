"""Buffers that the model updates: what reads one reads what it held before the call.

After the forward the new value is written over the old one, in place. Autograd may have kept the old one for the backward by
then, itself or a view of it, and a recomputed block computes once more what it makes of it (a power iteration); and another
buffer's new value may be a view of it. So ``keep_old_values`` has such readers read a copy, made where the forward begins and
outside of every block.

A parameter or buffer that the forward gives out is given as a copy (``copy_held_outputs``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshwright.compiler.rules import default_rules
from meshwright.ir.declared.operator import Operators
from meshwright.ir.graph import Graph, Op, Ref, map_refs, refs


def keep_old_values(graph: Graph) -> Graph:
    """The graph with a copy of every updated buffer that something with a gradient is computed from."""
    updated, operators = _updated(graph), default_rules().operators
    roots = {name: name for name in updated}  # value -> the buffer that it is, or is a view of
    made_of = {name: frozenset({name}) for name in updated}  # value -> the buffers that it is computed from
    kept: set[str] = set()
    for op in graph.ops:
        read = [name for name in op.inputs if name in made_of]
        if not read or operators[op.target].updates:
            continue
        sources = frozenset().union(*(made_of[name] for name in read))
        if any(graph.values[name].differentiable for name in op.outputs):
            kept.update(sources)
            continue
        made_of.update(dict.fromkeys(op.outputs, sources))
        if operators[op.target].kind == "view" and (viewed := [name for name in read if name in roots]):
            roots.update(dict.fromkeys(op.outputs, roots[viewed[0]]))
    kept.update(roots[new] for old, new in graph.mutations if new in roots and new != old)
    return _copied(graph, [name for name in updated if name in kept], operators) if kept else graph


def copy_held_outputs(graph: Graph) -> Graph:
    """The graph with a copy of every parameter and buffer, and view of one, that is itself an output: what runs may hold only a
    piece of it, or gather it for the operators that read it, of which there may be none, and free that memory after them."""
    held, operators = {param.value for param in graph.params}, default_rules().operators
    for op in graph.ops:
        if operators[op.target].kind == "view" and held.intersection(op.inputs):
            held.update(op.outputs)
    names = [name for name in dict.fromkeys(ref.name for ref in refs(graph.output_tree)) if name in held]
    copies = {name: f"{name}_given" for name in names}
    values = {**graph.values, **{copy: replace(graph.values[name], name=copy) for name, copy in copies.items()}}
    ops = tuple(Op(copy, "aten.clone.default", (Ref(name),), (), (copy,), "", "") for name, copy in copies.items())
    tree = map_refs(graph.output_tree, lambda ref: Ref(copies.get(ref.name, ref.name)))
    return replace(graph, ops=(*graph.ops, *ops), values=values, output_tree=tree) if copies else graph


def _updated(graph: Graph) -> list[str]:
    return list(dict.fromkeys(old for old, _ in graph.mutations))


def _copied(graph: Graph, buffers: Iterable[str], operators: Operators) -> Graph:
    copies = {name: f"{name}_before" for name in buffers}
    values = {**graph.values, **{copy: replace(graph.values[name], name=copy) for name, copy in copies.items()}}

    def renamed(ref: Ref) -> Ref:
        return Ref(copies.get(ref.name, ref.name))

    ops = [Op(copy, "aten.clone.default", (Ref(name),), (), (copy,), "", "") for name, copy in copies.items()]
    for op in graph.ops:
        if not operators[op.target].updates:
            op = replace(op, args=map_refs(op.args, renamed), kwargs=map_refs(op.kwargs, renamed))
        ops.append(op)
    mutations = tuple((old, copies.get(new, new)) for old, new in graph.mutations)
    tree = map_refs(graph.output_tree, renamed)
    return replace(graph, ops=tuple(ops), values=values, output_tree=tree, mutations=mutations)
