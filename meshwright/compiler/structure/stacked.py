"""Experts that are matrices of one batched product: the mixtures of a graph that route by products alone (``StackedExperts``).

    dispatch "b s e c, b s h -> e b c h", "e b c h, e h f -> e b c f", combine "b s e c, e b c h -> b s h"

A mixture with a capacity sends tokens to places by a product with what its router says, and fetches the answers by another; one
whose experts all compute every token adds the answers up. Either way its experts are a factor e that a trainable weight, what
it is multiplied with and the product have in common, and that is later summed away among values that still have their
samples. An axis may have other experts on each of its ranks there, and other samples in all the rest: from one to the other is
an all-to-all, as between any two splits. Heads and groups with weights of their own are such factors too, but are joined by a
weight. Names play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.structure.dims import Dim, DimClasses, batch_inputs
from meshwright.ir.graph import Graph, Op
from meshwright.ir.rule import Factor


@dataclass(frozen=True)
class StackedExperts:
    """``dims``: classes of the dims that are experts. ``products``: {operator that reads their weights: its factor of experts},
    products and the views of weights that lead to them."""

    dims: frozenset[Dim]
    products: Mapping[str, Factor]

    @classmethod
    def of(cls, graph: Graph, classes: DimClasses) -> StackedExperts:
        """Those of a graph."""
        operators = classes.rules.operators
        held = {param.value for param in graph.params if param.trainable}  # and what is only another shape of a weight
        views: list[Op] = []
        others: list[Op] = []
        multiplied: dict[str, tuple[Factor, Dim]] = {}
        for op in graph.ops:
            if held.isdisjoint(op.inputs):
                others.append(op)
            elif held.issuperset(op.inputs) and operators[op.target].kind == "view":
                held.update(op.outputs)
                views.append(op)
            elif operators[op.target].kind == "matmul" and (found := _multiplied(op, classes, held)) is not None:
                multiplied[op.name] = found
        if not multiplied:
            return cls(frozenset(), {})
        batch = classes.of(batch_inputs(graph).items())
        joined = {dim for op in others for dim in _joined(op, classes, batch)}
        dims = frozenset(joined.intersection(dim for _, dim in multiplied.values()) - batch)
        products = {name: factor for name, (factor, dim) in multiplied.items() if dim in dims}
        return cls(dims, products | _leading(views, {op.name: op for op in graph.ops}, products, dims, classes))

    def counts(self, classes: DimClasses) -> frozenset[int]:
        """The numbers of experts."""
        return frozenset(classes.rules[name].sizes[factor] for name, factor in self.products.items())


def _multiplied(op: Op, classes: DimClasses, held: set[str]) -> tuple[Factor, Dim] | None:
    """The factor, and its class, that a product has of its weight and of the other operand alike; None if it has none."""
    rule = classes.rules[op.name]
    pairs = list(zip(op.inputs, rule.operands, strict=True))
    others = {factor for name, dims in pairs if name not in held for factor in dims}.intersection(rule.splittable)
    for name, dims in pairs:
        for dim, factor in enumerate(dims) if name in held else ():
            if factor is not None and factor in others and factor in rule.results[0]:
                return factor, classes.find((name, dim))
    return None


def _leading(
    views: Sequence[Op], ops: Mapping[str, Op], products: Mapping[str, Factor], dims: frozenset[Dim], classes: DimClasses
) -> dict[str, Factor]:
    """The views of weights that lead to the products, with their factors of experts."""
    found: dict[str, Factor] = {}
    read = {name for product in products for name in ops[product].inputs}
    for op in reversed(views):
        factors = [factor for dim, factor in enumerate(classes.rules[op.name].results[0])
                   if factor is not None and classes.find((op.outputs[0], dim)) in dims]
        if factors and not read.isdisjoint(op.outputs):
            found[op.name] = factors[0]
            read.update(op.inputs)
    return found


def _joined(op: Op, classes: DimClasses, batch: frozenset[Dim]) -> Iterator[Dim]:
    """Classes of what an operator sums away, if what it makes has samples."""
    rule = classes.rules[op.name]
    made = [(name, dim) for name, dims in zip(op.outputs, rule.results, strict=True) for dim in range(len(dims))]
    if batch.isdisjoint(map(classes.find, made)):
        return
    kept = {factor for dims in rule.results for factor in dims}
    for name, dims in zip(op.inputs, rule.operands, strict=True):
        yield from (classes.find((name, dim)) for dim, factor in enumerate(dims) if factor is not None and factor not in kept)
