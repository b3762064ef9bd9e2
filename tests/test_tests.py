"""Promises about the tests themselves: every one can fail, none asserts how long something takes."""

from __future__ import annotations

import ast
import contextlib
import io
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

HERE = Path(__file__).parent
FAILS = frozenset({"raises", "assert_close", "assert_allclose", "assert_array_equal", "check", "check_rule", "fail",
                   "typecheck", "verify"})
"""Calls that raise where something is wrong."""
CLOCKS = frozenset({"perf_counter", "monotonic", "process_time", "thread_time", "time_ns", "perf_counter_ns", "monotonic_ns"})
WAITS = frozenset({"browser.py", "pipelines.py", "pool.py"})
"""Helpers that look at a clock so that what hangs is ended, with an error; no test asserts what they read."""


@cache
def trees() -> Mapping[str, ast.Module]:
    """{file: its syntax}; seconds, so not when the tests are collected."""
    return {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("*.py"))}


def functions(tree: ast.Module) -> dict[str, ast.AST]:
    """{name: its definition} of the functions, methods and classes of a file."""
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """{name: (file, its name there)} of what a file imports from other files of tests."""
    return {
        alias.asname or alias.name: (f"{node.module.rpartition('.')[2]}.py", alias.name)
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests.")
        for alias in node.names
    }


@cache
def defined() -> Mapping[str, dict[str, ast.AST]]:
    """{file: what it defines}."""
    return {file: functions(tree) for file, tree in trees().items()}


@cache
def imports() -> Mapping[str, dict[str, tuple[str, str]]]:
    """{file: what it imports from other files of tests}."""
    return {file: imported(tree) for file, tree in trees().items()}


def names(node: ast.AST) -> Iterator[str]:
    """What a piece of code names, as a variable or an attribute."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute):
            yield one.attr


def can_fail(file: str, name: str, seen: set[tuple[str, str]]) -> bool:
    """Whether a function asserts or raises, or names one that does."""
    if (file, name) in seen or name not in defined().get(file, {}):
        return False
    seen.add((file, name))
    node = defined()[file][name]
    if any(isinstance(one, ast.Assert | ast.Raise) for one in ast.walk(node)):
        return True
    used = set(names(node))
    if used & FAILS:
        return True
    return any(can_fail(*imports()[file].get(one, (file, one)), seen) for one in sorted(used))


def test_every_test_can_fail() -> None:
    tests = [(file, name) for file, found in defined().items() for name in found if name.startswith("test_")]
    assert len(tests) > 500
    assert [f"{file}::{name}" for file, name in tests if not can_fail(file, name, set())] == []


def test_no_test_looks_at_a_clock() -> None:
    """How long something takes is measured in ``benchmarks/``; how much was done is counted (``effort``)."""
    looking = {file for file, tree in trees().items() if CLOCKS.intersection(names(tree))}
    assert looking <= WAITS | {Path(__file__).name}


def test_programs_print_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for help, they say how they are called, and run nothing."""
    root, codes, said = HERE.parent, {}, {}
    programs = [path for folder in ("tests", "benchmarks", "examples") for path in sorted((root / folder).glob("*.py"))
                if '\nif __name__ == "__main__"' in path.read_text(encoding="utf-8")]
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(root / folder))  # a program finds its neighbours
    for path in programs:
        monkeypatch.setattr("sys.argv", [path.name, "--help"])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a module that is run beside its twin
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as ended:
                codes[path.name], said[path.name] = ended.code, printed.getvalue()
    assert codes == {path.name: 0 for path in programs}
    assert [name for name, text in said.items() if not text.startswith("usage: ")] == []
    assert len(programs) > 20


def _threads(rank: int) -> int:
    return len([*Path("/proc/self/task").iterdir()])


def _in_a_cycle(rank: int, name: str) -> None:
    """A group that only a cycle holds, in a job that brings a module that is new."""
    held: list[Any] = [dist.new_group([0, 1])]
    held.append(held)
    sys.modules[name] = ModuleType(name)


def test_a_job_leaves_no_group_behind(pool: Callable[[int], Any]) -> None:
    """A group has threads of its own, which look whether there is anything to do."""
    pool(2).run(_in_a_cycle, "tests.first")
    before = pool(2).run(_threads)
    for name in ("tests.first", "tests.second"):
        pool(2).run(_in_a_cycle, name)
        assert pool(2).run(_threads) == before
