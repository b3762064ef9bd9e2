"""A function with a backward of its own, as a value: what a ``torch.autograd.Function`` computes, both ways.

    forward    operands -> results, saved           two graphs of plain operators, without parameters
    backward   saved, gradients of results -> gradients of operands

The backward is what the function's author wrote, which need not be the forward's derivative (straight-through estimators,
gradient reversal). One call of it is one operator of the captured graph:

    mw.custom_function(CustomFunction, (operands...)) -> results
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.ir.graph import Graph, Ref, Value, refs
from meshwright.ir.sharding import DTYPE_NAMES

CUSTOM = "mw.custom_function"
"""The target of a call."""


@dataclass(frozen=True, eq=False)
class CustomFunction:
    """Two are equal if they compute the same, whatever they are called.

    ``forward.inputs`` are the operands in order, ``forward.output_tree`` the results and then the saved values;
    ``backward.inputs`` are the saved values and then a gradient of every result that is ``differentiable``,
    ``backward.output_tree`` a gradient of every operand, None where there is none.
    """

    name: str
    forward: Graph
    backward: Graph
    differentiable: tuple[bool, ...]

    @property
    def results(self) -> tuple[Ref, ...]:
        """What the caller gets."""
        return tuple(self.forward.output_tree[: len(self.differentiable)])

    @property
    def saved(self) -> tuple[Ref, ...]:
        """What the forward keeps for the backward."""
        return tuple(self.forward.output_tree[len(self.differentiable) :])

    @property
    def gradients(self) -> tuple[Ref | None, ...]:
        """Of every operand."""
        return tuple(self.backward.output_tree)

    @property
    def kept(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Value, ...]]:
        """What is saved: positions of operands, positions of results, and what is neither."""
        names, results = list(self.forward.inputs), [ref.name for ref in self.results]
        saved = [ref.name for ref in self.saved]
        inner = tuple(self.forward.values[name] for name in saved if name not in names and name not in results)
        return (tuple(names.index(n) for n in saved if n in names),
                tuple(results.index(n) for n in saved if n in results and n not in names), inner)

    @cached_property
    def _content(self) -> str:
        return repr((self.differentiable, len(self.saved), content(self.forward), content(self.backward)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other._content == self._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __repr__(self) -> str:
        return self.name


def content(graph: Graph) -> Any:
    """What a graph computes, with its values by number."""
    numbers: dict[str, int] = {}

    def plain(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return "%", numbers[tree.name]
        return tuple(map(plain, tree)) if isinstance(tree, tuple | list) else tree

    def number(name: str) -> tuple[int, tuple[int, ...], str]:
        value = graph.values[name]
        return numbers.setdefault(name, len(numbers)), value.shape, DTYPE_NAMES[value.dtype]

    inputs = tuple(number(name) for name in graph.inputs)
    constants = tuple((number(name), tensor.flatten().tolist()) for name, tensor in sorted(graph.constants.items()))
    ops = []
    for op in graph.ops:
        called = op.target, plain(op.args), tuple((key, plain(value)) for key, value in op.kwargs)
        ops.append((*called, tuple(number(name) for name in op.outputs)))
    return inputs, constants, tuple(ops), plain(graph.output_tree)


def split_joint(joint: Graph, results: int, tangents: int, differentiable: tuple[bool, ...], name: str) -> CustomFunction:
    """From one graph of both directions: inputs are the operands and then ``tangents`` gradients, outputs ``results`` results
    and then a gradient of every operand.

    What the results need is the forward; the rest is the backward, which saves what it reads of the forward.
    """
    operands, incoming = joint.inputs[: len(joint.inputs) - tangents], joint.inputs[len(joint.inputs) - tangents :]
    made, gradients = tuple(joint.output_tree[:results]), tuple(joint.output_tree[results:])
    needed, ahead = {ref.name for ref in made}, []
    for op in reversed(joint.ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            ahead.append(op)
    ahead.reverse()
    first = {op.name for op in ahead}
    behind = [op for op in joint.ops if op.name not in first]
    known = {*operands, *(output for op in ahead for output in op.outputs)}
    read = [n for op in behind for n in op.inputs] + [ref.name for ref in refs(gradients)]
    saved = tuple(dict.fromkeys(n for n in read if n in known))

    def part(inputs: tuple[str, ...], ops: list[Any], tree: tuple[Any, ...]) -> Graph:
        used = {*inputs, *(n for op in ops for n in (*op.inputs, *op.outputs)), *(ref.name for ref in refs(tree))}
        constants = {n: t for n, t in joint.constants.items() if n in used}
        return Graph({n: v for n, v in joint.values.items() if n in used}, inputs, (), tuple(ops), tree, constants=constants)

    return CustomFunction(
        name, part(operands, ahead, (*made, *map(Ref, saved))), part((*saved, *incoming), behind, gradients), differentiable
    )
