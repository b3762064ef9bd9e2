"""A plan from a file: every decision checked for its type, its range and what it refers to, and what is only shown for what it
is. Whether the factors are those of the operators' rules, lowering and ``passes.verify`` say."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError, PlanError
from meshwright.ir.decisions import ONCE_AND_AGAIN, TIME, Decisions, GroupChoice, Pipeline, Schedule
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.declared.registered import check_registered, registered_of
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import PP, Mesh
from meshwright.ir.pins import RECOMPUTE
from meshwright.ir.prediction import Certificate, Prediction
from meshwright.ir.reading.fields import FOLDED, LARGEST, VERSION, Field, check_form, unpacked
from meshwright.ir.reading.graphs import read_graph
from meshwright.ir.reading.unfold import unfolded
from meshwright.ir.schedules import schedules, unknown
from meshwright.ir.serialize import graph_digest, hash_as_named, predictions_digest
from meshwright.ir.sharding import Sharding, format_sharding, parse_sharding

Made = TypeVar("Made", bound=Decisions)


def read_plan(data: Any, kind: type[Made]) -> Made:
    """The plan, made as ``kind``, that ``plan_to_dict`` wrote; PlanError with the path of the field if it is none, or of
    another version."""
    if not isinstance(data, dict) or "meshwright" not in data:
        raise PlanError("this file holds no meshwright plan; write one with plan.save(path)")
    version = data["meshwright"]
    if type(version) is not int or version not in (VERSION, FOLDED):
        raise PlanError(f"the plan is of format {version!r:.40}, this version reads formats {VERSION} and {FOLDED}; "
                        + ("a newer meshwright wrote it: use that one, or make the plan anew"
                           if type(version) is int and version > FOLDED else "make the plan anew"))
    if version == FOLDED:
        found = read_plan(unfolded(data), kind)
        want, have = data["fingerprint"]["graph"], graph_digest(found.graph)
        if want != have or data["fingerprint"]["mesh"] != str(found.mesh):
            raise PlanError("the plan is damaged: fingerprint: its graph or its mesh was altered after it was written "
                            f"(they are {have} on {found.mesh}); decisions may be edited, the rest is the model's")
        return _as_made(found, data["fingerprint"], data["predictions"], have)
    check_form(data)
    top = Field(data, "").record(
        "meshwright mesh cluster precision optimizer groups schedule pipeline assignments copies predicted certificate notes "
        "graph", "registered devices"
    )
    graph = read_graph(top["graph"])
    mesh = _mesh(top["mesh"])
    axes = [axis for axis in mesh.axes if axis != PP]
    ops = {op.name for op in graph.ops}
    assignments = {}
    for name, field in top["assignments"].mapping().items():
        if name not in ops:
            raise PlanError(f"the plan is damaged: assignments: the graph has no operator {name!r}")
        assignments[name] = _assignment(field, axes)
    schedule = top["schedule"].record("microbatches time prologue", " ".join(ONCE_AND_AGAIN))
    times = schedule["time"].mapping()
    if unknown := sorted(times.keys() - ops):
        raise PlanError(f"the plan is damaged: schedule.time: the graph has no operator {unknown[0]!r}")
    pipeline = _pipeline(top["pipeline"], graph, mesh)
    return kind(
        graph, mesh, assignments, {name: _copy(field, name, graph, axes) for name, field in top["copies"].mapping().items()},
        _groups(top["groups"], graph, axes, pipeline),
        schedule=Schedule(
            schedule["microbatches"].count(1, 1 << 31), {name: field.name() for name, field in times.items()},
            *(frozenset(schedule[kind].names(ops, "an operator of the graph")) if kind in schedule else frozenset()
              for kind in ("prologue", *ONCE_AND_AGAIN)),
        ),
        pipeline=pipeline, precision=top["precision"].one_of(PRECISIONS, " or ".join(PRECISIONS)),
        optimizer=_optimizer(top["optimizer"]), cluster=top["cluster"].text(),
        devices=_devices(top), registered=_registered(top, graph),
        predicted=_prediction(top["predicted"], pipeline),
        certificate=_certificate(top["certificate"]),
        notes=tuple(item.text() for item in top["notes"].items()),
    )


def _as_made(found: Made, made: Mapping[str, Any], shown: Mapping[str, Any], graph: str) -> Made:
    """The plan of a file, its predictions stale where the file's fingerprint does not say that they are of these decisions and
    as they were written; what was altered is no proof either, nor does it say what was left free."""
    stated, predicted = made.get("predictions"), found.predicted
    if stated is not None and stated != predictions_digest(shown):
        return replace(found, predicted=predicted and replace(predicted, prices="", free_bytes=None), certificate=None)
    if predicted is not None and (stated is None or made.get("decisions") != hash_as_named(found, graph)):
        return replace(found, predicted=replace(predicted, prices=""))
    return found


# --- decisions -------------------------------------------------------------------------------------------------------------


def _mesh(field: Field) -> Mesh:
    marked = {axis: size.count(1, 1 << 31) for axis, size in field.mapping().items()}
    sizes = {axis.removesuffix("*"): size for axis, size in marked.items()}
    if TIME in sizes or len(sizes) < len(marked) or math.prod(sizes.values()) > 1 << 31:
        raise field.wrong(f"axes of devices, none of them {TIME!r}")
    try:
        return Mesh(tuple(sizes), tuple(sizes.values()), frozenset(axis[:-1] for axis in marked if axis.endswith("*")))
    except MeshwrightError as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error


def _assignment(field: Field, axes: Collection[str]) -> dict[str, str]:
    found = field.mapping()
    for axis in found:
        if axis not in axes:
            raise field.wrong(f"axes of the mesh ({', '.join(axes)})")
    return {axis: factor.name() for axis, factor in found.items()}


def _copy(field: Field, name: str, graph: Graph, axes: Collection[str]) -> Sharding:
    if name not in graph.values:
        raise PlanError(f"the plan is damaged: copies: the graph has no value {name!r}")
    try:
        found = parse_sharding(field.text())
    except MeshwrightError as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error
    used = {*found.split_axes, *found.partial, *found.varying}
    if found.ndim != len(graph.values[name].shape) or not used <= set(axes) or format_sharding(found) != field.value:
        raise field.wrong(f"a sharding of a value of {len(graph.values[name].shape)} dims over axes of the mesh")
    return found


def _groups(field: Field, graph: Graph, axes: list[str], pipeline: Pipeline | None) -> tuple[GroupChoice, ...]:
    rows = field.row(len(graph.blocks) + 1)
    groups = []
    for row, block in zip(rows, (*graph.blocks, None), strict=True):
        part = row.record("path zero data_axes shard_axes recompute stage keep")
        path = part["path"].one_of(("" if block is None else block.path,), f"{block.path!r}" if block else "the root's, ''")
        data = part["data_axes"].names(axes, "an axis of the mesh")
        shard = part["shard_axes"].names(data, "one of data_axes")
        for name, found in (("data_axes", data), ("shard_axes", shard)):
            if list(found) != [axis for axis in axes if axis in found]:
                raise part[name].wrong("axes in the order of the mesh")
        zero, keep = part["zero"].count(0, 3), part["keep"].flag()
        if keep and zero != 3:
            raise part["keep"].wrong("false, since only weights of ZeRO-3 are freed")
        groups.append(GroupChoice(
            path, zero, data, shard, part["recompute"].one_of(RECOMPUTE, " or ".join(RECOMPUTE)),
            part["stage"].count(0, 0 if pipeline is None else pipeline.stages - 1), keep,
        ))
    return tuple(groups)


def _pipeline(field: Field, graph: Graph, mesh: Mesh) -> Pipeline | None:
    if field.value is None:
        if PP in mesh.axes:
            raise field.wrong(f"a pipeline, since the mesh has the axis {PP}")
        return None
    part = field.record("schedule cuts stage_rank")
    cuts = tuple(item.count(0, len(graph.ops)) for item in part["cuts"].items())
    ranks = tuple(item.count(0, mesh.world) for item in part["stage_rank"].items())
    if not ranks or len(cuts) != len(ranks) + 1 or cuts[-1] != len(graph.ops) or mesh.axes[:1] != (PP,):
        raise field.wrong(f"stages that end at operator {len(graph.ops)}, over the mesh's outermost axis {PP}")
    name = part["schedule"].name()
    if name not in schedules():
        raise PlanError(f"{part['schedule'].path}: {unknown(name)}")
    try:
        found = Pipeline(name, cuts, ranks)
    except PlanError as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error
    if mesh.size(PP) != found.degree or found.stages % found.degree:
        raise field.wrong(f"as many stages for every rank of {PP}={mesh.size(PP)}")
    return found


def _optimizer(field: Field) -> str:
    """A name, or "8 bytes"."""
    text = field.name()
    words = text.split(" ")
    if len(words) == 1 and text.isascii() and text.isidentifier():
        return text
    try:
        good = len(words) == 2 and words[1] == "bytes" and 0 <= float(words[0]) < float("inf")
    except ValueError:
        good = False
    if not good:
        raise field.wrong("the name of an optimizer, or bytes of state as in '8 bytes'")
    return text


def _devices(top: Mapping[str, Field]) -> tuple[Mapping[str, Any], ...]:
    """Numbers of the cluster, which who prices reads."""
    given = top["devices"].items() if "devices" in top else []
    return tuple({name: one.value for name, one in item.mapping().items()} for item in given)


def _registered(top: Mapping[str, Field], graph: Graph) -> dict[str, str]:
    """The registered rules that the plan needs, which are those of this process. A plan of the days before they were recorded
    needs those that are here."""
    if "registered" not in top:
        return registered_of(graph)
    needed = {name: words.name() for name, words in top["registered"].mapping().items()}
    check_registered(needed, graph)
    return needed


# --- predictions: data that is only shown -----------------------------------------------------------------------------------


def _prediction(field: Field, pipeline: Pipeline | None) -> Prediction | None:
    data = field.value
    if _of_the_first_days(data):
        data = _renamed(unpacked(field), {"bytes": "bytes_by_kind", "bubble": "bubble_fraction"}, "microbatches")
    try:
        found = Prediction.of_json(data) if data else None
    except (ValueError, TypeError, OverflowError) as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error
    if found is None:
        return None
    stages = found.stages
    numbers = [number for number in vars(found).values() if isinstance(number, int | float)]
    numbers += [*found.bytes_by_kind.values(), *found.bytes_per_pipeline_rank]
    for row in () if stages is None else (stages.forward, stages.backward_input, stages.backward_weight, stages.transfer):
        numbers += row
    if not all(0 <= number < LARGEST for number in numbers) or not found.capacity_bytes:
        raise field.wrong("numbers that are not negative, and a capacity")
    if stages is not None and (pipeline is None or len(stages.forward) != pipeline.stages):
        raise field.wrong("seconds of as many stages as the plan has")
    if found.bytes_per_pipeline_rank and (pipeline is None or len(found.bytes_per_pipeline_rank) != pipeline.degree):
        raise field.wrong("bytes of as many pipeline ranks as the plan has")
    return found


def _certificate(field: Field) -> Certificate | None:
    data = field.value
    try:
        if _of_the_first_days(data):
            names = {"objective": "objective_seconds", "bound": "bound_seconds", "seconds": "planning_seconds"}
            data = _renamed(unpacked(field), names, "gap")
            seen = [_renamed(one, {"mesh": "layout", "result": "outcome"}) for one in data.pop("candidates", ())]
            data = data and {**data, "candidates": seen}
        found = Certificate.of_json(data) if data else None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error
    if found is not None and not all(0 <= seconds < LARGEST for seconds in (found.objective_seconds, found.bound_seconds)):
        raise field.wrong("seconds that are not negative")
    return found


def _of_the_first_days(data: Any) -> bool:
    """Whether predictions are packed pairs, under names that said less."""
    return isinstance(data, Mapping) and set(data) == {"map"}


def _renamed(data: Mapping[str, Any], names: Mapping[str, str], dropped: str = "") -> dict[str, Any]:
    return {names.get(name, name): item for name, item in data.items() if name != dropped}
