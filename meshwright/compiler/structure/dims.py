"""What the dims of a graph are: batch, sequence - by where they come from, never by name.

Dims that one factor joins inside an operator belong together; the classes of that relation follow a dim through the whole
graph. The *batch* is the class of dim 0 of the inputs, the *sequence* the class of the first other dim of what blocks hand on,
and of the queries of attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import networkx as nx

from meshwright.ir.graph import Graph, Op, Value
from meshwright.ir.rule import OpRule, Rules

Dim = tuple[str, int]


class DimClasses:
    """Classes of (value, dim), joined by the factors of every operator's rule (``rules``: by its name); with ``alike`` also
    dims that an operator does not split but that are of one length: those that it says (``OpRule.alike``), and those of
    its first operand and of a result of the same shape."""

    def __init__(self, graph: Graph, rules: Rules, alike: bool = False) -> None:
        self.rules = rules
        joined: nx.utils.UnionFind[Dim] = nx.utils.UnionFind()
        for op in graph.ops:
            rule = rules[op.name]
            seen: dict[str, list[Dim]] = {}
            pairs = [*zip(op.inputs, rule.operands, strict=True), *zip(op.outputs, rule.results, strict=True)]
            for name, dims in pairs:
                for dim, factor in enumerate(dims):
                    if factor is not None:
                        seen.setdefault(factor, []).append((name, dim))
            for together in (*seen.values(), *(_alike(op, rule, graph) if alike else ())):
                joined.union(*together)
        self._first: dict[Dim, Dim] = {}
        for dims in joined.to_sets():
            self._first.update(dict.fromkeys(dims, min(dims)))

    def find(self, dim: Dim) -> Dim:
        """The class of a dim, by its first member."""
        return self._first.get(dim, dim)

    def of(self, dims: Iterable[Dim]) -> frozenset[Dim]:
        """The classes of several dims."""
        return frozenset(self.find(dim) for dim in dims)


def _alike(op: Op, rule: OpRule, graph: Graph) -> Iterator[list[Dim]]:
    """Dims of one length that no factor joins."""
    for group in rule.alike:
        yield [(op.inputs[position], dim) for position, dim in group]
    for out, dims in zip(op.outputs, rule.results, strict=True):
        if op.inputs and graph.values[out].shape == graph.values[op.inputs[0]].shape:
            for dim, pair in enumerate(zip(rule.operands[0], dims, strict=True)):
                if pair == (None, None):
                    yield [(op.inputs[0], dim), (out, dim)]


def batch_inputs(graph: Graph) -> dict[str, int]:
    """{input: its batch dim}: dim 0 of every input as long as the first input that has dims."""
    sizes = [graph.values[name].shape[0] for name in graph.inputs if graph.values[name].shape]
    return {name: 0 for name in graph.inputs if graph.values[name].shape and graph.values[name].shape[0] == sizes[0]}


def batch_size(graph: Graph) -> int:
    """The global batch, 1 if no input has dims."""
    return next((graph.values[name].shape[0] for name in batch_inputs(graph)), 1)


def handed_on(graph: Graph) -> list[str]:
    """Values made of parameters that leave a block as what it reads came in: what layers hand to the next."""
    where: dict[str, int] = {}
    enters: list[set[tuple[int, ...]]] = []
    for index, block in enumerate(graph.blocks):
        ops = graph.ops[block.start : block.stop]
        where.update({name: index for op in ops for name in op.outputs})
        outside = {name for op in ops for name in op.inputs if where.get(name) != index}
        enters.append({graph.values[name].shape for name in outside.difference(param.value for param in graph.params)})
    result = []
    for position, op in enumerate(graph.ops):
        inside = next((i for i, b in enumerate(graph.blocks) if b.start <= position < b.stop), -1)
        for name in op.inputs:
            if name in graph.parameter_free_values or where.get(name, inside) == inside:
                continue
            if graph.values[name].shape in enters[where[name]]:
                result.append(name)
    return list(dict.fromkeys(result))


def sequence_dims(graph: Graph, passed: Iterable[str], classes: DimClasses, batch: frozenset[Dim]) -> dict[str, int]:
    """{value with three dims or more: its sequence}: the first dim that is not the batch's, the last left out."""
    found: dict[str, int] = {}
    for name in passed:
        ndim = len(graph.values[name].shape)
        dim = next((dim for dim in range(ndim - 1) if classes.find((name, dim)) not in batch), None)
        if ndim >= 3 and dim is not None:
            found[name] = dim
    return found


def sequence_classes(graph: Graph, passed: Iterable[str], classes: DimClasses, batch: frozenset[Dim]) -> frozenset[Dim]:
    """The classes of dims that are a sequence: of what blocks hand on (``passed``) and of what a rule's ways split, or else of
    inputs."""
    found = classes.of(sequence_dims(graph, passed, classes, batch).items())
    attended = [
        (name, dim) for op in graph.ops for algorithm in classes.rules[op.name].algorithms.values() if not algorithm.dealt
        for name, dim in zip(op.inputs, algorithm.operands, strict=True) if dim is not None
    ]
    found = (found | classes.of(attended)) - batch
    return found or classes.of((name, 1) for name in graph.inputs if _is_sequence(graph.values[name])) - batch


def _is_sequence(value: Value) -> bool:
    """Whether an input is ids or vectors in a row."""
    return len(value.shape) == 3 or (len(value.shape) == 2 and not value.dtype.is_floating_point)
