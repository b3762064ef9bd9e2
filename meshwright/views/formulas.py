"""The closed forms behind an operator's numbers, with the numbers in: bytes and seconds of its collectives, bytes it keeps.

    traffic      what every rank sends (``cost.collectives.traffic``), in S, the group's buffer on one rank, and P, its ranks
    seconds      T(S) = b S + l + 2 sqrt(k b l S) of the fastest algorithm; b and l in the topology's symbols, which stand at
                 the head of ``cost.collectives``
    kept         the product of a result's dims over the axes that split it, and over the micro-batches
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from meshwright.compiler.structure.activations import saved_values
from meshwright.cost.collectives import FILL, SYMBOLS, S, algorithms, group_layouts, traffic
from meshwright.ir.graph import Op
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.views.prices import Move, Prices


def formulas(prices: Prices, op: Op) -> Iterator[str]:
    """One line for every collective before and inside an operator, and for every result that is kept."""
    moves = [move for edge in prices.edges(op) for move in edge.moves] + list(prices.op(op).inside)
    for move in moves:
        for kind, seconds in ((move.forward, move.forward_seconds), (move.backward, move.backward_seconds)):
            if kind and move.bytes_:
                yield _collective(prices, move, kind, seconds)
    kept = saved_values(prices.graph, prices.facts.rules.operators).values
    for name in op.outputs:
        if name in kept:
            yield _kept(prices, name)


def _collective(prices: Prices, move: Move, kind: str, seconds: float) -> str:
    island, mesh = prices.cluster.island, prices.plan.mesh
    names = frozenset(axis for axis in move.axis.split(",") if mesh.size(axis) > 1)
    scope = max(group_layouts(island, mesh, names), key=lambda one: one.nodes)
    numbers = dict(zip(SYMBOLS, scope.numbers, strict=True))
    best = min(algorithms(kind), key=lambda one: float(_value(one.seconds, {**numbers, S: move.bytes_})))
    sent = float(_value(traffic(kind), {**numbers, S: move.bytes_}))
    b, latency = float(_value(best.per_byte, numbers)), float(_value(best.latency, numbers))
    once = float(_value(best.seconds, {**numbers, S: move.bytes_}))
    often = f", {move.times:.3g} times in a step" if move.times != 1 else ""
    return (
        f"{kind.replace('_', '-')}@{move.axis} by {best.name}: sends {traffic(kind)} = {bytes_text(sent)} for S = "
        f"{bytes_text(move.bytes_)}, P = {scope.ranks}; T = b S + l + 2 sqrt({FILL} b l S) = {seconds_text(once)}{often}, with "
        f"b = {best.per_byte} = {b:.3g} s/byte, l = {best.latency} = {seconds_text(latency)}; not hidden in a step: "
        f"{seconds_text(seconds)}"
    )


def _value(expression: sympy.Expr, numbers: dict[sympy.Symbol, float]) -> sympy.Expr:
    """The expression with numbers in; an infinite bandwidth is a way that costs nothing."""
    finite = {symbol: sympy.Float(1e30) if value == float("inf") else value for symbol, value in numbers.items()}
    return expression.subs(finite).evalf()


def _kept(prices: Prices, name: str) -> str:
    value, sharding, mesh = prices.graph.values[name], prices.made(name), prices.plan.mesh
    count = prices.plan.schedule.microbatches if prices.local_bytes(name, sharding) * 1.5 < (
        value.bytes_ / mesh.size(sharding.split_axes)) else 1
    dims = [sympy.Symbol(f"d{number}", positive=True) for number in range(len(value.shape))]
    axes = [sympy.Symbol(axis, positive=True) for axis in sharding.split_axes]
    itemsize, pieces = sympy.Symbol("itemsize", positive=True), sympy.Symbol("m", positive=True)
    form = sympy.Mul(*dims, itemsize) / sympy.Mul(*axes, *([pieces] if count > 1 else []))
    numbers = [f"d{number} = {size}" for number, size in enumerate(value.shape)]
    numbers += [f"{axis} = {mesh.size(axis)}" for axis in sharding.split_axes] + ([f"m = {count}"] if count > 1 else [])
    return (f"%{name} is kept for the backward: {form} = {bytes_text(prices.local_bytes(name, sharding))} per micro-batch in "
            f"flight, with {', '.join(numbers)}, itemsize = {value.dtype.itemsize}")
