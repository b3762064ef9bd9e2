"""The longest sequence that trains, for every count of devices, beside what all-to-all alone reaches by the same prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from meshwright.commands.sizing import spec_of
from meshwright.errors import MeshwrightError
from meshwright.lengths import Longest, by_heads, longest, loss_alone
from meshwright.planner import OutOfMemoryError


@dataclass(frozen=True)
class Reach:
    """One cluster. ``tokens``: of the longest sequence found to fit; ``free_bytes``: of a device, left to its context,
    communicators and the allocator; ``alone``: with ZeRO-3, all-to-all attention and full recomputation, nothing else, of the
    model as it is; ``alone_loss_only``: likewise, where its outputs beside the loss are dropped; ``reason``: why there is none,
    and the numbers are then None."""

    devices: int
    cluster: str
    tokens: int | None = None
    too_long: int | None = None
    mesh: str = ""
    step_seconds: float | None = None
    bytes_per_rank: float | None = None
    free_bytes: float | None = None
    alone: int | None = None
    alone_loss_only: int | None = None
    reason: str = ""

    @property
    def times(self) -> float | None:
        """Of the sequence that all-to-all alone reaches with the model as it is."""
        return None if self.tokens is None or not self.alone else self.tokens / self.alone

    @property
    def times_loss_only(self) -> float | None:
        """Of the sequence that all-to-all alone reaches if the loss alone is kept."""
        return None if self.tokens is None or not self.alone_loss_only else self.tokens / self.alone_loss_only

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return {**asdict(self), "times": self.times, "times_loss_only": self.times_loss_only}


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
            alone = by_heads(model, cluster, batch, **options)
            loss_only = _from(alone, options, partial(by_heads, model, cluster, batch, loss_fn=loss_alone))
            found = _from(loss_only or alone, options, partial(longest, model, cluster, batch))
            assert found is not None
        except MeshwrightError as error:
            rows.append(replace(row, reason=str(error)))
            continue
        said = found.plan.predicted
        rows.append(replace(
            row, tokens=found.tokens, too_long=found.too_long, mesh=str(found.plan.mesh),
            alone=None if alone is None else alone.tokens, alone_loss_only=None if loss_only is None else loss_only.tokens,
            step_seconds=None if said is None else said.step_seconds,
            bytes_per_rank=None if said is None else said.bytes_per_rank,
            free_bytes=None if said is None else said.free_bytes,
        ))
    return rows


def _from(known: Longest | None, options: dict[str, Any], search: Callable[..., Longest | None]) -> Longest | None:
    """What a search finds that can do more than another: it begins where that one ended, or from the start if it does not fit
    there."""
    if known is not None:
        with suppress(OutOfMemoryError):
            if (found := search(**{**options, "shortest": known.tokens})) is not None:
                return found
    return search(**options)


def table(rows: Sequence[Reach]) -> Any:
    """For rich."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    beside = ("all-to-all alone", "times", "its loss only", "times")
    for title in ("devices", "longest", "mesh", "s a step", "GiB a device", "left free", *beside):
        shown.add_column(title, justify="left" if title == "mesh" else "right")
    for row in rows:
        if row.tokens is None:
            shown.add_row(str(row.devices), "", row.reason.splitlines()[0])
            continue
        shown.add_row(
            str(row.devices), f"{row.tokens:,}" + ("+" if row.too_long is None else ""), row.mesh,
            f"{row.step_seconds or 0:.3g}", f"{(row.bytes_per_rank or 0) / 2**30:.1f}",
            f"{(row.free_bytes or 0) / 2**30:.1f}",
            *(text for tokens, times in ((row.alone, row.times), (row.alone_loss_only, row.times_loss_only))
              for text in (f"{tokens:,}" if tokens else "does not fit", f"{times:.2f}" if times else "")),
        )
    return shown
