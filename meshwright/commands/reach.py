"""The longest sequence that trains, for every count of devices, beside what all-to-all alone reaches by the same prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from meshwright.commands.sizing import spec_of
from meshwright.errors import MeshwrightError
from meshwright.lengths import by_heads, longest


@dataclass(frozen=True)
class Reach:
    """One cluster. ``tokens``: of the longest sequence found to fit; ``alone``: with ZeRO-3, all-to-all attention and full
    recomputation, and nothing else; ``reason``: why there is none, and the numbers are then None."""

    devices: int
    cluster: str
    tokens: int | None = None
    too_long: int | None = None
    mesh: str = ""
    step_seconds: float | None = None
    bytes_per_rank: float | None = None
    alone: int | None = None
    reason: str = ""

    @property
    def times(self) -> float | None:
        """Of the sequence that all-to-all alone reaches."""
        return None if self.tokens is None or not self.alone else self.tokens / self.alone

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return {**asdict(self), "times": self.times}


def reaches(
    model: nn.Module, device: str, counts: Sequence[int], batch: int, *, inputs: Callable[[int], Any] | None,
    optimizer: str | float, precision: str, shortest: int, most: int, report: Callable[[str, float], None],
) -> list[Reach]:
    """A row for every count of devices."""
    rows = []
    for number, count in enumerate(sorted(set(counts))):
        cluster = spec_of(device, count)
        report(cluster, number / len(counts))
        row = Reach(count, cluster)
        options: dict[str, Any] = {
            "inputs": inputs, "optimizer": optimizer, "precision": precision, "shortest": shortest, "most": most,
        }
        try:
            found = longest(model, cluster, batch, **options)
            alone = by_heads(model, cluster, batch, **options)
        except MeshwrightError as error:
            rows.append(replace(row, reason=str(error)))
            continue
        said = found.plan.predicted
        rows.append(replace(
            row, tokens=found.tokens, too_long=found.too_long, mesh=str(found.plan.mesh),
            alone=None if alone is None else alone.tokens, step_seconds=None if said is None else said.step_seconds,
            bytes_per_rank=None if said is None else said.bytes_per_rank,
        ))
    return rows


def table(rows: Sequence[Reach]) -> Any:
    """For rich."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    for title in ("devices", "longest", "mesh", "s a step", "GiB a device", "all-to-all alone", "times"):
        shown.add_column(title, justify="left" if title == "mesh" else "right")
    for row in rows:
        if row.tokens is None:
            shown.add_row(str(row.devices), "", row.reason.splitlines()[0])
            continue
        shown.add_row(
            str(row.devices), f"{row.tokens:,}" + ("+" if row.too_long is None else ""), row.mesh,
            f"{row.step_seconds or 0:.3g}", f"{(row.bytes_per_rank or 0) / 2**30:.1f}",
            f"{row.alone:,}" if row.alone else "does not fit", f"{row.times:.2f}" if row.times else "",
        )
    return shown
