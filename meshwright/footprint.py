"""The memory of a plan, exactly: its program for the rank that holds most, replayed (``cost.peak``).

The solver counts memory as a sum over blocks, which is what a linear program can hold. A plan is judged by its program: what
is alive at the worst moment of the step. The first rank (of a stage) has the largest piece of everything that is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.cost.peak import Peak, peak
from meshwright.passes import cut_stages, rank_program
from meshwright.plan import Plan
from meshwright.rule import OpRule


def footprints(plan: Plan, rules: Mapping[str, OpRule], state_bytes: float) -> list[Peak]:
    """The worst moment of a training step, of a rank of every stage group (without a pipeline: of any rank)."""
    program = rank_program(plan, rules, 0)
    if plan.pipeline is None:
        return [peak(program, state_bytes)]
    firsts = range(0, plan.mesh.world, plan.mesh.world // plan.pipeline.degree)
    return [peak(cut_stages(replace(program, rank=rank), plan.pipeline), state_bytes) for rank in firsts]


def with_footprint(plan: Plan, rules: Mapping[str, OpRule], state_bytes: float) -> Plan:
    """The plan, predicted to need what its program needs."""
    found = footprints(plan, rules, state_bytes)
    fullest = max(found, key=lambda one: one.bytes)
    predicted = {**plan.predicted, "bytes_per_rank": fullest.bytes, "bytes": dict(fullest.kinds)}
    if plan.pipeline is not None:
        predicted["bytes_per_pipeline_rank"] = [one.bytes for one in found]
    return replace(plan, predicted=predicted)
