"""Which ranks' programs are checked, and how, and what is run: what the command ``verify`` does.

    a plan of few devices and a small model    is run as it is, on as many CPU processes
    another, with the model given              its degrees are, made smaller, on a plan for the model or its shrunken copy
    another, without                           is not run, which is said
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.commands.running import Compared, compare
from meshwright.errors import InputError, MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import PP, Mesh
from meshwright.ir.plan import Plan
from meshwright.passes import cut_stages, rank_program
from meshwright.passes.typecheck import typecheck
from meshwright.passes.verify import verify
from meshwright.rules import rules_of_plan

FEW_RANKS = 16
"""Up to so many ranks every one is checked."""
MOST_ELEMENTS = 3e7
"""Of a model whose plan is run as it is: parameters, and the largest value."""


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


def ran(
    plan: Plan, model: str | None, processes: int, modules: Sequence[str], report: Callable[[str, float], None]
) -> Compared | str:
    """What a run found, or why there was none. ``model``: as the command line names it. Raises InputError, PlanError,
    RunError."""
    if model is None:
        size = sum(plan.graph.values[param.value].numel for param in plan.graph.params)
        if plan.mesh.world <= processes and max(size, _largest(plan.graph)) <= MOST_ELEMENTS:
            return compare(plan, None, modules, (), report)
        return (f"the plan is for {plan.mesh.world} devices and {size:,} parameters, too much for {processes} CPU processes: "
                "give its model (--model config.json, or module:callable), and its degrees run on a small copy")
    from meshwright.commands.models import load
    from meshwright.commands.shrinking import left_out, shrunken, smaller
    from meshwright.cost.cluster import Cluster
    from meshwright.planner import capture_model, make_plan

    pins, world = smaller(plan, processes)
    if os.path.exists(model):
        module, example = shrunken(Path(model), pins)
        args, kwargs, notes = (), example, [f"a shrunken copy of {model}"]
    else:
        module, given = load(model, 1, 2)
        from meshwright.api import example_call

        args, kwargs, targets = example_call(module, given)
        if targets:
            raise InputError(f"{model!r} gives targets, and a loss function is not part of it; let the model return its loss")
        notes = [f"the model that {model} returns"]
    report("capturing the model", 0.0)
    try:
        graph = capture_model(module, args, kwargs, (), None, "fp32")
    except MeshwrightError as error:
        if not os.path.exists(model):
            raise
        raise InputError(f"a shrunken copy of {model} cannot be captured ({error}); its programs are checked with "
                         "--programs-only, and a small model of your own runs as --model module:callable") from error
    if _largest(graph) > MOST_ELEMENTS:
        raise InputError(f"the model that {model!r} returns is too large to run on CPU processes; return a small one")
    found = make_plan(graph, Cluster.parse(f"cpu:1x{world}"), pins)
    if str(found.mesh) != str(plan.mesh):
        notes.append(f"on {found.mesh}, the plan is on {plan.mesh}: every degree within {processes} processes (--processes)")
        lost, enough = left_out(plan, found.mesh)
        if lost:
            notes.append(f"not run: {', '.join(lost)}, for which there were no processes; --processes {enough} runs all")
    return compare(found, module, modules, notes, report)


def _largest(graph: Graph) -> float:
    return max((value.numel for value in graph.values.values()), default=0)
