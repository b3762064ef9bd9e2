"""Plan files, version 2: a plan under canonical names, equal blocks written once, decisions apart from predictions.

    {"meshwright": 2,
     "fingerprint": {graph, mesh, versions, decisions, predictions}    what the plan was made for; checked when it is read
     "decisions":   {mesh, ..., blocks, operators, values, ...}    names and words as in pins (``ir.writing.names``)
     "predictions": {predicted, certificate, notes}
     "graph":       {inputs, params, operators, ...}}

Rows of the graph, of operators and of parameters, whose names follow from their modules::

    operator     [target, arguments, named arguments, results: [shape, dtype, differentiable], module, source]
    parameter    [names, shape, dtype, "trainable differentiable buffer persistent" as far as they hold]

A block is {"block": path, "kind": number, "rows": [...], "outside": [...]}: within its rows "~" stands for its path and "$k"
for the k-th value that it reads from outside. One with equal rows is {"block", "kind", "like": number of the block that has
them, "outside"}. ``reading.unfold`` reads it back. The same plan gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.ir.decisions import ONCE_AND_AGAIN, Decisions
from meshwright.ir.pins import ROOT
from meshwright.ir.reading.fields import FOLDED
from meshwright.ir.serialize import graph_digest, in_lines, plan_hash, plan_to_dict, predictions_digest
from meshwright.ir.writing.canonical import canonical
from meshwright.ir.writing.names import Kept, choice_text, kept_text, names_of
from meshwright.ir.writing.pins import folded_names, parts
from meshwright.ir.writing.versions import versions

Row = list[Any]
FLAGS = ("trainable", "differentiable", "buffer", "persistent")
_LINES = 3


def plan_text(plan: Decisions) -> str:
    """The plan as its file holds it. How long the search took is left out."""
    certificate = plan.certificate and replace(plan.certificate, planning_seconds={})
    return in_lines(plan_to_file(replace(plan, certificate=certificate)), _LINES) + "\n"


def plan_to_file(plan: Decisions) -> dict[str, Any]:
    """A plan as the JSON-able values of a file."""
    plan = canonical(plan)
    data = plan_to_dict(plan)
    return {
        "meshwright": FOLDED,
        "fingerprint": {"graph": graph_digest(plan.graph), "mesh": str(plan.mesh), "versions": versions(),
                        "decisions": plan_hash(plan), "predictions": predictions_digest(data)},
        "decisions": {
            **{name: data[name] for name in ("mesh", "cluster", "precision", "optimizer", "registered")},
            **({"devices": data["devices"]} if plan.devices else {}),
            "microbatches": plan.schedule.microbatches, "pipeline": _pipeline(plan), "blocks": _blocks(plan),
            "operators": folded_names(plan, {
                op.name: choice_text(plan.assignments[op.name]) for op in plan.graph.ops if plan.assignments.get(op.name)
            }),
            "values": folded_names(plan, data["copies"]), "time": folded_names(plan, data["schedule"]["time"]),
            "prologue": _named(plan, plan.schedule.prologue),
            **{name: _named(plan, ops) for name in ONCE_AND_AGAIN if (ops := getattr(plan.schedule, name))},
        },
        "predictions": {"predicted": data["predicted"], "certificate": data["certificate"], "notes": data["notes"]},
        "graph": _graph(data["graph"]),
    }


def _named(plan: Decisions, ops: Collection[str]) -> list[str]:
    """Operators by their names."""
    return list(folded_names(plan, {op.name: "" for op in plan.graph.ops if op.name in ops}))


def _pipeline(plan: Decisions) -> dict[str, Any] | None:
    if plan.pipeline is None:
        return None
    starts = [plan.graph.ops[at].name for at in plan.pipeline.cuts[:-1]]
    return {"schedule": plan.pipeline.schedule, "stages": starts, "stage_rank": list(plan.pipeline.stage_rank)}


def _blocks(plan: Decisions) -> dict[str, str]:
    """{blocks: how their parameters are kept, and their stage}."""
    kept: dict[tuple[str, bool], list[str]] = {}
    for name, group in zip((*names_of(plan.graph).blocks, ROOT), plan.groups, strict=True):
        text = kept_text(Kept(group.zero, group.data_axes, group.shard_axes, group.recompute, group.keep))
        kept.setdefault((text + f", stage {group.stage}" * bool(group.stage), name == ROOT), []).append(name)
    return {part: text for (text, _), paths in kept.items() for part in parts(paths)}


# --- the graph -------------------------------------------------------------------------------------------------------------


def _graph(data: Mapping[str, Any]) -> dict[str, Any]:
    specs = {name: spec for name, *spec in data["values"]}
    paths = [path for path, *_ in data["blocks"]]
    params = [_param(param, specs[param["value"]]) for param in data["params"]]
    ops = [[target, args, kwargs, [specs[out] for out in outputs], module, source]
           for _, target, args, kwargs, outputs, module, source in data["ops"]]
    owner = [next((path for path in _prefixes(row[0][0]) if path in set(paths)), "") for row in params] if paths else []
    return {
        "inputs": [[name, *specs[name]] for name in data["inputs"]],
        "params": _folded(params, _runs(owner), _param_row) if paths else params,
        "operators": _folded(ops, [(start, stop, {"block": path, "kind": kind}) for path, kind, start, stop in data["blocks"]],
                             _op_row),
        **{name: data[name] for name in ("output_tree", "loss", "mutations", "signature", "constants", "changes")},
    }


def _param(param: Mapping[str, Any], spec: Sequence[Any]) -> Row:
    shape, dtype, differentiable = spec
    held = {**param, "differentiable": differentiable}
    return [param["fqns"], shape, dtype, " ".join(flag for flag in FLAGS if held[flag])]


def _prefixes(name: str) -> list[str]:
    parts_ = name.split(".")
    return [".".join(parts_[:n]) for n in range(len(parts_) - 1, 0, -1)]


def _runs(owner: Sequence[str]) -> list[tuple[int, int, dict[str, Any]]]:
    """(start, stop, entry) of parameters of one block that follow each other."""
    found: list[tuple[int, int, dict[str, Any]]] = []
    for at, path in enumerate(owner):
        if path and found and found[-1][1] == at and found[-1][2]["block"] == path:
            found[-1] = (found[-1][0], at + 1, found[-1][2])
        elif path:
            found.append((at, at + 1, {"block": path}))
    return found


def _folded(rows: Sequence[Row], runs: Sequence[tuple[int, int, dict[str, Any]]], relative: Callable[..., Row]) -> list[Any]:
    """The rows, those of runs as blocks, and of equal ones once."""
    entries: list[Any] = []
    known: dict[str, int] = {}
    at = 0
    for number, (start, stop, entry) in enumerate(runs):
        entries += rows[at:start]
        outside: dict[str, str] = {}
        inner = [relative(row, entry["block"], outside) for row in rows[start:stop]]
        first = known.setdefault(json.dumps(inner), number)
        body = {"rows": inner} if first == number else {"like": first}
        entries.append({**entry, **body, "outside": list(outside)})
        at = stop
    return [*entries, *rows[at:]]


def _op_row(row: Row, path: str, outside: dict[str, str]) -> Row:
    target, args, kwargs, results, module, source = row
    return [target, _uses(args, path, outside), _uses(kwargs, path, outside), results, _inner(module, path), source]


def _param_row(row: Row, path: str, outside: dict[str, str]) -> Row:
    return [[_inner(name, path) for name in row[0]], *row[1:]]


def _inner(name: str, path: str) -> str:
    """A module or a parameter of a block."""
    own = path and (name == path or name.startswith((f"{path}.", f"{path}:")))
    return f"~{name[len(path):]}" if own else name


def _uses(tree: Any, path: str, outside: dict[str, str]) -> Any:
    """Arguments with the uses of values as a block has them; graphs within arguments have names of their own."""
    if isinstance(tree, list):
        return [_uses(item, path, outside) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"%"}:
        name = tree["%"]
        mark = "@" if name.startswith("@") else ""
        inner = _inner(name.removeprefix("@"), path)
        if inner.startswith("~"):
            return {"%": mark + inner}
        return {"%": outside.setdefault(name, f"${len(outside)}")}
    if tree.keys() == {"map"}:
        return {"map": [[key, _uses(item, path, outside)] for key, item in tree["map"]]}
    return tree
