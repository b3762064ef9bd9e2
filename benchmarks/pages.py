"""Pages of plans (``mw.show(plan, "plan.html")``) of many sizes: how large, and how soon there is something to see.

    python benchmarks/pages.py [NAME ...] [--pictures FOLDER]

Each is planned for its cluster under its pins, the page is written, and a headless Chromium (Debian's package; without one only
sizes are printed) opens it 1280 and 390 pixels wide. A line for each page: megabytes, seconds to write it, milliseconds of the
first contentful paint at either width, and what the browser complained about. ``--pictures`` keeps the pages, and a picture at
either width. The exit status is 1 where a page is over its limit (``LIMITS``), is painted after 2 s, or has complaints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script: find tests/

from benchmarks.models import MIXTURES, MODELS, build, inputs
from tests.browser import Browser, binary

WIDTHS = 1280, 390
LIMITS: Mapping[str, float] = {"gpt2": 1.0}
"""Megabytes; of the others 5."""
PAINT = 2000.0
"""Milliseconds."""


def _ours(name: str, batch: int) -> Callable[[], tuple[Any, Any]]:
    model = {**MODELS, **MIXTURES}[name]
    return lambda: (build(model), inputs(model, batch))


def _theirs(family: str, batch: int, sequence: int, **more: Any) -> Callable[[], tuple[Any, Any]]:
    """A family's own configuration."""
    def made() -> tuple[Any, Any]:
        import torch
        import transformers

        config = getattr(transformers, f"{family}Config")(use_cache=False, **more)
        with torch.device("meta"):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            ids = torch.zeros(batch, sequence, dtype=torch.int64)
        return model, {"input_ids": ids, "labels": ids.clone()}

    return made


CASES: Mapping[str, tuple[Callable[[], tuple[Any, Any]], str, Mapping[str, Any]]] = {
    "gpt2": (_ours("gpt2", 32), "h100:1x8", {}),
    "llama-405b": (_ours("llama-405b", 2048), "h100:2048x8", {"tp": 8, "pp": 16, "cp": 1, "schedule": "interleaved1f1b"}),
    "t5-3b": (_ours("t5-3b", 64), "a100:2x8", {}),
    "mixtral-8x7b": (_ours("mixtral-8x7b", 256), "h100:8x8", {"ep": 8, "pp": 4, "tp": 1, "schedule": "1f1b"}),
    "mamba2": (_theirs("Mamba2", 16, 1024), "h100:1x8", {}),
    "mamba": (_theirs("Mamba", 16, 32), "h100:1x8", {}),
    "jamba": (_theirs("Jamba", 32, 16, use_mamba_kernels=False), "h100:4x8", {}),
}
"""The scans of Mamba and Jamba are loops over positions, of which a capture has every turn: of short sequences only."""


def page(name: str, folder: Path) -> tuple[str, bool]:
    """The line of a page, and whether it is as it must be."""
    import meshwright as mw

    made, cluster, pins = CASES[name]
    model, batch = made()
    plan = mw.plan(model, cluster, ((), batch), precision="bf16", pins=dict(pins))
    path, before = folder / f"{name}.html", time.monotonic()
    mw.show(plan, path)
    seconds, megabytes = time.monotonic() - before, path.stat().st_size / 1e6
    paints, complaints = [], list[str]()
    for width in WIDTHS if binary() else ():
        with tempfile.TemporaryDirectory() as own, Browser.start(Path(own), width) as browser:
            browser.open(path)
            first = "performance.getEntriesByName('first-contentful-paint')"
            browser.until(f"{first}.length > 0")
            paints.append(float(browser.run(f"{first}[0].startTime")))
            browser.picture(folder / f"{name}.{width}.png")
            complaints += browser.messages
    shown = ", ".join(f"{paint:.0f} ms at {width}" for paint, width in zip(paints, WIDTHS, strict=False)) or "no browser here"
    line = f"{name:14s} {plan.mesh!s:40s} {megabytes:5.2f} MB, written in {seconds:.1f} s; first paint {shown}"
    good = megabytes <= LIMITS.get(name, 5.0) and max(paints, default=0.0) <= PAINT and not complaints
    return f"{line}{''.join(f'; {one}' for one in complaints)}", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--pictures", type=Path, help="a folder for the pages and their pictures")
    options = parser.parse_args()
    faults = 0
    with tempfile.TemporaryDirectory() as other:
        folder = options.pictures or Path(other)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.names or CASES:
            line, good = page(name, folder)
            faults += not good
            print(line, flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
