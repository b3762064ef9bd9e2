"""Paths of modules that differ in one number, written as one: "model.layers.0..31,40"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_RUNS = re.compile(r"(?<=\.)\d+(?:\.\.\d+)?(?:,\d+(?:\.\.\d+)?)*(?=[.:]|$)")
MOST = 1 << 16
"""Paths that one text may stand for."""


def fold_paths(paths: Sequence[str]) -> str:
    """Many paths in one.

    >>> fold_paths(["layers.0", "layers.1", "layers.2", "layers.5"])
    'layers.0..2,5'
    """
    parts = [re.split(r"(?<=\.)(\d+)(?=\.|$)", path) for path in paths]
    if len(paths) > 1 and len({len(part) for part in parts}) == 1:
        differing = [i for i in range(len(parts[0])) if len({part[i] for part in parts}) > 1]
        if len(differing) == 1 and differing[0] % 2:
            at = differing[0]
            parts[0][at] = ",".join(_runs(sorted(int(part[at]) for part in parts)))
            return "".join(parts[0])
    return ", ".join(paths)


def unfold_paths(text: str, most: int = MOST) -> list[str]:
    """The paths that ``fold_paths`` wrote as one. Raises ValueError for what stands for too many.

    >>> unfold_paths("layers.0..2,5"), unfold_paths("embed, layers.1.mlp")
    (['layers.0', 'layers.1', 'layers.2', 'layers.5'], ['embed', 'layers.1.mlp'])
    """
    found: list[str] = []
    for part in text.split(", "):
        runs = _RUNS.search(part)
        if runs is None or ("," not in runs[0] and ".." not in runs[0]):
            found.append(part)
            continue
        for run in runs[0].split(","):
            first, _, last = run.partition("..")
            if len(first) > 9 or len(last) > 9:
                raise ValueError(f"{text!r:.80} has a number that is too long")
            if int(last or first) - int(first) >= most - len(found):
                raise ValueError(f"{text!r:.80} stands for more than {most} names")
            numbers = range(int(first), int(last or first) + 1)
            found += [f"{part[:runs.start()]}{number}{part[runs.end():]}" for number in numbers]
    return found


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}..{members[-1]}"
