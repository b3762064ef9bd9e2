"""Which gradients are there while the backward of each operator of a block runs, as ``replay`` has it, whatever their sizes.

A gradient that an operator passes on, as sums and views do, is the one it was handed: it is there once, under the name of the
value that is nearest to the operator that runs, or of a smaller one that it is an expanded view of (a mean's or a total's
operand has its gradient from a single number). Sums of gradients are made in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from meshwright.ir.graph import Graph, Op


class GradientsAlive(NamedTuple):
    """While an operator's backward runs: ``values`` whose gradients are there when it begins, those of its results among them,
    and the positions of the operands for which it ``makes`` one."""

    values: frozenset[str]
    makes: tuple[int, ...]


def gradients_alive(
    ops: Sequence[Op], graph: Graph, passed: Mapping[str, Collection[int]], held: Collection[str], leaving: Collection[str]
) -> list[GradientsAlive | None]:
    """Of every operator, None where no gradient reaches it. ``passed``: by operator the operands whose gradient is that of the
    result; ``held``: parameters; ``leaving``: values whose gradients come from outside."""
    values = graph.values
    alive = {name: (name, name) for name in leaving if values[name].differentiable}  # value -> its gradient, and whose that is
    found: list[GradientsAlive | None] = [None] * len(ops)
    for index in reversed(range(len(ops))):
        op = ops[index]
        made = {name: alive[name] for name in op.outputs if name in alive}
        if not made:
            continue
        nearest = dict([*alive.values(), *made.values()])
        first, whose = next(iter(made.values()))
        operands = [(at, name) for at, name in enumerate(op.inputs) if values[name].differentiable and name not in held]
        makes = tuple(at for at, _ in operands if at not in passed[op.name])
        found[index] = GradientsAlive(frozenset(nearest.values()), makes)
        for name in made:
            del alive[name]
        for at, name in operands:
            expanded = values[name].numel > values[whose].numel
            alive.setdefault(name, (f"{op.name}:{name}", name) if at in makes else (first, whose if expanded else name))
    return found
