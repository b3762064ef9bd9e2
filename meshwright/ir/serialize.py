"""Graphs and plans as JSON: nothing pickled, nothing executed on reading.

Tensors' uses are {"%": name}; dtypes, memory formats, layouts and devices are {"torch": name}; small constant tensors are
lists of numbers, two for a complex one; a custom function is its name and its two graphs. Infinite and missing numbers are
JSON's Infinity and NaN.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import Block, Graph, Op, Param, Ref, Value, map_refs
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import GroupChoice, Pipeline, Plan, PlanError, Schedule
from meshwright.ir.prediction import Certificate, Prediction
from meshwright.ir.sharding import DTYPE_NAMES, DTYPES, format_sharding, parse_sharding

VERSION = 1


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """A graph as JSON-able values."""
    return {
        "values": [[v.name, list(v.shape), DTYPE_NAMES[v.dtype], v.differentiable] for v in graph.values.values()],
        "inputs": list(graph.inputs),
        "params": [asdict(param) for param in graph.params],
        "ops": [
            [op.name, op.target, _pack(op.args), _pack(dict(op.kwargs)), list(op.outputs), op.module, op.source]
            for op in graph.ops
        ],
        "output_tree": _pack(graph.output_tree),
        "loss": graph.loss,
        "mutations": [list(pair) for pair in graph.mutations],
        "blocks": [[b.path, b.kind, b.start, b.stop] for b in graph.blocks],
        "signature": graph.signature,
        "constants": {name: [DTYPE_NAMES[t.dtype], list(t.shape), _numbers(t)] for name, t in graph.constants.items()},
        "changes": graph.changes and graph_to_dict(graph.changes),
    }


def graph_from_dict(data: Mapping[str, Any]) -> Graph:
    """The graph that ``graph_to_dict`` wrote."""
    return Graph(
        values={n: Value(n, tuple(shape), DTYPES[dtype], diff) for n, shape, dtype, diff in data["values"]},
        inputs=tuple(data["inputs"]),
        params=tuple(Param(**{**param, "fqns": tuple(param["fqns"])}) for param in data["params"]),
        ops=tuple(
            Op(name, target, _unpack(args), tuple(_unpack(kwargs).items()), tuple(outputs), module, source)
            for name, target, args, kwargs, outputs, module, source in data["ops"]
        ),
        output_tree=_unpack(data["output_tree"]),
        loss=data["loss"],
        mutations=tuple((old, new) for old, new in data["mutations"]),
        blocks=tuple(Block(*block) for block in data["blocks"]),
        signature=data["signature"],
        constants={
            name: _tensor(numbers, DTYPES[dtype]).reshape(shape)
            for name, (dtype, shape, numbers) in data["constants"].items()
        },
        changes=data["changes"] and graph_from_dict(data["changes"]),
    )


def _numbers(tensor: torch.Tensor) -> list[Any]:
    """The elements; a complex one as two."""
    flat = tensor.detach().flatten()
    return list((torch.view_as_real(flat.resolve_conj()).flatten() if flat.is_complex() else flat).tolist())


def _tensor(numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_complex:
        return torch.tensor(numbers, dtype=dtype)
    return torch.view_as_complex(torch.tensor(numbers, dtype=dtype.to_real()).reshape(-1, 2))


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as JSON-able values."""
    return {
        **_decisions(plan), "predicted": plan.predicted and plan.predicted.as_json(),
        "certificate": plan.certificate and plan.certificate.as_json(), "notes": list(plan.notes),
        "graph": graph_to_dict(plan.graph),
    }


def _decisions(plan: Plan) -> dict[str, Any]:
    """A plan without its graph and what was predicted."""
    return {
        "meshwright": VERSION,
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        "cluster": plan.cluster, "precision": plan.precision, "optimizer": plan.optimizer,
        "groups": [asdict(group) for group in plan.groups],
        "schedule": {
            "microbatches": plan.schedule.microbatches, "time": dict(plan.schedule.time),
            "prologue": sorted(plan.schedule.prologue),
        },
        "pipeline": None if plan.pipeline is None else asdict(plan.pipeline),
        "assignments": {name: dict(assignment) for name, assignment in plan.assignments.items() if assignment},
        "copies": {name: format_sharding(sharding) for name, sharding in plan.copies.items()},
    }


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """The plan that ``plan_to_dict`` wrote; PlanError if it is none, or of another version."""
    if not isinstance(data, Mapping) or "meshwright" not in data:
        raise PlanError("this file holds no meshwright plan; write one with plan.save(path)")
    if data["meshwright"] != VERSION:
        raise PlanError(f"the plan is of format {data['meshwright']}, this version reads format {VERSION}; make the plan anew")
    try:
        return Plan(
            graph=graph_from_dict(data["graph"]),
            mesh=Mesh(tuple(data["mesh"]), tuple(data["mesh"].values())),
            assignments=data["assignments"],
            copies={name: parse_sharding(text) for name, text in data["copies"].items()},
            groups=tuple(
                GroupChoice(**{**g, "data_axes": tuple(g["data_axes"]), "shard_axes": tuple(g["shard_axes"])})
                for g in data["groups"]
            ),
            schedule=Schedule(
                data["schedule"]["microbatches"], data["schedule"]["time"], frozenset(data["schedule"]["prologue"])
            ),
            pipeline=_pipeline(data["pipeline"]),
            precision=data["precision"], optimizer=data["optimizer"], cluster=data["cluster"],
            predicted=_prediction(data["predicted"]), certificate=_certificate(data["certificate"]), notes=tuple(data["notes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the plan is damaged: {type(error).__name__} {error}") from error


def _pipeline(data: Mapping[str, Any] | None) -> Pipeline | None:
    return None if data is None else Pipeline(data["schedule"], tuple(data["cuts"]), tuple(data["stage_rank"]))


def _prediction(data: Any) -> Prediction | None:
    if _of_the_first_days(data):
        data = _renamed(_unpack(data), {"bytes": "bytes_by_kind", "bubble": "bubble_fraction"}, "microbatches")
    return Prediction.of_json(data) if data else None


def _certificate(data: Any) -> Certificate | None:
    if _of_the_first_days(data):
        names = {"objective": "objective_seconds", "bound": "bound_seconds", "seconds": "planning_seconds"}
        data = _renamed(_unpack(data), names, "gap")
        seen = [_renamed(one, {"mesh": "layout", "result": "outcome"}) for one in data.pop("candidates", ())]
        data = data and {**data, "candidates": seen}
    return Certificate.of_json(data) if data else None


def _of_the_first_days(data: Any) -> bool:
    """Whether predictions are packed pairs, under names that said less."""
    return isinstance(data, Mapping) and set(data) == {"map"}


def _renamed(data: Mapping[str, Any], names: Mapping[str, str], dropped: str = "") -> dict[str, Any]:
    return {names.get(name, name): item for name, item in data.items() if name != dropped}


def plan_hash(plan: Plan) -> str:
    """What every rank must agree on: a digest of all decisions and of the graph, not of predictions."""
    return _digest({**_decisions(plan), "graph": graph_digest(plan.graph)})


def graph_digest(graph: Graph) -> str:
    """Equal for graphs that compute the same of the same tensors, whatever the order of their operators and the names of what
    these make: a model that walks a set is captured in another order by every process."""
    made: dict[str, str] = {}

    def known(tree: Any) -> Any:
        return _pack(map_refs(tree, lambda ref: made[ref.name]))

    def kind(name: str) -> list[Any]:
        value = graph.values[name]
        return [DTYPE_NAMES[value.dtype], list(value.shape), value.differentiable]

    made.update((name, _digest(["input", name, kind(name)])) for name in graph.inputs)
    for param in graph.params:
        what = _numbers(graph.constants[param.value]) if param.value in graph.constants else list(param.fqns)
        made[param.value] = _digest([what, kind(param.value), param.trainable, param.buffer, param.persistent])
    held = sorted(made[param.value] for param in graph.params)
    for op in graph.ops:
        call = _digest([op.target, known(op.args), known(dict(op.kwargs))])
        made.update((name, _digest([call, number, kind(name)])) for number, name in enumerate(op.outputs))
    return _digest([
        list(graph.inputs), held, known(graph.output_tree), graph.loss and made[graph.loss],
        sorted([made[old], made[new]] for old, new in graph.mutations), sorted(block.path for block in graph.blocks),
        graph.signature, graph.changes and graph_digest(graph.changes),
    ])


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _pack(tree: Any) -> Any:
    if isinstance(tree, Ref):
        return {"%": tree.name}
    if isinstance(tree, torch.dtype | torch.memory_format | torch.layout):
        return {"torch": str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.device):
        return {"device": str(tree)}
    if isinstance(tree, tuple | list):
        return [_pack(item) for item in tree]
    if isinstance(tree, Mapping):
        return {"map": [[_pack(key), _pack(item)] for key, item in tree.items()]}
    if isinstance(tree, CustomFunction):
        both = [graph_to_dict(tree.forward), graph_to_dict(tree.backward)]
        return {"function": [tree.name, *both, list(tree.differentiable)]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise PlanError(f"cannot write {tree!r} of type {type(tree).__name__} into a plan")


def _unpack(tree: Any) -> Any:
    if isinstance(tree, list):
        return tuple(_unpack(item) for item in tree)
    if isinstance(tree, Mapping):
        if "%" in tree:
            return Ref(tree["%"])
        if "torch" in tree:
            return getattr(torch, tree["torch"])
        if "device" in tree:
            return torch.device(tree["device"])
        if "function" in tree:
            name, forward, backward, differentiable = tree["function"]
            return CustomFunction(name, graph_from_dict(forward), graph_from_dict(backward), tuple(differentiable))
        return {_unpack(key): _unpack(item) for key, item in tree["map"]}
    return tree
