"""The pipeline schedules of the field: the orders that torch runs, and what their tables say in closed form.

| name             | source                                      | stages a rank | micro-batches M              |
|------------------|---------------------------------------------|---------------|------------------------------|
| gpipe            | arXiv 1811.06965                            | 1             | any                          |
| 1f1b             | PipeDream-Flush, arXiv 2006.09503           | 1             | M >= pp                      |
| interleaved1f1b  | Megatron-LM, arXiv 2104.04473               | any           | M % max(1, M // pp) == 0     |
| zb               | zero bubble ZB-H1, arXiv 2401.10241         | any           | M % max(1, M // pp) == 0     |
| zbv              | ZB-V, the same paper                        | 2, V map      | any                          |
| dualpipev        | DualPipeV, after DeepSeek-V3, 2412.19437    | 2, V map      | M >= 2 pp                    |

The orders are those of torch's schedule classes (``tests/test_timeline.py`` holds them equal, action by action); they are
written out here because building torch's classes takes longer than the search has, and because ``Schedule1F1B`` prints a table
that is not what it runs. A new schedule is one more entry of ``BUILTIN``; closed forms it may have or not.

Each family of closed forms stands behind its orders. In the loop schedules micro-batches go through a rank's stages in rounds:
before the first backward a rank runs (V - 1) rounds and a forward for each hop that a gradient comes back later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from meshwright.ir.schedules.action import Action
from meshwright.ir.schedules.schedule import ClosedForms, PipelineSchedule, vee

# ------------------------------------------------------------------------------------------------ one stage on every rank


def _gpipe(rank: int, pp: int, virtual_stages: int, microbatches: int) -> Iterator[Action]:
    for kind in "FB":
        yield from (Action(rank, kind, m) for m in range(microbatches))


def _one_f_one_b(rank: int, pp: int, virtual_stages: int, microbatches: int) -> Iterator[Action]:
    ahead = min(microbatches, pp - rank)
    yield from (Action(rank, "F", m) for m in range(ahead))
    for m in range(microbatches):
        yield Action(rank, "B", m)
        if ahead + m < microbatches:
            yield Action(rank, "F", ahead + m)


def _all_ahead(pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    return np.full(pp, microbatches)


def _few_ahead(pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    return np.minimum(microbatches, np.arange(pp, 0, -1))


def _one_turn(pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    return np.zeros(pp, dtype=np.int64)


def _held_ahead(warm: Callable[[int, int, int], np.ndarray], pp: int, microbatches: int) -> np.ndarray:
    """A rank of one stage, the first backward being next, and after it."""
    counts = np.zeros((pp, 2, 3), dtype=np.int64)
    counts[:, 0, 0] = warm(pp, 1, microbatches)
    counts[:, 0, 2] = counts[:, 0, 0] < microbatches  # then a forward follows the first backward
    counts[:, 1, 0], counts[:, 1, 2] = counts[:, 0, 0] - 1, 1
    return counts


# ------------------------------------------------------------------------- any number of stages, in a loop


def _round(pp: int, microbatches: int) -> int:
    """Micro-batches that go through a stage before the rank turns to its next one."""
    return microbatches // max(1, microbatches // pp)


def _uneven(pp: int, virtual_stages: int, microbatches: int) -> str | None:
    rounds = max(1, microbatches // pp)
    return f"micro-batches go in max(1, {microbatches} // {pp}) = {rounds} equal rounds" if microbatches % rounds else None


def _warmup(rank: int, pp: int, virtual_stages: int, microbatches: int, *, split: bool) -> int:
    """Forwards before the first backward (without the one that it is paired with)."""
    hop = 1 if split else 2
    return min((virtual_stages - 1) * _round(pp, microbatches) + hop * (pp - 1 - rank), microbatches * virtual_stages)


def _interleaved(rank: int, pp: int, virtual_stages: int, microbatches: int, *, split: bool) -> Iterator[Action]:
    """Rounds of equal numbers of micro-batches go through the rank's stages in turn; W follows I by ``rank`` places."""
    per_round = _round(pp, microbatches)
    warmup = _warmup(rank, pp, virtual_stages, microbatches, split=split)
    turns = range(microbatches * virtual_stages)
    local = [k // per_round % virtual_stages for k in turns]
    batch = [k // (per_round * virtual_stages) * per_round + k % per_round for k in turns]
    there, back = [v * pp + rank for v in local], [(virtual_stages - 1 - v) * pp + rank for v in local]

    def actions(stages: Sequence[int], kind: str) -> list[Action]:
        return list(map(Action._make, zip(stages, itertools.repeat(kind), batch, strict=False)))

    forward, backward = actions(there, "F"), actions(back, "I" if split else "B")
    weights = [*itertools.repeat(None, rank), *actions(back, "W")] if split else []
    woven = itertools.chain.from_iterable(itertools.zip_longest(forward[warmup:], backward, weights))
    return itertools.chain(forward[:warmup], filter(None, woven))


def _loop_warm(split: bool, pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    counts, per_round = np.zeros(pp * virtual_stages, dtype=np.int64), _round(pp, microbatches)
    for rank in range(pp):
        ahead = _warmup(rank, pp, virtual_stages, microbatches, split=split) + 1
        rounds, rest = divmod(min(ahead, microbatches * virtual_stages), per_round * virtual_stages)
        for v in range(virtual_stages):
            counts[v * pp + rank] = rounds * per_round + min(per_round, max(0, rest - v * per_round))
    return counts


def _loop_turn(pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    return np.repeat([_round(pp, microbatches), 0], [pp * (virtual_stages - 1), pp])


def _loop_in_flight(split: bool, pp: int, microbatches: int) -> np.ndarray:
    """After the warm-up forwards and backwards alternate, and the first backwards are all of the last stage."""
    ranks, in_turn = np.arange(pp)[:, None], _round(pp, microbatches)
    done = np.concatenate(np.broadcast_arrays(0 * ranks, np.minimum(ranks, in_turn), in_turn // 2, in_turn), axis=1)
    forwards = (1 if split else 2) * (pp - 1 - ranks) + 1 + done  # since the last stage ran its first
    second_turn = np.clip(forwards - in_turn, 0, in_turn) * (in_turn < microbatches)
    between, last = np.full_like(done, in_turn), np.minimum(forwards, in_turn) - done
    full = np.stack([in_turn + second_turn, between, last], axis=-1)
    half = np.stack([0 * done, 0 * done, np.minimum(done, ranks) * split], axis=-1)
    again = np.full_like(done, microbatches >= 3 * in_turn)  # the same moments come back, a turn later
    summed = np.stack([again, again, np.maximum(again, done > ranks * split)], axis=-1)
    return np.stack([full, half, summed], axis=2)


def _loop_alone(split: bool, pp: int, microbatches: int) -> np.ndarray:
    ranks = np.arange(pp)[:, None]
    done = np.concatenate([0 * ranks, np.minimum(ranks, microbatches)], axis=1) if split else 0 * ranks
    summed = np.full_like(done, microbatches > pp + 1)  # forwards follow the first gradients of weights
    return np.stack([np.minimum(pp - ranks + done, microbatches) - done, done, summed], axis=-1)


def _loop_waiting(pp: int, virtual_stages: int, microbatches: int) -> int:
    return 3 if virtual_stages == 1 else max(pp, _round(pp, microbatches)) + 1


def _loop_holds(split: bool, pp: int, virtual_stages: int, microbatches: int) -> int:
    """With several stages two rounds: those of one are forward while those of the other come back."""
    if virtual_stages == 1:
        return int(_loop_warm(split, pp, 1, microbatches)[0])
    return min(microbatches, 2 * _round(pp, microbatches))


def _loop_forms(*, split: bool) -> ClosedForms:
    return ClosedForms(
        partial(_loop_warm, split), _loop_waiting, turn=_loop_turn, in_flight=partial(_loop_in_flight, split),
        alone=partial(_loop_alone, split), holds=partial(_loop_holds, split),
    )


# ------------------------------------------------------------------------------------------ two stages a rank, in a V


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


def _zbv(rank: int, pp: int, virtual_stages: int, microbatches: int) -> Iterator[Action]:
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


def _dualpipev(rank: int, pp: int, virtual_stages: int, microbatches: int) -> Iterator[Action]:
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


def _vee_holds(pp: int, virtual_stages: int, microbatches: int) -> int:
    return min(microbatches, 2 * pp)


def _vee_warm(more: int, pp: int, virtual_stages: int, microbatches: int) -> np.ndarray:
    """``more``: forwards of the last rank's first stage that other schedules of this shape do not run."""
    ranks = np.arange(pp)
    first = 2 * pp - ranks - 1 + more * (ranks == pp - 1)
    return np.concatenate([np.minimum(microbatches, first), np.minimum(microbatches, ranks + 1)[::-1]])


def _zbv_in_flight(pp: int, microbatches: int) -> np.ndarray:
    """Behind the first weights of both stages, as one of the second and one of the first run; before, if there are few."""
    warm, many = _vee_warm(0, pp, 2, microbatches), microbatches > 2 * pp
    found = np.zeros((pp, 2, 3, 3), dtype=np.int64)
    found[:, :, 0, 0], found[:, :, 0, 2] = warm[:pp, None] + [0, many], warm[: pp - 1 : -1, None] - [0, many]
    found[:, :, 2, ::2] = microbatches >= 2 * pp
    return found


def _dualpipev_in_flight(pp: int, microbatches: int) -> np.ndarray:
    """As whole backwards run of both stages in turns."""
    ranks, found = np.arange(pp), np.zeros((pp, 1, 3, 3), dtype=np.int64)
    found[:, 0, 0, 0], found[:, 0, 0, 2] = np.minimum(2 * pp - ranks, microbatches - 1), ranks + 1
    found[:, 0, 2, ::2] = 1
    return found


# ------------------------------------------------------------------------------------------------------------ all of them


def _each(order: Callable[..., Iterator[Action]]) -> Callable[[int, int, int], Iterable[Iterator[Action]]]:
    """The orders of all ranks, from a function of one rank and the setting."""
    return lambda pp, virtual_stages, microbatches: [order(rank, pp, virtual_stages, microbatches) for rank in range(pp)]


BUILTIN = (
    PipelineSchedule(
        "gpipe", _each(_gpipe), early=False,
        closed=ClosedForms(
            _all_ahead, lambda pp, v, m: 1, turn=_one_turn, alone=partial(_held_ahead, _all_ahead), holds=lambda pp, v, m: m,
            forwards_first=True,
        ),
    ),
    PipelineSchedule(
        "1f1b", _each(_one_f_one_b), early=False,
        refuses=lambda pp, v, m: f"it needs at least pp = {pp} micro-batches" if m < pp else None,
        closed=ClosedForms(
            _few_ahead, lambda pp, v, m: 1, turn=_one_turn, alone=partial(_held_ahead, _few_ahead),
            holds=lambda pp, v, m: min(m, pp),
        ),
    ),
    PipelineSchedule(
        "interleaved1f1b", _each(partial(_interleaved, split=False)), stages=None, usual=2, refuses=_uneven,
        closed=_loop_forms(split=False),
    ),
    PipelineSchedule(
        "zb", _each(partial(_interleaved, split=True)), stages=None, refuses=_uneven, split=True,
        closed=_loop_forms(split=True),
    ),
    PipelineSchedule(
        "zbv", _each(_zbv), stages=2, usual=2, placement=vee, split=True,
        closed=ClosedForms(
            partial(_vee_warm, 0), lambda pp, v, m: 3, in_flight=_zbv_in_flight, holds=_vee_holds, turns=True
        ),
    ),
    PipelineSchedule(
        "dualpipev", _each(_dualpipev), stages=2, usual=2, placement=vee, split=True,
        refuses=lambda pp, v, m: f"it needs at least one micro-batch a stage, 2 pp = {2 * pp}" if m < 2 * pp else None,
        closed=ClosedForms(
            partial(_vee_warm, 1), lambda pp, v, m: 4, in_flight=_dualpipev_in_flight, holds=_vee_holds, turns=True, mixed=True
        ),
    ),
)
