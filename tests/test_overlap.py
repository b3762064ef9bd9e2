"""Exposed communication: closed forms, and a simulation of two machines step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.overlap import exposed, gathered_and_reduced, in_pieces, overlapped, prefetched, reduced, ring, together

SECONDS = st.floats(0.01, 10.0)
BLOCKS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=8)


@given(SECONDS, SECONDS, st.floats(1.0, 2.0))
def test_beside_lies_between_the_longer_and_the_sum(compute, communication, contention):
    together_ = overlapped(compute, communication, contention)
    assert max(compute, communication) <= together_ * (1 + 1e-12)
    assert together_ <= (compute + communication) * (1 + 1e-12)
    assert exposed(compute, communication, contention) == pytest.approx(together_ - compute)


def test_beside_by_hand():
    # compute of 10 at speed 1 / 1.25 during the 4 s of the collective: 3.2 done, 6.8 left
    assert overlapped(10.0, 4.0, 1.25) == pytest.approx(4 + 6.8)


@given(BLOCKS)
def test_reduced_is_the_two_machine_flow(blocks):
    """Without contention: a link that takes one reduction after another as they become ready."""
    ready = link = 0.0
    for backward, reduction in blocks:
        ready += backward
        link = max(link, ready) + reduction
    got = reduced([block for block, _ in blocks], [reduction for _, reduction in blocks])
    assert got == pytest.approx(max(link, ready))


@given(BLOCKS, st.floats(1.0, 1.5))
def test_contention_only_lengthens(blocks, contention):
    compute, link = [block for block, _ in blocks], [block for _, block in blocks]
    for flow in (prefetched, reduced):
        assert flow(compute, link, contention) >= flow(compute, link) - 1e-12
    assert gathered_and_reduced(compute, link, link, contention) >= gathered_and_reduced(compute, link, link) - 1e-12


def test_equal_blocks_closed_forms():
    blocks, compute, link = 6, 3.0, 1.0
    assert prefetched([compute] * blocks, [link] * blocks) == link + blocks * compute
    assert prefetched([compute] * blocks, [5.0] * blocks) == blocks * 5.0 + compute  # bound by the link
    assert reduced([compute] * blocks, [link] * blocks) == blocks * compute + link
    assert reduced([compute] * blocks, [5.0] * blocks) == compute + blocks * 5.0
    assert gathered_and_reduced([compute] * blocks, [link] * blocks, [link] * blocks) == 2 * link + blocks * compute


def test_ring_attention_hides_its_sends_behind_enough_compute():
    assert ring(2.0, 1.0, 4) == 8.0
    assert ring(1.0, 2.0, 4) == 7.0
    assert ring(1.0, 2.0, 1) == 1.0


def test_candidates_as_arrays():
    compute, link = np.array([1.0, 5.0]), np.array([2.0, 2.0])
    assert overlapped(compute, link).tolist() == [2.0, 5.0]
    assert reduced([compute, compute], [link, link]).tolist() == [5.0, 12.0]
    assert prefetched([compute, compute], [link, link]).tolist() == [5.0, 12.0]


def test_one_link_is_shared_two_are_not():
    assert together({"nic": [1.0, 1.0]}) == 2.0
    assert together({"nic": [1.0], "nvlink": [1.0]}) == 1.0
    assert together({}) == 0.0


@given(SECONDS, st.integers(1, 64), st.floats(1.0, 2.0))
def test_a_collective_in_pieces_exposes_one_and_slows_the_rest_down(seconds, pieces, contention):
    found = in_pieces(seconds, pieces, contention)
    first = seconds / pieces
    assert found == pytest.approx(first + exposed(1e9, seconds - first, contention), rel=1e-3, abs=1e-6)
    assert in_pieces(seconds, 1, contention) == seconds
