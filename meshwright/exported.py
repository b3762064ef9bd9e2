"""Compiled plans as folders: written by ``parallel.export``, run again by ``meshwright.load`` without the model and the solver.

    folder/export.json                what is in the folder, with checksums; versions; what order it relies on
    folder/plan.json                  the plan, as ``plan.save`` writes it; programs are those of the plan that is read from it
    folder/programs/<sha256>.json     the lowered program of every rank role: ranks whose pieces are of one size have the same
    folder/state/                     a checkpoint of what the module held: all of it, or without weights the buffers

Nothing in a folder is executed, imported or unpickled. ``load`` reads the plan as any plan file is read, field by field, lowers
it for this rank, verifies the program against the graph by the operators' rules, and goes on only if the program is, to the
letter, one that was exported: so what runs is what ran, and a folder that was altered is refused, or is a legal plan. All
ranks have read the same folder, or none goes on. Nothing is traced or searched; operators are looked up as ``ir.operators``
does.

The output's containers come back without importing a class: dataclasses and ModelOutputs as an ``AttributeDict``, named tuples
as an ``AttributeTuple``; or as the classes that the caller gives (``classes=[CausalLMOutputWithPast]``).
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.compiler.structure.calls.guard import refuse_autocast
from meshwright.errors import ExportError, InputError, MeshwrightError, PlanError, RunError
from meshwright.ir.graph import collector_paused
from meshwright.ir.mesh import PP, SEQUENCE, role_of
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.ir.program import Program, Stored
from meshwright.ir.reading.fields import Field, check_form, load_json
from meshwright.ir.rule import SHARED
from meshwright.ir.serialize import digest, in_lines, program_to_dict
from meshwright.ir.signature import classes_by_name
from meshwright.ir.writing.plans import plan_text
from meshwright.ir.writing.versions import versions
from meshwright.passes import cut_stages, rank_program
from meshwright.programs import check_given, checked_program, device_of, mesh_pins, order_of
from meshwright.rules import rules_of_plan
from meshwright.runtime.module import ParallelModule, build
from meshwright.runtime.state.layout import local_of
from meshwright.runtime.state.names import ModuleKind, NamedModule
from meshwright.runtime.state.storage import put_in_place
from meshwright.runtime.verdict import together

FORMAT = 3
READ = (2, FORMAT)
"""Formats that are read: up to 2 the plan was written as its trace named everything."""
INDEX, PLAN, STATE = "export.json", "plan.json", "state"
_DIGEST = re.compile(r"[0-9a-f]{64}")
FEW, FEW_ALONG = 64, 16
"""Up to so many ranks in all, and along one axis, are lowered one by one where no processes run that would each lower their
own."""


# --- writing ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exporter:
    """How a parallel module exports itself. ``evaluation``: why its eval() cannot be vouched for, or None."""

    plan: Plan
    evaluation: Callable[[], str | None]

    def __call__(self, parallel: ParallelModule, folder: Path, weights: bool) -> None:
        """Write the folder; it is whole, or as it was. Every rank calls this. Raises ExportError, CheckpointError."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        target, draft = _places(folder)
        together(lambda: _clear(target, draft) if rank == 0 else None)
        plan, text = together(lambda: _as_read(self.plan, rank))
        roles = _gathered(_sha(text))
        together(lambda: _write_program(draft, text) if roles.index(_sha(text)) == rank else None)
        parallel.save_contents(draft / STATE, weights)
        called = {param.value: read.value for param, read in zip(self.plan.graph.params, plan.graph.params, strict=True)}
        names = [[fqn, called[stored.value]] for fqn, stored in parallel.names]

        def finish() -> None:
            if rank == 0:
                _finish(draft, target, plan, roles, names, parallel.training, weights, self.evaluation(), parallel.resting)

        together(finish)


def export(plan: Plan, folder: str | Path) -> None:
    """Write a plan as ``parallel.export`` does, from one process and without any contents: parameters and buffers are then the
    loader's to bring. Raises ExportError."""
    target, draft = _places(Path(folder))
    _clear(target, draft)
    roles = []
    plan = Plan.from_dict(load_json(plan_text(plan)))
    for rank in _representatives(plan):
        text = _text_of(plan, rank)
        if _sha(text) not in roles:
            roles.append(_sha(text))
            _write_program(draft, text)
    _finish(draft, target, plan, roles, None, True, False, "it was exported from the plan alone")


def _places(folder: Path) -> tuple[Path, Path]:
    target = folder.absolute()
    return target, target.with_name(f".{target.name}.partial")


def _clear(target: Path, draft: Path) -> None:
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not (target / INDEX).is_file()):
        raise ExportError(f"{target} is there and is no exported program; give a new folder, or empty this one")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "programs").mkdir(parents=True)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}") from error


def _write_program(draft: Path, text: str) -> None:
    try:
        (draft / "programs" / f"{_sha(text)}.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"cannot write {draft}: {error.strerror or error}") from error


def _finish(
    draft: Path, target: Path, plan: Plan, roles: Sequence[str], names: Any, training: bool, weights: bool,
    evaluation: str | None, resting: Sequence[str] = (),
) -> None:
    """The index, last; then the folder takes its place."""
    text = plan_text(plan)
    state = draft / STATE / "checkpoint.json"
    data: dict[str, Any] = {
        "meshwright_export": FORMAT, "versions": versions(), "mesh": str(plan.mesh), "plan": _sha(text),
        "programs": sorted(set(roles)), "order": order_of(plan), "names": names,
        "training": training, "weights": weights, "evaluation": evaluation, "resting": list(resting),
        "state": _sha(state.read_text(encoding="utf-8")) if state.is_file() else None,
    }
    try:
        (draft / PLAN).write_text(text, encoding="utf-8")
        (draft / INDEX).write_text(in_lines({**data, "digest": digest(data)}, 1) + "\n", encoding="utf-8")
        put_in_place(draft, target)
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}") from error


def _as_read(plan: Plan, rank: int) -> tuple[Plan, str]:
    """The plan as ``load`` reads it, under names that the trace has no part in, and this rank's program of it."""
    read = Plan.from_dict(load_json(plan_text(plan)))
    return read, _text_of(read, rank)


def _text_of(plan: Plan, rank: int) -> str:
    return _text(rank_program(plan, rules_of_plan(plan), rank))


def _text(program: Program) -> str:
    return in_lines(program_to_dict(program), 2) + "\n"


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _gathered(mine: str) -> list[str]:
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _representatives(plan: Plan) -> list[int]:
    """Ranks among which every role is: all of few; of many those at the ends of every long axis, and where a
    dim that it does not divide ends. Stages of a pipeline differ only after the cut."""
    mesh = plan.mesh
    if mesh.world <= FEW:
        return list(range(mesh.world))
    sizes = {size for value in plan.graph.values.values() for size in value.shape}
    sharing = {axis for assignment in plan.assignments.values() for axis, factor in assignment.items() if factor == SHARED}
    wanted = {}
    for axis in mesh.axes:
        count = mesh.size(axis)
        parts = {-(-size // other) for size in sizes for other in {1, *(mesh.size(a) for a in mesh.axes if a != axis)}}
        ends = {part // -(-part // count) for part in parts if part % count}
        every = count <= FEW_ALONG or role_of(axis) == SEQUENCE or axis in sharing  # attention differs from place to place
        some = range(count) if every else {0, count - 1, *ends, *(end + 1 for end in ends)}
        wanted[axis] = {0} if axis == PP else set(some)
    return [rank for rank in range(mesh.world) if all(at in wanted[axis] for axis, at in mesh.coordinates(rank).items())]


# --- reading ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Export:
    """An export that this process can run. ``names``: (name, value) in the order of the state dict, if known; ``resting``:
    sub-modules that were in eval() when the model was captured in training."""

    plan: Plan
    names: tuple[tuple[str, str], ...] | None
    training: bool
    weights: bool
    evaluation: str | None
    state: bool
    programs: frozenset[str]
    digest: str
    resting: tuple[str, ...] = ()


def load(folder: str | Path, mesh: DeviceMesh, *, classes: Iterable[type] = ()) -> ParallelModule:
    """The module that was exported to ``folder``, on as many devices: no source of the model, no trace, no search, and nothing
    in the folder is executed. It holds what the exporting one held; where it was exported without weights, a checkpoint
    (``parallel.load``) or a state dict must bring them before the first call.

    Every rank calls this. ``classes``: those of the output's containers, where attributes by name are not enough. Raises, on
    every rank: ExportError, PlanError or CheckpointError for a folder that is damaged, or made for other versions, rules or
    schedules; PlanError for another mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"load runs on a torch DeviceMesh, got {type(mesh).__name__}")
    source, given = Path(folder), list(classes)
    rank = dist.get_rank() if dist.is_initialized() else 0

    def prepare() -> tuple[_Export, Program]:
        return prepared(source, rank, lambda plan: check_given(plan, mesh, mesh_pins(mesh, Pins()), None, None), given)

    with collector_paused():
        found, program = together(prepare)
        if len(set(_gathered(found.digest))) > 1:
            raise ExportError("the ranks read different exports; give every rank the same folder")
        names = together(lambda: _names(found, program, source))
        kinds = {path: ModuleKind(NamedModule, False) for path in found.resting}
        parallel = build(program, None, device=device_of(mesh), names=names, kinds=kinds)
    parallel.plan = found.plan
    if found.state:
        parallel.load_contents(source / STATE, found.weights)
    parallel.watch = _Loaded(found, _blank(parallel, found))
    parallel.exporter = Exporter(found.plan, lambda: found.evaluation)
    if not found.training:
        parallel.eval()
    return parallel


@collector_paused()
def prepared(
    folder: Path, rank: int, check: Callable[[Plan], object] = lambda plan: None, classes: Sequence[type] = (),
) -> tuple[_Export, Program]:
    """What was exported and this rank's program, in its stages. ``check``: raises for a plan that is not for this mesh.

    Raises ExportError for what cannot be run here."""
    found = _read(folder)
    check(found.plan)
    graph = found.plan.graph
    output = None if graph.signature is None else graph.signature["output"]
    graph = replace(graph, classes=classes_by_name(output, classes))
    whole = checked_program(replace(found.plan, graph=graph), rank)
    _check_program(whole, found, folder)
    return found, cut_stages(whole, found.plan.pipeline)


def _read(folder: Path) -> _Export:
    try:
        return _checked(folder)
    except ExportError:
        raise
    except MeshwrightError as error:
        raise ExportError(f"the export {folder} cannot be run: {error}") from error
    except (OSError, ValueError) as error:
        raise ExportError(f"the export {folder} cannot be read ({type(error).__name__}: {error}); export it again") from error


def _checked(folder: Path) -> _Export:
    """The index and the plan, every field checked."""
    if not (folder / INDEX).is_file():
        raise ExportError(f"{folder} is no exported program (it has no {INDEX}); write one with parallel.export(folder)")
    data = load_json((folder / INDEX).read_text(encoding="utf-8"))
    if not isinstance(data, dict) or "meshwright_export" not in data:
        raise ExportError(f"{folder / INDEX} is no index of an exported program")
    if data["meshwright_export"] not in READ or type(data["meshwright_export"]) is not int:
        raise ExportError(f"the export {folder} is of format {data['meshwright_export']!r:.40}, this version reads "
                          f"{' and '.join(map(str, READ))}; export it again")
    check_form(data)
    part = Field(data, "").record("meshwright_export versions mesh plan programs order names training weights evaluation "
                                  "state digest", optional="resting")
    if part["digest"].text() != digest({key: value for key, value in data.items() if key != "digest"}):
        raise ExportError(f"the export {folder} is damaged: {INDEX} was altered after it was written; export it again")
    made = {name: field.text() for name, field in part["versions"].record("meshwright torch").items()}
    if _minor(made["torch"]) != _minor(versions()["torch"]):
        raise ExportError(f"the export {folder} was made under torch {made['torch']}, this is torch {versions()['torch']}; "
                          f"export it again under this version, or run it under torch {_minor(made['torch'])}")
    text = (folder / PLAN).read_text(encoding="utf-8")
    if _sha(text) != part["plan"].text():
        raise ExportError(f"the export {folder} is damaged: {PLAN} is not the plan that was exported; export it again")
    plan = Plan.from_dict(load_json(text))
    if part["order"].text() != order_of(plan):
        schedule = plan.pipeline and plan.pipeline.schedule
        raise ExportError(f"the export {folder} relies on another order of the pipeline schedule {schedule!r} than is "
                          "registered here; register the one that it was exported with")
    programs = frozenset(part["programs"].names())
    if not programs or not all(_DIGEST.fullmatch(name) for name in programs):
        raise part["programs"].wrong("digests of programs")
    state = part["state"].value
    if state is not None and _sha((folder / STATE / "checkpoint.json").read_text(encoding="utf-8")) != part["state"].text():
        raise ExportError(f"the export {folder} is damaged: its {STATE} is not what was exported; export it again")
    names = None if part["names"].value is None else tuple(
        (row.row(2)[0].name(), row.row(2)[1].name()) for row in part["names"].items()
    )
    return _Export(
        plan, names, part["training"].flag(), part["weights"].flag(),
        None if part["evaluation"].value is None else part["evaluation"].text(), state is not None, programs,
        part["digest"].text(), part["resting"].names() if "resting" in part else (),
    )


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])


def _check_program(program: Program, found: _Export, folder: Path) -> None:
    """Raise ExportError unless the program was exported, to the letter."""
    text = _text(program)
    name = _sha(text)
    path = folder / "programs" / f"{name}.json"
    if name not in found.programs or not path.is_file():
        raise ExportError(f"the export {folder} lacks the program of rank {program.rank}, as this version of meshwright "
                          f"({versions()['meshwright']}) lowers its plan: it is damaged, or was made by another version; "
                          "export it again")
    try:
        same = path.read_bytes() == text.encode()
    except OSError:
        same = False
    if not same:
        raise ExportError(f"the export {folder} is damaged: {path.name} is not the program that was exported; export it again")


def _names(found: _Export, program: Program, folder: Path) -> list[tuple[str, Stored]] | None:
    """What the state dict holds, in its order. Raises ExportError unless it is what the program stores."""
    if found.names is None:
        return None
    everything = program.stages.stored if program.stages else program.stored
    known = {(fqn, stored.value): stored for stored in everything for fqn in stored.fqns}
    constants = found.plan.graph.constants
    wanted = {key for key, stored in known.items() if stored.value not in constants}
    if len(set(found.names)) != len(found.names) or not set(found.names) <= known.keys() or not wanted <= set(found.names):
        raise ExportError(f"the export {folder} is damaged: its names are not those of the plan's parameters and buffers")
    return [(fqn, known[fqn, value]) for fqn, value in found.names]


# --- running ---------------------------------------------------------------------------------------------------------------


def _blank(parallel: ParallelModule, found: _Export) -> dict[str, tuple[torch.Tensor, int]]:
    """{name: (local tensor, its version)} of what no file brought, its first element marked as not a number."""
    blank: dict[str, tuple[torch.Tensor, int]] = {}
    if found.state and found.weights:
        return blank
    with torch.no_grad():
        for fqn, tensor in (*parallel.named_parameters(), *parallel.named_buffers()):
            local = local_of(tensor)
            if found.state and (not isinstance(tensor, torch.nn.Parameter) or not local.dtype.is_floating_point):
                continue
            if local.numel():
                if local.dtype.is_floating_point or local.dtype.is_complex:
                    local[(0,) * local.ndim] = float("nan")
                blank[fqn] = local, local._version
    return blank


class _Loaded:
    """What is watched at the calls of a loaded module, in place of ``Watch``, which has a model to look at."""

    def __init__(self, found: _Export, blank: dict[str, tuple[torch.Tensor, int]]) -> None:
        self.found, self.blank, self.first = found, blank, not (found.state and found.weights)

    def __call__(self, training: bool, *call: Any) -> None:
        """Raise RunError for what the exported graph does not answer for."""
        refuse_autocast()
        if self.first:
            together(self._filled)
            self.first, self.blank = False, {}
        if not training and self.found.evaluation is not None:
            raise RunError(f"eval() of an exported program runs the graph without dropout and batch statistics, and nobody saw "
                           f"that the model does the same: {self.found.evaluation}. Export from a parallel module whose model "
                           "is still there")

    def _filled(self) -> None:
        for fqn, (local, before) in self.blank.items():
            first = local[(0,) * local.ndim]
            unset = bool(first.isnan()) if first.is_floating_point() or first.is_complex() else local._version == before
            if unset:
                raise RunError(f"{fqn!r} has no contents: the program was exported without weights. Call parallel.load(folder) "
                               "with a checkpoint, parallel.load_state_dict(...) with whole tensors, or write into every "
                               "parameter, first")


__all__ = ["ExportError", "Exporter", "PlanError", "export", "load"]
