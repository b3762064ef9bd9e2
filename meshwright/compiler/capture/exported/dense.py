"""Operands of kernels that may ask how they lie in memory.

In normal form a ``contiguous`` is nothing, and what a rank gathers may lie otherwise than what one process makes. To most of
torch's operators that is the same. An operator of another library may take its operands for contiguous without a look (the
model made them so before the call), and some of torch's raise. So before every operator that does not say how little it cares
(``Operator.dense``), each operand gets

    aten.contiguous(x)      x, in memory in the order of its dims: nothing where it is

So graphs are checked with operands that such kernels take. What a rank exchanges or cuts behind it is laid out again where it
is read (``runtime.codegen``).
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.capture.rewrite import Edit, rewrite
from meshwright.compiler.rules import default_rules
from meshwright.ir.graph import Graph, Op, Ref, map_refs

CONTIGUOUS = "aten.contiguous.default"


def lay_out(graph: Graph) -> Graph:
    """The graph with the operands of such operators contiguous."""
    operators = default_rules().operators

    def step(op: Op, edit: Edit) -> list[Op] | None:
        if not op.inputs or not operators[op.target].dense:
            return None
        made = {}
        for name in dict.fromkeys(op.inputs):
            value = edit.values[name]
            made[name] = edit.op(op, CONTIGUOUS, (Ref(name),), value.shape, value.dtype)
            edit.values[made[name].name] = replace(value, name=made[name].name)

        def laid(ref: Ref) -> Ref:
            return Ref(made[ref.name].name)

        return [*made.values(), replace(op, args=map_refs(op.args, laid), kwargs=map_refs(op.kwargs, laid))]

    return rewrite(graph, step)
