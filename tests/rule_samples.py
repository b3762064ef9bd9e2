"""A sample call, or several, for every operator with a built-in rule: ``SAMPLES`` maps a target to a maker of calls."""

from __future__ import annotations

from collections.abc import Mapping

from tests import samples_shapes, samples_values
from tests.samples import Maker

SAMPLES: Mapping[str, Maker] = {
    name if name.startswith("mw.") else f"aten.{name}": maker
    for table in (*samples_shapes.TABLES, *samples_values.TABLES)
    for name, maker in table().items()
}
