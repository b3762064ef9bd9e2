"""Why nothing runs: the operator that is left without a choice.

Every choice that has no partner along some edge is struck, until nothing changes (arc consistency). Where an operator loses its
last choice, it and its neighbours cannot be placed together. That is a proof where it ends so; it need not end so, for choices
may fit in pairs and not all together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler.placement.blockmodel import Model
from meshwright.compiler.placement.problem import Problem
from meshwright.ir.graph import Op

Open = list[NDArray[np.bool_]]
"""For every variable of a position which choices are still open."""


def nothing_runs(problem: Problem) -> str:
    """The message."""
    text, op = f"nothing runs on {problem.mesh} with microbatches={problem.schedule.microbatches}", dead_end(problem)
    return text if op is None else f"{text}: {op.target} of {op.module or 'the model'} ({op.source}) fits nothing around it"


def dead_end(problem: Problem) -> Op | None:
    """The first operator that is left without a choice, if pairs alone show one."""
    models = [problem.model(number) for number in range(len(problem.positions))]
    left: list[Open] = [[np.isfinite(table.sum(axis=1)) for table in model.unary] for model in models]
    before = -1
    while before != (before := sum(int(now.sum()) for position in left for now in position)):
        for number, (model, position) in enumerate(zip(models, left, strict=True)):
            empty = _strike(model, position)
            if empty is not None:
                return _operator(problem, number, empty)
        for first, second, here, there in zip(models, models[1:], left, left[1:], strict=False):
            for out, into in zip(first.exit, second.entry, strict=True):
                here[out] &= there[into]
                there[into] &= here[out]
    return None


def _strike(model: Model, left: Open) -> int | None:
    """Strike what has no partner; the first variable that has nothing left."""
    changed = True
    while changed:
        changed = False
        for edge in model.edges:
            rows = np.arange(edge.shape[0]) if edge.rows is None else edge.rows
            cols = np.arange(edge.shape[1]) if edge.cols is None else edge.cols
            fits = np.isfinite(edge.table.sum(axis=2))[np.ix_(rows, cols)]
            for var, partners in ((edge.i, fits[:, left[edge.j]].any(axis=1)), (edge.j, fits[left[edge.i]].any(axis=0))):
                if (left[var] & ~partners).any():
                    left[var] &= partners
                    changed = True
                if not left[var].any():
                    return var
    return None


def _operator(problem: Problem, number: int, var: int) -> Op | None:
    """The operator of a variable: its own, or the one that makes or first reads the value that it stands for."""
    ops = problem.positions[number].ops(problem.graph)
    if var < len(ops):
        return ops[var]
    model, first = problem.model(number), problem.positions[problem.serves(number)].ops(problem.graph)
    name = next((name for name, (at, _) in (*model.copies.items(), *model.states.items()) if at == var), None)
    at = next((i for i, op in enumerate(first) if name in op.outputs or name in op.inputs), None)
    return None if at is None else ops[at]
