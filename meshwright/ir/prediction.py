"""What a plan is predicted to cost, and what is proven about it.

A ``Prediction`` has the step in parts. Those that are told apart add up to the whole::

    step_seconds = compute + exposed communication + recomputation + optimizer + pipeline bubble + outside the schedule

    ``compiler.search.plans.simulation_of`` runs the schedule; with what lies outside of it and the optimizer it takes the step.

    tflops_per_device = model FLOPs / (step_seconds x devices),    mfu = that / the device's peak in the compute dtype

A ``Certificate`` has the plan's seconds, a lower bound, and what the search looked at. Both are written to plan files as JSON
objects of their fields (``as_json``, ``of_json``); what is unknown is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one micro-batch in a pipeline.

    forward: of every stage
    backward_input: of every stage, the part of its backward that the stage before waits for
    backward_weight: of every stage, the rest of its backward
    transfer: between every stage and the next, one way
    waits: whether a rank goes on only when what it sent has arrived; None: it does not
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: tuple[float, ...]
    waits: bool | None = None

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if (len(self.backward_input), len(self.backward_weight), len(self.transfer) + 1) != (stages, stages, stages):
            raise ValueError(f"seconds of {stages} stages need as many backwards and one transfer less, got "
                             f"{len(self.backward_input)}, {len(self.backward_weight)} and {len(self.transfer)}")


@dataclass(frozen=True)
class Prediction:
    """What one training step of a plan is predicted to take and to hold. None or empty: not known, or not told apart.

    step_seconds: the whole step
    low_seconds, high_seconds: of the whole step, where most published runs of this kind came out that nothing was fitted to
    compute_seconds: of the mean rank; with the optimizer where that is None (one without state)
    exposed_communication_seconds: of the mean rank, what no compute hides
    communication_seconds: of the mean rank, hidden or not
    recomputation_seconds: of the mean rank
    optimizer_seconds: of the slowest rank
    pipeline_bubble_seconds: idle time of the mean rank within the schedule, waiting for transfers included
    outside_schedule_seconds: before the first action of the schedule and after its last: gathers, what is made of inputs alone,
        reductions that are left
    tokens_per_second: of all devices together
    tflops_per_device: model FLOPs; recomputation counts for nothing
    mfu: share of the device's peak in the compute dtype, 0 to 1
    bytes_per_rank: of the fullest rank at its worst moment
    capacity_bytes: of a device, what a plan may use
    free_bytes: of a device, what is left to its context, to communicators and to the allocator
    bytes_by_kind: of the fullest rank at its worst moment; they add up to bytes_per_rank
    bubble_fraction: idle share of the ranks' time within the schedule, 0 to 1
    bytes_per_pipeline_rank: of every rank of a pipeline at its worst moment
    stages: seconds of every stage of a pipeline
    prices: a digest of what it was made with (``ir.writing.versions.prices``), "" if that is not known
    """

    step_seconds: float
    bytes_per_rank: float
    capacity_bytes: float
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    recomputation_seconds: float | None = None
    optimizer_seconds: float | None = None
    pipeline_bubble_seconds: float | None = None
    outside_schedule_seconds: float | None = None
    tokens_per_second: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    bubble_fraction: float | None = None
    free_bytes: float | None = None
    bytes_by_kind: Mapping[str, float] = field(default_factory=dict)
    bytes_per_pipeline_rank: tuple[float, ...] = ()
    stages: StageSeconds | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    prices: str = ""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.bytes_per_rank <= self.capacity_bytes

    def as_json(self) -> dict[str, Any]:
        """The fields that are known."""
        return _object(self)

    @classmethod
    def of_json(cls, data: Any) -> Prediction:
        """What ``as_json`` wrote. Raises ValueError for anything else."""
        return cls(**_fields(cls, data, {
            "bytes_by_kind": _shares, "bytes_per_pipeline_rank": _numbers, "stages": _stages, "prices": _word,
        }))


@dataclass(frozen=True, slots=True)
class SeenCandidate:
    """Something the search looked at.

    layout: its mesh, stages and schedule
    microbatches: their number
    step_seconds: as far as it was solved
    zero: its ZeRO level, if it has one for all blocks
    outcome: why there are no seconds
    """

    layout: str
    microbatches: int
    step_seconds: float | None = None
    zero: int | None = None
    outcome: str = ""


STATUSES = ("optimal", "gap", "time_limit")
"""Of a search: within the gap that was asked for, nothing left to try, or work left undone."""


@dataclass(frozen=True)
class Certificate:
    """What is known about how good a plan is, in predicted seconds.

    objective_seconds: of the plan's step
    bound_seconds: no plan that was considered takes less
    status: one of ``STATUSES``
    considered: candidates of the search, 0 if nothing but placements was searched
    pruned: of these, never solved: by their bounds no better, or left undone
    infeasible: of these, impossible
    solved: of these, solved
    assumes: what the bound takes for granted, beside the prices; empty if it is proven
    runner_up: the best candidate of another layout or schedule, and what it spends more time on
    candidates: some of those looked at
    planning_seconds: by phase
    """

    objective_seconds: float
    bound_seconds: float
    status: str
    considered: int = 0
    pruned: int = 0
    infeasible: int = 0
    solved: int = 0
    assumes: tuple[str, ...] = ()
    runner_up: str = ""
    candidates: tuple[SeenCandidate, ...] = ()
    planning_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective: 0 is proven optimal."""
        return max(0.0, 1.0 - self.bound_seconds / self.objective_seconds) if self.objective_seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """The fields that are known."""
        return _object(self)

    @classmethod
    def of_json(cls, data: Any) -> Certificate:
        """What ``as_json`` wrote. Raises ValueError for anything else."""
        counts = dict.fromkeys(("considered", "pruned", "infeasible", "solved"), _count)
        return cls(**_fields(cls, data, {
            **counts, "status": _status, "assumes": _words, "runner_up": _word, "candidates": _candidates,
            "planning_seconds": _shares,
        }))


# ------------------------------------------------------------------------------------------------------------------- JSON


def _object(value: Any) -> dict[str, Any]:
    known = {f.name: getattr(value, f.name) for f in fields(value)}
    return {name: _plain(item) for name, item in known.items() if item is not None}


def _plain(item: Any) -> Any:
    if isinstance(item, SeenCandidate | StageSeconds):
        return _object(item)
    if isinstance(item, Mapping):
        return {key: _plain(value) for key, value in item.items()}
    return [_plain(value) for value in item] if isinstance(item, tuple) else item


def _fields(cls: type, data: Any, readers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """The fields of ``cls`` that an object holds, each by its reader, as a number if it has none. Raises ValueError."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__} must be an object, not {data!r:.80}")
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}
    unknown = [str(name) for name in data if name not in known]
    missing = [name for name, needed in known.items() if needed and name not in data]
    if unknown or missing:
        raise ValueError(f"{cls.__name__} " + (f"has no {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"))
    found = {}
    for name, item in data.items():
        try:
            found[name] = readers.get(name, _number)(item)
        except ValueError as error:
            raise ValueError(f"{cls.__name__}.{name}: {error}") from None
    return found


def _number(item: Any) -> float:
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise ValueError(f"{item!r:.80} is no number")
    return item


def _count(item: Any) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or item < 0:
        raise ValueError(f"{item!r:.80} is no count")
    return item


def _word(item: Any) -> str:
    if not isinstance(item, str):
        raise ValueError(f"{item!r:.80} is no text")
    return item


def _status(item: Any) -> str:
    if _word(item) not in STATUSES:
        raise ValueError(f"{item!r:.80} is none of {', '.join(STATUSES)}")
    return _word(item)


def _list(item: Any) -> list[Any]:
    if not isinstance(item, list | tuple):
        raise ValueError(f"{item!r:.80} is no list")
    return list(item)


def _numbers(item: Any) -> tuple[float, ...]:
    return tuple(map(_number, _list(item)))


def _words(item: Any) -> tuple[str, ...]:
    return tuple(map(_word, _list(item)))


def _shares(item: Any) -> dict[str, float]:
    if not isinstance(item, Mapping):
        raise ValueError(f"{item!r:.80} is no object")
    return {_word(name): _number(number) for name, number in item.items()}


def _stages(item: Any) -> StageSeconds:
    readers = {f.name: _flag if f.name == "waits" else _numbers for f in fields(StageSeconds)}
    return StageSeconds(**_fields(StageSeconds, item, readers))


def _flag(item: Any) -> bool:
    if not isinstance(item, bool):
        raise ValueError(f"{item!r:.80} is neither true nor false")
    return item


def _candidates(item: Any) -> tuple[SeenCandidate, ...]:
    readers = {"layout": _word, "outcome": _word, "microbatches": _count, "zero": _count}
    return tuple(SeenCandidate(**_fields(SeenCandidate, one, readers)) for one in _list(item))
