"""A gather that feeds linears keeps only its shard for the backward.

Autograd would save the gathered activation and give back what the split of the sequence saved (Korthikanti et al. 2022,
section 4.2.2). So an all-gather whose result only linears read becomes one operator with them: it saves the shard, gathers
again in the backward, and reduce-scatters the sum of the linears' input gradients once.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.program import Program

LINEARS = ("aten.linear.default", "mw.fused_linear")


def fuse_gathers(program: Program) -> Program:
    """Fuse every ``mw.gather_vary`` with the linears that alone read it."""
    return replace(program, segments=tuple(replace(s, graph=_fuse(s.graph)) for s in program.segments))


def _fuse(graph: Graph) -> Graph:
    consumers = graph.consumers()
    leaving = set(graph.outputs)
    made = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    dropped: set[int] = set()
    fused: dict[int, Op] = {}
    for index, op in enumerate(graph.ops):
        readers = consumers[op.outputs[0]]
        if op.target != "mw.gather_vary" or op.outputs[0] in leaving or not readers:
            continue
        linears = [graph.ops[reader] for reader in readers]
        if not all(_reads_as_input(linear, op.outputs[0]) for linear in linears):
            continue
        if any(made.get(name, -1) > readers[0] for linear in linears for name in linear.inputs[1:]):
            continue
        dropped.update((index, *readers))
        fused[readers[0]] = _gather_linear(op, linears)
    if not fused:
        return graph
    ops = [fused.get(index, op) for index, op in enumerate(graph.ops) if index not in dropped or index in fused]
    defined = {name for op in ops for name in op.outputs} | set(graph.inputs) | {param.value for param in graph.params}
    return replace(graph, ops=tuple(ops), values={name: v for name, v in graph.values.items() if name in defined})


def _reads_as_input(linear: Op, name: str) -> bool:
    in_terms = linear.target == "mw.fused_linear" and "terms" in dict(linear.kwargs)
    return linear.target in LINEARS and not in_terms and linear.inputs.count(name) == 1 and linear.args[0] == Ref(name)


def _gather_linear(gather: Op, linears: list[Op]) -> Op:
    weights = tuple(linear.args[1] for linear in linears)
    biases = tuple(dict(linear.kwargs).get("bias", linear.args[2] if len(linear.args) > 2 else None) for linear in linears)
    args = (gather.args[0], weights, biases, gather.args[1])
    outputs = tuple(output for linear in linears for output in linear.outputs)
    kwargs = gather.kwargs
    parts = tuple((1, False) if linear.target == LINEARS[0] else linear.args[3:5] for linear in linears)
    if any(how != (1, False) for how in parts):
        kwargs = (*kwargs, ("parts", parts))
    return Op(linears[0].name, "mw.gather_linear", args, kwargs, outputs, linears[0].module, linears[0].source)
