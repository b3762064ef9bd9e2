"""``write``: a plan's page into a file, which is whole or not there."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.cost.cluster import ClusterError
from meshwright.ir.graph import Op
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.writing.canonical import canonical
from meshwright.views.alternatives import SHOWN, Alternatives
from meshwright.views.facts import Facts, facts_of
from meshwright.views.page.data import page_data
from meshwright.views.page.document import document
from meshwright.views.words import assignment_words


def priced(facts: Facts) -> Callable[[Op], list[dict[str, Any]]] | None:
    """The alternatives of an operator as the page shows them; None where the plan has no prices or no choices to compare."""
    try:
        known = Alternatives(facts)
    except (ClusterError, PlanError):
        return None

    def of(op: Op) -> list[dict[str, Any]]:
        found = known.of(op) or []
        chosen = next((one for one in found if one.chosen), None)
        if chosen is None or len(found) < 2:
            return []
        return [
            {"choice": assignment_words(one.assignment), "chosen": one.chosen, "why": one.why,
             "more": one.seconds - chosen.seconds, "bytes": one.bytes_ - chosen.bytes_,
             **({} if one.least == one.seconds else {"least": one.least - chosen.seconds if one.least > 0 else "unknown"})}
            for one in sorted(found, key=lambda one: (not one.chosen, one.seconds))[:SHOWN] if math.isfinite(one.seconds)
        ]

    return of


def write(plan: Plan, path: str | Path, against: Plan | None = None) -> None:
    """Write the page of ``plan``, and of the plan it is compared with, with the names that pins have and none of a trace."""
    one, other = facts_of(canonical(plan)), None if against is None else facts_of(canonical(against))
    pages = [page_data(one, other, priced(one))]
    pages += [] if other is None else [page_data(other, one, priced(other))]
    names = ["this plan", "the other plan"]
    path = Path(path)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(document(pages, names))
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
