"""Units of a model whose layers do not repeat.

Parameters are gathered, freed and reduced block by block, and pipelines are cut between blocks; a model without repeated layers
would be one unit: ZeRO-3 would free nothing, and there would be nowhere to cut. So where ``find_blocks`` finds none, a block is
the run of a module that

    is contiguous in the graph, and the module was called once;
    reads a trainable parameter of at least two dims that no other run reads;

if these runs cut the graph into a chain: each value with a gradient goes to the next position and no further (``find_units``).

Where they do not (skips, position biases, an encoder's output), a pipeline is cut between innermost *layers*: modules of at
least two contractions, with siblings of that sort; if few values are read across them (``find_layers``). Without a pipeline
such a model stays one unit: what is read across layers costs the solver more than units of so small a model bring.

Where there are no such layers either (weights called again and again, skips between convolutions), it is cut wherever few
values cross, of those that parameters made (``_narrow``).

Every unit is of a kind of its own. Names have no influence, only which module made which operator.

Where a pin cuts inside a block, the block is two (``split_at``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshwright.compiler.structure.blocks import ModuleRun, module_tree
from meshwright.compiler.structure.positions import positions_of
from meshwright.ir.graph import Block, Graph
from meshwright.ir.writing.names import names_of

_SHARED = 4
"""As many values may be read across layers: the solver tries all combinations of their shardings."""
_ENOUGH, _MOST = 4, 16
"""Units between narrow places: with as many no wider places are taken; weights are counted so that there are no more."""


def find_units(graph: Graph) -> Graph:
    """The graph with units as blocks, if it has no blocks and at least two units."""
    return graph if graph.blocks else _cut_at(graph, _owners(graph), 0)


def find_layers(graph: Graph) -> Graph:
    """The graph with layers as blocks, else with what lies between narrow places, if it has none and two or more of these."""
    if graph.blocks:
        return graph
    layers = _cut_at(graph, _layers(module_tree(graph)), _SHARED)
    if layers.blocks:
        return layers
    found = [_cut_at(graph, _narrow(graph, width), _SHARED) for width in range(1, _SHARED + 1)]
    return next((one for one in found if len(one.blocks) >= _ENOUGH), max(found, key=lambda one: len(one.blocks)))


def _narrow(graph: Graph, width: int) -> list[tuple[str, int, int]]:
    """(name, start, stop) of runs that read weights, between places that at most ``width`` values cross; at most ``_MOST``."""
    last = {name: index for index, op in enumerate(graph.ops) for name in op.inputs}
    weights = {param.value for param in graph.params if not param.buffer and len(graph.values[param.value].shape) >= 2}
    share = max(1, -(-sum(not weights.isdisjoint(op.inputs) for op in graph.ops) // _MOST))
    units: list[tuple[str, int, int]] = []
    crossing: set[str] = set()
    start = read = 0
    for index, op in enumerate(graph.ops):
        if len(crossing) <= width and read >= share:
            units.append((graph.ops[start].name, start, index))
            start, read = index, 0
        read += not weights.isdisjoint(op.inputs)
        if op.name not in graph.parameter_free:
            crossing |= {name for name in op.outputs if last.get(name, -1) > index}
        crossing = {name for name in crossing if last[name] > index}
    return [*units, (graph.ops[start].name, start, len(graph.ops))] if read else units


def split_at(graph: Graph, names: Iterable[str]) -> Graph:
    """The graph with blocks that start at each of the named modules or operators too; those it does not have are left out.

    Blocks of one kind that are split in the same place stay of one kind, a new one for each part.
    """
    kinds: dict[tuple[int, int, int], int] = {}
    for name in names:
        at = start_of(graph, name)
        if at is None or at in (0, *(edge for block in graph.blocks for edge in (block.start, block.stop))):
            continue
        block = next((block for block in graph.blocks if block.start < at < block.stop), None)
        following = min((block.start for block in graph.blocks if block.start > at), default=len(graph.ops))
        start, stop, kind = (block.start, block.stop, block.kind) if block else (at, following, -1)
        parts = [Block(path, kinds.setdefault((kind, first - start, last - start), _new(graph, kinds)), first, last)
                 for path, first, last in ((block.path if block else "", start, at), (name, at, stop)) if first < last]
        rest = [other for other in graph.blocks if other != block]
        graph = replace(graph, blocks=tuple(sorted((*rest, *parts), key=lambda block: block.start)))
    return graph


def start_of(graph: Graph, name: str) -> int | None:
    """The first operator of a module, or the operator of that name (its own, or as pins name it: "layers.0.mlp:relu")."""
    if ":" in name:
        known = names_of(graph).op_of
        return next((i for i, op in enumerate(graph.ops) if op.name == known.get(name)), None)
    where = (i for i, op in enumerate(graph.ops) if name in (op.name, op.module) or op.module.startswith(f"{name}."))
    return next(where, None)


def _new(graph: Graph, kinds: Mapping[tuple[int, int, int], int]) -> int:
    """A kind that no block has."""
    return max((*(block.kind for block in graph.blocks), *kinds.values()), default=-1) + 1


def _cut_at(graph: Graph, units: list[tuple[str, int, int]], shared: int) -> Graph:
    """The graph with these blocks if they are several, and no more values than ``shared`` are read across them."""
    found = replace(graph, blocks=tuple(Block(path, kind, start, stop) for kind, (path, start, stop) in enumerate(units)))
    positions, _ = positions_of(found)
    return found if len(units) > 1 and len({name for p in positions for name in p.shared_in}) <= shared else graph


def _owners(graph: Graph) -> list[tuple[str, int, int]]:
    """The runs that own a matrix."""
    runs = _runs(graph)
    where = {index: number for number, (_, start, stop) in enumerate(runs) for index in range(start, stop)}
    readers: dict[str, set[int]] = {}
    for index, op in enumerate(graph.ops):
        for name in op.inputs:
            readers.setdefault(name, set()).add(where[index])
    matrices = [param.value for param in graph.params if param.trainable and len(graph.values[param.value].shape) >= 2]
    owners = {next(iter(readers[name])) for name in matrices if len(readers.get(name, ())) == 1}
    called = [path for path, _, _ in runs]
    return [run for number, run in enumerate(runs) if number in owners and run[0] and called.count(run[0]) == 1]


def _runs(graph: Graph) -> list[tuple[str, int, int]]:
    """(module, start, stop) of the runs of operators that one module made."""
    runs: list[tuple[str, int, int]] = []
    for index, op in enumerate(graph.ops):
        if runs and runs[-1][0] == op.module:
            runs[-1] = (op.module, runs[-1][1], index + 1)
        else:
            runs.append((op.module, index, index + 1))
    return runs


def _layers(tree: ModuleRun) -> list[tuple[str, int, int]]:
    """(module, start, stop) of the innermost layers, in the order of their operators."""
    return sorted(((run.path, run.start, run.stop) for run in _innermost(tree)), key=lambda unit: unit[1])


def _innermost(run: ModuleRun) -> Iterable[ModuleRun]:
    children = run.children.values()
    alone = sum(child.is_candidate for child in children) < 2
    for child in children:
        inner = list(_innermost(child))
        yield from inner or ([child] if child.is_candidate and not alone else [])
