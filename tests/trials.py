"""Trials of a loop on one process and under a plan, judged, and a line for each that did not come out as it must: what
``tests.loops``, ``tests.brought`` and ``tests.strangers`` share. And the command lines of all programs here (``parser_of``)."""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.ir.pins import PinError
from meshwright.runtime.verdict import interrupting
from tests.equality import RELATIVE, compare
from tests.looped import whole

State = Mapping[str, Tensor]
SHORT = re.compile(r"make 4 stages, but the model can be cut into [23] pieces")
"""Of a model with stages for two ranks, but not for schedules with two a rank."""


def judged(
    alone: Callable[[], Any], together: Callable[[], tuple[Any, State]], state: Callable[[], State], word: str | None, *,
    equal: bool, runs: bool = False,
) -> tuple[bool, str]:
    """(whether it came out as it must, what came out). ``alone`` says what one process does, which leaves a ``state``;
    ``together`` what this rank does, and the state that it leaves. ``word``: of the refusal that may come, if one may;
    ``equal``: whether it may be equal; ``runs``: or run where one process raises."""
    raised: Exception | None = None
    wanted: Any = None
    try:
        wanted = alone()
    except Exception as error:
        raised = error
    try:
        with interrupting():  # a rank that is refused something ends, and the others are told
            said, left = together()
    except MeshwrightError as error:
        too_short = isinstance(error, PinError) and SHORT.search(str(error))
        return bool(too_short) or (word is not None and word in str(error)), f"refused: {type(error).__name__}: {error}"
    except Exception as error:
        alike = raised is not None and type(raised) is type(error)
        return alike, f"{'raises as one process does' if alike else 'RAW'}: {type(error).__name__}: {error}"
    if raised is not None:
        return runs, f"runs, where one process raises {type(raised).__name__}: {raised}"
    problems = unlike(said, wanted, left, state())
    return equal and not problems, "; ".join(problems[:3]) or "equal"


def unlike(said: Any, wanted: Any, left: State, alone: State) -> list[str]:
    """What differs between the words and the states of a rank and of one process; states on rank 0."""
    first = torch.distributed.get_rank() == 0
    problems = compare(left, {key: x.detach() for key, x in alone.items()}) if first else []
    if said is not None:
        have, want = (torch.as_tensor(whole(x), dtype=torch.float64) for x in (said, wanted))
        problems += [] if torch.allclose(have, want, rtol=RELATIVE, atol=1e-9) else [f"{said} instead of {wanted}"]
    return problems


Judge = Callable[[Sequence[Any]], tuple[bool, Sequence[str]]]


def as_they_must(results: Sequence[tuple[bool, str]]) -> tuple[bool, list[str]]:
    """Of what ``judged`` says on every rank."""
    return all(good for good, _ in results), [what for _, what in results]


def parser_of(document: str | None, words: str | None = None) -> argparse.ArgumentParser:
    """The command line of a program, whose help is its docstring; of ``words``, if it has any, and what is added."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    if words is not None:
        parser.add_argument("words", nargs="*", help=words)
    return parser


def report(
    document: str | None, arguments: Sequence[str], trials: Callable[..., Any], every: Collection[str], ways: Collection[str],
    *, usual: Collection[str], four: Collection[str], judge: Judge = as_they_must,
) -> int:
    """Run ``trials(rank, way, [name])`` on two ranks, or ``four``, for each way and name that the arguments ask for (else the
    ``usual`` ways, ``every`` name; with --drawn each name under one of the ways), and print what did not come out as it must,
    with -v all, and how many came out how: 1 if there is a fault. A trial gives [(name, result ...)]; ``document`` is the
    program's docstring; ``judge``: whether the results of all ranks are as they must be, in words."""
    from tests.pool import Pool, WorkerError

    parser = parser_of(document, "ways, and parts of names")
    parser.add_argument("-v", action="store_true", help="a line for each trial")
    parser.add_argument("--drawn", type=int, metavar="SEED", help="each name under one of the ways, drawn")
    given = parser.parse_args(arguments)
    asked = [word for word in given.words if word not in ways]
    names = [name for name in every if not asked or any(word in name for word in asked)]
    if unknown := [word for word in asked if not any(word in name for name in every)]:
        parser.error(f"{unknown[0]!r} is no way ({', '.join(ways)}) and in none of the {len(every)} names")
    chosen = [word for word in given.words if word in ways] or list(usual)
    pairs = [(way, name) for way in chosen for name in names]
    if given.drawn is not None:
        pairs = [(random.Random(f"{given.drawn} {name}").choice(chosen), name) for name in names]
    pool, counts = Pool(), Counter[str]()
    for way, name in pairs:
        try:
            found = pool.run(4 if way in four else 2, trials, way, [name], timeout=90)
            good, words = judge([rest if len(rest) > 1 else rest[0] for (_, *rest), in found])
        except WorkerError as error:
            good, words = False, [str(error)]
        kind = words[0].partition(":")[0]
        counts[(kind if kind in ("equal", "refused") else "as one process") if good else "not as they must be"] += 1
        if not good or given.v:
            print(f"{way:14} {name:22} {'' if good else 'WRONG: '}{' | '.join(dict.fromkeys(words))}", flush=True)
    pool.close()
    faults = counts.setdefault("not as they must be", 0)
    print(f"{len(pairs)} trials:", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if faults else 0
