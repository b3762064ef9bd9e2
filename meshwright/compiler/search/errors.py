"""The errors of a search.

``DoesNotFitError`` says that one candidate does not fit the memory, ``NoBetterError`` that one has no plan faster than the
incumbent; both stay inside the search. ``OutOfMemoryError`` says that no candidate fits, what binds, and what would fit; it is
what a user sees.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.quantities import bytes_text, seconds_text
from meshwright.ir.sharding import ceil_div

_MARGIN = 0.95
"""Part of the capacity that a batch of which we say that it would fit may fill: memory is not quite linear in it (assumed)."""


class DoesNotFitError(Exception):
    """No cut of a candidate is within the capacity: the message says where; ``least`` bytes that it needs on some rank, as far
    as found. Unless ``proven``, there may be one."""

    def __init__(self, message: str, least: float, proven: bool = True) -> None:
        super().__init__(message)
        self.least, self.proven = least, proven


class NoBetterError(Exception):
    """No plan of a layout is faster than one that is known. ``bound_seconds``: no plan of it takes less;
    ``limited``: whether that is proven under its memory limit only, so that more micro-batches may help."""

    def __init__(self, bound_seconds: float, limited: bool) -> None:
        super().__init__(f"takes at least {seconds_text(bound_seconds)}")
        self.bound_seconds, self.limited = bound_seconds, limited


class OutOfMemoryError(PlanError):
    """No plan fits the device memory; says what binds and what would fit. Bytes per device: ``least`` of all plans found,
    ``capacity`` there is, ``bytes_`` of the plan that needs least by kind. Unless ``proven``, there may be one that fits."""

    def __init__(
        self, message: str, least: float, capacity: float, bytes_: Mapping[str, float], proven: bool = False
    ) -> None:
        super().__init__(message)
        self.least, self.capacity, self.bytes_, self.proven = least, capacity, dict(bytes_), proven

    @classmethod
    def of_layout(
        cls, least: float, bytes_: Mapping[str, float], mesh: Mesh, microbatches: int, cluster: Cluster, needs: float = 0.0
    ) -> OutOfMemoryError:
        """Of one layout, whose leanest plan needs ``least`` bytes; ``bytes_``: these by kind; ``needs``: counted bytes that
        every plan of it is proven to need."""
        kinds = sorted(bytes_.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {bytes_text(value)}" for name, value in kinds if value)
        binding = f"; {kinds[0][0]} bind: {parts}" if kinds else ""
        there = cluster.capacity_bytes
        return cls(
            f"nothing fits {cluster}: the least memory any plan needs on mesh {mesh} with microbatches={microbatches} is "
            f"{bytes_text(least)} per device, {bytes_text(there)} are there{_free(cluster)}{binding}", least, there, bytes_,
            proven=needs > there,
        )

    @classmethod
    def of_plan(cls, plan: Plan, cluster: Cluster, needs: float = 0.0) -> OutOfMemoryError:
        """Of the layout whose leanest plan, as predicted, does not fit; ``needs``: as in ``of_layout``."""
        assert plan.predicted is not None
        held, count = plan.predicted, plan.schedule.microbatches
        return cls.of_layout(held.bytes_per_rank, held.bytes_by_kind, plan.mesh, count, cluster, needs)

    @classmethod
    def of_candidate(cls, error: DoesNotFitError, cluster: Cluster, inputs: float) -> OutOfMemoryError:
        """Of the nearest candidate, in the user's terms. ``inputs``: bytes that every device holds whole, which the search of
        cuts leaves out."""
        least, there = error.least + inputs, cluster.capacity_bytes
        return cls(
            f"nothing was found that fits {cluster}: the nearest needs {bytes_text(least)} of {bytes_text(there)} per device"
            f"{_free(cluster)}. {error}", least, there, {},
        )

    def with_remedy(self, remedy: str) -> OutOfMemoryError:
        """The same error, saying what would fit."""
        return OutOfMemoryError(f"{self}. Nearest change: {remedy}", self.least, self.capacity, self.bytes_, self.proven)

    def smaller(self, batch: int, world: int) -> str:
        """What would fit when no pin stands in the way: a smaller batch, or else more or larger devices.

        Inputs and activations grow with the batch, inputs stay whole on every device, the rest is what devices share.
        """
        inputs = self.bytes_.get("inputs", 0.0)
        growing = inputs + self.bytes_.get("activations", 0.0) + self.bytes_.get("transient", 0.0)
        free = self.capacity - (self.least - growing)
        if batch > 1 and growing > 0 and free >= growing / batch:
            fitting = next(n for n in range(max(1, int(_MARGIN * batch * free / growing)), 0, -1) if batch % n == 0)
            return f"a batch of about {fitting} instead of {batch} would fit"
        larger = f"devices of {bytes_text(self.least)}"
        if self.capacity <= inputs:
            return f"{larger} would fit"
        many = max(world + 1, ceil_div(int(world * (self.least - inputs)), int(self.capacity - inputs)))
        return f"about {many} devices of this kind instead of {world}, or {larger}, would fit"


def _free(cluster: Cluster) -> str:
    """What of a device is not used, as the planner was told (``headroom``), in brackets."""
    free = cluster.memory_bytes - cluster.capacity_bytes
    return f" ({bytes_text(free)} more are left free for its context and headroom)" if free else ""
