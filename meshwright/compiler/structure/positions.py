"""Where a graph is cut into positions, and what passes between them.

A *position* is a block, or a run of the root's operators between blocks. What parameters made, trained or frozen, is handed on
where only the next position reads it (``exit`` there, ``entry`` here) and *shared* by all where others do. What is made of
inputs and buffers alone (masks, position tables) leaves in one form that is known before (``choices.handed_out``), of which
each reader slices its part freely: it couples nothing.

Blocks of one kind that stand in the chain in the same way are ``alike``: one model serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.ir.graph import Graph, Op

Place = tuple[int, int]
"""(operator of the position, operand or result of it)."""


@dataclass
class Position:
    """One position of the chain. ``block``: index of the block, -1 for a run of the root."""

    start: int
    stop: int
    block: int
    entry: list[str] = field(default_factory=list)
    exit: list[str] = field(default_factory=list)
    shared_in: list[str] = field(default_factory=list)
    shared_out: list[str] = field(default_factory=list)

    def ops(self, graph: Graph) -> tuple[Op, ...]:
        """The operators of the position."""
        return graph.ops[self.start : self.stop]


def positions_of(graph: Graph) -> tuple[list[Position], frozenset[str]]:
    """(positions, values made of inputs and buffers alone that leave their position)."""
    positions, at = [], 0
    for index, block in enumerate(graph.blocks):
        if block.start > at:
            positions.append(Position(at, block.start, -1))
        positions.append(Position(block.start, block.stop, index))
        at = block.stop
    if at < len(graph.ops) or not positions:
        positions.append(Position(at, len(graph.ops), -1))
    makers = {name: n for n, position in enumerate(positions) for op in position.ops(graph) for name in op.outputs}
    alone: set[str] = set()
    readers: dict[str, dict[int, None]] = {}
    for number, position in enumerate(positions):
        for name in (name for op in position.ops(graph) for name in op.inputs):
            if makers.get(name, number) == number:
                continue
            if name in graph.parameter_free_values:
                alone.add(name)
            else:
                readers.setdefault(name, {})[number] = None
    for name, numbers in readers.items():
        maker = makers[name]
        if list(numbers) == [maker + 1]:
            positions[maker].exit.append(name)
            positions[maker + 1].entry.append(name)
        else:
            positions[maker].shared_out.append(name)
            for number in numbers:
                positions[number].shared_in.append(name)
    return positions, frozenset(alone)


def several_readers(graph: Graph) -> frozenset[str]:
    """Parameters that several operators read (tied weights)."""
    parameters = {param.value for param in graph.params if not param.buffer}
    count: dict[str, int] = {}
    for op in graph.ops:
        for name in dict.fromkeys(op.inputs):
            if name in parameters:
                count[name] = count.get(name, 0) + 1
    return frozenset(name for name, number in count.items() if number > 1)


def alike(position: Position, graph: Graph, tied: frozenset[str]) -> object:
    """Equal for blocks that one model can serve: the same kind, handing on and reading at the same places."""
    ops = position.ops(graph)
    made = results(ops)
    first = {name: places[0] for name, places in operands(ops).items()}
    return (
        graph.blocks[position.block].kind, tuple(made[n] for n in position.exit), tuple(first[n] for n in position.entry),
        tuple((n, first[n]) for n in position.shared_in), tuple((n, made[n]) for n in position.shared_out),
        tuple(name for name in first if name in tied),
    )


def results(ops: tuple[Op, ...]) -> dict[str, Place]:
    """Where each value is made."""
    return {name: (i, k) for i, op in enumerate(ops) for k, name in enumerate(op.outputs)}


def operands(ops: tuple[Op, ...]) -> dict[str, list[Place]]:
    """Where each value is read, in order."""
    found: dict[str, list[Place]] = {}
    for i, op in enumerate(ops):
        for k, name in enumerate(op.inputs):
            found.setdefault(name, []).append((i, k))
    return found


def renaming(first: Position, other: Position, graph: Graph) -> dict[str, str]:
    """Values of one block -> those of another that is alike."""
    names: dict[str, str] = {}
    for a, b in zip(first.ops(graph), other.ops(graph), strict=True):
        names.update(zip(a.inputs, b.inputs, strict=True))
        names.update(zip(a.outputs, b.outputs, strict=True))
    return names
