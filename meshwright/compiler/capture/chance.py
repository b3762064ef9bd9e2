"""Random numbers that a graph could not follow, noticed while a forward is traced.

An operator that draws is part of the graph. What Python or NumPy draws in a forward is a number to the trace, and would be the
same in every step; and where a forward seeds torch's generator, or puts an old state back, the trace sees nothing at all. Both
are refused, by module and line. Whatever the trace itself draws is put back.

A branch on what is drawn (``torch.rand([]) < p``: layers that are left out at random) is one that a graph has not, unless it is
certain (``Drawn``): with a p of 0 no layer is left out.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright.compiler.capture.ranges import COMPARISONS, Span, holds

SEEDING = ("manual_seed", "seed", "set_rng_state")


class ChanceError(RuntimeError):
    """The forward seeds a generator, or draws where the graph cannot."""


class Drawn:
    """What ``torch.rand`` made in one forward, and what is certain of it: no number is below 0, or above 1."""

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[torch.Tensor, int]] = {}  # with the version that each is of
        self.outcomes: dict[int, tuple[torch.Tensor, int, bool]] = {}

    def note(self, function: Any, args: tuple[Any, ...], made: Any) -> None:
        """After every function of torch that the forward calls."""
        comparison = getattr(function, "__name__", "").strip("_")
        if function is torch.rand and made.is_floating_point() and not made.is_inference():
            self.numbers[id(made)] = made, made._version
        elif comparison in COMPARISONS and len(args) == 2 and id(args[0]) in self.numbers and type(args[1]) in (int, float):
            number, version = self.numbers[id(args[0])]
            if number._version == version and args[1] == args[1] // 1:
                found = holds(comparison, Span(0, 1), Span(int(args[1]), int(args[1])))
                if found is not None:
                    self.outcomes[id(made)] = made, made._version, found

    def outcome(self, condition: Any) -> bool | None:
        """Of a comparison with what was drawn; None if it is not certain."""
        made, version, found = self.outcomes.get(id(condition), (None, 0, None))
        return found if made is not None and made._version == version else None


@contextlib.contextmanager
def generators_unchanged(is_user_file: Callable[[str], bool]) -> Iterator[None]:
    """Within, seeding raises ChanceError, and so does the end if Python's or NumPy's generator was drawn from. Afterwards every
    generator is as it was."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    before = random.getstate(), numpy and numpy.get_state(legacy=False)
    with torch.random.fork_rng(devices=devices), _seeding_refused(is_user_file):
        try:
            yield
            drawn = ["random"] * (random.getstate() != before[0])
            drawn += ["numpy.random"] * (numpy is not None and not _same(numpy.get_state(legacy=False), before[1]))
            if drawn:
                raise ChanceError(f"the forward draws from Python's {drawn[0]}")
        finally:
            random.setstate(before[0])
            if numpy is not None:
                numpy.set_state(before[1])


def _same(one: Any, other: Any) -> bool:
    """Whether two states of NumPy's generator are equal: dicts of numbers and arrays."""
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


@contextlib.contextmanager
def _seeding_refused(is_user_file: Callable[[str], bool]) -> Iterator[None]:
    places = [(module, name) for module in (torch, torch.random, torch.cuda) for name in SEEDING if hasattr(module, name)]
    held = [(module, name, getattr(module, name)) for module, name in places]

    def refuse(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if is_user_file(frame.f_code.co_filename):
                raise ChanceError(f"the forward sets the state of torch's generator (torch.{name})")
            return function(*args, **kwargs)

        return call

    for module, name, function in held:
        setattr(module, name, refuse(name, function))
    try:
        yield
    finally:
        for module, name, function in held:
            setattr(module, name, function)


@contextlib.contextmanager
def raised_where_drawn() -> Iterator[None]:
    """Within, the line that draws from a generator of Python's or NumPy's raises ChanceError. Slow: for the message."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    kinds = (random.Random, numpy.RandomState, numpy.Generator) if numpy is not None else (random.Random,)

    def look(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(getattr(function, "__self__", None), kinds):
            raise ChanceError(f"the forward draws from Python's {'numpy.' * (type(function.__self__) is not kinds[0])}random")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
