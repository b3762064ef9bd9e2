"""The closed forms behind an operator's numbers, with the numbers in: bytes and seconds of its collectives, bytes it keeps.

    traffic      what every rank sends (``cost.collectives.traffic``), in S, the group's buffer on one rank, and P, its ranks
    seconds      T(S) = b S + l + 2 sqrt(k b l S) of the fastest algorithm; b and l in the topology's symbols, which stand at
                 the head of ``cost.collectives``
    kept         the product of a result's dims over the axes that split it, and over the micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from meshwright.compiler.structure.activations import saved_values
from meshwright.cost.collectives import FILL, SYMBOLS, Algorithm, P, S, W, algorithms, group_layouts, parted, traffic
from meshwright.ir.graph import Op
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.views.prices import Prices


def formulas(prices: Prices, op: Op) -> Iterator[str]:
    """One line for all equal collectives before and inside an operator, and one for every result that is kept."""
    moves = [move for edge in prices.edges(op) for move in edge.moves] + list(prices.op(op).inside)
    hidden: dict[tuple[str, str, float, float], list[float]] = {}
    for move in moves:
        for kind, seconds in ((move.forward, move.forward_seconds), (move.backward, move.backward_seconds)):
            if kind and move.bytes_:
                hidden.setdefault((kind, move.axis, move.bytes_, move.times), []).append(seconds)
    for (kind, axis, bytes_, times), seconds_of in hidden.items():
        yield _collective(closed_form(prices, kind, axis, bytes_), axis, times, seconds_of)
    kept = saved_values(prices.graph, prices.facts.rules.operators).values
    for name in op.outputs:
        if name in kept:
            yield _kept(prices, name)


@dataclass(frozen=True)
class ClosedForm:
    """A collective's closed form with its numbers in. ``numbers``: of the form's symbols; ``sent``: bytes of every rank;
    ``seconds``: of one collective by the form; ``priced``: as the plan prices it, which differs where it was measured."""

    kind: str
    algorithm: Algorithm
    numbers: Mapping[sympy.Symbol, float]
    sent: float
    seconds: float
    priced: float


def closed_form(prices: Prices, kind: str, axis: str, bytes_: float) -> ClosedForm:
    """A collective's, over the groups that take longest. ``axis``: one, or several with commas between."""
    island, mesh = prices.cluster.island, prices.plan.mesh
    names = tuple(name for name in axis.split(",") if mesh.size(name) > 1)
    runs, hop = parted(kind)
    scope = max(group_layouts(island, mesh, frozenset(names), hop), key=lambda one: one.nodes)
    numbers = {**dict(zip(SYMBOLS, scope.numbers, strict=True)), S: bytes_}
    ways = algorithms(runs)
    if island.torus and runs == "all_to_all":  # the links of the longest dim carry more than a ring's part of the bytes
        ((per_byte, _),) = prices.costs.network.terms(kind, names)
        ways = tuple(replace(one, per_byte=sympy.nsimplify(per_byte * scope.ring, tolerance=1e-9) / W) for one in ways)
    best = min(ways, key=lambda one: float(_value(one.seconds, numbers)))
    return ClosedForm(kind, best, numbers, float(_value(traffic(runs), numbers)), float(_value(best.seconds, numbers)),
                      float(prices.costs.collective(kind, names, bytes_)))


def _collective(form: ClosedForm, axis: str, times: float, seconds: Sequence[float]) -> str:
    """``times``: each of them in a step; ``seconds``: of each, a step's that do not hide."""
    best, numbers = form.algorithm, form.numbers
    b, latency = float(_value(best.per_byte, numbers)), float(_value(best.latency, numbers))
    often = f", {times * len(seconds):.3g} times in a step" if times * len(seconds) != 1 else ""
    formula = math.isclose(form.seconds, form.priced, rel_tol=1e-6)
    table = "" if formula else f" ({seconds_text(form.priced)} by what was measured on the cluster)"
    size = f"S = {bytes_text(numbers[S])}, P = {numbers[P]:.0f}"
    return (
        f"{form.kind.replace('_', '-')}@{axis} by {best.name}: sends {traffic(parted(form.kind)[0])} = "
        f"{bytes_text(form.sent)} for {size}; T = b S + l + 2 sqrt({FILL} b l S) = "
        f"{seconds_text(form.seconds)}{table}{often}, with "
        f"b = {best.per_byte} = {b:.3g} s/byte, l = {best.latency} = {seconds_text(latency)}; "
        f"not hidden in a step: {seconds_text(sum(seconds))}"
    )


def _value(expression: sympy.Expr, numbers: Mapping[sympy.Symbol, float]) -> sympy.Expr:
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
