"""From the plan to a rank's program: lowering, passes program -> program in order, the checks, then the cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.ir.plan import Plan
from meshwright.ir.program import Program
from meshwright.ir.rule import Rules
from meshwright.passes.fuse import fuse_gathers
from meshwright.passes.lower import lower
from meshwright.passes.stages import cut_for_ranks, cut_stages

PASSES: tuple[Callable[[Program], Program], ...] = (fuse_gathers,)
"""Applied in this order to the lowered program."""


def rank_program(
    plan: Plan, rules: Rules, rank: int, passes: Sequence[Callable[[Program], Program]] = PASSES
) -> Program:
    """The program of the whole model at one rank's place on the mesh; ``rules``: of every operator of the plan's graph, by op
    name. It is what ``verify`` and ``typecheck`` take; with a pipeline the rank then runs ``cut_stages`` of it. ``passes``:
    fewer of them, of software that lacks one."""
    program = lower(plan, rules, rank)
    for step in passes:
        program = step(program)
    return program


__all__ = ["PASSES", "cut_for_ranks", "cut_stages", "fuse_gathers", "lower", "rank_program"]
