"""Small linear programs, written row by row.

A program is written as a proto: building it through the modelling classes takes longer than solving it, with HiGHS. One that
is solved again and again with more rows is GLOP's, which goes on from where it was (seen: 2.2 times as fast); what GLOP finds
no optimum of, HiGHS is asked. One in which some sums are whole numbers is SCIP's, without cuts and heuristics: a bound is asked
for, no solution (seen: a tenth to all of what HiGHS takes). All are told to stop after so many steps, not seconds, so that a
program has the same answer on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

ITERATIONS = 20_000
"""Limit of one program."""
_NODES, _CLOSE = 20, 0.001
"""Where numbers are whole, the cases that are told apart at most; a bound so near to the best that was found is enough."""
_STUCK = 2
"""A program that goes on where it was is stuck after so many iterations a row (seen: one at most where it was not, and 30 s
where it was)."""
_NOTHING = 1e-13
"""A weight is nothing beside one of its row that is so many times larger (of sums of one, rounding leaves 1e-16 and more)."""
Term = tuple[np.ndarray, np.ndarray | float]
"""Variables and their weights."""
Row = tuple[Sequence[Term], float, float]
"""The sum of terms is within two limits."""
_Part = tuple[np.ndarray, np.ndarray]
"""The variables of a row and their weights."""
_Row = tuple[_Part, float, float]
_FAILURES = (AttributeError, RuntimeError, ValueError)
"""How a failure of a solver's own shows."""
_NONE = (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED)


class NoSolutionError(Exception):
    """No values of the variables are within all limits."""


class UnsolvedError(Exception):
    """The solver ended without an answer: no more is known than before."""


class LinearProgram:
    """Rows over variables that are no less than 0; there is one variable to begin with, number 0."""

    def __init__(self) -> None:
        self.count = 1
        self.integers: list[int] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.parts: list[_Part] = []
        self._growing: _Growing | None = None

    def variables(self, *shape: int) -> np.ndarray:
        """New variables, as their numbers."""
        first, self.count = self.count, self.count + math.prod(shape)
        return np.arange(first, self.count).reshape(shape)

    def add(self, terms: Sequence[Term], lower: float, upper: float = math.inf) -> None:
        """A row: the sum of weights x variables, each of which is named once, is within the limits."""
        self.parts.append(_part(terms))
        self.lower.append(lower)
        self.upper.append(upper)

    def make_whole(self, terms: Sequence[Term]) -> None:
        """The sum of weights x variables is a whole number, where ``minimum`` is asked for that."""
        number = self.variables(1)
        self.add([*terms, (number, -1.0)], 0.0, 0.0)
        self.integers.append(int(number[0]))

    def minimum(self, objective: Mapping[int, float]) -> float:
        """What the sum of weights x variables is at least: the minimum, if there was time to find it. Raises
        NoSolutionError."""
        try:
            result = self._solved(objective)
        except UnsolvedError:
            return -math.inf
        proven = self.integers or result.termination.reason == mathopt.TerminationReason.OPTIMAL
        return float(result.dual_bound()) if proven else -math.inf

    def solution(self, objective: Mapping[int, float], rows: Sequence[Row] = ()) -> tuple[float, np.ndarray]:
        """What ``minimum`` gives, and values of all variables at which it is so, with some more rows. The objective is the same
        in every call. Raises NoSolutionError, UnsolvedError."""
        more = [(_part(terms), lower, upper) for terms, lower, upper in rows]
        if self._growing is None:
            self._growing = _Growing(mathopt.Model.from_model_proto(self._proto(objective)), len(self.parts))
        done = self._growing.count
        for row in zip(self.parts[done:], self.lower[done:], self.upper[done:], strict=True):
            self._growing.add(*row)
        result = self._growing.solved(more)
        if result is None:
            result = self._solved(objective, more, values=True)
            if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
                raise UnsolvedError
        found = np.zeros(self.count)
        for variable, value in result.variable_values().items():
            found[variable.id] = value
        return float(result.dual_bound()), found

    def _solved(self, objective: Mapping[int, float], rows: Sequence[_Row] = (), values: bool = False) -> mathopt.SolveResult:
        """Minimize; ``values``: of the variables too. Raises NoSolutionError, UnsolvedError."""
        result = self._run(mathopt.Model.from_model_proto(self._proto(objective, rows)), values)
        if result.termination.reason in _NONE:
            raise NoSolutionError
        return result

    def _proto(self, objective: Mapping[int, float], rows: Sequence[_Row] = ()) -> model_pb2.ModelProto:
        parts = [*self.parts, *(part for part, _, _ in rows)]
        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(self.count))
        proto.variables.lower_bounds.extend([0.0] * self.count)
        proto.variables.upper_bounds.extend([math.inf] * self.count)
        whole = set(self.integers)
        proto.variables.integers.extend([number in whole for number in range(self.count)])
        proto.linear_constraints.ids.extend(range(len(parts)))
        proto.linear_constraints.lower_bounds.extend([*self.lower, *(lower for _, lower, _ in rows)])
        proto.linear_constraints.upper_bounds.extend([*self.upper, *(upper for _, _, upper in rows)])
        matrix = proto.linear_constraint_matrix
        for row, (columns, weights) in enumerate(parts):
            order = columns.argsort()
            matrix.row_ids.extend([row] * len(columns))
            matrix.column_ids.extend(columns[order].tolist())
            matrix.coefficients.extend(weights[order].tolist())
        proto.objective.linear_coefficients.ids.extend(sorted(objective))
        proto.objective.linear_coefficients.values.extend(objective[variable] for variable in sorted(objective))
        return proto

    def _run(self, model: mathopt.Model, values: bool) -> mathopt.SolveResult:
        kind, params = mathopt.SolverType.HIGHS, mathopt.SolveParameters(iteration_limit=ITERATIONS)
        if self.integers:
            kind, params = mathopt.SolverType.GSCIP, mathopt.SolveParameters(
                node_limit=_NODES, relative_gap_tolerance=_CLOSE, cuts=mathopt.Emphasis.OFF, heuristics=mathopt.Emphasis.OFF,
            )
        try:
            return mathopt.solve(model, kind, params=params, model_params=_read(values))
        except _FAILURES as error:
            raise UnsolvedError from error


class _Growing:
    """A program that stays with its solver while rows are added: ``count`` of them are there for good."""

    def __init__(self, model: mathopt.Model, count: int) -> None:
        self.model, self.count = model, count
        self._variables = list(model.variables())
        self._solver: mathopt.IncrementalSolver | None = None

    def add(self, part: _Part, lower: float, upper: float) -> None:
        """A row that stays."""
        self._add(part, lower, upper)
        self.count += 1

    def solved(self, rows: Sequence[_Row]) -> mathopt.SolveResult | None:
        """The optimum with some more rows, which do not stay; None if it was not found."""
        for_now = [self._add(*row) for row in rows]
        try:
            if self._solver is None:
                self._solver = mathopt.IncrementalSolver(self.model, mathopt.SolverType.GLOP)
            limit = min(ITERATIONS, _STUCK * (self.count + len(rows)) + 100)
            params = mathopt.SolveParameters(iteration_limit=limit, presolve=mathopt.Emphasis.OFF)  # it goes on from there
            result = self._solver.solve(params=params, model_params=_read(values=True))
        except _FAILURES:
            self._solver = None
            return None
        finally:
            for row in for_now:
                self.model.delete_linear_constraint(row)
        if result.termination.limit is not None:
            self._solver = None  # from the beginning, if it is asked again
        return result if result.termination.reason == mathopt.TerminationReason.OPTIMAL else None

    def _add(self, part: _Part, lower: float, upper: float) -> mathopt.LinearConstraint:
        row = self.model.add_linear_constraint(lb=lower, ub=upper)
        for column, weight in zip(part[0].tolist(), part[1].tolist(), strict=True):
            row.set_coefficient(self._variables[column], weight)
        return row


def _read(values: bool) -> mathopt.ModelSolveParameters:
    """No more than what is read, since reading takes a while."""
    none, every = mathopt.SparseVectorFilter(filtered_items=[]), mathopt.SparseVectorFilter(skip_zero_values=True)
    return mathopt.ModelSolveParameters(
        variable_values_filter=every if values else none, reduced_costs_filter=none, dual_values_filter=none
    )


def _part(terms: Sequence[Term]) -> _Part:
    """The variables of a row and their weights, without those that rounding left (``_NOTHING``): GLOP says of programs that
    have them that there is no solution, and HiGHS, which finds one, begins anew each time."""
    values = [np.empty(columns.shape) for columns, _ in terms]
    for value, (_, weights) in zip(values, terms, strict=True):
        value[...] = weights
    columns, weights = np.concatenate([columns.ravel() for columns, _ in terms]), np.concatenate([v.ravel() for v in values])
    sizes = np.abs(weights)
    some = sizes > _NOTHING * sizes.max(initial=0.0)
    return columns[some], weights[some]
