"""A graph without the copies of its repeated blocks: what is priced once for all of them is built once.

Equal blocks that follow each other (``positions.alike``, with kernels fused alike) get the same model, so two of them say
everything: the first, which hands on to its like, and the second, which hands on to whatever follows the run. Their chain is
stretched to its full length again (``Folded.serves``), so the solver still chooses for every copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.compiler.structure.positions import Position, alike, positions_of, renaming, several_readers
from meshwright.cost.compute import fusion
from meshwright.ir.declared.operator import Operators
from meshwright.ir.graph import Block, Graph, Op, Ref, map_refs

_KEPT = 2
"""Copies of a layer that stay, so that there still is an edge from one to the next."""


@dataclass(frozen=True)
class Folded:
    """``graph``: the short graph. ``positions``: those of the whole graph; ``serves``: for each the position of the short graph
    that stands for it; ``renamed``: values of dropped positions that others read -> those that stand for them."""

    graph: Graph
    positions: tuple[Position, ...]
    serves: tuple[int, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)


def fold(
    graph: Graph, operators: Operators, apart: Callable[[Position, Graph], object] = lambda position, graph: None
) -> Folded:
    """The graph with two copies of every run of equal blocks; ``apart``: what else must be equal. The first and the last layer
    of a model stay where their kernels are fused with others than those of the rest."""
    positions, _ = positions_of(graph)
    runs = [run for run in _runs(positions, graph, operators, apart) if not any(positions[n].shared_out for n in run)]
    dropped = {n for run in runs for n in run[_KEPT:]}
    if not dropped:
        return Folded(graph, tuple(positions), tuple(range(len(positions))))
    renamed: dict[str, str] = {}
    last_kept: dict[int, int] = {}
    for run in runs:
        stands = run[_KEPT - 1]
        last_kept.update(dict.fromkeys(run[_KEPT:], stands))
        own = {name for op in positions[run[-1]].ops(graph) for name in op.outputs}
        names = renaming(positions[stands], positions[run[-1]], graph)
        renamed.update({theirs: ours for ours, theirs in names.items() if theirs in own})
    short = _without(graph, positions, dropped, renamed)
    index = {n: at for at, n in enumerate(n for n in range(len(positions)) if n not in dropped)}
    serves = tuple(index[last_kept.get(n, n)] for n in range(len(positions)))
    return Folded(short, tuple(positions), serves, renamed)


def _runs(
    positions: Sequence[Position], graph: Graph, operators: Operators, apart: Callable[[Position, Graph], object]
) -> list[list[int]]:
    """Positions of equal blocks that follow each other, more than are kept."""
    tied = several_readers(graph)
    fused = fusion(graph, operators)
    keys = [
        n if p.block < 0 else (alike(p, graph, tied), fused[p.start : p.stop], apart(p, graph)) for n, p in enumerate(positions)
    ]
    runs: list[list[int]] = []
    for n, key in enumerate(keys):
        if n and key == keys[n - 1]:
            runs[-1].append(n)
        else:
            runs.append([n])
    return [run for run in runs if len(run) > _KEPT]


def _without(graph: Graph, positions: Sequence[Position], dropped: set[int], renamed: dict[str, str]) -> Graph:
    """The graph without some positions; what read their results reads those that stand for them."""

    def rename(ref: Ref) -> Ref:
        return Ref(renamed.get(ref.name, ref.name))

    ops: list[Op] = []
    blocks: list[Block] = []
    for n, position in enumerate(positions):
        if n in dropped:
            continue
        start = len(ops)
        for op in position.ops(graph):
            ops.append(replace(op, args=map_refs(op.args, rename), kwargs=map_refs(op.kwargs, rename)))
        if position.block >= 0:
            blocks.append(replace(graph.blocks[position.block], start=start, stop=len(ops)))
    made = {name for op in ops for name in op.outputs}
    read = {name for op in ops for name in op.inputs}
    params = tuple(param for param in graph.params if param.value in read)
    held = made | set(graph.inputs) | {param.value for param in params}
    return replace(
        graph, ops=tuple(ops), blocks=tuple(blocks), params=params,
        values={name: value for name, value in graph.values.items() if name in held},
        output_tree=_kept(map_refs(graph.output_tree, rename), held),
        mutations=tuple((old, new) for old, new in graph.mutations if old in held and new in held),
        constants={name: value for name, value in graph.constants.items() if name in held},
    )


def _kept(tree: object, held: set[str]) -> object:
    """An output tree without the values that are gone."""
    return map_refs(tree, lambda ref: ref if ref.name in held else None)
