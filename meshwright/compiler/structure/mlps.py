"""MLPs in pieces: what lies between two linears is made of a few rows at a time, so that nobody ever holds all of it.

    linear(x, w1), linear(x, w3) -> silu, times -> linear(., w2)     =>     mw.mlp(x, [w1, w3], [-, -], steps, w2, rows)

In long sequences the inner values of an MLP are the largest of a layer: five or six tensors of several times the model's width,
at the moment at which everything else is alive too. In pieces a layer keeps what goes in, and makes the inner values again in
the backward, as recomputation does. Recognized by data flow alone: linears of one value, operators that work element by
element on their results (on no other tensor, and draw nothing), and one linear of what these make; nobody else may read what
lies between. The planner chooses (``meshwright.piecewise``); the operator in the plan's graph says how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, mark_differentiable, rewrite
from meshwright.compiler.rules import default_rules
from meshwright.compiler.structure.blocks import find_blocks
from meshwright.compiler.structure.units import find_units
from meshwright.ir.declared.draws import draws
from meshwright.ir.declared.operator import MLP, Linear
from meshwright.ir.graph import Graph, Op, Ref, refs

ROWS = 8192
"""Rows of a piece where none are pinned: fewer add up the weights' gradients too often."""
ADD = "aten.add.Tensor"


@dataclass
class Between:
    """What one operator becomes of: the linears of ``x``, the steps after them, and the last linear."""

    last: Linear
    linears: list[Linear] = field(default_factory=list)
    steps: list[Op] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)


def rows_of_mlps(graph: Graph) -> int | None:
    """Rows of a piece of the graph's MLPs, 0 if they are whole; None if there are none that could be in pieces."""
    pieces = next((int(op.args[5]) for op in graph.ops if op.target == MLP), None)
    return 0 if pieces is None and _chains(graph) else pieces


def many_rows(graph: Graph) -> bool:
    """Whether a sample has more rows in some MLP than a piece has."""
    return any(math.prod(graph.values[chain.linears[0].x.name].shape[1:-1]) > ROWS for chain in _chains(graph).values())


def mlps_in_pieces(graph: Graph, rows: int) -> Graph:
    """The graph with every MLP in pieces of ``rows`` rows that can be; the same one if none can be."""
    chains = _chains(graph)
    if not chains:
        return graph

    def step(op: Op, edit: Edit) -> list[Op] | None:
        chain = chains.get(op.name)
        if chain is None:
            return None
        args = (
            chain.linears[0].x, tuple(one.weight for one in chain.linears), tuple(one.bias for one in chain.linears),
            tuple(_call(one, chain.places) for one in chain.steps), chain.last.weight, rows,
        )
        like = replace(op, module=_common(chain.modules))
        if chain.last.bias is None:
            return [replace(like, target=MLP, args=args, kwargs=())]
        made = edit.op(like, MLP, args, edit.values[op.outputs[0]].shape, edit.values[op.outputs[0]].dtype)
        return [made, replace(op, target=ADD, args=(Ref(made.outputs[0]), chain.last.bias), kwargs=())]

    made = rewrite(replace(graph, blocks=()), step)
    return find_units(find_blocks(mark_differentiable(eliminate_dead_code(made))))


def _call(op: Op, places: Mapping[str, int]) -> tuple[Any, ...]:
    """A step as ``runtime.pieces.mlp`` reads it."""

    def given(arg: Any) -> Any:
        return ("at", places[arg.name]) if isinstance(arg, Ref) else arg

    return op.target, tuple(map(given, op.args)), tuple((name, given(arg)) for name, arg in op.kwargs)


def _common(modules: list[str]) -> str:
    """The module that holds them all."""
    parts = [module.split(".") for module in modules]
    same = 0
    while all(len(one) > same for one in parts) and len({one[same] for one in parts}) == 1:
        same += 1
    return ".".join(parts[0][:same])


def _chains(graph: Graph) -> dict[str, Between]:
    """The MLPs of a graph by the name of their last linear."""
    readers = graph.consumers()
    leaving = {*graph.outputs, *([graph.loss] if graph.loss else [])}
    found = {}
    for index, op in enumerate(graph.ops):
        last = _plain(op, graph)
        chain = None if last is None else _chain(op, last, graph)
        if chain is None:
            continue
        inside = {graph.producers[name] for name in chain.places} | {index}
        if all(name not in leaving and inside.issuperset(readers[name]) for name in chain.places):
            found[op.name] = chain
    return found


def _plain(op: Op, graph: Graph) -> Linear | None:
    """The call as a linear whose weight is a parameter in one part."""
    read = default_rules().operators[op.target].linear
    linear = None if read is None else read(op)
    if linear is None or (linear.parts, linear.transposed) != (1, False):
        return None
    return linear if linear.weight.name not in graph.producers else None


def _chain(op: Op, last: Linear, graph: Graph) -> Between | None:
    """What a linear reads, back to linears of one value; None if it is made of anything else."""
    chain, linears, steps = Between(last, modules=[op.module]), dict[int, Linear](), set[int]()
    shape, waiting = graph.values[last.x.name].shape, [last.x.name]
    while waiting:
        name = waiting.pop()
        index = graph.producers.get(name)
        if index is None or graph.values[name].shape != shape or not graph.values[name].differentiable:
            return None
        if index in linears or index in steps:
            continue
        made = graph.ops[index]
        linear = _plain(made, graph)
        if linear is not None:
            linears[index] = linear
        elif _elementwise(made):
            steps.add(index)
            waiting += made.inputs
        else:
            return None
        chain.modules.append(made.module)
    if not steps or not linears or len({linear.x.name for linear in linears.values()}) > 1:
        return None
    for place, index in enumerate((*sorted(linears), *sorted(steps))):
        chain.places[graph.ops[index].outputs[0]] = place
    chain.linears = [linears[index] for index in sorted(linears)]
    chain.steps = [graph.ops[index] for index in sorted(steps)]
    return chain


def _elementwise(op: Op) -> bool:
    """Whether a call works element by element on tensors that stand among its arguments themselves."""
    operator = default_rules().operators[op.target]
    direct = [arg for arg in (*op.args, *(arg for _, arg in op.kwargs)) if isinstance(arg, Ref)]
    plain = operator.elementwise and operator.recompute == "allowed" and not draws(op) and op.target.startswith("aten.")
    return plain and len(op.outputs) == 1 and len(direct) == len(list(refs((op.args, op.kwargs))))
