"""From the plan to a rank's program: lowering, then passes program -> program in order, then the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.passes.fuse import fuse_gathers
from meshwright.passes.lower import lower
from meshwright.plan import Plan
from meshwright.program import Program
from meshwright.rule import OpRule

PASSES: tuple[Callable[[Program], Program], ...] = (fuse_gathers,)
"""Applied in this order to the lowered program."""


def rank_program(plan: Plan, rules: Mapping[str, OpRule], rank: int) -> Program:
    """The program that one rank runs under the plan; ``rules``: of every operator of the plan's graph, by op name."""
    program = lower(plan, rules, rank)
    for step in PASSES:
        program = step(program)
    return program


__all__ = ["PASSES", "fuse_gathers", "lower", "rank_program"]
