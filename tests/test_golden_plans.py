"""Plans change only on purpose: five models on three clusters against the files of ``tests/plans``."""

from __future__ import annotations

import difflib

import pytest

from tests.golden import CLUSTERS, MODELS, as_text, path_of, plan_of


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_plans_are_as_they_were(model: str) -> None:
    changed = []
    for cluster in CLUSTERS:
        path = path_of(model, cluster)
        was, now = path.read_text(encoding="utf-8").splitlines(), as_text(plan_of(model, cluster)).splitlines()
        changed += difflib.unified_diff(was, now, str(path), "planned now", lineterm="", n=1)
    assert not changed, "\n".join([*changed, "on purpose? python -m tests.golden writes the files anew: review the difference"])
