"""Steps that succeed on every rank or on none: what fails on one rank is raised by all, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.errors import MeshwrightError, RunError

T = TypeVar("T")


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


def _portable(error: Exception) -> Exception:
    """The error itself if other ranks can act on it, else its words: not every exception survives pickling."""
    return error if isinstance(error, MeshwrightError) else RunError(f"{type(error).__name__}: {error}")
