"""Bytes that the search counts against those that the program holds, of every program of ``benchmarks/memory.py``.

    python benchmarks/counted.py [NAME ...] [--json]

A search counts memory as a sum over blocks or units and the largest transient, which a linear program can hold; whether a plan
fits is decided by the replay of its program, which ``memory.py`` compares with torch's tracker. Both of the fullest rank. Goal:
within 2%.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from memory import CASES, plan_of

from meshwright.compiler.search.fitting import prediction_of
from meshwright.compiler.search.settled import settled
from meshwright.planner import task_of

GOAL = 0.02


def counted(name: str) -> dict[str, Any]:
    """One program."""
    plan = plan_of(CASES[name])
    found = prediction_of(settled(task_of(plan, None), plan, prediction_of)).bytes_per_rank
    held = prediction_of(plan).bytes_per_rank
    return {"name": name, "counted": found, "replayed": held, "error": found / held - 1}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Bytes that the search counts against those that the program holds.")
    parser.add_argument("names", nargs="*", help="programs of memory.py (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    options = parser.parse_args()
    rows = []
    for name in options.names or CASES:
        rows.append(counted(name))
        if not options.json:
            line = "{name:40s} counted {counted:15,.0f}   replayed {replayed:15,.0f}   {error:+7.2%}"
            print(line.format(**rows[-1]), flush=True)
    near = sum(abs(row["error"]) <= GOAL for row in rows)
    print(json.dumps(rows) if options.json else f"within {GOAL:.0%}: {near} of {len(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
