"""Elimination against enumeration, and pruning that keeps every optimum."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compiler.solver.chain import BlockModel, Edge
from meshwright.compiler.solver.elimination import WIDTHS, WORK, Eliminator, Tables, eliminated, min_sum, plan, prune
from tests.chains import RESOURCES, random_block


def weighted(block: BlockModel, choices: tuple[int, ...], weights: np.ndarray) -> float:
    """Cost of an assignment; forbidden is inf even at weight zero."""
    cost = block.cost(choices)
    return float(cost @ weights) if np.isfinite(cost).all() else np.inf


def enumerated(block: BlockModel, keep: tuple[int, ...], weights: np.ndarray) -> np.ndarray:
    """The table over the kept variables by walking all assignments."""
    out = np.full([block.sizes[v] for v in keep], np.inf)
    for x in product(*(range(n) for n in block.sizes)):
        at = tuple(x[v] for v in keep)
        out[at] = min(out[at], weighted(block, x, weights))
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_table_and_minimizers_are_those_of_enumeration(seed, sizes, data):
    rng = np.random.default_rng(seed)
    block = random_block(rng, tuple(sizes), forbidden=data.draw(st.sampled_from([0.0, 0.3])))
    keep = tuple(sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))))
    weights = rng.random(RESOURCES) * rng.integers(0, 2, RESOURCES)
    done = Eliminator(block, keep, Tables()).table(weights)
    want = enumerated(block, keep, weights)
    np.testing.assert_allclose(done.table, want, rtol=1e-12)
    states = np.argwhere(np.isfinite(want)) if keep else np.zeros((int(np.isfinite(want)), 0), dtype=np.intp)
    for state, row in zip(states, done.assignments(states), strict=True):
        assert tuple(row[list(keep)]) == tuple(state)
        assert weighted(block, tuple(row), weights) == pytest.approx(want[tuple(state)], rel=1e-12)


def alike(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[BlockModel]:
    """Blocks of the same variables and pairs: some share the tables of edges and differ in the rest, some the other way."""
    first = random_block(rng, sizes, 0.15)
    twice = [Edge(e.j, e.i, rng.random((*e.shape[::-1], RESOURCES))) for e in first.edges[:2]]  # a second edge of a pair
    edges = (*first.edges, *twice)
    out = []
    for n in range(5):
        unary = tuple(rng.random((size, RESOURCES)) for size in sizes)
        unary[0][0] = np.inf if n == 3 else unary[0][0]
        own = tuple(Edge(e.i, e.j, rng.random((*e.shape, RESOURCES))) for e in edges)
        out.append(BlockModel(sizes, unary, edges if n % 2 else own))
    return [*out, BlockModel(sizes, out[1].unary, own)]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("chunk", [3, 40, 1 << 15])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_blocks_eliminated_together_are_as_one_by_one(seed, chunk, wide, monkeypatch):
    """Where some forbid choices, read a pair twice, or are given weights or tables that others have; in pieces, in several
    buckets."""
    monkeypatch.setattr("meshwright.compiler.solver.elimination.CHUNK", chunk)
    if wide:
        monkeypatch.setattr("meshwright.compiler.solver.elimination.WIDTHS", (12,))
    rng = np.random.default_rng(seed)
    tables, sizes = Tables(), (3, 2, 2, 3, 2, 2, 3) if wide else (3, 1, 2, 3, 2, 1, 3)
    eliminators = [Eliminator(block, (0, 4), tables) for block in alike(rng, sizes)]
    assert len({id(one.plan) for one in eliminators}) == 1
    assert eliminators[0].plan.inexact == wide
    weights = [rng.random(RESOURCES) for _ in eliminators]
    weights[3] = weights[1]  # the same tables for the same weights, and for others
    extra = {3: np.array([np.inf, 0.0, np.inf]), 1: np.full(sizes[1], 0.5)}
    extras = [extra if n in (1, 2) else {} for n in range(len(eliminators))]
    alone = [one.table(w, extra) for one, w, extra in zip(eliminators, weights, extras, strict=True)]
    found = eliminated(list(zip(eliminators, weights, extras, strict=True)))
    forbidding = [  # what is added to choices as a resource of its own, for the oracle
        BlockModel(sizes, tuple(np.c_[u, extra.get(v, np.zeros(len(u)))] for v, u in enumerate(one.block.unary)), tuple(
            Edge(e.i, e.j, np.concatenate([e.table, np.zeros((*e.table.shape[:2], 1))], axis=2), e.rows, e.cols)
            for e in one.block.edges))
        for one, extra in zip(eliminators, extras, strict=True)
    ]
    for one, other, block, w in zip(found, alone, forbidding, weights, strict=True):
        np.testing.assert_array_equal(one.table, other.table)
        if not wide:
            np.testing.assert_allclose(one.table, enumerated(block, (0, 4), np.array([*w, 1.0])), rtol=1e-12)
    states = np.array([[n, a, b] for n in range(len(found)) for a in range(3) for b in range(2)])
    states = states[rng.permutation(len(states))]
    got = found[0].together.assignments(states[:, 1:], states[:, 0])
    for (n, *state), row in zip(states.tolist(), got.tolist(), strict=True):
        assert row == alone[n].assignments(np.array([state]))[0].tolist()
        cost, want = eliminators[n].cost(row), eliminators[n].block.cost(row)
        assert np.array_equal(cost, want) if cost is not None else np.isinf(want).any()
        known = weighted(forbidding[n], tuple(row), np.array([*weights[n], 1.0]))
        others = [(*row[:v], a, *row[v + 1 :]) for v in (1, 2, 3, 5, 6) for a in range(sizes[v])]
        assert all(weighted(forbidding[n], one, np.array([*weights[n], 1.0])) >= known - 1e-12 for one in others)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(2, 4), min_size=3, max_size=5))
def test_one_more_is_kept_in_the_order_that_is_known(seed, sizes):
    block = random_block(np.random.default_rng(seed), tuple(sizes))
    tables, weights = Tables(), np.ones(RESOURCES)
    known = tables.plan(block, (1,))
    found = tables.plan(block, (0, 1), like=(1,), most=WORK)
    assert [step.var for step in found.steps] == [step.var for step in known.steps if step.var != 0]
    np.testing.assert_allclose(
        Eliminator(block, (0, 1), tables, found).table(weights).table, enumerated(block, (0, 1), weights), rtol=1e-12)
    others = Tables()  # that takes more than may be: another order is looked for, as it is where none is known
    others.plan(block, (1,))
    assert others.plan(block, (0, 1), like=(1,), most=1) == plan(block, (0, 1))
    assert Tables().plan(block, (0, 1), like=(1,), most=WORK) == plan(block, (0, 1))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(2, 5), min_size=2, max_size=4))
def test_pruning_keeps_the_optimum_for_all_weights(seed, sizes):
    rng = np.random.default_rng(seed)
    block = random_block(rng, tuple(sizes))
    # choices that are certainly worse: the first one plus something, in the unary table and in every edge
    unary = tuple(np.concatenate([u, u[:1] + 0.1]) for u in block.unary)
    edges = []
    for e in block.edges:
        n, m = e.shape
        table = np.array([[e.cost(a if a < n else 0, b if b < m else 0) for b in range(m + 1)] for a in range(n + 1)])
        edges.append(Edge(e.i, e.j, table))
    worse = BlockModel(tuple(s + 1 for s in sizes), unary, tuple(edges))
    small, kept = prune(worse, protect=(0,))
    assert small.sizes[0] == sizes[0] + 1
    assert all(s <= n for s, n in zip(small.sizes[1:], sizes[1:], strict=True))
    for _ in range(5):
        weights = rng.random(RESOURCES)
        before = Eliminator(worse, (0,), Tables()).table(weights).table
        done = Eliminator(small, (0,), Tables()).table(weights)
        np.testing.assert_allclose(done.table, before, rtol=1e-12)
        x = done.assignments(np.array([[0]]))[0]
        old = tuple(int(k[a]) for k, a in zip(kept, x, strict=True))
        assert weighted(worse, old, weights) == pytest.approx(before[0], rel=1e-12)


def test_equal_choices_leave_the_first():
    block = BlockModel((3,), (np.array([[1.0, 2.0], [1.0, 2.0], [0.5, 3.0]]),), ())
    small, kept = prune(block)
    assert small.sizes == (2,)
    assert kept[0].tolist() == [0, 2]


@pytest.mark.parametrize("chunk", [1, 30, 1 << 15])
@pytest.mark.parametrize("seed", range(8))
def test_pruning_drops_what_another_equals_or_beats(seed, chunk, monkeypatch):
    """Ties, forbidden pairs, edges in both directions and over states; compared at once or pair by pair."""
    monkeypatch.setattr("meshwright.compiler.solver.elimination.CHUNK", chunk)
    rng = np.random.default_rng(seed)
    tables = [rng.integers(0, 2, (5, 4, 2)).astype(float) for _ in range(3)]
    tables[0][rng.random((5, 4)) < 0.3] = np.inf
    states, others = rng.integers(0, 5, 6), rng.integers(0, 4, 6)
    edges = (
        Edge(0, 1, tables[0], states, np.arange(4)), Edge(2, 0, tables[1], rng.integers(0, 5, 3), others),
        Edge(0, 3, tables[2][:, :1], rng.integers(0, 5, 6), np.zeros(2, dtype=np.intp)),
    )
    unary = tuple(rng.integers(0, 2, (size, 2)).astype(float) for size in (6, 4, 3, 2))
    block = BlockModel((6, 4, 3, 2), unary, edges)
    costs = [np.concatenate([unary[0][a], *(e.cost(a, b) if e.i == 0 else e.cost(b, a)
             for e in edges for b in range(e.shape[e.i == 0]))]) for a in range(6)]
    want = [a for a in range(6) if not any(
        (costs[b] <= costs[a]).all() and (b < a or (costs[b] < costs[a]).any()) for b in range(6) if b != a)]
    assert prune(block, protect=(1, 2, 3))[1][0].tolist() == want


def test_variables_without_a_choice_are_in_no_table():
    """A hundred of them around one that all read: numpy's arrays have at most 64 dims, its broadcasts 32."""
    rng = np.random.default_rng(0)
    sizes = (3, *[1] * 100, 2)
    edges = [Edge(0, v, rng.random((3, 1, RESOURCES))) for v in range(1, 101)]
    edges += [Edge(v, 101, rng.random((1, 2, RESOURCES))) for v in range(1, 101)]
    edges.append(Edge(0, 101, rng.random((3, 2, RESOURCES))))
    block = BlockModel(sizes, tuple(rng.random((s, RESOURCES)) for s in sizes), tuple(edges))
    weights = rng.random(RESOURCES)
    for keep in ((), (0,), (5, 101)):
        done = Eliminator(block, keep, Tables()).table(weights)
        np.testing.assert_allclose(done.table, enumerated(block, keep, weights), rtol=1e-12)
        assert all(sizes[v] > 1 for step in done.plan.steps for scope, _ in step.buckets for v in scope)


def test_work_is_bounded_whatever_the_block():
    """A clique of 40 variables with 12 choices each, a third of the pairs forbidden but for one assignment."""
    rng = np.random.default_rng(0)
    legal = rng.integers(0, 12, 40)
    edges = []
    for i in range(40):
        for j in range(i):
            table = rng.random((12, 12, 1))
            table[rng.random((12, 12)) < 0.3] = np.inf
            table[legal[i], legal[j]] = 0.01
            edges.append(Edge(i, j, table))
    block = BlockModel((12,) * 40, tuple(rng.random((12, 1)) for _ in legal), tuple(edges))
    wide = Eliminator(block, (0,), Tables())
    assert wide.plan.work <= WORK
    assert wide.plan.largest <= WIDTHS[0]
    done = wide.table(np.ones(1))
    known = block.cost(legal)[0]
    assert 0 < done.table[legal[0]] <= known * (1 + wide.plan.rounding)
    found = done.assignments(np.arange(12)[:, None])[legal[0]]
    assert block.cost(found)[0] <= known * (1 + 1e-12)


def test_sharing_evenly_lifts_the_bound(monkeypatch):
    """What a bucket leaves unpaid another's surplus pays; the bound stays one."""
    better = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        block, weights = random_block(rng, (4,) * 8), rng.random(RESOURCES)
        exact = float(Eliminator(block, (), Tables()).table(weights).table)
        with monkeypatch.context() as patch:
            patch.setattr("meshwright.compiler.solver.elimination.WIDTHS", (16,))
            wide = Eliminator(block, (), Tables())
            shared = float(wide.table(weights).table)
            patch.setattr("meshwright.compiler.solver.elimination._shared_evenly", lambda buckets: buckets)
            plain = float(wide.table(weights).table)
        assert max(shared, plain) <= exact * (1 + 1e-12)
        better += shared > plain
    assert better >= 25


@pytest.mark.parametrize("seed", range(5))
def test_wide_blocks_give_a_lower_bound_and_honest_minimizers(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    block = random_block(rng, (3,) * 8)
    weights = rng.random(RESOURCES)
    want = enumerated(block, (0,), weights)
    monkeypatch.setattr("meshwright.compiler.solver.elimination.WIDTHS", (30,))
    wide = Eliminator(block, (0,), Tables())
    assert wide.plan.largest <= 30
    assert any(len(step.buckets) > 1 for step in wide.plan.steps)
    done = wide.table(weights)
    assert (done.table <= want + 1e-12).all()
    assert (done.table > 0.5 * want).all()
    for state, row in enumerate(done.assignments(np.arange(3)[:, None])):
        assert row[0] == state
        assert want[state] <= weighted(block, tuple(row), weights) + 1e-12 <= 1.5 * want[state]


def test_pieces_give_the_whole_minimum():
    rng = np.random.default_rng(0)
    parts = [rng.random((50, 1, 60)), rng.random((50, 70, 1)), rng.random((50, 1, 1))]
    np.testing.assert_array_equal(min_sum(parts), (parts[0] + (parts[2] + parts[1])).min(axis=0))


def test_a_chain_needs_only_tables_of_two_variables():
    sizes = (10,) * 40
    unary = tuple(np.ones((10, 1)) for _ in sizes)
    table = np.ones((10, 10, 1))
    path = BlockModel(sizes, unary, tuple(Edge(i, i + 1, table) for i in range(39)))
    assert plan(path).largest == 100
    ladder = BlockModel(sizes, unary, tuple(Edge(i, i + d, table) for d in (1, 2) for i in range(40 - d)))
    assert plan(ladder).largest == 1000


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="variable 0 has 2 choices"):
        BlockModel((2,), (np.zeros((3, 1)),), ())
    with pytest.raises(ValueError, match="does not join two different"):
        BlockModel((2,), (np.zeros((2, 1)),), (Edge(0, 0, np.zeros((2, 2, 1))),))
    with pytest.raises(ValueError, match=r"written for \(3, 2\) choices"):
        BlockModel((2, 2), (np.zeros((2, 1)),) * 2, ((0, 1, np.zeros((3, 2, 1))),))


def test_single_precision_stays_within_the_stated_rounding(monkeypatch):
    rng = np.random.default_rng(0)
    block = random_block(rng, (20,) * 6)
    weights = rng.random(RESOURCES)
    exact = Eliminator(block, (0,), Tables())
    want = exact.table(weights).table
    monkeypatch.setattr("meshwright.compiler.solver.elimination.SINGLE", 1)
    monkeypatch.setattr("meshwright.compiler.solver.elimination.CHUNK", 100)
    single = Eliminator(block, (0,), Tables())
    got = single.table(weights).table
    assert exact.plan.rounding < 1e-11 < single.plan.rounding < 1e-5
    assert (got != want).any()
    assert (abs(got - want) <= single.plan.rounding * want).all()
