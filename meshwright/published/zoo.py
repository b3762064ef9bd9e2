"""Published systems, priced: the parallelism that was published, whether it fits, how fast we say it is, and what we would do.

    for system in systems():          # zoo.toml: data, each entry with its source
        row = price(system)           # builds the model on the meta device, captures it, plans it with the published degrees
        row.predicted, row.ratio, row.reason

What a source leaves open (micro-batches, virtual stages, ...) the planner chooses. What the planner cannot do, or what was
never disclosed, is a ``reason``, not a number: a row is neither dropped nor approximated. Rows are priced one by one and
nothing is kept.

A run whose recomputation was published did fit, so its speed is predicted with memory out of the way; where by our memory it
does not fit, ``within`` is the best plan of the same degrees that does. Elsewhere the planner chooses recomputation within the
memory. A published run is held to all that the context leaves of the memory, because it ran; the planner's own best leaves the
headroom free that its plans do (``Cluster.with_headroom``), which is printed beside it, and so is what that best rests on: the
interval of published runs in its regime that nothing was fitted to (``cost.spread``).

TFLOP/s and MFU are counted as the source counts them. "recompute" (Narayanan et al. 2021) counts what is run again::

    96 B s l h^2 (1 + s / 6h + V / 16 l h)   per step
"""

from __future__ import annotations

import difflib
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from meshwright.cost.cluster import Cluster
from meshwright.cost.spread import regime, spread
from meshwright.errors import InputError
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.ir.quantities import count_text
from meshwright.ir.schedules import schedule_of, schedules
from meshwright.planner import OutOfMemoryError, capture_model, make_plan
from meshwright.progress import Report
from meshwright.published.architectures import Architecture, build

AXES: Sequence[str] = ("dp", "shard", "tp", "cp", "pp", "ep")
PINNED = (
    "dp", "shard", "tp", "cp", "pp", "ep", "zero", "schedule", "virtual_stages", "microbatches", "recompute",
    "sequence_parallel",
)
_UNBOUNDED = 2**50  # bytes


def _silent(what: str, done: float) -> None:
    """Where nobody asked how far it is."""


@dataclass(frozen=True)
class Published:
    """What a source states; None: it does not. ``parameters``, ``active``: 1e9. Per device: ``tflops``, ``mfu`` (a fraction),
    ``tokens_per_second``. ``counts``: "model" or "recompute" FLOPs."""

    parameters: float | None = None
    active: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    tokens_per_second: float | None = None
    counts: str = "model"

    def __post_init__(self) -> None:
        if self.counts not in ("model", "recompute"):
            raise InputError(f"counts={self.counts!r}: FLOPs are counted as 'model' or 'recompute'")


@dataclass(frozen=True)
class System:
    """One entry of the data. ``degrees``: pins by name, and ``undisclosed``, the axes that are used to an unknown degree.
    ``assumed``: what a plan is made with where the source is silent (cluster, batch, sequence, degrees), and the schedule in
    the place of one that is not planned, or that splits the backward, with which nothing can be recomputed here.
    ``precision``: a name of ``PRECISIONS``, also one that is planned and not run here.
    ``attention``: "eager" where the run formed the matrix of scores; ``kernel``: the attention kernel, if not the device's."""

    name: str
    date: str
    source: str
    degrees: Mapping[str, Any]
    published: Published = field(default_factory=Published)
    recalled: str = ""
    note: str = ""
    device: str | None = None
    cluster: str | None = None
    batch: int | None = None
    sequence: int | None = None
    optimizer: str | float = "adamw"
    precision: str = "bf16"
    model: Architecture | None = None
    attention: str = "sdpa"
    kernel: str | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(f"system {self.name!r}: precision {self.precision!r} is none of {', '.join(PRECISIONS)}")
        unknown = set(self.degrees) - {*AXES, *PINNED, "undisclosed"}
        if unknown:
            raise InputError(f"system {self.name!r}: unknown degrees {', '.join(sorted(unknown))}")
        known = [name for name in ("cluster", "batch", "sequence") if getattr(self, name) is not None]
        whole = {name for name in schedules() if not schedule_of(name).split}
        known += [name for name in self.degrees if name != "schedule" or self.degrees[name] in whole]
        if stated := set(self.assumed).intersection(known):
            raise InputError(f"system {self.name!r}: {', '.join(sorted(stated))} is stated by the source, so it is not assumed")
        if unknown := set(self.assumed) - {"cluster", "batch", "sequence", *AXES, *PINNED}:
            raise InputError(f"system {self.name!r}: {', '.join(sorted(unknown))} cannot be assumed")

    def taken(self) -> System:
        """The system that is planned: with what is assumed."""
        plain = {name: one for name, one in self.assumed.items() if name in ("cluster", "batch", "sequence")}
        degrees = {name: one for name, one in self.assumed.items() if name not in plain}
        left = [axis for axis in self.degrees.get("undisclosed", ()) if axis not in degrees]
        return replace(self, **plain, degrees={**self.degrees, **degrees, "undisclosed": left}, assumed={})

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> System:
        """From a table of the file. Raises InputError for keys that mean nothing."""
        known = {f.name for f in fields(cls)} - {"attention"}
        if unknown := set(entry) - known:
            raise InputError(f"system {entry.get('name')!r}: unknown keys {', '.join(sorted(unknown))}")
        dims = dict(entry.get("model", {}))
        attention = dims.pop("attention", "sdpa")
        rest = {key: value for key, value in entry.items() if key not in ("model", "published")}
        return cls(**rest, attention=attention, model=Architecture(**dims) if dims else None,
                   published=Published(**entry.get("published", {})))

    @property
    def devices(self) -> int | None:
        return None if self.cluster is None else Cluster.parse(self.cluster).world

    @property
    def shown_degrees(self) -> str:
        """As published; a question mark for what was used and not disclosed."""
        open_ = self.degrees.get("undisclosed", ())
        words = [f"{axis}={self.degrees[axis]}" for axis in AXES if axis in self.degrees]
        words += [f"{axis}=?" for axis in open_]
        words += [f"zero={self.degrees['zero']}"] if "zero" in self.degrees else []
        stages = self.degrees.get("virtual_stages", 1)
        words += [self.degrees["schedule"] + (f" x{stages}" if stages > 1 else "")] if "schedule" in self.degrees else []
        return " ".join([*words, *([f"{self.degrees['recompute']} recompute"] if "recompute" in self.degrees else [])])

    def obstacles(self) -> list[str]:
        """Why the published degrees cannot be priced; empty if they can."""
        degrees = self.degrees
        found = []
        if "schedule" in degrees and degrees["schedule"] not in schedules():
            found.append(f"schedule {degrees['schedule']}: not planned yet")
        return [*found, *self.unknowns()]

    def unknowns(self) -> list[str]:
        """What is missing for any plan at all."""
        needs = {"model": self.model, "number of devices": self.cluster, "batch": self.batch, "sequence": self.sequence}
        missing = [name for name, value in needs.items() if value is None]
        return [f"not disclosed: {', '.join(missing)}"] if missing else []

    def pins(self) -> Pins:
        """The published degrees (of ZeRO see ``zero_of_stages``), all logits at once."""
        pins = Pins(**{name: self.degrees[name] for name in PINNED if name in self.degrees})
        return replace(pins, zero=zero_of_stages(pins.zero, pins.pp or 1), loss_rows=0, mlp_rows=0)


GATHERED = 512
"""Devices of the largest measured run whose gathers hide behind compute: FSDP on H100 (llm-foundry, ``steps.csv``). DeepSpeed's
ZeRO-3 over more took what nothing hides."""


def zero_of_stages(level: int | None, pp: int) -> int | None:
    """The ZeRO level at which a published run is planned, with a pipeline at most 1: there FSDP, under torch's schedules, and
    Megatron's distributed optimizer add up whole gradients over the micro-batches and reduce once a step (DeepSpeed refuses
    level 2 with stages for it), whereas level 2 here reduces those of every micro-batch."""
    return level if level is None or pp == 1 else min(level, 1)


@dataclass(frozen=True)
class PricedSystem:
    """Predictions of one plan: seconds of a step, per device TFLOP/s (as the source counts), MFU and tokens/s; bytes, of those
    there are to use, beside those left free; the regime of the step, and measured over predicted seconds there; without a
    pipeline the share of the step that communication takes beside compute (``hidden``); over how many ranks ZeRO-3 gathers."""

    layout: str
    step_seconds: float
    tflops: float
    mfu: float
    tokens_per_second: float
    bytes_per_rank: float
    fits: bool = True
    capacity_bytes: float | None = None
    free_bytes: float | None = None
    regime: str = ""
    likely: tuple[float, float] | None = None
    hidden: float | None = None
    gathers_over: int = 0


@dataclass(frozen=True)
class Comparison:
    """A system beside its prices. ``parameters``: counted in the model built, 1e9. ``reason``: why ``predicted`` is None;
    ``within``: the same degrees within the memory, where ``predicted`` is not; ``best``: the planner's own plan,
    ``best_reason`` why there is none."""

    system: System
    parameters: float | None = None
    capacity_bytes: float | None = None
    predicted: PricedSystem | None = None
    reason: str = ""
    within: PricedSystem | None = None
    best: PricedSystem | None = None
    best_reason: str = ""
    planning_seconds: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Predicted over published speed, by the first figure that was published; None without one."""
        published = self.system.published
        if self.predicted is None:
            return None
        for name in ("tflops", "tokens_per_second", "mfu"):
            if getattr(published, name) is not None:
                return float(getattr(self.predicted, name) / getattr(published, name))
        return None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, blanks as None."""
        system = self.system
        plans = {name: getattr(self, name) for name in ("predicted", "within", "best")}
        return {
            "name": system.name, "date": system.date, "source": system.source, "recalled": system.recalled or None,
            "assumed": dict(system.assumed) or None, "precision": system.precision,
            "note": system.note or None, "device": system.device, "devices": system.devices, "degrees": dict(system.degrees),
            "published": dict(vars(system.published)), "parameters": self.parameters, "capacity_bytes": self.capacity_bytes,
            **{name: None if plan is None else dict(vars(plan)) for name, plan in plans.items()}, "ratio": self.ratio,
            "reason": self.reason or None, "best_reason": self.best_reason or None, "planning_seconds": self.planning_seconds,
        }


class Trained(nn.Module):
    """A model as training programs call it: its loss alone is returned. Logits that were handed back would be held for every
    micro-batch until the step ends."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """[batch, sequence] ids to the loss."""
        return {"loss": self.model(input_ids=input_ids, labels=labels)["loss"]}


def systems(path: str | Path | None = None, name: str = "") -> tuple[System, ...]:
    """The data, or a file of the same form; ``name``: only systems whose name holds it. Raises InputError if none does."""
    file = Path(path) if path is not None else Path(__file__).with_name("zoo.toml")
    found = tuple(System.of(entry) for entry in tomllib.loads(file.read_text(encoding="utf-8"))["system"])
    chosen = tuple(system for system in found if name.lower() in system.name.lower())
    if not chosen:
        names = [system.name for system in found]
        near = difflib.get_close_matches(name, names, n=4, cutoff=0.0)
        raise InputError(f"no system named {name!r}; the nearest of {len(names)} are {'; '.join(near)}; meshwright zoo has "
                         "all without a name")
    return chosen


def price(system: System, search: bool = False, report: Report = _silent) -> Comparison:
    """Plan the published degrees, and with ``search`` the model without any. Whatever goes wrong becomes a reason.

    ``report``: called with what is done now and the share of this system that is done.
    """
    start = time.perf_counter()
    taken = system.taken()
    row = Comparison(system, reason="; ".join(taken.obstacles()), best_reason="; ".join(taken.unknowns()) if search else "")
    if not row.reason or (search and not row.best_reason):
        try:
            row = _priced(row, search, report)
        except Exception as error:
            reason = _said(error)
            row = replace(row, reason=row.reason or reason, best_reason=reason if search else "")
    return replace(row, planning_seconds=time.perf_counter() - start)


def _priced(row: Comparison, search: bool, report: Report) -> Comparison:
    system = row.system.taken()
    assert system.model is not None
    assert system.cluster is not None
    assert system.batch is not None
    assert system.sequence is not None
    report("capturing the model", 0.0)
    cluster = Cluster.parse(system.cluster).with_kernels(system.kernel, fused=True)  # as the stacks that trained them do
    model = build(system.model, system.sequence, system.attention)
    row = replace(row, parameters=sum(p.numel() for p in model.parameters()) / 1e9, capacity_bytes=cluster.capacity_bytes)
    ids = torch.zeros(system.batch, system.sequence, dtype=torch.int64, device="meta")
    graph = capture_model(Trained(model), (), {"input_ids": ids, "labels": ids.clone()}, (), None, system.precision)
    if not row.reason:
        try:
            row = _published(row, graph, cluster, report)
        except Exception as error:
            row = replace(row, reason=_said(error))
    if search:
        try:
            row = replace(row, best=_planned(system, graph, cluster.with_headroom(), Pins(), report))
        except Exception as error:
            row = replace(row, best_reason=_said(error))
    return row


def _published(row: Comparison, graph: Graph, cluster: Cluster, report: Report) -> Comparison:
    """The row with the plan of the published degrees, and what of it fits."""
    system = row.system.taken()
    pins = system.pins()
    if pins.recompute is None:
        return replace(row, predicted=_planned(system, graph, cluster, pins, report))
    fastest = _planned(system, graph, cluster.with_memory(_UNBOUNDED), pins, report)
    if fastest.bytes_per_rank <= cluster.capacity_bytes:
        return replace(row, predicted=fastest)
    row = replace(row, predicted=replace(fastest, fits=False))
    try:
        return replace(row, within=_planned(system, graph, cluster, pins, report))
    except OutOfMemoryError:
        return row


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _planned(system: System, graph: Graph, cluster: Cluster, pins: Pins, report: Report) -> PricedSystem:
    """One plan's predictions. Raises OutOfMemoryError, PinError, PlanError."""
    plan = make_plan(graph, cluster, pins, precision=system.precision, optimizer=system.optimizer, progress=report)
    predicted, peak = plan.predicted, cluster.device.flops(torch.bfloat16)
    assert predicted is not None
    seconds, tflops = predicted.step_seconds, predicted.tflops_per_device or 0.0
    if system.published.counts == "recompute" and all(group.recompute == "full" for group in plan.groups if group.path):
        tflops = recompute_flops(system) / seconds / cluster.world / 1e12
    tokens = (predicted.tokens_per_second or 0.0) / cluster.world
    likely, moved = spread(cluster, plan.mesh), predicted.communication_seconds
    return PricedSystem(
        layout_of(plan), seconds, tflops, tflops * 1e12 / peak, tokens, predicted.bytes_per_rank,
        capacity_bytes=predicted.capacity_bytes, free_bytes=predicted.free_bytes,
        regime=regime(plan.mesh, cluster.per_node), likely=(likely.low, likely.high),
        hidden=None if moved is None else (moved - (predicted.exposed_communication_seconds or 0.0)) / seconds,
        gathers_over=max((plan.mesh.size(group.shard_axes) for group in plan.groups if group.zero == 3), default=0),
    )


def recompute_flops(system: System) -> float:
    """FLOPs of a step with full recomputation, Narayanan et al. 2021."""
    model, batch, sequence = system.model, system.batch or 0, system.sequence or 0
    if model is None:
        return 0.0
    attention, head = sequence / (6 * model.hidden), model.vocab / (16 * model.layers * model.hidden)
    return 96.0 * batch * sequence * model.layers * model.hidden**2 * (1 + attention + head)


def layout_of(plan: Plan) -> str:
    """The decisions of a plan in a line: degrees, ZeRO levels, schedule, micro-batches, recomputation."""
    words = [] if plan.pipeline is None else [f"pp={plan.pipeline.degree}"]
    words += [f"{axis}={size}" for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True) if size > 1 and axis != "pp"]
    words.append("zero=" + "/".join(str(level) for level in sorted({group.zero for group in plan.groups})))
    if plan.pipeline is not None:
        virtual = plan.pipeline.stages // plan.pipeline.degree
        words.append(plan.pipeline.schedule + (f" x{virtual}" if virtual > 1 else ""))
    kinds = sorted({group.recompute for group in plan.groups if group.path} - {"none"})
    return " ".join([*words, count_text(plan.schedule.microbatches, "micro-batch"), *(f"{kind} recompute" for kind in kinds)])


def table(rows: Iterable[Comparison], search: bool = False) -> Table:
    """The rows for people. Blank: not published, or not asked for."""
    columns = ("system", "devices", "published degrees", "parameters", "published", "predicted", "ratio", "planned as", "GiB")
    found = Table(*columns, *(["planner's own best"] if search else []), show_lines=True)
    for row in rows:
        system, published, priced = row.system, row.system.published, row.predicted
        count = f"{system.devices:,} " if system.devices else ""
        cells = [
            system.name, f"{count}{system.device or ''}".strip(), system.shown_degrees, _parameters(row),
            _speed(published.tflops, published.mfu, published.tokens_per_second),
            row.reason if priced is None else _of(priced, published), "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if priced is None else priced.layout + _assumed(system), _memory(row),
        ]
        best = row.best_reason if row.best is None else f"{row.best.layout}: {_faster(row)}"
        found.add_row(*cells, *([best] if search else []))
    return found


def _assumed(system: System) -> str:
    words = ", ".join(f"{name}={one}" for name, one in system.assumed.items())
    precision = "" if system.precision == "bf16" else f" in {system.precision}"
    return precision + (f" (assumed: {words})" if words else "")


def notes(rows: Iterable[Comparison]) -> list[str]:
    """What stands below the table: a line for each note, with the systems it is about."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.system.note, []).append(row.system.name)
    return [f"{'; '.join(names)}: {note}" for note, names in found.items() if note]


def _faster(row: Comparison) -> str:
    """The planner's own plan beside the published one."""
    assert row.best is not None
    times = f", {row.predicted.step_seconds / row.best.step_seconds:.2f} times as fast" if row.predicted is not None else ""
    words = [f"{_speed(None, None, row.best.tokens_per_second)}{times}"]
    if row.best.capacity_bytes is not None:
        words.append(f"{row.best.bytes_per_rank / 2**30:.1f} of {row.best.capacity_bytes / 2**30:.1f} GiB, "
                     f"{(row.best.free_bytes or 0.0) / 2**30:.1f} left free")
    if row.best.likely is not None:
        words.append(f"rests on {row.best.regime}: runs took {row.best.likely[0]:.2f} to {row.best.likely[1]:.2f} times "
                     "what was predicted without them")
    if row.best.hidden:
        words.append(f"{row.best.hidden:.0%} of the step is communication behind compute")
    if row.best.gathers_over > GATHERED:
        words.append(f"its ZeRO-3 gathers over {row.best.gathers_over} devices, and no run over more than {GATHERED} says that "
                     "those hide")
    return "; ".join(words)


def _of(priced: PricedSystem, published: Published) -> str:
    """The figures that were published, as predicted; TFLOP/s and MFU where none was."""
    names = ("tflops", "mfu", "tokens_per_second")
    shown = [name for name in names if getattr(published, name) is not None] or names[:2]
    return _speed(*(getattr(priced, name) if name in shown else None for name in names))


def _speed(tflops: float | None, mfu: float | None, tokens: float | None) -> str:
    words = [f"{tflops:.0f} TFLOP/s"] if tflops is not None else []
    words += [f"{mfu:.1%}"] if mfu is not None else []
    return ", ".join([*words, *([f"{tokens:,.{0 if tokens >= 1000 else 1}f} tokens/s"] if tokens is not None else [])])


def _parameters(row: Comparison) -> str:
    published = row.system.published
    stated = [f"{published.parameters:g}B"] if published.parameters is not None else []
    stated += [f"{published.active:g}B active"] if published.active is not None else []
    return ", ".join([*stated, *([f"built {row.parameters:.1f}B"] if row.parameters is not None else [])])


def _memory(row: Comparison) -> str:
    priced, within, there = row.predicted, row.within, row.capacity_bytes
    if priced is None or there is None:
        return ""
    need = f"{priced.bytes_per_rank / 2**30:.1f} of {there / 2**30:.1f}"
    if priced.fits:
        return f"fits: {need}"
    best = f"; within it {_of(within, row.system.published)} as {within.layout}" if within is not None else ""
    return f"does not fit: {need}{best}"


def brief(row: Comparison) -> str:
    """One line of progress."""
    words: Sequence[str] = [row.reason] if row.predicted is None else [_of(row.predicted, row.system.published)]
    return f"{row.system.name}: {words[0]} ({row.planning_seconds:.0f} s)"
