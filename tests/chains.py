"""Random blocks and chains for the tests of the solver, small enough to enumerate."""

from __future__ import annotations

import numpy as np

from meshwright.compiler.solver.chain import BlockModel, Chain, Edge, Kind

RESOURCES = 4
"""Compute, communication, bytes held, transient bytes."""


def random_block(rng: np.random.Generator, sizes: tuple[int, ...], forbidden: float = 0.0) -> BlockModel:
    """A block with random edges, two of them over one shared table; ``forbidden`` is the share of pairs with inf."""
    n, top = len(sizes), max(sizes)
    common = rng.random((top, top, RESOURCES))
    common[rng.random((top, top)) < forbidden] = np.inf
    edges: list[Edge] = []
    for i in range(n):
        for j in range(i + 1, n):
            kind = rng.random()
            if kind < 0.4:
                table = rng.random((sizes[i], sizes[j], RESOURCES))
                table[rng.random((sizes[i], sizes[j])) < forbidden] = np.inf
                edges.append(Edge(i, j, table) if kind < 0.2 else Edge(j, i, table.transpose(1, 0, 2)))
            elif kind < 0.6:
                edges.append(Edge(i, j, common, rng.permutation(top)[: sizes[i]], rng.integers(0, top, sizes[j])))
    return BlockModel(sizes, tuple(rng.random((s, RESOURCES)) for s in sizes), tuple(edges))


def random_chain(
    seed: int,
    rows: int = 1,
    transient: bool = False,
    sequence: tuple[int, ...] = (0, 1, 1, 1, 2),
    shared: bool = False,
    variants: int = 2,
    boundary: int = 1,
    alike: bool = False,
    forbidden: float = 0.0,
    choices: int = 3,
) -> Chain:
    """Three kinds, boundaries of ``boundary`` binary variables, optionally one variable of so many ``choices`` shared by all
    positions. ``alike``: the variants of a kind differ in what single variables cost alone."""
    rng = np.random.default_rng(seed)
    kinds = []
    for _ in range(3):
        sizes = (2,) * (2 * boundary) + (choices if shared else int(rng.integers(2, 4)),)
        blocks = tuple(random_block(rng, sizes, forbidden) for _ in range(variants))
        if alike:
            blocks = tuple(BlockModel(sizes, block.unary, blocks[0].edges) for block in blocks)
        costs = tuple(rng.random(RESOURCES) * 0.2 for _ in blocks)
        entry, leave = tuple(range(boundary)), tuple(range(boundary, 2 * boundary))
        kinds.append(Kind(blocks, costs, entry, leave, ((0, 2 * boundary),) if shared else ()))
    time_rows = rng.random((rows, RESOURCES)) * [1, 1, 0, 0]
    bytes_row, transient_rows = np.array([0, 0, 1.0, 0]), np.array([[0, 0, 0, 0.8], [0, 0, -0.5, 1.2]]) * transient
    sizes = (choices,) if shared else ()
    return Chain(tuple(kinds), sequence, sizes, time_rows, bytes_row, transient_rows, fixed_bytes=0.5, fixed_time=0.1)
