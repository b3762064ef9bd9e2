"""Exposed communication: by hand, and between its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
