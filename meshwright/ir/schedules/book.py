"""The book of schedules: which ones there are, and what a plan may ask of each.

Users add theirs with ``register_schedule``; the registered ones live in the current context (``contextvars``), as registered
sharding rules do. Whoever plans, loads a plan or runs one needs the schedule that it names: register it in every process,
before.

Everything here finds a schedule by its name; what it may not be combined with follows from its properties.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

from meshwright.ir.schedules.action import ScheduleError
from meshwright.ir.schedules.builtin import BUILTIN
from meshwright.ir.schedules.schedule import Orders, PipelineSchedule, Placement, Refusal, anything, loop
from meshwright.ir.schedules.table import Table

_BUILTIN: Mapping[str, PipelineSchedule] = MappingProxyType({schedule.name: schedule for schedule in BUILTIN})
_registered: ContextVar[Mapping[str, PipelineSchedule]] = ContextVar("meshwright_schedules", default=_BUILTIN)


def schedules() -> Mapping[str, PipelineSchedule]:
    """The built-in schedules and those registered in this context, by name."""
    return _registered.get()


def schedule_of(name: str) -> PipelineSchedule:
    """The schedule of this name. Raises ScheduleError if there is none."""
    found = schedules().get(name)
    if found is None:
        raise ScheduleError(unknown(name))
    return found


def unknown(name: str) -> str:
    """That there is no schedule of this name, and what to do."""
    return (f"schedule {name[:40]!r} is unknown; known: {', '.join(schedules())}. Register one of your own before, in this "
            "process: meshwright.register_schedule")


def schedule_table(name: str, pp: int, virtual_stages: int, microbatches: int) -> Table:
    """The action table of a schedule. Raises ScheduleError for a setting that it cannot run.

    >>> print(schedule_table("1f1b", 2, 1, 3))
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    reason = illegal(name, pp, virtual_stages, microbatches)
    if reason is not None:
        raise ScheduleError(reason)
    return schedule_of(name).table(pp, virtual_stages, microbatches)


def illegal(name: str, pp: int, virtual_stages: int, microbatches: int) -> str | None:
    """Why a schedule cannot run this setting, with the nearest that can; None if it can."""
    if name not in schedules():
        return unknown(name)
    schedule = schedule_of(name)
    reason = schedule.illegal(pp, virtual_stages, microbatches)
    if reason is None or schedule.stages in (None, virtual_stages) or schedule.stages != 1:
        return reason
    return f"{reason}, or {_named(virtual_stages)}"


def illegal_combination(
    name: str, *, zero: int = 0, keep: bool = False, recompute: str = "none", compiled: bool = False
) -> str | None:
    """Why a schedule cannot run together with these, and what is nearest; None if it can.

    ``zero``: the level of parameters that several ranks read (0 if none do); ``keep``: of level 3, weights stay gathered over
    the micro-batches of a step; ``recompute``: "none", "selective" or "full"; ``compiled``: stages under ``torch.compile``.
    What is refused here torch 2.13 runs all the same, and wrong: see ``docs/pipelines.md``.

    >>> illegal_combination("1f1b", zero=3, recompute="full") is None
    True
    >>> illegal_combination("zb", zero=2)[-62:]
    "nearest legal: zero=1, or schedule '1f1b' or 'interleaved1f1b'"
    """
    schedule = schedule_of(name)
    if not schedule.split:
        return None
    other = _named(schedule.stages)
    if zero == 3 and not keep:
        return (f"schedule {name!r} with zero=3: it splits the backward, and weights that FSDP2 freed after the forward "
                "are not gathered again for it, so gradients would be dropped; nearest legal: zero=1, which gathers the weights"
                f" once a step, or {other}")
    if zero >= 2:
        return (f"schedule {name!r} with zero={zero}: it splits the backward, and FSDP2 reduces gradients after a whole "
                f"backward only, so they stay whole until the end of the step; nearest legal: zero=1, or {other}")
    if recompute != "none":
        return (f"schedule {name!r} with recompute={recompute!r}: it splits the backward, and each half would recompute "
                f"the forward; nearest legal: recompute='none', or {other}")
    if compiled:
        return (f"schedule {name!r} with compiled stages: it splits the backward, and a compiled backward runs whole each "
                f"time; nearest legal: stages that are not compiled, or {other}")
    return None


def _named(stages: int | None) -> str:
    """The built-in schedules of a whole backward that hold few micro-batches and run so many stages a rank (None: any)."""
    fit = [
        repr(s.name) for s in BUILTIN
        if not s.split and s.closed is not None and not s.closed.forwards_first
        and (stages is None or s.stages in (None, stages))
    ]
    return f"schedule {' or '.join(fit)}"


def register_schedule(
    name: str, order: Orders, *, stages: int | None = 1, placement: Placement = loop, split: bool = False,
    refuses: Refusal = anything,
) -> None:
    """Add a pipeline schedule, in the current context (threads started later begin without it).

    It is then a candidate of every search, ``pins={"schedule": name}`` asks for it, and it runs as the built-in ones do.
    Register it in every process that plans, loads or runs a plan which names it.

    * ``order(pp, virtual_stages, microbatches)``: for every rank its actions in order, each as ``"1F0"``: stage, kind and
      micro-batch, with F the forward, B the backward, or in its place I and W, the gradients of the stage's input and of its
      weights. A rank's actions may be one text.
    * ``stages``: how many stages a rank holds; None: any number.
    * ``placement(pp, virtual_stages)``: the rank of each of the pp x virtual_stages stages, as many on every rank. Default:
      stage s on rank s mod pp.
    * ``split``: whether some backward is split into I and W. Such a schedule goes with ZeRO 0 and 1, without recomputation.
    * ``refuses(pp, virtual_stages, microbatches)``: why a setting cannot be run, or None.

    Raises ScheduleError for a name that is taken by a built-in schedule, and for orders that are none: an action that is
    missing, doubled or out of order, ranks that wait for each other for ever. Some small settings are tried at once, others
    when they are asked for.

    Example, GPipe, which runs all forwards and then all backwards::

        def all_ahead(pp, virtual_stages, microbatches):
            return [[f"{rank}{kind}{m}" for kind in "FB" for m in range(microbatches)] for rank in range(pp)]

        meshwright.register_schedule("all_ahead", all_ahead)
    """
    if not isinstance(name, str) or not name.isidentifier() or name in ("none", *_BUILTIN):
        raise ScheduleError(f"register_schedule takes a name of letters, digits and underscores, not {name!r}; taken: "
                            f"none, {', '.join(_BUILTIN)}")
    if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
        raise ScheduleError(f"schedule {name!r}: stages={stages!r} is no number of stages a rank; None stands for any number")
    schedule = PipelineSchedule(name, order, stages, placement, refuses, split, usual=stages or 1)
    for pp in _TRIED:
        for microbatches in (pp, 2 * pp, 4 * pp):
            if schedule.illegal(pp, schedule.usual, microbatches) is None:
                schedule.table(pp, schedule.usual, microbatches)
    _registered.set(MappingProxyType({**schedules(), name: schedule}))


_TRIED = (2, 3, 4)
"""Pipeline degrees at which a schedule is tried when it is registered."""
