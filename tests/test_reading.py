"""``docs/reading_a_plan.md`` and ``docs/pipelines.md``: what they show of plans is what is printed of them, line by line."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from benchmarks.models import MODELS, build, inputs
from meshwright.ir.writing.plans import plan_text
from meshwright.views.report import render

ROOT = Path(__file__).parent.parent
STAGED: Mapping[str, Any] = {
    "axes": {"pp": 4, "dp": 2, "tp": 1}, "schedule": "zb", "microbatches": 8, "zero": 1, "recompute": "none",
    "stage_cuts": ("transformer.h.2", "transformer.h.6", "transformer.ln_f:layer_norm"),
}
WHOLE: Mapping[str, Any] = {"axes": {"x": 2, "y": 4}, "microbatches": 1, "blocks": {
    "transformer.h.0..11": "ZeRO 2, recompute none, gradients summed over x, y, state split over x, y",
    "outside the blocks": "ZeRO 0, recompute none, gradients summed over x",
}}
SEARCHED = "search ", "runner-up", "certificate", "changes "
"""Beginnings of what is printed of a search: of that under pins of the degrees it is other, and what would help is planned for
long."""


@cache
def _plan(staged: bool) -> mw.Plan:
    """One of the page's two plans with its degrees pinned, read from its file, whose names the page shows."""
    model, pins = MODELS["gpt2"], STAGED if staged else WHOLE
    plan = mw.plan(build(model), "a100:1x8", ((), inputs(model, 32)), precision="bf16", pins=dict(pins))
    return mw.Plan.from_dict(json.loads(plan_text(plan)))


def _blocks(page: str) -> list[str]:
    """What stands between the fences of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [found[1] for found in re.finditer(r"^```[^\n]*\n(.*?)^```", text, re.S | re.M)]


def _example() -> mw.Plan:
    """What ``examples/train_gpt2_pipeline.py`` trains with."""
    sys.path.insert(0, str(ROOT / "examples"))  # the examples import each other as scripts do
    try:
        from demo import make_batch
        from train_gpt2_pipeline import make_model
    finally:
        sys.path.pop(0)
    return mw.plan(make_model(), "cpu:1x4", ((), make_batch(0)), pins={"pp": 4, "microbatches": 8})


def _shown(begins: str) -> list[str]:
    """The lines of the page's output in which a line begins so, from that line on; none of a search."""
    blocks = _blocks("reading_a_plan.md")
    (lines,) = [block.splitlines() for block in blocks if re.search(f"^{re.escape(begins)}", block, re.M)]
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith(begins)):]
    return [line for line in itertools.takewhile(lambda line: not line.startswith(SEARCHED), lines) if line.strip(" .")]


PRINTED: Mapping[str, Callable[[], str]] = {
    "plan         pp=4": lambda: render(_plan(True)),
    "stages under zb": lambda: render(_plan(True)),
    "bound by   compute": lambda: mw.explain(_plan(True), changes=False),
    "operator transformer.h.0.mlp.c_fc:linear": lambda: mw.explain(_plan(False), "transformer.h.0.mlp.c_fc:linear"),
    "mesh: pp=4": lambda: mw.diff(_plan(True), _plan(False)),
}


@pytest.mark.parametrize("begins", PRINTED)
def test_what_the_page_shows_is_printed(begins: str) -> None:
    shown = _shown(begins)
    assert len(shown) > 5
    _in_that_order(shown, PRINTED[begins]())


def test_the_pipeline_of_the_example_is_the_one_that_is_shown() -> None:
    """Its search and clock, of CPU processes."""
    (block,) = [block for block in _blocks("pipelines.md") if "stages under zbv" in block]
    _in_that_order([line for line in block.splitlines() if line.strip(" .")], render(_example()))


def _in_that_order(shown: list[str], text: str) -> None:
    printed = iter(text.splitlines())
    for line in shown:
        assert any(one.rstrip() == line for one in printed), line
