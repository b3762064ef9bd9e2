"""Units of a model whose layers do not repeat: the modules that own a matrix, if they follow each other.

Parameters are gathered, freed and reduced block by block; a model without repeated layers would be one unit, and ZeRO-3 would
free nothing. So where ``find_blocks`` finds none, a block is the run of a module that

    is contiguous in the graph, and the module was called once;
    reads a trainable parameter of at least two dims that no other run reads;

and only if these runs cut the graph into a chain: each value with a gradient goes to the next position and no further. Every
unit is of a kind of its own. Names have no influence, only which module made which operator.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.positions import cut
from meshwright.graph import Block, Graph


def find_units(graph: Graph) -> Graph:
    """The graph with units as blocks, if it has no blocks and at least two units."""
    if graph.blocks:
        return graph
    runs = _runs(graph)
    where = {index: number for number, (_, start, stop) in enumerate(runs) for index in range(start, stop)}
    readers: dict[str, set[int]] = {}
    for index, op in enumerate(graph.ops):
        for name in op.inputs:
            readers.setdefault(name, set()).add(where[index])
    matrices = [param.value for param in graph.params if param.trainable and len(graph.values[param.value].shape) >= 2]
    owners = {next(iter(readers[name])) for name in matrices if len(readers.get(name, ())) == 1}
    called = [path for path, _, _ in runs]
    units = [run for number, run in enumerate(runs) if number in owners and run[0] and called.count(run[0]) == 1]
    found = replace(graph, blocks=tuple(Block(path, kind, start, stop) for kind, (path, start, stop) in enumerate(units)))
    positions, _ = cut(found)
    return found if len(units) > 1 and not any(position.shared_in for position in positions) else graph


def _runs(graph: Graph) -> list[tuple[str, int, int]]:
    """(module, start, stop) of the runs of operators that one module made."""
    runs: list[tuple[str, int, int]] = []
    for index, op in enumerate(graph.ops):
        if runs and runs[-1][0] == op.module:
            runs[-1] = (op.module, runs[-1][1], index + 1)
        else:
            runs.append((op.module, index, index + 1))
    return runs
