"""The memory of a plan, exactly: its program for the rank that holds most, replayed (``cost.peak``).

The solver counts memory as a sum over blocks, which is what a linear program can hold. A plan is judged by its program: what
is alive at the worst moment of the step. Rank 0 has the largest piece of everything that is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.cost.peak import Peak, peak
from meshwright.passes import rank_program
from meshwright.plan import Plan
from meshwright.rule import OpRule


def footprint(plan: Plan, rules: Mapping[str, OpRule], state_bytes: float) -> Peak:
    """Bytes per rank at the worst moment of a training step, of a plan without a pipeline."""
    return peak(rank_program(plan, rules, 0), state_bytes)


def with_footprint(plan: Plan, rules: Mapping[str, OpRule], state_bytes: float) -> Plan:
    """The plan, predicted to need what its program needs; a plan with a pipeline as it is."""
    if plan.pipeline is not None:
        return plan
    found = footprint(plan, rules, state_bytes)
    return replace(plan, predicted={**plan.predicted, "bytes_per_rank": found.bytes, "bytes": dict(found.kinds)})
