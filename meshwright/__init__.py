"""meshwright: a declarative graph compiler that parallelizes an unmodified PyTorch model.

    parallel = meshwright.autoparallel(model, mesh)     run it: an nn.Module, in an unmodified training loop
    plan = meshwright.plan(model, "h100:8x8", example)  plan it: no processes, no GPU, any size
    parallel.export(folder); meshwright.load(folder, mesh)   run it again: without the model, without a search
    meshwright.show(plan), explain(plan, name), diff(plan, other), timeline(plan, path), to_networkx(plan)   look at it

Names are imported when first used: planning needs the solver, running needs torch.distributed, importing needs neither, nor
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.errors import (
    AbsentError,
    CaptureError,
    CheckpointError,
    ExportError,
    InputError,
    MeshwrightError,
    MissingCheckpointError,
    PlanError,
    RunError,
    StageWarning,
    VerifyError,
)

if TYPE_CHECKING:
    from meshwright.api import autoparallel, plan
    from meshwright.compiler.rules import register_rule
    from meshwright.cost.cluster import Cluster, ClusterError
    from meshwright.exported import export, load
    from meshwright.ir.graph import GraphError
    from meshwright.ir.mesh import MeshError
    from meshwright.ir.notation import RuleError
    from meshwright.ir.pins import PinError, Pins
    from meshwright.ir.plan import Plan
    from meshwright.ir.schedules import ScheduleError, register_schedule
    from meshwright.ir.sharding import ShardingError
    from meshwright.lengths import longest, loss_alone
    from meshwright.planner import OutOfMemoryError, load_plan, reprice
    from meshwright.runtime.checks.elsewhere import Elsewhere
    from meshwright.runtime.state.materialize import MaterializeError
    from meshwright.views.difference import diff
    from meshwright.views.explain import explain
    from meshwright.views.network import to_networkx
    from meshwright.views.report import show, timeline

_LAZY: Mapping[str, str] = {
    "GraphError": "meshwright.ir.graph",
    "MeshError": "meshwright.ir.mesh",
    "PinError": "meshwright.ir.pins",
    "Pins": "meshwright.ir.pins",
    "Plan": "meshwright.ir.plan",
    "RuleError": "meshwright.ir.notation",
    "ShardingError": "meshwright.ir.sharding",
    "autoparallel": "meshwright.api",
    "plan": "meshwright.api",
    "register_rule": "meshwright.compiler.rules",
    "load_plan": "meshwright.planner",
    "reprice": "meshwright.planner",
    "Cluster": "meshwright.cost.cluster",
    "ClusterError": "meshwright.cost.cluster",
    "MaterializeError": "meshwright.runtime.state.materialize",
    "OutOfMemoryError": "meshwright.planner",
    "Elsewhere": "meshwright.runtime.checks.elsewhere",
    "ScheduleError": "meshwright.ir.schedules",
    "register_schedule": "meshwright.ir.schedules",
    "export": "meshwright.exported",
    "load": "meshwright.exported",
    "longest": "meshwright.lengths",
    "loss_alone": "meshwright.lengths",
    "explain": "meshwright.views.explain",
    "diff": "meshwright.views.difference",
    "show": "meshwright.views.report",
    "timeline": "meshwright.views.report",
    "to_networkx": "meshwright.views.network",
}
"""{public name: the module that defines it}."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AbsentError", "CaptureError", "CheckpointError", "Cluster", "ClusterError", "Elsewhere", "ExportError", "GraphError",
    "InputError", "MaterializeError", "MeshError", "MeshwrightError", "MissingCheckpointError", "OutOfMemoryError",
    "PinError", "Pins", "Plan", "PlanError", "RuleError", "RunError", "ScheduleError", "ShardingError", "StageWarning",
    "VerifyError", "autoparallel", "diff", "explain", "export", "load", "load_plan", "longest", "loss_alone", "plan",
    "register_rule", "register_schedule", "reprice", "show", "timeline", "to_networkx",
]
