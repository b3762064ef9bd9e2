"""The shardings in which positions can hand a value to the next, of all that a value of its shape could have.

A model's boundary variables start out with every sharding (``ResourceTables.states``), because a model serves several positions
and is built without its neighbours. Which of them some operator leaves the value in is known once all models are there: equal
positions and neighbours agree on their variables, so what one of a connected set can leave is what all of them can have. The
others are forbidden choices, which the solver would only carry along: a mesh of data and tensor ranks leaves about five of
two dozen.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.placement.blockmodel import Model, pruned
from meshwright.compiler.solver.chain import Edge

Indices = NDArray[np.intp]


def reachable(models: Mapping[int, Model], serves: Sequence[int]) -> dict[int, Model]:
    """The models with boundary variables of those shardings only that some operator can leave. ``serves``: the model of every
    position, in order."""
    linked: nx.Graph[tuple[int, int]] = nx.Graph()
    linked.add_nodes_from((number, var) for number, model in models.items() for var in model.exit)
    for left, right in itertools.pairwise(serves):
        pairs = zip(models[left].exit, models[right].entry, strict=True)
        linked.add_edges_from(((left, out), (right, into)) for out, into in pairs)
    kept: dict[int, dict[int, Indices]] = {number: {} for number in models}
    for together in nx.connected_components(linked):
        left_in = {state for number, var in together for state in _left_in(models[number], var)}
        if left_in:
            for number, var in together:
                kept[number][var] = np.array(sorted(left_in), dtype=np.intp)
    return {number: _restricted(model, kept[number]) for number, model in models.items()}


def _left_in(model: Model, var: int) -> set[int]:
    """The states of a boundary variable in which an operator of the model leaves its value."""
    found: set[int] = set()
    for name in model.leaving:
        at, states = model.states[name]
        if at == var:
            index = {state: number for number, state in enumerate(states)}
            op, result = model.leaving[name]
            found.update(index[p.results[result]] for p in model.placed[op] if p.results[result] in index)
    return found


def _restricted(model: Model, kept: Mapping[int, Indices]) -> Model:
    """The model with some variables at some of their choices, and copies of their values at what is asked for or handed on;
    pruned."""
    kept = {var: rows for var, rows in {**kept, **_copies(model, kept)}.items() if len(rows) < model.sizes[var]}
    everything = [kept.get(var, np.arange(size)) for var, size in enumerate(model.sizes)]
    edges = [
        Edge(
            e.i, e.j, e.table, everything[e.i] if e.rows is None else e.rows[everything[e.i]],
            everything[e.j] if e.cols is None else e.cols[everything[e.j]],
        ) if e.i in kept or e.j in kept else e
        for e in model.edges
    ]
    left = replace(
        model, sizes=[len(rows) for rows in everything], edges=edges,
        unary=[unary[rows] for unary, rows in zip(model.unary, everything, strict=True)],
        states={name: (var, [states[n] for n in everything[var]]) for name, (var, states) in model.states.items()},
        copies={name: (var, [options[n] for n in everything[var]]) for name, (var, options) in model.copies.items()},
    )
    return pruned(left, kept)


def _copies(model: Model, kept: Mapping[int, Indices]) -> dict[int, Indices]:
    """The choices of copies of what a position is handed that have a use: some reader asks for them, or it is handed on so."""
    found = {}
    for name, (var, options) in model.copies.items():
        at, states = model.states.get(name, (-1, []))
        if at in kept:
            useful = model.asked[name].union(states[n] for n in kept[at])
            found[var] = np.array([n for n, option in enumerate(options) if option in useful], dtype=np.intp)
    return found
