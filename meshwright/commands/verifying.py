"""Which ranks' programs are checked, and how: what the command ``verify`` does."""

from __future__ import annotations

from meshwright.ir.mesh import PP, Mesh
from meshwright.ir.plan import Plan
from meshwright.passes import cut_stages, rank_program
from meshwright.passes.typecheck import typecheck
from meshwright.passes.verify import verify
from meshwright.rules import rules_of_plan

FEW_RANKS = 16
"""Up to so many ranks every one is checked."""


def distinct_ranks(mesh: Mesh) -> list[int]:
    """The ranks whose programs may differ: all of few, else those at the ends of every axis but the pipeline's (only the last
    part of an uneven split is another) on every stage."""
    if mesh.world <= FEW_RANKS:
        return list(range(mesh.world))
    return [rank for rank in range(mesh.world)
            if all(axis == PP or at in (0, mesh.size(axis) - 1) for axis, at in mesh.coordinates(rank).items())]


def verify_rank(plan: Plan, rank: int) -> None:
    """Lower a rank's program and check it. Raises PlanError, VerifyError."""
    rules = rules_of_plan(plan)
    program = rank_program(plan, rules, rank)
    verify(program, plan.graph, rules)
    typecheck(program)
    cut_stages(program, plan.pipeline)
