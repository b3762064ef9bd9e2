"""A gather that feeds linears keeps only its shard for the backward.

Autograd would save the gathered activation and give back what the split of the sequence saved (Korthikanti et al. 2022,
section 4.2.2). So an all-gather whose result only linears read (operators declared as such, ``Operator.linear``) becomes one
operator with them: it saves the shard, gathers again in the backward, and reduce-scatters the sum of the linears' input
gradients once.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.ir.declared.operator import Linear, Operators
from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.program import Program


def fuse_gathers(program: Program) -> Program:
    """Fuse every ``mw.gather_vary`` with the linears that alone read it."""
    return replace(program, segments=tuple(replace(s, graph=_fuse(s.graph, program.operators)) for s in program.segments))


def _fuse(graph: Graph, operators: Operators) -> Graph:
    consumers = graph.consumers()
    leaving = set(graph.outputs)
    made = {name: index for index, op in enumerate(graph.ops) for name in op.outputs}
    dropped: set[int] = set()
    fused: dict[int, Op] = {}
    for index, op in enumerate(graph.ops):
        readers = consumers[op.outputs[0]]
        if op.target != "mw.gather_vary" or op.outputs[0] in leaving or not readers or dict(op.kwargs).get("mirrored"):
            continue
        linears = [graph.ops[reader] for reader in readers]
        read = [_reads_as_input(linear, op.outputs[0], operators) for linear in linears]
        if None in read:
            continue
        if any(made.get(name, -1) > readers[0] for linear in linears for name in linear.inputs[1:]):
            continue
        dropped.update((index, *readers))
        fused[readers[0]] = _gather_linear(op, linears, [how for how in read if how is not None])
    if not fused:
        return graph
    ops = [fused.get(index, op) for index, op in enumerate(graph.ops) if index not in dropped or index in fused]
    defined = {name for op in ops for name in op.outputs} | set(graph.inputs) | {param.value for param in graph.params}
    return replace(graph, ops=tuple(ops), values={name: v for name, v in graph.values.items() if name in defined})


def _reads_as_input(op: Op, name: str, operators: Operators) -> Linear | None:
    """The call as a linear whose input the value is, and nothing else of it."""
    read = operators[op.target].linear
    linear = None if read is None else read(op)
    return linear if linear is not None and linear.x == Ref(name) and op.inputs.count(name) == 1 else None


def _gather_linear(gather: Op, ops: list[Op], linears: list[Linear]) -> Op:
    weights, biases = tuple(linear.weight for linear in linears), tuple(linear.bias for linear in linears)
    args = (gather.args[0], weights, biases, gather.args[1])
    outputs = tuple(output for op in ops for output in op.outputs)
    kwargs = gather.kwargs
    parts = tuple((linear.parts, linear.transposed) for linear in linears)
    if any(how != (1, False) for how in parts):
        kwargs = (*kwargs, ("parts", parts))
    return Op(ops[0].name, "mw.gather_linear", args, kwargs, outputs, ops[0].module, ops[0].source)
