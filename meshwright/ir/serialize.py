"""Graphs and plans as JSON; ``ir.reading`` reads them back. Nothing is pickled.

Tensors' uses are {"%": name}; dtypes, memory formats, layouts and devices are {"torch": name}; a complex number is {"complex":
[real, imaginary]}; small constant tensors are lists of numbers, two for a complex one; a custom function is its name and its
two graphs. Infinite and missing numbers are JSON's Infinity and NaN.
"""

from __future__ import annotations

import cmath
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from meshwright.errors import PlanError
from meshwright.ir.decisions import ONCE_AND_AGAIN, Decisions
from meshwright.ir.declared.experts import IMBALANCE, Experts
from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import LITERALS, Graph, Ref
from meshwright.ir.program import DRAW, Port, Program, Segment
from meshwright.ir.reading.fields import VERSION
from meshwright.ir.sharding import DTYPE_NAMES, format_sharding
from meshwright.ir.writing.canonical import canonical


def graph_to_dict(graph: Graph) -> dict[str, Any]:
    """A graph as JSON-able values."""
    return {
        "values": [[v.name, list(v.shape), DTYPE_NAMES[v.dtype], v.differentiable] for v in graph.values.values()],
        "inputs": list(graph.inputs),
        "params": [_listed(param) for param in graph.params],
        "ops": [
            [op.name, op.target, packed(op.args), packed(dict(op.kwargs)), list(op.outputs), op.module, op.source]
            for op in graph.ops
        ],
        "output_tree": packed(graph.output_tree),
        "loss": graph.loss,
        "mutations": [list(pair) for pair in graph.mutations],
        "blocks": [[b.path, b.kind, b.start, b.stop] for b in graph.blocks],
        "signature": graph.signature,
        "constants": {name: [DTYPE_NAMES[t.dtype], list(t.shape), elements(t)] for name, t in graph.constants.items()},
        "changes": graph.changes and graph_to_dict(graph.changes),
    }


def _listed(record: Any) -> dict[str, Any]:
    found = ((field.name, getattr(record, field.name)) for field in fields(record))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found}


def elements(tensor: torch.Tensor) -> list[Any]:
    """The elements; a complex one as two."""
    flat = tensor.detach().flatten()
    return list((torch.view_as_real(flat.resolve_conj()).flatten() if flat.is_complex() else flat).tolist())


def plan_to_dict(plan: Decisions) -> dict[str, Any]:
    """A plan as JSON-able values."""
    return {
        **_decisions(plan), "predicted": plan.predicted and plan.predicted.as_json(),
        "certificate": plan.certificate and plan.certificate.as_json(), "notes": list(plan.notes),
        "graph": graph_to_dict(plan.graph),
    }


def _decisions(plan: Decisions) -> dict[str, Any]:
    """A plan without its graph and what was predicted."""
    return {
        "meshwright": VERSION,
        "mesh": {axis + "*" * (axis in plan.mesh.mirrored): plan.mesh.size(axis) for axis in plan.mesh.axes},
        "cluster": plan.cluster, "precision": plan.precision, "optimizer": plan.optimizer,
        "groups": [_listed(group) for group in plan.groups],
        "schedule": {
            "microbatches": plan.schedule.microbatches, "time": dict(plan.schedule.time),
            "prologue": sorted(plan.schedule.prologue),
            **{name: sorted(ops) for name in ONCE_AND_AGAIN if (ops := getattr(plan.schedule, name))},
        },
        "pipeline": None if plan.pipeline is None else _listed(plan.pipeline),
        "assignments": {name: dict(assignment) for name, assignment in plan.assignments.items() if assignment},
        "registered": dict(sorted(plan.registered.items())),
        "copies": {name: format_sharding(sharding) for name, sharding in plan.copies.items()},
        **({"devices": list(plan.devices)} if plan.devices else {}),
    }


def plan_hash(plan: Decisions) -> str:
    """What every rank must agree on: a digest of all decisions and of the graph, not of predictions or of the trace's names."""
    plan = canonical(plan)
    return hash_as_named(plan, graph_digest(plan.graph))


def hash_as_named(plan: Decisions, graph: str) -> str:
    """``plan_hash`` of a plan whose names are those of ``canonical``, as in a file; ``graph``: the digest of its graph."""
    return digest({**_decisions(plan), "graph": graph})


def predictions_digest(shown: Mapping[str, Any]) -> str:
    """Equal for equal predictions and certificates, as a file holds them."""
    return digest([shown["predicted"], shown["certificate"]])


def graph_digest(graph: Graph) -> str:
    """Equal for graphs that compute the same of the same tensors, whatever the order of their operators and the names of what
    these make: a model that walks a set is captured in another order by every process."""
    made: dict[str, str] = {}

    def known(tree: Any) -> Any:
        return packed(tree, lambda ref: made[ref.name])

    def kind(name: str) -> list[Any]:
        value = graph.values[name]
        return [DTYPE_NAMES[value.dtype], list(value.shape), value.differentiable]

    made.update((name, digest(["input", name, kind(name)])) for name in graph.inputs)
    for param in graph.params:
        what = elements(graph.constants[param.value]) if param.value in graph.constants else list(param.fqns)
        made[param.value] = digest([what, kind(param.value), param.trainable, param.buffer, param.persistent])
    held = sorted(made[param.value] for param in graph.params)
    for op in graph.ops:
        call = digest([op.target, known(op.args), known(dict(op.kwargs))])
        made.update((name, digest([call, number, kind(name)])) for number, name in enumerate(op.outputs))
    return digest([
        list(graph.inputs), held, known(graph.output_tree), graph.loss and made[graph.loss],
        sorted([made[old], made[new]] for old, new in graph.mutations), sorted(block.path for block in graph.blocks),
        graph.signature, graph.changes and graph_digest(graph.changes),
    ])


def digest(data: Any) -> str:
    """Equal for equal data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def program_to_dict(program: Program) -> dict[str, Any]:
    """What a rank runs, before it is cut into stages, as JSON-able values, with nothing of the rank itself: the ranks whose
    pieces are of one size have the same. What a call draws from follows from the rank, and is left out; so is what only speaks
    of the model's source."""

    def port(one: Port) -> list[Any]:
        return [one.name, format_sharding(one.sharding, one.shape, one.dtype), one.time]

    def segment(one: Segment) -> dict[str, Any]:
        graph = one.graph
        return {
            "path": one.path, "prologue": one.prologue, "zero": one.zero, "recompute": one.recompute, "stage": one.stage,
            **({"epilogue": True} if one.epilogue else {}),
            "inputs": list(graph.inputs), "params": [param.value for param in graph.params], "outputs": list(graph.outputs),
            "ops": [[op.target, packed(op.args), packed({key: _of_all(key, value) for key, value in op.kwargs}),
                     [str(graph.values[name]) for name in op.outputs]] for op in graph.ops],
        }

    return {
        "mesh": dict(zip(program.mesh.axes, program.mesh.sizes, strict=True)), "microbatches": program.microbatches,
        "compute_dtype": packed(program.compute_dtype),
        "inputs": [port(one) for one in program.inputs], "outputs": [port(one) for one in program.outputs],
        "output_tree": packed(program.output_tree), "loss": program.loss, "cuts": packed(program.cuts),
        "mutations": packed(program.mutations),
        "stored": [
            {**_listed(one), "dtype": DTYPE_NAMES[one.dtype], "tensor": format_sharding(one.tensor, one.shape)}
            for one in program.stored
        ],
        "segments": [segment(one) for one in program.segments],
        **({"collected": [_listed(one) for one in program.collected]} if program.collected else {}),
    }


def _of_all(name: str, value: Any) -> Any:
    """A named argument without what differs between ranks that run the same: the salt of what is drawn."""
    return (value[0], value[2]) if name == DRAW else value


def in_lines(data: Any, depth: int) -> str:
    """JSON of which the first ``depth`` levels have a line for each item; the same text for the same data."""
    if depth and data and isinstance(data, Mapping):
        items = [f"{json.dumps(key)}: {in_lines(item, depth - 1)}" for key, item in data.items()]
        return "{\n" + ",\n".join(items) + "\n}"
    if depth and data and isinstance(data, list):
        return "[\n" + ",\n".join(in_lines(item, depth - 1) for item in data) + "\n]"
    return json.dumps(data)


def _use(ref: Ref) -> Any:
    return {"%": ref.name}


def packed(tree: Any, use: Callable[[Ref], Any] = _use) -> Any:
    """A tree of literals and uses of values as JSON-able values; ``reading.fields.unpacked`` reads it. ``use``: what stands for
    the use of a value."""
    if type(tree) in LITERALS:
        return tree
    if isinstance(tree, Ref):
        return use(tree)
    if isinstance(tree, torch.dtype | torch.memory_format | torch.layout):
        return {"torch": str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.device):
        return {"device": str(tree)}
    if isinstance(tree, tuple | list):
        return [packed(item, use) for item in tree]
    if isinstance(tree, Mapping):
        return {"map": [[packed(key, use), packed(item, use)] for key, item in tree.items()]}
    if isinstance(tree, CustomFunction):
        both = [graph_to_dict(tree.forward), graph_to_dict(tree.backward)]
        return {"function": [tree.name, *both, list(tree.differentiable)]}
    if isinstance(tree, Experts):
        limited = [list(tree.limited)] if tree.limited != (1, 1) else []
        assumed = [tree.imbalance, *limited] if limited or tree.imbalance != IMBALANCE else []
        return {"experts": [graph_to_dict(tree.graph), tree.count, tree.chosen, tree.scaled, list(tree.stacked), *assumed]}
    if isinstance(tree, complex) and cmath.isfinite(tree):
        return {"complex": [tree.real, tree.imag]}
    if isinstance(tree, bool | int | float | str):
        return tree
    raise PlanError(f"cannot write {tree!r} of type {type(tree).__name__} into a plan")
