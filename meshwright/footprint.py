"""The memory of a plan, exactly: its program for the rank that holds most, replayed (``cost.peak``).

The solver counts memory as a sum over blocks, which is what a linear program can hold. A plan is judged by its program: what
is alive at the worst moment of the step. The first rank (of a stage) has the largest piece of everything that is split.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from meshwright.cost.peak import Peak, peak
from meshwright.passes import cut_stages, rank_program
from meshwright.plan import Plan
from meshwright.rule import OpRule

LOOKED_AT = 4
"""Ranks of a pipeline that a plan is judged by: those that hold most by the search's sum, beside the first and the last
stage's. The rest keep that sum, which is a little higher than the replay."""


def footprints(
    plan: Plan, rules: Mapping[str, OpRule], state_bytes: float, ranks: Collection[int] | None = None
) -> dict[int, Peak]:
    """The worst moment of a training step, of a rank of every stage group by pipeline rank (without a pipeline: of rank 0).
    ``ranks``: of the pipeline, all if not given."""
    program = rank_program(plan, rules, 0)
    if plan.pipeline is None:
        return {0: peak(program, state_bytes)}
    apart = plan.mesh.world // plan.pipeline.degree
    chosen = range(plan.pipeline.degree) if ranks is None else ranks
    return {r: peak(cut_stages(replace(program, rank=r * apart), plan.pipeline), state_bytes) for r in chosen}


def with_footprint(plan: Plan, rules: Mapping[str, OpRule], state_bytes: float) -> Plan:
    """The plan, predicted to need what its program needs."""
    sums = list(plan.predicted.get("bytes_per_pipeline_rank", ()))
    ranks: set[int] = set()
    if plan.pipeline is not None:
        ranks = {0, plan.pipeline.stage_rank[-1], *sorted(range(len(sums)), key=lambda r: -sums[r])[:LOOKED_AT]}
    found = footprints(plan, rules, state_bytes, sorted(ranks))
    fullest = max(found.values(), key=lambda one: one.bytes)
    predicted = {**plan.predicted, "bytes_per_rank": fullest.bytes, "bytes": dict(fullest.kinds)}
    if plan.pipeline is not None:
        known = {rank: one.bytes for rank, one in found.items()}
        predicted["bytes_per_pipeline_rank"] = [known.get(rank, min(sum_, fullest.bytes)) for rank, sum_ in enumerate(sums)]
    return replace(plan, predicted=predicted)
