"""Blocks: layers that repeat, found by structure alone.

The ops that one module instance makes (its sub-modules' included) are its *run*. A run is a block if

    it is contiguous in the graph, and the module was called once;
    it holds at least two contractions with a parameter (operators declared as matrix products): what can be decided inside it;
    a sibling (a module with the same parent) makes an equal run, up to what takes a gradient (the first layer's input may take
    none), or is a block beside such siblings (a first layer that makes the position bias the others read);
    no module around it is a block: the layers, not what they are made of.

Two runs are equal, and get the same ``kind``, if one becomes the other by renaming: the same operators with the same literals
in the same order, connected in the same way, on parameters and outside values of the same shapes and dtypes, the same results
read by others, the same values with a gradient. Who makes an outside value does not matter. Kinds are numbered in order of
appearance. Names have no influence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.compiler.capture.movement import TURN
from meshwright.compiler.rules import default_rules
from meshwright.ir.graph import Block, Graph, Op, Ref, map_refs


@dataclass
class ModuleRun:
    """A node of the module tree with the ops made under it."""

    path: str
    start: int = -1
    stop: int = -1
    count: int = 0
    contractions: int = 0
    repeated: bool = False
    children: dict[str, ModuleRun] = field(default_factory=dict)

    @property
    def is_candidate(self) -> bool:
        return not self.repeated and self.stop - self.start == self.count and self.contractions >= 2


def find_blocks(graph: Graph) -> Graph:
    """The graph with ``blocks``, in the order of their ops."""
    signatures = _Signatures(graph)
    found: list[tuple[ModuleRun, tuple[Any, Any]]] = []
    stack = [module_tree(graph)]
    while stack:
        run = stack.pop()
        siblings = [child for child in run.children.values() if child.is_candidate]
        keys = {child.path: signatures.of(child) for child in siblings} if len(siblings) > 1 else {}
        if len({structure for structure, _ in keys.values()}) < len(keys):
            found += [(child, keys[child.path]) for child in siblings]
            stack += [child for child in run.children.values() if not child.is_candidate]
        else:
            stack += run.children.values()
    found.sort(key=lambda item: item[0].start)
    kinds: dict[Any, int] = {}
    blocks = tuple(Block(run.path, kinds.setdefault(key, len(kinds)), run.start, run.stop) for run, key in found)
    return replace(graph, blocks=blocks)


def module_tree(graph: Graph) -> ModuleRun:
    """The tree of the modules that made ops, each with its run."""
    weights = {param.value for param in graph.params if not param.buffer}
    weights |= {op.outputs[0] for op in graph.ops if op.target == TURN and op.inputs[0] in weights}
    root, operators = ModuleRun(""), default_rules().operators
    for index, op in enumerate(graph.ops):
        contracts = operators[op.target].kind == "matmul" and any(name in weights for name in op.inputs)
        for run in _ancestors(root, op.module):
            run.start = index if run.start < 0 else run.start
            run.stop = index + 1
            run.count += 1
            run.contractions += contracts
    return root


def _ancestors(root: ModuleRun, module: str) -> Iterator[ModuleRun]:
    """The runs that an op of this module belongs to; a later call of a module ("name@1") marks it as repeated."""
    run, path = root, ""
    yield run
    for part in module.split(".") if module else ():
        name, _, call = part.partition("@")
        path = f"{path}.{name}" if path else name
        run = run.children.setdefault(name, ModuleRun(path))
        run.repeated = run.repeated or bool(call)
        yield run


class _Signatures:
    """What makes two runs equal, as hashable values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.last_reader: dict[str, int] = {}
        self.params = {param.value: (param.buffer, param.persistent) for param in graph.params}
        self.trainable = {param.value for param in graph.params if param.trainable}
        for index, op in enumerate(graph.ops):
            for name in op.inputs:
                self.last_reader[name] = index
        for name in (*graph.outputs, *((graph.loss,) if graph.loss else ())):
            self.last_reader[name] = len(graph.ops)
        self.mutated = dict(graph.mutations)

    def of(self, run: ModuleRun) -> tuple[Any, Any]:
        """(the run in its own numbering: values in order of appearance, then the results that others read; what of these takes
        a gradient)."""
        numbers: dict[str, int] = {}
        outside: list[Any] = []
        gradients: list[Any] = []

        def number(ref: Ref) -> tuple[str, int]:
            if ref.name not in numbers:
                numbers[ref.name] = len(numbers)
                outside.append((numbers[ref.name], self._outside(ref.name)))
                gradients.append((self.graph.values[ref.name].differentiable, ref.name in self.trainable))
            return ("value", numbers[ref.name])

        body, results = [], []
        for op in self.graph.ops[run.start:run.stop]:
            body.append((op.target, *_hashable(op, number), len(op.outputs)))
            for name in op.outputs:
                numbers[name] = len(numbers)
                value = self.graph.values[name]
                results.append((value.shape, value.dtype, self.last_reader.get(name, -1) >= run.stop))
                gradients.append(value.differentiable)
        mutations = tuple((number_, numbers.get(self.mutated.get(name, ""))) for name, number_ in numbers.items()
                          if name in self.mutated)
        return (tuple(body), tuple(outside), tuple(results), mutations), tuple(gradients)

    def _outside(self, name: str) -> tuple[Any, ...]:
        value = self.graph.values[name]
        return (value.shape, value.dtype, self.params.get(name))


def _hashable(op: Op, number: Any) -> tuple[Any, Any]:
    return _frozen(map_refs(op.args, number)), _frozen(map_refs(op.kwargs, number))


def _frozen(tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return tuple(_frozen(item) for item in tree)
    return (type(tree).__name__, tree) if isinstance(tree, bool | int | float) else tree
