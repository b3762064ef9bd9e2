"""Plans kept in a folder, so that a second start of the same training script need not search again. Off unless asked for.

    folder/<sha256>.json      {"meshwright_cache": 3, "digest": ..., "order": ..., "plan": as plan.save writes it}

The name is a digest of all that a search depends on: the captured graph, the cluster, the pins, the options, the versions, the
prices (catalogue and formulas) and the registered rules and schedules. What is found is read like any plan file and must
compute what the model's graph does. Whatever is wrong with an entry is said, and the plan is searched for again and takes the
entry's place: a cache makes starts faster, it never stops one. Only one process of a run looks and writes, and files appear
whole.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.compiler.structure.pieces import as_in
from meshwright.compiler.structure.same import aligned
from meshwright.cost.cluster import Cluster
from meshwright.errors import MeshwrightError, PlanError
from meshwright.ir.declared.registered import registered_of
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins, vars_of
from meshwright.ir.plan import Plan
from meshwright.ir.reading.fields import load_json
from meshwright.ir.schedules import schedules
from meshwright.ir.serialize import digest, graph_digest
from meshwright.ir.writing.plans import plan_text
from meshwright.ir.writing.versions import prices, versions
from meshwright.programs import order_of

FORMAT = 3


def cached(
    folder: str | Path, graph: Graph, cluster: Cluster, pins: Pins, options: Mapping[str, Any], search: Callable[[], Plan]
) -> Plan:
    """The plan that an earlier search found for all this, else that of ``search``, which is then kept. The notes of a plan that
    was found say so. ``options``: what else decides, JSON-able."""
    path = Path(folder) / f"{_key(graph, cluster, pins, options)}.json"
    found = _look(path, graph, cluster)
    if found is not None:
        return replace(found, notes=(*found.notes, f"taken from the cache, {path}: nothing was searched"))
    plan = search()
    _keep(plan, path)
    return plan


def _key(graph: Graph, cluster: Cluster, pins: Pins, options: Mapping[str, Any]) -> str:
    return digest([
        FORMAT, graph_digest(graph), repr(cluster), repr(sorted(vars_of(pins).items())), dict(options), versions(), prices(),
        registered_of(graph), sorted(schedules()),
    ])


def _look(path: Path, graph: Graph, cluster: Cluster) -> Plan | None:
    """The plan of an entry, for this graph; None if there is none, or none that can be used."""
    try:
        data = load_json(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.keys() != {"meshwright_cache", "digest", "order", "plan"}:
            raise PlanError("it is no entry of a cache")
        if data["digest"] != digest([data["order"], data["plan"]]):
            raise PlanError("it was altered after it was written")
        plan = Plan.from_dict(data["plan"])
        if plan.mesh.world != cluster.world or data["order"] != order_of(plan):
            raise PlanError("it is for other devices, or relies on another order of its schedule")
        return replace(plan, graph=aligned(plan.graph, as_in(graph, plan.graph)))
    except FileNotFoundError:
        return None
    except (MeshwrightError, OSError, ValueError) as error:
        warnings.warn(f"meshwright: the cache entry {path} cannot be used ({error}); planning again", stacklevel=2)
        return None


def _keep(plan: Plan, path: Path) -> None:
    """Write the entry; a cache that cannot be written is said, and no error."""
    content = json.loads(plan_text(plan))
    entry = {"meshwright_cache": FORMAT, "order": order_of(plan), "plan": content}
    entry["digest"] = digest([entry["order"], content])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            os.chmod(draft, 0o644)
            if path.is_dir():
                raise IsADirectoryError(21, "it is a folder")
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        warnings.warn(f"meshwright: the plan cannot be kept in {path} ({error.strerror or error})", stacklevel=2)
