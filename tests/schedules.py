"""The built-in schedules by name, for tests of all of them."""

from __future__ import annotations

from meshwright.ir.schedules.builtin import BUILTIN

SCHEDULES = tuple(schedule.name for schedule in BUILTIN)
SPLIT_BACKWARD = tuple(schedule.name for schedule in BUILTIN if schedule.split)
