"""When values and gradients travel between the ranks of a pipeline, and how many wait to be read.

Every transfer is a pair: ``SEND`` in the order of the rank that made it, ``RECV`` in that of the rank that reads it. Pairs
are put down one at a time while the ranks take their actions in turns, so that all ranks meet them in one order and never
wait for each other for ever, even where a device runs its transfers one by one. ::

    early   a pair stands where its value was made: the transfer runs beside what the reader does meanwhile
            (the order of ``torch.distributed.pipelining``)
    late    a pair stands where its value is read: the reader holds one value or gradient at a time that it has not read
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.ir.schedules.action import Action


def with_transfers(
    ranks: Sequence[Sequence[Action]], stage_rank: Sequence[int], early: bool = True
) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank, with those that send and receive between them. The order must come to an end
    (``Table.order``).

    >>> first, second = (tuple(map(Action.parse, text.split())) for text in ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    >>> print(*with_transfers((first, second), (0, 1), early=False)[1])
    1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """
    last, at, made = len(stage_rank) - 1, [0] * len(ranks), set[Action]()
    steps: list[list[Action]] = [[] for _ in ranks]

    def send(result: Action) -> None:
        stage, kind, microbatch = result
        to = stage + 1 if kind == "F" else stage - 1
        steps[stage_rank[stage]].append(Action(stage, f"SEND_{kind}", microbatch))
        steps[stage_rank[to]].append(Action(to, f"RECV_{kind}", microbatch))

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            if at[rank] == len(actions):
                continue
            action = actions[at[rank]]
            needed = action.needs(last)
            if needed is not None and needed not in made:
                continue
            if needed is not None and not early and stage_rank[needed.stage] != rank:
                send(needed)
            steps[rank].append(action)
            if action.kind != "W":
                result = action.gives
                to = result.stage + (1 if result.kind == "F" else -1)
                made.add(result)
                if early and 0 <= to <= last and stage_rank[to] != rank:
                    send(result)
            at[rank] += 1
            progress = True
    return tuple(map(tuple, steps))


def most_waiting(steps: Sequence[Sequence[Action]], stage_rank: Sequence[int]) -> int:
    """Of the values and gradients that a rank was sent, the most that wait to be read at once, over all ranks."""
    most = 0
    for rank, actions in enumerate(steps):
        now = 0
        for action in actions:
            needed = action.needs(len(stage_rank) - 1) if len(action.kind) == 1 else None
            now += action.kind.startswith("RECV")
            most = max(most, now)
            now -= needed is not None and stage_rank[needed.stage] != rank
    return most
