"""Exposed communication: by hand, and between its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.compiler.placement.costs import FORWARD, GATHER, RESOURCES, SEND, time_rows
from meshwright.cost.overlap import exposed, in_pieces, overlapped, ring

SECONDS = st.floats(0.01, 10.0)


@given(SECONDS, SECONDS, st.floats(1.0, 2.0))
def test_beside_lies_between_the_longer_and_the_sum(compute, communication, contention):
    together_ = overlapped(compute, communication, contention)
    assert max(compute, communication) <= together_ * (1 + 1e-12)
    assert together_ <= (compute + communication) * (1 + 1e-12)
    assert exposed(compute, communication, contention) == pytest.approx(together_ - compute)


def test_beside_by_hand():
    # compute of 10 at speed 1 / 1.25 during the 4 s of the collective: 3.2 done, 6.8 left
    assert overlapped(10.0, 4.0, 1.25) == pytest.approx(4 + 6.8)


def test_ring_attention_hides_its_sends_behind_enough_compute():
    assert ring(2.0, 1.0, 4) == 8.0
    assert ring(1.0, 2.0, 4) == 7.0
    assert ring(1.0, 2.0, 1) == 1.0


def test_candidates_as_arrays():
    compute, link = np.array([1.0, 5.0]), np.array([2.0, 2.0])
    assert overlapped(compute, link).tolist() == [2.0, 5.0]


@given(SECONDS, st.integers(2, 64), st.floats(1.0, 2.0))
def test_a_collective_in_pieces_has_a_product_beside_each_of_its_transfers(seconds, ranks, contention):
    """A rank works on one piece after the other, its own among them, and exchanges the others meanwhile: run step by step."""
    product, transfer = 100.0, seconds / (ranks - 1)
    steps = sum(overlapped(product, transfer, contention) for _ in range(ranks - 1)) + product
    assert in_pieces(seconds, contention=contention) == pytest.approx(steps - ranks * product, rel=1e-6, abs=1e-9)
    assert in_pieces(seconds, 0.5, contention) == pytest.approx(in_pieces(seconds, contention=contention) + 0.5)


def shared_link(compute: float, sends: float, gathers: float, pieces: int) -> float:
    """Seconds of a block whose compute and sends take turns, ``pieces`` of each, beside gathers on the link of the sends, which
    gives each of two transfers half of itself: run event by event."""
    now, left = 0.0, gathers
    for _ in range(pieces):
        now += compute / pieces
        left -= min(left, compute / pieces)
        both = min(left, sends / pieces)  # as much of each is moved while both are under way, in twice the time
        now, left = now + 2 * both + (sends / pieces - both), left - both
    return now + left


@given(SECONDS, SECONDS, SECONDS)
def test_axes_that_share_a_link_hold_each_other_up_by_a_closed_form(compute, sends, gathers):
    """Nothing is moved faster by taking turns, so all is over no sooner than the sum of the transfers; what a block waits for
    is held up by s g / (c + s), as long as gathers are over before the block. That is what the price leaves out, and at most
    the smaller of the two."""
    found = shared_link(compute, sends, gathers, 2_000)
    block = np.zeros(RESOURCES)
    block[[FORWARD, SEND, GATHER]] = compute, sends, gathers
    price = float((time_rows(1.0) @ block).max())
    assert price == pytest.approx(sends + max(compute, gathers))
    assert found >= sends + gathers - 1e-9
    assert price <= found * (1 + 1e-3)
    assert found <= (price + min(sends, gathers)) * (1 + 1e-3)
    if gathers <= compute:
        assert found == pytest.approx(compute + sends + sends * gathers / (compute + sends), rel=5e-3)
