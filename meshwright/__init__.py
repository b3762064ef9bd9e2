"""meshwright: a declarative graph compiler that parallelizes an unmodified PyTorch model.

    parallel = meshwright.autoparallel(model, mesh)     run it: an nn.Module, in an unmodified training loop
    plan = meshwright.plan(model, "h100:8x8", example)  plan it: no processes, no GPU, any size

Names are imported when first used: planning needs the solver, running needs torch.distributed, importing needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright import plan as _plan_module
from meshwright.errors import (
    CaptureError,
    CheckpointError,
    InputError,
    MeshwrightError,
    MissingCheckpointError,
    RunError,
    VerifyError,
)
from meshwright.graph import GraphError
from meshwright.mesh import MeshError
from meshwright.notation import RuleError
from meshwright.pins import PinError, Pins
from meshwright.plan import Plan, PlanError
from meshwright.sharding import ShardingError

if TYPE_CHECKING:
    from meshwright.api import autoparallel, plan
    from meshwright.compiler.rules import register_rule
    from meshwright.cost.cluster import Cluster, ClusterError
    from meshwright.cost.table import ScheduleError
    from meshwright.planner import OutOfMemoryError
    from meshwright.runtime.materialize import MaterializeError

_LAZY: Mapping[str, str] = {
    "autoparallel": "meshwright.api",
    "plan": "meshwright.api",
    "register_rule": "meshwright.compiler.rules",
    "Cluster": "meshwright.cost.cluster",
    "ClusterError": "meshwright.cost.cluster",
    "MaterializeError": "meshwright.runtime.materialize",
    "OutOfMemoryError": "meshwright.planner",
    "ScheduleError": "meshwright.cost.table",
}
"""{public name: the module that defines it}."""

# ``meshwright.plan`` is the function; the module of the same name, bound here by its import, stays reachable by import only.
if globals().get("plan") is _plan_module:
    del globals()["plan"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "CaptureError", "CheckpointError", "Cluster", "ClusterError", "GraphError", "InputError", "MaterializeError", "MeshError",
    "MeshwrightError", "MissingCheckpointError", "OutOfMemoryError", "PinError", "Pins", "Plan", "PlanError", "RuleError",
    "RunError", "ScheduleError", "ShardingError", "VerifyError", "autoparallel", "plan", "register_rule",
]
