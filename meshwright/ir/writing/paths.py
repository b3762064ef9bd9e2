"""Paths of modules that differ in one number, written as one: "model.layers.0..31,40"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_NUMBER = re.compile(r"(?<![^.])(0|[1-9]\d{0,8})(?=\.|$)")
_RUNS = re.compile(r"(?<![^.])\d+(?:\.\.\d+)?(?:,\d+(?:\.\.\d+)?)*(?=[.:]|$)")
MOST = 1 << 16
"""Paths that one text may stand for."""


def fold_paths(paths: Sequence[str]) -> str:
    """Many paths in few texts: those that differ in one number are one.

    >>> fold_paths(["layers.0", "layers.1", "layers.2", "layers.5"])
    'layers.0..2,5'
    >>> fold_paths(["stages.0.layers.0", "stages.0.layers.1", "stages.1.layers.0"])
    'stages.0.layers.0..1, stages.1.layers.0'
    """
    return ", ".join(fold_parts(paths))


def fold_parts(paths: Sequence[str]) -> list[str]:
    """The texts of ``fold_paths``, each for itself; a name with a comma, which would be read as a fold, folds nothing."""
    if any("," in path for path in paths):
        return list(dict.fromkeys(paths))
    alike: dict[str, list[list[str]]] = {}
    for path in dict.fromkeys(paths):
        alike.setdefault(_NUMBER.sub("*", path), []).append(_NUMBER.split(path))
    return [text for same in alike.values() for text in _folded(same)]


def _folded(paths: Sequence[list[str]]) -> list[str]:
    """Paths of one form, split at their numbers, in as few texts as folding one of the numbers gives."""
    ways = []
    for at in range(len(paths[0]) - 2, 0, -2):
        texts: dict[tuple[str, str], list[int]] = {}
        for parts in paths:
            texts.setdefault(("".join(parts[:at]), "".join(parts[at + 1 :])), []).append(int(parts[at]))
        ways.append([f"{before}{','.join(_runs(sorted(numbers)))}{after}" for (before, after), numbers in texts.items()])
    return min(ways, key=len, default=["".join(parts) for parts in paths])


def unfold_paths(text: str, most: int = MOST) -> list[str]:
    """The paths that ``fold_paths`` wrote as one. Raises ValueError for what stands for too many.

    >>> unfold_paths("layers.0..2,5"), unfold_paths("embed, layers.1.mlp")
    (['layers.0', 'layers.1', 'layers.2', 'layers.5'], ['embed', 'layers.1.mlp'])
    >>> unfold_paths("stages.3.layers.0..1")
    ['stages.3.layers.0', 'stages.3.layers.1']
    """
    found: list[str] = []
    for part in text.split(", "):
        runs = next((runs for runs in _RUNS.finditer(part) if "," in runs[0] or ".." in runs[0]), None)
        if runs is None:
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
