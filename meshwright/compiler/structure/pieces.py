"""The loss in pieces: logits and their cross entropy a few rows at a time, so that nobody ever holds all logits.

    linear(x, weight, bias) -> casts and slices -> mw.cross_entropy      =>      mw.linear_cross_entropy(x, weight, bias, ..)

What a piece's backward needs it makes again, as recomputation does: the vocabulary's product runs once more. Recognized by data
flow alone, and only where nothing else reads the logits: an output that holds them keeps them whole. A slice of the logits is
one of the rows that make them. The planner chooses (``planner.make_plan``); the operator in the plan's graph says how.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, mark_differentiable, rewrite
from meshwright.compiler.rules import default_rules
from meshwright.compiler.structure.blocks import find_blocks
from meshwright.compiler.structure.mlps import mlps_in_pieces, rows_of_mlps
from meshwright.compiler.structure.units import find_units
from meshwright.ir.declared.operator import PIECES, Linear
from meshwright.ir.graph import Graph, Op, Ref

ROWS = 2048
"""Rows of a piece where none are pinned: a product of that height is as fast as a higher one."""
LOSS, CAST, SLICE = "mw.cross_entropy", "aten._to_copy.default", "aten.slice.Tensor"


def rows_of(graph: Graph) -> int | None:
    """Rows of a piece of the graph's losses, 0 if they are whole; None if no loss could be in pieces."""
    pieces = next((int(op.args[6]) for op in graph.ops if op.target == PIECES), None)
    return 0 if pieces is None and losses(graph) else pieces


def losses(graph: Graph) -> frozenset[str]:
    """Names of the losses that are whole and could be in pieces."""
    read = _reads(graph)
    return frozenset(op.name for op in graph.ops if op.target == LOSS and _chain(op, graph, read) is not None)


def in_pieces(graph: Graph, rows: int) -> Graph:
    """The graph with every loss in pieces of ``rows`` rows that can be; the same one if none can be."""
    read = _reads(graph)
    chains = {op.name: found for op in graph.ops if op.target == LOSS and (found := _chain(op, graph, read)) is not None}
    if not chains:
        return graph

    def step(op: Op, edit: Edit) -> list[Op] | None:
        if op.name not in chains:
            return None
        linear, module, slices = chains[op.name]
        x, made = linear.x, []
        for cut in slices:
            dim, start, stop, *by = cut.args[1:]
            shape = list(edit.shape(x))
            shape[dim] = len(range(start, stop, *by))
            made.append(edit.op(replace(cut, module=module), SLICE, (x, *cut.args[1:]), shape, edit.dtype(x)))
            x = Ref(made[-1].outputs[0])
        args = (x, linear.weight, linear.bias, *op.args[1:4], rows)
        return [*made, replace(op, target=PIECES, args=args, module=module)]

    made = rewrite(replace(graph, blocks=()), step)
    return find_units(find_blocks(mark_differentiable(eliminate_dead_code(made))))


def as_in(graph: Graph, other: Graph) -> Graph:
    """The graph with its losses and MLPs in pieces if those of ``other`` are."""
    rows, inner = rows_of(other), rows_of_mlps(other)
    graph = in_pieces(graph, rows) if rows else graph
    return mlps_in_pieces(graph, inner) if inner else graph


def _reads(graph: Graph) -> dict[str, int]:
    """How often every value is read; once more if it leaves the graph."""
    found: dict[str, int] = dict.fromkeys((*graph.outputs, *([graph.loss] if graph.loss else [])), 1)
    for op in graph.ops:
        for name in op.inputs:
            found[name] = found.get(name, 0) + 1
    return found


def _chain(loss: Op, graph: Graph, reads: dict[str, int]) -> tuple[Linear, str, list[Op]] | None:
    """(the linear that makes a loss's logits, its module, the slices between, in order); None if something else makes or reads
    them."""
    operators, slices, ref = default_rules().operators, list[Op](), loss.args[0]
    while isinstance(ref, Ref) and reads.get(ref.name) == 1 and ref.name in graph.producers:
        op = graph.ops[graph.producers[ref.name]]
        value = graph.values[ref.name]
        if op.target == CAST:
            ref = op.args[0]
            before = graph.values[ref.name].dtype
            exact = before.is_floating_point and torch.promote_types(before, torch.float32) == torch.promote_types(
                value.dtype, torch.float32) and value.dtype in (before, torch.float32, torch.float64)
            if not exact:
                return None
        elif op.target == SLICE and op.args[1] != len(value.shape) - 1:
            slices.insert(0, op)
            ref = op.args[0]
        else:
            read = operators[op.target].linear
            linear = None if read is None else read(op)
            plain = linear is not None and (linear.parts, linear.transposed) == (1, False)
            return (linear, op.module, slices) if linear is not None and plain else None
    return None
