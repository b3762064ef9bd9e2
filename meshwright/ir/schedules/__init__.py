"""Pipeline schedules: in which order every rank works, where its stages lie, and what a plan may ask of it.

``action`` one piece of work; ``table`` the pieces of all ranks in order; ``transfers`` when values and gradients travel between
them; ``schedule`` the object that makes tables; ``builtin`` the schedules of the field; ``book`` finds a schedule by its name.
"""

from meshwright.ir.schedules.action import Action, ScheduleError
from meshwright.ir.schedules.book import (
    illegal,
    illegal_combination,
    register_schedule,
    schedule_of,
    schedule_table,
    schedules,
    unknown,
)
from meshwright.ir.schedules.schedule import ClosedForms, PipelineSchedule, loop, vee
from meshwright.ir.schedules.table import Left, Margins, Order, Table, maximal

__all__ = [
    "Action", "ClosedForms", "Left", "Margins", "Order", "PipelineSchedule", "ScheduleError",
    "Table", "illegal", "illegal_combination",
    "loop", "maximal", "register_schedule", "schedule_of", "schedule_table", "schedules", "unknown", "vee",
]
