"""How far a long step is, on stderr: a bar where a person looks, else a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[str, float], None]
"""(what is looked at now, share that is done): called as often as there is something to say."""
SECONDS = 10.0
"""Between two lines where stderr is no terminal."""
_outer: ContextVar[Report | None] = ContextVar("meshwright_progress", default=None)


@contextmanager
def progress(on: bool = True, verb: str = "planning") -> Iterator[Report]:
    """What reports within; it is shown from the first second on, unless not ``on``. One within another is part of that one."""
    outer = _outer.get()
    if not on or outer is not None:
        yield outer if on and outer is not None else lambda what, done: None
        return
    with (_bar if sys.stderr.isatty() else _lines)(verb) as report:
        token = _outer.set(report)
        try:
            yield report
        finally:
            _outer.reset(token)


@contextmanager
def _bar(verb: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(verb), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done: bar.update(task, description=what, total=1.0 if done else None, completed=done)
        bar.update(task, total=1.0, completed=1.0)


@contextmanager
def _lines(verb: str) -> Iterator[Report]:
    now, started, ended = ("starting", 0.0), time.monotonic(), threading.Event()

    def report(what: str, done: float) -> None:
        nonlocal now
        now = what, done

    def speak() -> None:
        while not ended.wait(SECONDS):
            what, done = now
            share = f" ({done:.0%})" if done else ""
            print(f"{verb}: {time.monotonic() - started:.0f} s, {what}{share}", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield report
    finally:
        ended.set()
        speaker.join()
