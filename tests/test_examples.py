"""The examples train as one process does: what they run on processes of their own runs on those of the pool, which have
imported everything."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> str:
    """What it prints; it makes a process group of its own."""
    dist.barrier()  # the pool's may not go before all are connected
    dist.destroy_process_group()
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(io.StringIO()) as printed:
        function(rank, *args)
    return printed.getvalue()


@pytest.fixture
def said(pool: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``said(name, *words)``: what the example prints, called with these words."""

    def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
        print(*pool(nprocs).run(_worker, function, args), sep="")

    def run(name: str, *words: str) -> str:
        monkeypatch.setattr("sys.argv", [name, *words])
        with mock.patch.object(mp, "spawn", spawn):
            import_module(f"examples.{name}").main()
        return capsys.readouterr().out

    return run


def test_a_mixture(said: Callable[..., str]) -> None:
    assert len((Path(__file__).parents[1] / "examples" / "train_moe.py").read_text().splitlines()) < 100
    losses = [line.split(":")[1].split() for line in said("train_moe", "2").splitlines() if "process" in line.split(":")[0]]
    assert len(losses) == 2
    assert [float(loss) for loss in losses[0]] == pytest.approx([float(loss) for loss in losses[1]], rel=1e-4)


def test_a_long_sequence(said: Callable[..., str]) -> None:
    """Its losses are compared where they are printed, beside what a process held."""
    text = said("train_long_context", "--length", "256", "--processes", "2")
    assert text.count("loss, step") == 2
    assert "MiB each" in text


def test_the_demo(said: Callable[..., str], tmp_path: Path) -> None:
    """Losses that differ end it with an error."""
    text = said("demo", "--steps", "2", "--out", str(tmp_path / "plan.json"))
    assert (tmp_path / "plan.json").exists()
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert [float(row[1]) for row in rows] == pytest.approx([float(row[2]) for row in rows], rel=1e-4)
    assert len(rows) == 2
