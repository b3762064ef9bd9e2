"""Small linear programs, written row by row.

A program is written as a proto: building it through the modelling classes takes longer than solving it, with HiGHS. One that
is solved again and again with more rows is GLOP's, which goes on from where it was (seen: 2.2 times as fast); what GLOP finds
no optimum of, HiGHS is asked. One in which some sums are whole numbers is SCIP's, without cuts and heuristics: a bound is asked
for, no solution (seen: a tenth to all of what HiGHS takes). All are told to stop after so many steps or cases, not seconds, so
that a program has the same answer on every machine.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from ortools.linear_solver import pywraplp
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from meshwright.compiler.solver.effort import GLOP, HIGHS, SCIP

ITERATIONS = 20_000
"""Limit of one program."""
SAFE = 1 + 5e-6
"""More than what the solvers' tolerances were seen to make of a bound."""
_NEAR = 0.001
"""Where numbers are whole, a bound so near to the best that was found is enough."""
_FIRST = 1_000_000
"""Cases of the least bound go before others (seen: of 1,000 cases a third to two thirds of what is left of a gap)."""
_STUCK = 2
"""A program that goes on where it was is stuck after so many iterations a row (seen: one at most where it was not, and 30 s
where it was)."""
_NOTHING = 1e-13
"""A weight is nothing beside one of its row that is so many times larger (of sums of one, rounding leaves 1e-16 and more)."""
Term = tuple[np.ndarray, np.ndarray | float]
"""Variables and their weights."""
_Part = tuple[np.ndarray, np.ndarray]
"""The variables of a row and their weights."""
_FAILURES = (AttributeError, RuntimeError, ValueError)
"""How a failure of a solver's own shows."""
_GOES_ON = pywraplp.MPSolverParameters()
"""From where it was, without a look at the whole program first."""
_GOES_ON.SetIntegerParam(_GOES_ON.INCREMENTALITY, _GOES_ON.INCREMENTALITY_ON)
_GOES_ON.SetIntegerParam(_GOES_ON.PRESOLVE, _GOES_ON.PRESOLVE_OFF)
_NONE = (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED)


class NoSolutionError(Exception):
    """No values of the variables are within all limits."""


@contextmanager
def aside() -> Iterator[None]:
    """What solvers print of their own accord (seen: HiGHS, of integer programs) goes to the standard error meanwhile: the
    standard output is for what a program was asked for."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):  # there is no such output
        yield
        return
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


class UnsolvedError(Exception):
    """The solver ended without an answer: no more is known than before."""


class LinearProgram:
    """Rows over variables that are no less than 0; there is one variable to begin with, number 0. ``steps``: iterations that
    ``whole`` took; ``work``: nominal seconds of all that was solved (``effort``)."""

    def __init__(self) -> None:
        self.count = 1
        self.integers: list[int] = []
        self.steps, self.work = 0, 0.0
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.parts: list[_Part] = []
        self._growing: _Growing | None = None

    @property
    def numbers(self) -> int:
        """Of the program as it is."""
        return sum(len(columns) for columns, _ in self.parts)

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
        """The sum of weights x variables is a whole number, where ``whole`` asks."""
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
        optimal = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        return float(result.dual_bound()) if optimal else -math.inf

    def solution(self, objective: Mapping[int, float], again: bool = True) -> tuple[float, np.ndarray]:
        """What ``minimum`` gives, and values of all variables at which it is so. ``again``: this is asked with more rows and no
        new variables, and goes on from where it was; else it is solved by itself, in half the time. Raises NoSolutionError,
        UnsolvedError."""
        if not again:
            return self._alone(objective)
        if self._growing is None:
            self._growing = _Growing(objective, self.count)
        done = self._growing.count
        for row in zip(self.parts[done:], self.lower[done:], self.upper[done:], strict=True):
            self._growing.add(*row)
        found, took = self._growing.solved()
        self.work += took
        return self._alone(objective) if found is None else found

    def _alone(self, objective: Mapping[int, float]) -> tuple[float, np.ndarray]:
        """A minimum with its values, whatever was solved before. Raises NoSolutionError, UnsolvedError."""
        result = self._solved(objective, values=True)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            raise UnsolvedError
        return float(result.dual_bound()), self._values(result)

    def let_go(self) -> None:
        """``solution`` is not asked for again: what it goes on from is let go of."""
        self._growing = None

    def whole(self, objective: Mapping[int, float], cases: int) -> tuple[float, np.ndarray | None]:
        """What the sum of weights x variables is at least where all that was made whole is, and values of all variables with
        the least that was found, if any, when so many ``cases`` were told apart. Raises NoSolutionError, UnsolvedError."""
        result = self._solved(objective, values=True, cases=cases)
        return float(result.dual_bound()), self._values(result) if result.has_primal_feasible_solution() else None

    def _values(self, result: mathopt.SolveResult) -> np.ndarray:
        found = np.zeros(self.count)
        for variable, value in result.variable_values().items():
            found[variable.id] = value
        return found

    def _solved(self, objective: Mapping[int, float], values: bool = False, cases: int = 0) -> mathopt.SolveResult:
        """Minimize; ``values``: of the variables too; ``cases``: as of ``whole``. Raises NoSolutionError, UnsolvedError."""
        kind, params = mathopt.SolverType.HIGHS, mathopt.SolveParameters(iteration_limit=ITERATIONS)
        if cases:
            kind, params = mathopt.SolverType.GSCIP, mathopt.SolveParameters(
                node_limit=cases, relative_gap_tolerance=_NEAR, cuts=mathopt.Emphasis.OFF, heuristics=mathopt.Emphasis.OFF,
            )
            params.gscip.long_params["lp/iterlim"] = ITERATIONS  # of each program on the way
            params.gscip.int_params["nodeselection/bfs/stdpriority"] = _FIRST
        try:
            model = mathopt.Model.from_model_proto(self._proto(objective, bool(cases)))
            result = mathopt.solve(model, kind, params=params, model_params=_read(values))
        except _FAILURES as error:
            raise UnsolvedError from error
        iterations = result.solve_stats.simplex_iterations
        self.steps += iterations if cases else 0
        self.work += (SCIP if cases else HIGHS).seconds(self.numbers, 0, len(self.parts), iterations)
        if result.termination.reason in _NONE:
            raise NoSolutionError
        return result

    def _proto(self, objective: Mapping[int, float], whole: bool = False) -> model_pb2.ModelProto:
        proto, integers = model_pb2.ModelProto(), set(self.integers if whole else ())
        proto.variables.ids.extend(range(self.count))
        proto.variables.lower_bounds.extend([0.0] * self.count)
        proto.variables.upper_bounds.extend([math.inf] * self.count)
        proto.variables.integers.extend([number in integers for number in range(self.count)])
        proto.linear_constraints.ids.extend(range(len(self.parts)))
        proto.linear_constraints.lower_bounds.extend(self.lower)
        proto.linear_constraints.upper_bounds.extend(self.upper)
        if self.parts:
            columns, weights = (np.concatenate(found) for found in zip(*self.parts, strict=True))
            rows = np.repeat(np.arange(len(self.parts)), [len(part) for part, _ in self.parts])
            order, matrix = np.lexsort((columns, rows)), proto.linear_constraint_matrix
            matrix.row_ids.extend(rows.tolist())
            matrix.column_ids.extend(columns[order].tolist())
            matrix.coefficients.extend(weights[order].tolist())
        proto.objective.linear_coefficients.ids.extend(sorted(objective))
        proto.objective.linear_coefficients.values.extend(objective[variable] for variable in sorted(objective))
        return proto


class _Growing:
    """A program that stays with its solver while rows are added: ``count`` of them are there for good. By GLOP's own interface,
    which hands over numbers and nothing else (with the other one a program took 1.3 to 1.6 times as long)."""

    def __init__(self, objective: Mapping[int, float], variables: int) -> None:
        self.count, self._variables, self._objective = 0, variables, dict(objective)
        self._rows: list[tuple[_Part, float, float]] = []
        self._numbers = 0
        self._solver: pywraplp.Solver | None = None
        self._columns: list[pywraplp.Variable] = []

    def add(self, part: _Part, lower: float, upper: float) -> None:
        """One more row."""
        self._rows.append((part, lower, upper))
        self._numbers += len(part[0])
        self.count += 1

    def solved(self) -> tuple[tuple[float, np.ndarray] | None, float]:
        """The optimum, and values of all variables, None if it was not found: asked again, it begins anew; and nominal seconds
        that it took."""
        solver = self._solver or self._begun()
        new = sum(len(columns) for (columns, _), *_ in self._rows[solver.NumConstraints() :])
        for (columns, weights), lower, upper in self._rows[solver.NumConstraints() :]:
            row = solver.RowConstraint(lower, upper, "")
            for column, weight in zip(columns.tolist(), weights.tolist(), strict=True):
                row.SetCoefficient(self._columns[column], weight)
        limit = min(ITERATIONS, _STUCK * self.count + 100)
        solver.SetSolverSpecificParametersAsString(f"max_number_of_iterations: {limit} use_preprocessing: false")
        ended = solver.Solve(_GOES_ON)
        took = GLOP.seconds(self._numbers, new, self.count, solver.iterations())
        self._solver = solver if ended == pywraplp.Solver.OPTIMAL else None
        if self._solver is None:
            return None, took
        return (solver.Objective().Value(), np.array([column.solution_value() for column in self._columns])), took

    def _begun(self) -> pywraplp.Solver:
        """A solver without rows."""
        solver = pywraplp.Solver("", pywraplp.Solver.GLOP_LINEAR_PROGRAMMING)
        self._columns = [solver.NumVar(0.0, math.inf, "") for _ in range(self._variables)]
        for column, weight in self._objective.items():
            solver.Objective().SetCoefficient(self._columns[column], weight)
        solver.Objective().SetMinimization()
        return solver


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
