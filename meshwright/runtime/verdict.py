"""What fails on one rank is raised by all, so that nobody waits for it.

    together       a step without communication succeeds on every rank or on none: every rank says how it went
    of_rank_zero   every rank goes by what rank 0 has: a plan, and what each process may order for itself
    interrupting   a step that communicates costs nothing more; the rank that fails in it tells the others

A rank that fails in the middle of a step says so in the process group's store, and waits a little (``PATIENCE``). Where all
fail alike each raises its own error and the groups stay as they were. Else the ranks no longer do the same, so it makes those
that wait for it stop: on gloo, a receive that runs out of time at once ends whatever waits in that group, on every rank. They
find in the store why. NCCL's kernels wait on the device, not here: there the next call of every other rank raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from meshwright.errors import MeshwrightError, RunError

T = TypeVar("T")

PATIENCE = 3.0
"""Seconds that a rank which failed gives the others to fail alike."""

_KEY = "meshwright/failed"
_TAG = 2**31 - 7
"""Of a message that nobody sends."""


def together(step: Callable[[], T]) -> T:
    """What ``step`` returns here, once every rank has done it. Where it failed its error is raised; elsewhere that of the first
    rank where it did, with a note that says which. Every rank calls this, and ``step`` communicates nothing."""
    result: T | None = None
    failure: Exception | None = None
    try:
        result = step()
    except Exception as error:
        failure = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        verdicts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(verdicts, None if failure is None else _portable(failure))
        first = next((rank for rank, verdict in enumerate(verdicts) if verdict is not None), None)
        if failure is None and first is not None:
            failure = verdicts[first]
            assert failure is not None
            failure.add_note(f"raised by rank {first}")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def of_rank_zero(mine: T) -> T:
    """What rank 0 has, on every rank; for what each process may have in an order of its own, as what is made of a set. Every
    rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    message: list[Any] = [mine if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0)
    return message[0]  # type: ignore[no-any-return]


def _portable(error: Exception) -> Exception:
    """The error itself if other ranks can act on it, else its words: not every exception survives pickling."""
    return error if isinstance(error, MeshwrightError) else RunError(f"{type(error).__name__}: {error}")


@contextmanager
def interrupting() -> Iterator[None]:
    """Around a step that communicates: what a rank raises in it ends the others' waiting. They raise a RunError that names it;
    the rank itself raises its own error, as one process would."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        try:
            cause = _tell(error)
        except RuntimeError:  # the store ended with the process that holds it
            cause = _lost(error)
        if cause is not None:
            raise cause from error
        raise


def _tell(error: Exception) -> RunError | None:
    """The error to raise in this one's place, if that is not where things began."""
    store, rank = _get_default_store(), dist.get_rank()
    alike = f"{_KEY}/alike/{rank}"  # how often all have failed together, which every rank counts for itself
    here = f"{_KEY}/{store.add(alike, 0)}"
    count, words, alone = f"{here}/count", f"{here}/words", f"{here}/alone"
    if store.check([alone]):
        _end_waiting()  # somebody may be waiting for this rank in a group that the first one is not in
        return RunError(store.get(words).decode())
    if store.add(count, 1) == 1:
        store.set(words, f"rank {rank} failed in the middle of a step ({type(error).__name__}: {error}), so that the others "
                         f"cannot go on: see the cause on that rank, and start the processes again from a checkpoint")
    deadline = time.monotonic() + PATIENCE
    while store.add(count, 0) < dist.get_world_size():
        if time.monotonic() > deadline or store.check([alone]):
            store.set(alone, "")
            _end_waiting()
            return _lost(error)
        time.sleep(0.02)
    store.add(alike, 1)
    return _lost(error)


def _lost(error: Exception) -> RunError | None:
    """In place of what a broken connection raises."""
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return RunError(f"the connection to another rank was lost in the middle of a step ({error}): see whether a process "
                        f"ended, and start the processes again from a checkpoint")
    return None


def _end_waiting() -> None:
    """End whatever waits for this rank, in every group that it is in."""
    for group in list(_world.pg_map):
        size = dist.get_world_size(group)
        if size > 1 and "gloo" in dist.get_backend(group):
            with suppress(RuntimeError):  # which is what it is for
                work = dist.irecv(torch.empty(1), group=group, group_src=(dist.get_rank(group) + 1) % size, tag=_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
