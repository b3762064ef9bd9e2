"""How far a long step is, on stderr: a bar where a person looks, else a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, float], None]
"""(what is looked at now, share that is done): called as often as there is something to say."""
SECONDS = 10.0
"""Between two lines where stderr is no terminal."""


@contextmanager
def progress(on: bool = True, verb: str = "planning") -> Iterator[Report]:
    """What reports within; it is shown from the first second on, unless not ``on``."""
    if not on:
        yield lambda what, done: None
    elif sys.stderr.isatty():
        with _bar(verb) as report:
            yield report
    else:
        with _lines(verb) as report:
            yield report


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
