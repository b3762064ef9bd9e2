"""Making a plan whose program fits.

A search counts memory block by block or unit by unit; a program's memory is replayed (``Fits``). The two differ by some
percent, either way. So a plan is made within a limit of counted bytes, replayed, and made again within a corrected limit,
until it fits and leaves little unused::

    next limit = counted x capacity / replayed bytes

Within more, what does not fit would be found again; where a plan fits, more is of use only if it is more than its limit. The
bound is that of the widest limit that was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.compiler.search.candidates import Candidate
from meshwright.compiler.search.errors import DoesNotFitError, NoBetterError, OutOfMemoryError
from meshwright.compiler.search.task import Fits
from meshwright.cost.cluster import Cluster
from meshwright.ir.plan import Plan
from meshwright.ir.prediction import Prediction

ROUNDS = 3
"""So many plans are tried for one that fits and is faster, beside those that do not fit."""
_FULL = 0.95
"""A plan that fills this much of a device is not made again to use the rest."""
_DEAR = 0.02
"""A plan is made again to use memory that may save this part of its step (chosen: the gap of a certificate)."""
_SHORT = 0.995
"""After a plan within a limit, the next limit is aimed at this much of a device, so that it does not miss by a hair."""


@dataclass(frozen=True)
class Counted:
    """A plan with the memory that its search counted.

    plan: with its prediction
    limit_bytes: counted bytes that it was to stay within; what it counts, if there was no limit
    limited: whether there was one
    bound_seconds: no plan of the same candidate within that limit takes less; of a pipeline, as long as the limit is no more
        than the device has, its own seconds: what is proven of it stands in the sweep, which may sharpen it
    status: of the search for it, as in ``Certificate``
    settled: whether its search has used what it was given, or would not use more
    needs_bytes: counted bytes that every plan of the same candidate is proven to need; 0: nothing is known
    price: seconds that a byte more saves at most, as far as the search for it knows
    """

    plan: Plan
    limit_bytes: float
    limited: bool
    bound_seconds: float
    status: str
    settled: bool
    needs_bytes: float = 0.0
    price: float = 0.0


@dataclass(frozen=True)
class Fitted:
    """A plan whose program fits.

    plan: its prediction has the replayed memory
    bound_seconds: no plan of the same candidate takes less, as far as its search could tell (of pipelines: ``Counted``)
    status: of the search for it, as in ``Certificate``
    limited: whether memory kept it from being faster
    """

    plan: Plan
    bound_seconds: float
    status: str
    limited: bool

    @property
    def seconds(self) -> float:
        """Of its step."""
        return prediction_of(self.plan).step_seconds


@dataclass(frozen=True)
class Result:
    """A candidate with a plan that fits.

    name: of the candidate with its way to keep parameters
    counted_seconds: of its step, before its memory was replayed
    """

    candidate: Candidate
    name: str
    fitted: Fitted
    counted_seconds: float

    @property
    def seconds(self) -> float:
        """Of the plan's step."""
        return self.fitted.seconds


def prediction_of(plan: Plan) -> Prediction:
    """The prediction of a plan that a search made, which has one."""
    assert plan.predicted is not None
    return plan.predicted


def fitted(
    first: Counted, within: Callable[[float], Counted], fits: Fits, cluster: Cluster, asked: float | None = None
) -> Fitted:
    """The fastest plan found that fits.

    ``asked``: the limit that the first was to stay within, if it may not; ``within``: the fastest plan within so many counted
    bytes. Where there is none it returns the leanest, whose ``limit_bytes`` are more than it was asked for, or raises
    DoesNotFitError. Raises OutOfMemoryError, or what ``within`` raised.
    """
    best: Fitted | None = None
    counted, rounds, bound, widest, least, most = first, 0, math.inf, -math.inf, (0.0, 0.0), (math.inf, math.inf)
    asked = asked if asked is not None else first.limit_bytes if first.limited else math.inf

    def proven(one: Fitted) -> Fitted:
        return replace(one, bound_seconds=min(bound, one.seconds) if widest > -math.inf else one.bound_seconds)

    while True:
        leanest = counted.limit_bytes > asked
        if leanest and best is not None:
            return proven(best)
        # a plan that counts more than this one may hold less, so what was proven of the widest limit is what holds
        if counted.limited and counted.limit_bytes > widest:
            bound, widest = counted.bound_seconds, counted.limit_bytes
        plan = replace(counted.plan, predicted=fits(counted.plan))
        predicted, rounds = prediction_of(plan), 0 if leanest else rounds + 1
        if predicted.fits:
            if best is None or predicted.step_seconds < best.seconds:
                best = Fitted(plan, counted.bound_seconds, counted.status, counted.limited)
            least = max(least, (prediction_of(counted.plan).bytes_per_rank, predicted.bytes_per_rank))
            unused = predicted.capacity_bytes - predicted.bytes_per_rank
            if counted.price * unused <= _DEAR * predicted.step_seconds if counted.settled else (
                    unused < (1.0 - _FULL) * predicted.capacity_bytes and not leanest):
                return proven(best)
        elif leanest:
            raise OutOfMemoryError.of_plan(plan, cluster, counted.needs_bytes)
        else:
            most = min(most, (prediction_of(counted.plan).bytes_per_rank, predicted.bytes_per_rank))
        if best is not None and rounds >= ROUNDS:
            return proven(best)
        # of the leanest nothing is known but that less is too little, so what is asked next is no less, if it fits
        short = _SHORT if counted.limited and not leanest else 1.0
        asked = short * predicted.capacity_bytes / predicted.bytes_per_rank
        if best is not None and predicted.fits and counted.limited and not leanest:
            asked *= prediction_of(counted.plan).bytes_per_rank
            if asked >= most[0]:  # as much as is known not to fit: between the two
                part = (_SHORT * predicted.capacity_bytes - predicted.bytes_per_rank) / (most[1] - predicted.bytes_per_rank)
                asked = counted.limit_bytes + part * (most[0] - counted.limit_bytes)
            if asked <= counted.limit_bytes:
                return proven(best)
        else:
            asked *= min(counted.limit_bytes, prediction_of(counted.plan).bytes_per_rank)
        if asked <= least[0] < counted.limit_bytes and not predicted.fits:  # less than what is known to fit: between the two
            part = (predicted.capacity_bytes - least[1]) / (predicted.bytes_per_rank - least[1])
            asked = least[0] + part * (counted.limit_bytes - least[0])
        try:
            try:
                counted = within(asked)
            except (DoesNotFitError, OutOfMemoryError):
                if best is not None or predicted.fits or short == 1.0:
                    raise
                asked /= short  # a plan that would miss by less than that may be all there is
                counted = within(asked)
        except (DoesNotFitError, NoBetterError, OutOfMemoryError) as error:
            if best is None:
                raise
            if isinstance(error, NoBetterError) and asked > widest:
                bound, widest = error.bound_seconds, asked
            return proven(best)
