"""The pipeline schedules of the field, each as the table that torch runs.

S = pp x virtual_stages stages lie on pp ranks in one of two ways::

    loop map: stage s on rank s mod pp                V map (two stages a rank): 0 1 .. pp-1 pp-1 .. 1 0

| name             | source                                      | stages a rank | micro-batches M              |
|------------------|---------------------------------------------|---------------|------------------------------|
| gpipe            | arXiv 1811.06965                            | 1             | any                          |
| 1f1b             | PipeDream-Flush, arXiv 2006.09503           | 1             | M >= pp                      |
| interleaved1f1b  | Megatron-LM, arXiv 2104.04473               | any           | M % max(1, M // pp) == 0     |
| zb               | zero bubble ZB-H1, arXiv 2401.10241         | any           | M % max(1, M // pp) == 0     |
| zbv              | ZB-V, the same paper                        | 2, V map      | any                          |
| dualpipev        | DualPipeV, after DeepSeek-V3, 2412.19437    | 2, V map      | M >= 2 pp                    |

The orders are those that torch's schedule classes run (``tests/test_timeline.py`` holds them equal, action by action); they
are written out here because building torch's classes takes longer than the search has, and because ``Schedule1F1B`` prints a
table that is not what it runs. The functions: ``illegal`` (the last two columns), ``illegal_combination`` (what else a plan
may not ask of a schedule), ``schedule_table``, ``waiting`` (what torch receives early), and one generator a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.cost.table import Action, ScheduleError, Table

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zb", "zbv", "dualpipev")
SPLIT_BACKWARD = ("zb", "zbv", "dualpipev")
"""Schedules that run gradients of inputs and of weights apart (some or all of the time)."""
V_SHAPED = ("zbv", "dualpipev")
# ---------------------------------------------------------------------------------------------------------- legality


def illegal(name: str, pp: int, virtual_stages: int, microbatches: int) -> str | None:
    """Why torch refuses this setting, with the nearest legal one; None if it does not."""
    if name not in SCHEDULES:
        return f"schedule {name!r} is unknown; known: {', '.join(SCHEDULES)}"
    if min(pp, virtual_stages, microbatches) < 1:
        return f"pp, virtual_stages and microbatches must be at least 1, got {pp}, {virtual_stages}, {microbatches}"
    asked = f"{name} with pp={pp}, virtual_stages={virtual_stages}, microbatches={microbatches}: "
    per_rank = 2 if name in V_SHAPED else 1 if name in ("gpipe", "1f1b") else virtual_stages
    if virtual_stages != per_rank:
        other = ", or schedule 'interleaved1f1b'" if per_rank == 1 else ""
        return asked + f"it takes {per_rank} stage(s) a rank; nearest legal: virtual_stages={per_rank}{other}"
    if _divides(name, pp, microbatches):
        return None
    reason = {
        "1f1b": f"it needs at least pp = {pp} micro-batches",
        "dualpipev": f"it needs at least one micro-batch a stage, 2 pp = {2 * pp}",
    }.get(name, f"micro-batches go in max(1, {microbatches} // {pp}) = {max(1, microbatches // pp)} equal rounds")
    near = [
        next((m for m in candidates if _divides(name, pp, m)), None)
        for candidates in (range(microbatches - 1, 0, -1), range(microbatches + 1, microbatches + 2 * pp + 1))
    ]
    return asked + f"{reason}; nearest legal: microbatches={' or '.join(str(m) for m in near if m is not None)}"


def illegal_combination(
    schedule: str, *, zero: int = 0, keep: bool = False, recompute: str = "none", compiled: bool = False
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
    if schedule not in SPLIT_BACKWARD:
        return None
    other = "schedule 'interleaved1f1b'" if schedule in V_SHAPED else "schedule '1f1b' or 'interleaved1f1b'"
    if zero == 3 and not keep:
        return (f"schedule {schedule!r} with zero=3: it splits the backward, and weights that FSDP2 freed after the forward "
                "are not gathered again for it, so gradients would be dropped; nearest legal: zero=1, which gathers the weights"
                f" once a step, or {other}")
    if zero >= 2:
        return (f"schedule {schedule!r} with zero={zero}: it splits the backward, and FSDP2 reduces gradients after a whole "
                f"backward only, so they stay whole until the end of the step; nearest legal: zero=1, or {other}")
    if recompute != "none":
        return (f"schedule {schedule!r} with recompute={recompute!r}: it splits the backward, and each half would recompute "
                f"the forward; nearest legal: recompute='none', or {other}")
    if compiled:
        return (f"schedule {schedule!r} with compiled stages: it splits the backward, and a compiled backward runs whole each "
                f"time; nearest legal: stages that are not compiled, or {other}")
    return None


def _divides(name: str, pp: int, microbatches: int) -> bool:
    if name == "1f1b":
        return microbatches >= pp
    if name == "dualpipev":
        return microbatches >= 2 * pp
    return name in ("gpipe", "zbv") or microbatches % max(1, microbatches // pp) == 0


def stage_rank(name: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of every stage.

    >>> stage_rank("interleaved1f1b", 2, 2), stage_rank("zbv", 2, 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    if name in V_SHAPED:
        return (*range(pp), *reversed(range(pp)))
    return tuple(s % pp for s in range(pp * virtual_stages))


def waiting(name: str, pp: int, virtual_stages: int) -> int:
    """Of values and gradients that a rank was sent, the most that wait to be read at once: torch posts a receive where the
    sender has sent, which in its order of the communication may be some actions early."""
    if name in ("gpipe", "1f1b"):
        return 1
    if name in V_SHAPED or virtual_stages == 1:
        return 4 if name == "dualpipev" else 3
    return pp + 1


def schedule_table(name: str, pp: int, virtual_stages: int, microbatches: int) -> Table:
    """The action table of a schedule. Raises ScheduleError for a setting that torch refuses.

    >>> print(schedule_table("1f1b", 2, 1, 3))
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    reason = illegal(name, pp, virtual_stages, microbatches)
    if reason is not None:
        raise ScheduleError(reason)
    make: dict[str, Callable[[int], Iterator[Action]]] = {
        "gpipe": lambda rank: _gpipe(rank, microbatches),
        "1f1b": lambda rank: _one_f_one_b(rank, pp, microbatches),
        "interleaved1f1b": lambda rank: _interleaved(rank, pp, virtual_stages, microbatches, split=False),
        "zb": lambda rank: _interleaved(rank, pp, virtual_stages, microbatches, split=True),
        "zbv": lambda rank: _zbv(rank, pp, microbatches),
        "dualpipev": lambda rank: _dualpipev(rank, pp, microbatches),
    }
    ranks = tuple(tuple(make[name](rank)) for rank in range(pp))
    return Table(name, microbatches, ranks, stage_rank(name, pp, virtual_stages))


# -------------------------------------------------------------------------------------------------------- generators


def _gpipe(rank: int, microbatches: int) -> Iterator[Action]:
    for kind in "FB":
        yield from (Action(rank, kind, m) for m in range(microbatches))


def _one_f_one_b(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    ahead = min(microbatches, pp - rank)
    yield from (Action(rank, "F", m) for m in range(ahead))
    for m in range(microbatches):
        yield Action(rank, "B", m)
        if ahead + m < microbatches:
            yield Action(rank, "F", ahead + m)


def interleaved_warmup(rank: int, pp: int, virtual_stages: int, microbatches: int, *, split: bool) -> int:
    """Forwards before the first backward (without the one that it is paired with)."""
    per_round = microbatches // max(1, microbatches // pp)
    hop = 1 if split else 2
    return min((virtual_stages - 1) * per_round + hop * (pp - 1 - rank), microbatches * virtual_stages)


def _interleaved(rank: int, pp: int, virtual_stages: int, microbatches: int, *, split: bool) -> Iterator[Action]:
    """Rounds of equal numbers of micro-batches go through the rank's stages in turn; W follows I by ``rank`` places."""
    per_round = microbatches // max(1, microbatches // pp)
    warmup = interleaved_warmup(rank, pp, virtual_stages, microbatches, split=split)
    turns = range(microbatches * virtual_stages)
    local = [k // per_round % virtual_stages for k in turns]
    batch = [k // (per_round * virtual_stages) * per_round + k % per_round for k in turns]
    forward = [Action(v * pp + rank, "F", m) for v, m in zip(local, batch, strict=True)]
    backward = [((virtual_stages - 1 - v) * pp + rank, m) for v, m in zip(local, batch, strict=True)]
    yield from forward[:warmup]
    for k, (stage, m) in enumerate(backward):
        if warmup + k < len(forward):
            yield forward[warmup + k]
        yield Action(stage, "I" if split else "B", m)
        if split and k >= rank:
            done, batch_done = backward[k - rank]
            yield Action(done, "W", batch_done)
    if split:
        yield from (Action(stage, "W", m) for stage, m in backward[max(0, len(backward) - rank) :])


class _Counter:
    """Numbers the micro-batches of each (stage, kind) as they are asked for; queues the W that each I leaves."""

    def __init__(self) -> None:
        self.next: dict[tuple[int, str], int] = {}
        self.pending: list[tuple[int, int]] = []

    def __call__(self, stage: int, kind: str) -> Action:
        key = (stage, "I" if kind == "B" else kind)
        m = self.next.get(key, 0)
        self.next[key] = m + 1
        if kind == "I":
            self.pending.append((stage, m))
        return Action(stage, kind, m)

    def count(self, stage: int, kind: str) -> int:
        return self.next.get((stage, kind), 0)

    def weight(self) -> Iterator[Action]:
        if self.pending:
            stage, m = self.pending.pop(0)
            yield Action(stage, "W", m)


def _zbv(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """Laid out for enough micro-batches to fill the pipeline; those that do not exist are dropped."""
    return (action for action in _zbv_full(rank, pp, max(2 * pp - 1, microbatches)) if action.microbatch < microbatches)


def _zbv_full(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    first, second, make = rank, 2 * pp - 1 - rank, _Counter()

    def run(*plan: tuple[int, str]) -> Iterator[Action]:
        return (make(stage, kind) for stage, kind in plan)

    for _ in range(2 * (pp - rank) - 1):
        yield make(first, "F")
    for _ in range(rank):
        yield from run((second, "F"), (first, "F"))
    for _ in range(pp - rank):
        yield from run((second, "F"), (second, "I"), (second, "W"))
    while make.count(second, "F") < make.count(first, "F") or make.count(first, "F") < microbatches:
        if make.count(first, "F") < microbatches:
            yield make(first, "F")
        yield from run((first, "I"), (first, "W"), (second, "F"), (second, "I"), (second, "W"))
    for _ in range(rank):
        yield from run((first, "I"), (second, "I"))
    for _ in range(pp - rank):
        yield from run((first, "I"), (first, "W"))
    for stage in (second, first):
        while make.count(stage, "W") < make.count(stage, "I"):
            yield make(stage, "W")


def _dualpipev(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """DeepSeek's eight steps. Forward and backward that torch marks as overlapped stand one after the other."""
    first, second, make = rank, 2 * pp - 1 - rank, _Counter()
    after = pp - 1 - rank
    for _ in range(2 * after):
        yield make(first, "F")
    for _ in range(rank + 1):
        yield make(first, "F")
        yield make(second, "F")
    for _ in range(after):
        yield make(second, "I")
        yield from make.weight()
        yield make(second, "F")
    for _ in range(microbatches - 2 * pp + rank + 1):
        for ahead, back in ((first, second), (second, first)):
            yield make(ahead, "F")
            yield make(back, "B")
    for _ in range(after):
        yield make(second, "B")
        yield make(second, "F")
        yield make(first, "B")
    # The last backwards are split half-way, so that weight gradients fill the drain.
    split_from = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for i in range(2 * (rank + 1)):
        yield make(first if i % 2 else second, "I" if i >= split_from else "B")
    for _ in range(after):
        yield from make.weight()
        yield make(first, "I")
    for _ in range(rank + 1):
        yield from make.weight()
