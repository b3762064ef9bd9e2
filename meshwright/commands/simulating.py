"""What ``simulate`` runs: the pipeline of a plan, or a schedule alone on seconds of its stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.commands.options import finite, one_or_all, seconds_of
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.cost.timeline import Simulation

SLOTS = 500_000
"""Micro-batches on stages that are simulated: some ten seconds."""
LONGEST = 1e100
"""Seconds of an action at most."""
USUAL: Mapping[str, Any] = {"schedule": "1f1b", "forward": "1", "backward": "2", "transfer": 0.0}
"""What a schedule alone is simulated with where nothing else is given."""


def check_beside(given: Mapping[str, Any], beside: str) -> None:
    """Raise InputError for options that say nothing ``beside`` what else was given. ``given``: None where one is not."""
    if named := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
        raise InputError(f"{', '.join(named)} beside {beside}; drop {'it' if len(named) == 1 else 'them'}")


def alone(given: Mapping[str, Any]) -> Simulation:
    """A schedule on seconds of its stages. ``given``: the options by their names. Raises InputError, ScheduleError."""
    from meshwright.cost.timeline import simulate
    from meshwright.ir.schedules import schedule_of, schedule_table

    pp, count = given["pp"], given["microbatches"]
    if pp is None or count is None:
        raise InputError("give a plan file, or --pp and --microbatches")
    named = {**USUAL, **{name: value for name, value in given.items() if value is not None}}
    stages = given["virtual_stages"] or schedule_of(named["schedule"]).usual
    if (slots := pp * stages * count) > SLOTS:
        raise InputError(f"{pp} ranks x {stages} stages a rank x {count} micro-batches are {slots:,}, more than the {SLOTS:,} "
                         "that are simulated action by action; give fewer")
    half = [seconds / 2 for seconds in seconds_of(named["backward"], "--backward")]
    forward, transfer = seconds_of(named["forward"], "--forward"), finite(named["transfer"], "--transfer")
    if any(LONGEST < seconds < math.inf for seconds in (*half, *forward, transfer)):
        raise InputError(f"--forward, --backward and --transfer are at most {LONGEST:g} s each, or they add up to more than a "
                         "number holds; give smaller ones")
    return simulate(schedule_table(named["schedule"], pp, stages, count), one_or_all(forward), one_or_all(half),
                    one_or_all(half), transfer)
