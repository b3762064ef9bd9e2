"""Whether two graphs compute the same: their outputs compared by what they are made of, whatever values and order are called.

A value is known by its operator, its literals and what its operands are; inputs by their names, parameters and buffers by
theirs, literal tensors by their contents. Copies are what they copy. What draws random numbers is told apart by its order.
``in_evaluation`` is a training graph with what ``eval()`` switches off in torch's own operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.compiler.capture.rewrite import Edit, eliminate_dead_code, rewrite
from meshwright.ir.declared.draws import draws
from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import Graph, Op, Ref, map_refs
from meshwright.ir.operators import argument_names, evaluated, find

DROPOUT = ("input", "p", "train")
"""The arguments of every operator of torch that is a dropout and nothing else."""
COPIES = frozenset({"aten.clone.default", "mw.identity"})
NORMAL, BATCH_NORM = "mw.batch_norm", "aten.batch_norm.default"
"""What the capture makes of a batch norm that updates statistics (``normalize``), and torch's own."""


def in_evaluation(graph: Graph) -> Graph:
    """Without dropout, with the running statistics, updating no buffer."""

    def step(op: Op, edit: Edit) -> Iterable[Op] | None:
        if op.target == NORMAL and op.args[3] is not None:
            for new, old in zip(op.outputs[1:], op.args[3:5], strict=True):  # read by a second call of the same norm
                edit.replace(new, old.name)
            return (replace(op, target=BATCH_NORM, args=(*op.args[:5], False, *op.args[6:8], False), outputs=op.outputs[:1]),)
        operator = find(op.target)
        names = () if operator is None else argument_names(operator)
        if names == DROPOUT and len(op.outputs) == 1:
            edit.replace(op.outputs[0], op.args[0].name)
            return ()
        args, kwargs = evaluated(names, op.args, dict(op.kwargs))
        other = replace(op, args=args, kwargs=tuple(kwargs.items()))
        return None if other == op else (other,)

    return eliminate_dead_code(rewrite(replace(graph, mutations=()), step))


def difference(one: Graph, other: Graph, gradients: bool = True) -> str | None:
    """The first thing of ``other`` that ``one`` does not have, in words; None if they compute the same. Without ``gradients``
    what only stops them is nothing."""
    known = _KnownValue(COPIES if gradients else COPIES | {"aten.detach.default"})
    mine, theirs = known.of(one), known.of(other)
    for op in other.ops:
        if any(theirs[name] not in mine.values() for name in op.outputs):
            return f"{op.target} of module {op.module or '(root)'!r} ({op.source or 'made by the capture'})"
    trees = [map_refs(graph.output_tree, lambda ref, ids=ids: ("value", ids[ref.name]))
             for graph, ids in ((one, mine), (other, theirs))]
    if trees[0] != trees[1]:
        return "its outputs"
    updates = [sorted((ids[old], ids[new]) for old, new in graph.mutations) for graph, ids in ((one, mine), (other, theirs))]
    if updates[0] != updates[1]:
        return "the buffers that it updates"
    if (one.changes is None) != (other.changes is None):
        return "what it changes or asserts of inputs"
    if one.changes is None or other.changes is None:
        return None
    return difference(one.changes, other.changes, gradients) or difference(other.changes, one.changes, gradients)


@dataclass
class _KnownValue:
    """Numbers of values, the same for what is the same in several graphs."""

    copies: frozenset[str]
    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def of(self, graph: Graph) -> dict[str, int]:
        """{value: its number}."""
        found: dict[str, int] = {}
        drawn: dict[Any, int] = {}
        for name in graph.inputs:
            value = graph.values[name]
            found[name] = self.number(("input", name, value.shape, value.dtype))
        for param in graph.params:
            value, literal = graph.values[param.value], graph.constants.get(param.value)
            content = None if literal is None or literal.is_meta else (literal.detach().cpu().flatten().tolist(),)
            called = "" if param.fqn.startswith("_constant_") else min(param.fqns)
            found[param.value] = self.number(("held", called, value.shape, value.dtype, param.trainable, repr(content)))
        for op in graph.ops:
            if op.target in self.copies and len(op.outputs) == 1:
                found[op.outputs[0]] = found[op.inputs[0]]
                continue
            args = op.args
            if op.target == BATCH_NORM and args[5] is False:
                args = (*args[:6], args[7])  # neither the momentum nor the library matters
            key: tuple[Any, ...] = op.target, _plain(args, found), _plain(tuple(sorted(op.kwargs)), found)
            if draws(op):
                drawn[key] = drawn.get(key, 0) + 1
                key = (*key, drawn[key])
            found |= {name: self.number((*key, "result", at, graph.values[name].dtype)) for at, name in enumerate(op.outputs)}
        return found


def _plain(tree: Any, numbers: Mapping[str, int]) -> Any:
    """Hashable, with 1, 1.0 and True apart."""
    if isinstance(tree, Ref):
        return "value", numbers[tree.name]
    if isinstance(tree, tuple | list):
        return tuple(_plain(item, numbers) for item in tree)
    if isinstance(tree, CustomFunction):
        return tree  # equal to one that computes the same, which its words do not tell
    return type(tree).__name__, repr(tree)
