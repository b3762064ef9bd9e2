"""The solver against enumeration and against one mixed-integer program, with its certificate."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.compiler.solver import search
from meshwright.compiler.solver import solve as solving
from meshwright.compiler.solver.chain import Beaten, BlockModel, Chain, Edge, Infeasible, Kind, Solution, evaluate
from meshwright.compiler.solver.effort import Effort
from meshwright.compiler.solver.linear import aside
from meshwright.compiler.solver.master import Scale, choose
from meshwright.compiler.solver.oracle import brute_force, flow_mip
from meshwright.compiler.solver.pricing import Column, Pricer
from meshwright.compiler.solver.rounding import rounded
from meshwright.compiler.solver.solve import Hint, solve
from tests.chains import RESOURCES, random_block, random_chain

EXACT = 1e-9


def tight(chain: Chain, share: float) -> Chain:
    """Capacity from just above the least memory (share 0) to what the unconstrained optimum takes (share 1)."""
    least, free = brute_force(chain, "memory"), brute_force(chain)
    low, high = least.bytes_ + least.transient, free.bytes_ + free.transient
    return replace(chain, capacity=(low + share * (high - low)) * (1 + 1e-5))


def check(chain: Chain, gap: float = 0.005) -> None:
    """The certificate holds against enumeration, and the counted costs are those of the tables."""
    want, got = brute_force(chain), solve(chain, gap=gap)
    assert got.bound <= want.time * (1 + EXACT)
    assert want.time <= got.time * (1 + EXACT)
    assert got.gap == pytest.approx((got.time - got.bound) / got.time, abs=1e-12)
    assert got.gap <= gap
    assert got.status == "optimal"
    assert evaluate(chain, got.variants, got.choices) == pytest.approx((got.time, got.bytes_, got.transient))
    assert got.bytes_ + got.transient <= chain.capacity


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.integers(1, 2), st.booleans())
def test_without_memory(seed, rows, shared, boundary, alike):
    check(random_chain(seed, rows=rows, shared=shared, boundary=boundary, alike=alike))


@pytest.mark.parametrize(("seed", "rows"), [(230, 2), (247, 3), (291, 2)])
def test_choices_that_prove_nothing_are_not_all_solved(monkeypatch: pytest.MonkeyPatch, seed: int, rows: int) -> None:
    """Of twelve choices of a shared variable the best is one of the first; the gap that its own solve leaves is none that the
    others could close."""
    solved, leaf = list[object](), solving._leaf
    monkeypatch.setattr(solving, "_leaf", lambda *args: (solved.append(args), leaf(*args))[1])
    chain = random_chain(seed, rows=rows, shared=True, choices=12)
    got, want = solve(chain, gap=1e-4), brute_force(chain)
    assert len(solved) <= 6
    assert got.bound <= want.time * (1 + EXACT)
    assert got.time == pytest.approx(want.time)


def test_what_is_looked_up_counts_as_effort() -> None:
    """A chain that is priced again where it was looks its tables up, and still takes its time."""
    chain = random_chain(1, rows=2)
    pricer = Pricer(chain, Effort(np.inf))
    at = search.Search(chain, pricer, 0.005)._multipliers(0.0, 1.0)
    pricer.price(at, {})
    first = pricer.effort.spent
    pricer.price(at, {})
    assert first < pricer.effort.spent < 2 * first


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.floats(0, 1), st.booleans())
@example(3, 3, True, 0.21875, False)  # its flow program closes between the 20th and the 50th node
def test_within_memory(seed, rows, transient, share, alike):
    check(tight(random_chain(seed, rows=rows, transient=transient, alike=alike), share))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.booleans())
@example(1864, 0.0, False)
def test_shared_variables_within_memory(seed, share, alike):
    check(tight(random_chain(seed, rows=2, transient=True, shared=True, sequence=(0, 1, 1, 2), alike=alike), share))


@pytest.mark.parametrize("sequence", [(0,), (1, 1), (0, 1, 2, 1, 2), (0, 0, 1, 0, 0, 1), (2, 1, 1, 0, 1, 1)])
def test_all_orders_of_kinds(sequence):
    check(tight(random_chain(3, rows=2, transient=True, sequence=sequence, variants=1), 0.4))


@pytest.mark.parametrize("seed", range(4))
def test_enumeration_and_flow_program_agree(seed):
    chain = tight(random_chain(seed, rows=2, transient=True, shared=seed % 2 == 1), 0.5)
    want, got = brute_force(chain), flow_mip(chain)
    assert got.time == pytest.approx(want.time, rel=1e-5)
    assert got.bound <= want.time * (1 + EXACT)
    least = flow_mip(chain, objective="memory")
    want = brute_force(chain, "memory")
    assert least.bytes_ + least.transient == pytest.approx(want.bytes_ + want.transient, rel=1e-5)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.floats(0.5, 0.99))
def test_infeasible_names_the_least_memory(seed, shared, share):
    chain = random_chain(seed, transient=True, shared=shared, sequence=(0, 1, 1))
    least = brute_force(chain, "memory")
    need = least.bytes_ + least.transient
    with pytest.raises(Infeasible, match="capacity of") as caught:
        solve(replace(chain, capacity=share * need))
    error = caught.value
    assert error.bound <= need * (1 + EXACT)
    assert need <= error.least * (1 + EXACT)
    assert error.solution is not None
    assert evaluate(chain, error.solution.variants, error.solution.choices)[1:] == pytest.approx(
        (error.solution.bytes_, error.solution.transient)
    )
    assert error.solution.bytes_ + error.solution.transient == pytest.approx(error.least)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.floats(0.3, 1.3))
def test_what_is_hopeless_is_proven_to_be(seed, shared, share):
    """Where any assignment needs more than what is hopeless, no more than that is said; never where one needs less."""
    chain = random_chain(seed, transient=True, shared=shared, sequence=(0, 1, 1))
    least = brute_force(chain, "memory")
    need, hint = least.bytes_ + least.transient, Hint()
    chain = replace(chain, capacity=0.5 * share * need)
    for _ in range(2):  # the second time it is known
        with pytest.raises(Infeasible, match="capacity of") as caught:
            solve(chain, hint=hint, hopeless=share * need)
        assert caught.value.bound <= need * (1 + EXACT)
        if caught.value.solution is None:
            assert share * need < caught.value.bound
        else:
            assert share >= 1 - EXACT or caught.value.bound <= share * need
    assert solve(replace(chain, capacity=1.001 * need), hint=hint, hopeless=1.1 * need).time > 0


def test_infeasible_where_the_usual_choice_is_forbidden():
    """Two positions are leanest at a choice that the third does not have: memory is what is missing, not an assignment."""
    light, other = np.array([1.0, 0, 1, 0]), np.array([1.0, 0, 9, 0])
    states = (np.array([light, other]), np.array([np.full(RESOURCES, np.inf), other]))
    blocks = [BlockModel((1, 1, 2), (np.zeros((1, 4)), np.zeros((1, 4)), costs), ()) for costs in states]
    kinds = tuple(Kind((block,), (np.zeros(RESOURCES),), (0,), (1,), ((0, 2),)) for block in blocks)
    chain = Chain(kinds, (0, 0, 1), (2,), np.array([[1.0, 1, 0, 0]]), np.array([0, 0, 1.0, 0]), np.zeros(4), capacity=10.0)
    with pytest.raises(Infeasible, match="capacity of") as caught:
        solve(chain)
    assert 10 < caught.value.bound <= caught.value.least <= 27
    assert solve(replace(chain, capacity=27.0)).bytes_ == 27


def test_a_choice_that_one_position_forbids_bounds_no_other():
    """What two positions share is cheapest where one of them cannot be; no memory is asked about, so nothing of it may fit."""
    forbidden = np.full(RESOURCES, np.inf)
    states = ([1.0, 4.0, 4.5], [np.inf, 4.0, 3.0])
    costs = [np.array([forbidden if np.isinf(one) else [one, 0, 0, 0] for one in each]) for each in states]
    blocks = [BlockModel((1, 1, 3), (np.zeros((1, 4)), np.zeros((1, 4)), each), ()) for each in costs]
    kinds = tuple(Kind((block,), (np.zeros(RESOURCES),), (0,), (1,), ((0, 2),)) for block in blocks)
    chain = Chain(kinds, (0, 1), (3,), np.array([[1.0, 1, 0, 0]]), np.array([0, 0, 1.0, 0]), np.zeros(4))
    found = solve(chain)
    assert (found.time, found.bound, found.status) == (7.5, pytest.approx(7.5, rel=1e-9), "optimal")
    with pytest.raises(Beaten) as caught:
        solve(chain, cutoff=7.4)
    assert caught.value.bound == pytest.approx(7.5, rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.floats(0.0, 1.0), st.floats(0.3, 1.3))
def test_what_is_known_elsewhere_ends_no_search_that_would_find_better(seed, shared, share, part):
    chain = tight(random_chain(seed, rows=2, transient=True, shared=shared, sequence=(0, 1, 1)), share)
    best = brute_force(chain).time
    found: Solution | Beaten
    try:
        found = solve(chain, cutoff=part * best)
        assert best * (1 - EXACT) <= found.time <= best * 1.005 or found.time >= part * best
    except Beaten as beaten:
        found = beaten
    assert found.bound <= best * (1 + EXACT)
    assert isinstance(found, Solution) or part * best * 0.995 <= found.bound * (1 + EXACT)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.floats(0.3, 0.99), st.floats(0.3, 1.5), st.floats(1.0, 1.3))
@example(93960, True, 0.8125, 1.5, 1.25)
def test_what_does_not_fit_may_be_too_slow_first(seed, shared, share, part, more):
    """Less than any assignment needs, and something known elsewhere: what is said is true of all that is not hopeless."""
    chain = random_chain(seed, transient=True, shared=shared, sequence=(0, 1, 1))
    least = brute_force(chain, "memory")
    chain = replace(chain, capacity=share * (least.bytes_ + least.transient))
    cutoff = part * brute_force(replace(chain, capacity=np.inf)).time
    hopeless = more * chain.capacity
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search.Search, "check", lambda self: None)  # what is said of less, as of shared variables
        patch.setattr(solving, "_shared", lambda root: (_ for _ in ()).throw(Infeasible("", np.inf, np.inf, None)))
        with pytest.raises((Beaten, Infeasible)) as caught:
            solve(chain, cutoff=cutoff, hopeless=hopeless)
    if isinstance(caught.value, Beaten) and hopeless >= least.bytes_ + least.transient:
        assert caught.value.bound <= brute_force(replace(chain, capacity=hopeless)).time * (1 + EXACT)


def test_what_is_too_slow_is_not_looked_for_within_memory(monkeypatch):
    """Nothing fits in 95 bytes, and in 104, the most that may be meant by it, 198 s are needed: more than 150."""
    monkeypatch.setattr(search.Search, "check", lambda self: None)  # what is said of 95 bytes
    monkeypatch.setattr(search.Search, "_least_memory", lambda self: pytest.fail("looked for what fits"))
    with pytest.raises(Beaten) as caught:
        solve(trade_off(100, 95), cutoff=150, hopeless=104)
    assert 150 * 0.995 <= caught.value.bound <= 198


def test_memory_that_binds_is_priced_at_once(monkeypatch):
    """Ten bytes above the least, 195 s are needed: without a price of memory 100 s are proven first."""
    prices = list[float]()
    price = Pricer.price
    monkeypatch.setattr(Pricer, "price", lambda pricer, at, *how: prices.append(at.memory) or price(pricer, at, *how))
    with pytest.raises(Beaten) as caught:
        solve(trade_off(100, 110), cutoff=150)
    assert 150 <= caught.value.bound <= 195
    assert len(prices) == 1
    assert solve(trade_off(100, 110)).time == 195


@pytest.mark.parametrize("seed", range(3))
def test_a_hint_changes_no_certificate(seed):
    """What another limit, or another chain of the same shape, left behind may be far off, and is a bound all the same."""
    chain, other = (random_chain(s, rows=2, transient=True, sequence=(0, 1, 1, 2)) for s in (seed, seed + 100))
    hint = Hint()
    for one, share in ((other, 0.3), (chain, 0.7), (chain, 0.2)):
        limited = tight(one, share)
        want, got = brute_force(limited), solve(limited, hint=hint)
        assert hint.at is not None
        assert got.bound <= want.time * (1 + EXACT)
        assert want.time * (1 - EXACT) <= got.time <= want.time * 1.005


def test_of_many_copies_only_the_last_is_rounded():
    """Copies that are fast and large or slow and small: as many as must be are small, though no integer program is asked."""
    fast, slow = np.array([1.0, 0, 4, 0]), np.array([3.0, 0, 1, 0])
    block = BlockModel((1, 1, 2), (np.zeros((1, 4)), np.zeros((1, 4)), np.array([fast, slow])), ())
    kind = Kind((block,), (np.zeros(RESOURCES),), (0,), (1,))
    rows = np.array([[1.0, 1, 0, 0]])
    chain = Chain((kind,), (0,) * 33, (), rows, np.array([0, 0, 1.0, 0]), np.zeros(4), capacity=100.0)
    known = [Column(0, 0, (0, 0, at), 0, 0, cost, float(cost[0]), float(cost[2]), 0.0) for at, cost in enumerate((fast, slow))]
    found = rounded(chain, [(0, 0)] * 33, known)
    assert found is not None
    assert Counter(column.choices[2] for column in found) == {0: 22, 1: 11}  # 22 x 4 + 11 x 1 = 99 bytes
    assert rounded(replace(chain, capacity=32.0), [(0, 0)] * 33, known) is None


def test_forbidden_everywhere_is_infeasible():
    chain = random_chain(0)
    kind = chain.kinds[0]
    wall = replace(kind.variants[0], unary=(np.full((2, RESOURCES), np.inf), *kind.variants[0].unary[1:]))
    kinds = (replace(kind, variants=(wall,), variant_costs=kind.variant_costs[:1]), *chain.kinds[1:])
    with pytest.raises(Infeasible, match="forbidden"):
        solve(replace(chain, kinds=kinds))


def permuted(chain: Chain, seed: int) -> Chain:
    """The same chain with every kind's choices renumbered (boundaries alike) and its inner variables reversed."""
    rng = np.random.default_rng(seed)
    boundary = rng.permutation(2)
    kinds = []
    for kind in chain.kinds:
        blocks = []
        for block in kind.variants:
            n = len(block.sizes)
            new = [n - 1 - v for v in range(n)]
            order = [boundary if v < 2 else rng.permutation(block.sizes[v]) for v in range(n)]
            unary = [block.unary[n - 1 - v][order[n - 1 - v]] for v in range(n)]
            edges = []
            for e in block.edges:
                table = np.array([[e.cost(a, b) for b in order[e.j]] for a in order[e.i]])
                edges.append(Edge(new[e.i], new[e.j], table))
            blocks.append(BlockModel(tuple(reversed(block.sizes)), tuple(unary), tuple(edges)))
        n = len(kind.variants[0].sizes)
        kinds.append(replace(kind, variants=tuple(blocks), entry=(n - 1,), exit=(n - 2,)))
    return replace(chain, kinds=tuple(kinds))


@pytest.mark.parametrize("seed", range(4))
def test_numbering_does_not_change_the_objective(seed):
    chain = tight(random_chain(seed, rows=2, transient=True), 0.5)
    one, other = solve(chain, gap=1e-7), solve(permuted(chain, seed), gap=1e-7)
    assert other.time == pytest.approx(one.time, rel=1e-6)


def trade_off(copies: int, capacity: float) -> Chain:
    """Copies of a one-variable block that is either fast and large (1 s, 3 B) or slow and small (2 s, 1 B)."""
    block = BlockModel((2,), (np.array([[1.0, 3.0], [2.0, 1.0]]),), ())
    kind = Kind((block,), (np.zeros(2),))
    return Chain((kind,), (0,) * copies, (), np.array([[1.0, 0.0]]), np.array([0.0, 1.0]), np.zeros(2), capacity)


def test_copies_differ_when_memory_is_tight():
    got = solve(trade_off(100, 100 + 2 * 63.5), gap=1e-4)
    assert Counter(x for (x,) in got.choices) == {0: 63, 1: 37}
    assert got.time == 137
    assert got.bound <= 137 <= got.bound + 0.51


def test_many_copies_cost_no_more_rounds_than_few():
    few, many = solve(trade_off(8, 8 + 9), gap=1e-9), solve(trade_off(2000, 2000 + 2001), gap=1e-9)
    assert many.iterations <= few.iterations + 1
    assert many.time == 3000


def test_walks_stay_connected():
    """Staying in state 1 is free but entering it is forbidden: counts alone would circulate there."""
    table = np.array([[[5.0], [np.inf]], [[np.inf], [0.0]]])
    block = BlockModel((2, 2), (np.zeros((2, 1)),) * 2, (Edge(0, 1, table),))
    start = BlockModel((1, 2), (np.zeros((1, 1)), np.array([[0.0], [np.inf]])), ())
    kinds = (Kind((start,), (np.zeros(1),), (), (1,)), Kind((block,), (np.zeros(1),), (0,), (1,)))
    chain = Chain(kinds, (0, 1, 1, 1), (), np.ones((1, 1)), np.zeros(1), np.zeros(1), capacity=1.0)
    got = solve(chain)
    assert got.time == 15
    assert all(x == (0, 0) for x in got.choices[1:])


def circulating() -> tuple[Chain, list[Column]]:
    """Three copies that start in state 0, where each takes 5 s; in state 1, which none of them reaches, each takes nothing."""
    block = BlockModel((2, 2), (np.zeros((2, 1)),) * 2, ())
    start = BlockModel((1, 2), (np.zeros((1, 1)), np.zeros((2, 1))), ())
    kinds = Kind((start,), (np.zeros(1),), (0,), (1,)), Kind((block,), (np.zeros(1),), (0,), (1,))
    chain = Chain(kinds, (0, 1, 1, 1), (), np.ones((1, 1)), np.zeros(1), np.zeros(1), capacity=1.0)
    times = ((0, 0, 0.0), (1, 0, 5.0), (1, 1, 0.0))
    return chain, [Column(kind, 0, (at, at), at, at, np.array([time]), time, 0.0, 0.0) for kind, at, time in times]


def test_once_the_effort_is_over_no_walk_is_asked_for_again():
    chain, columns = circulating()
    ample, over = Effort(1.0), Effort(0.0)
    found = choose(chain, columns, Scale(1.0, 1.0), 1.0, 0.0, ample)
    assert found is not None
    assert sum(column.time for column in found) == 15
    assert choose(chain, columns, Scale(1.0, 1.0), 1.0, 0.0, over) is None
    assert 0 < over.spent < ample.spent  # the first program was solved, no second


def test_only_what_is_faster_than_is_known_is_chosen():
    chain, columns = circulating()
    found = choose(chain, columns, Scale(1.0, 1.0), 1.0, 0.0, Effort(np.inf))
    assert found is not None
    least = chain.fixed_time + sum(column.time for column in found)
    assert choose(chain, columns, Scale(1.0, 1.0), 1.0, 0.0, Effort(np.inf), to_beat=1.001 * least) == found
    assert choose(chain, columns, Scale(1.0, 1.0), 1.0, 0.0, Effort(np.inf), to_beat=0.999 * least) is None


def test_what_a_solver_prints_is_no_output(capfd):
    with aside():
        ctypes.CDLL(None).printf(b"a solver's own line\n")
    print("ours")
    out, err = capfd.readouterr()
    assert (out, "own line" in err) == ("ours\n", True)


def test_what_is_left_of_the_effort_limits_the_nodes():
    assert Effort(10.0).nodes(100, 50) == 50
    assert 1 < Effort(1.0).nodes(1000, 50) < 50
    assert Effort(1.0, spent=2.0).nodes(1000, 50) == 1
    assert Effort(3.0).affords(800)
    assert not Effort(1.0).affords(800)
    assert Effort(1.0).affords(100)


def test_two_runs_are_identical():
    chain = tight(random_chain(11, rows=3, transient=True, shared=True), 0.4)
    assert solve(chain) == solve(chain)


def test_only_exposed_communication_counts():
    """max(compute, overlapped) prefers hiding 4 s of communication behind 5 s of compute to exposing 1 s."""
    unary = np.array([[5.0, 0.0, 1.0], [5.0, 4.0, 0.0]])
    kind = Kind((BlockModel((2,), (unary,), ()),), (np.zeros(3),))
    rows = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    chain = Chain((kind,), (0, 0), (), rows, np.zeros(3), np.zeros(3))
    got = solve(chain)
    assert (got.time, got.choices) == (10.0, ((1,), (1,)))


def test_the_largest_transient_counts_once():
    chain = replace(trade_off(3, 3.5), bytes_row=np.zeros(2), transient_rows=np.array([[0.0, 1.0]]))
    assert solve(chain).time == 3
    assert solve(replace(chain, capacity=2.5)).time == 6


def ladder(choices: int, variables: int, copies: int, variants: int, seed: int = 0) -> Chain:
    """A chain of the size of a transformer over a mesh of two axes: 3 kinds, edges over shared tables, treewidth 2 to 3."""
    rng = np.random.default_rng(seed)
    k, kinds = 5, []
    tables = [np.abs(rng.normal(size=(choices, choices, k))) * [0, 1, 0, 0, 0] for _ in range(4)]
    for table in tables:
        table[np.arange(choices), np.arange(choices)] = 0
    for n in (10, variables, 10):
        edges = tuple(Edge(i - 1, i, tables[i % 4], None, rng.permutation(choices)) for i in range(1, n))
        edges += tuple(Edge(i, i + 3, tables[i % 4]) for i in range(1, n - 4, 3))
        base = [rng.random((choices, k)) / (1 + rng.integers(0, 7, choices))[:, None] for _ in range(n)]
        blocks = []
        for v in range(variants):
            scale = np.array([3 + v // 4, 1, (v % 4) / 3, 4 / (1 + v % 4), 3 / (1 + v // 4)])
            blocks.append(BlockModel((choices,) * n, tuple(b * scale for b in base), edges))
        kinds.append(Kind(tuple(blocks), (np.zeros(k),) * variants, (0,), (n - 1,)))
    rows = np.array([[1.0, 1, 0, 0, 0], [0, 1, 1, 0, 0]])
    bytes_row = np.array([0, 0, 0, 1.0, 1.0])
    return Chain(tuple(kinds), (0, *(1,) * copies, 2), (), rows, bytes_row, np.zeros(k))


def test_a_transformer_sized_chain_is_quick():
    chain = ladder(25, 40, 64, 8)
    free = solve(chain)
    with pytest.raises(Infeasible) as caught:
        solve(replace(chain, capacity=1e-6))
    low = caught.value.least
    got = solve(replace(chain, capacity=low + 0.3 * (free.bytes_ - low)))
    assert got.status == "optimal"
    assert got.iterations < 50
    assert got.columns < 5000


def test_lazy_pricing_finds_the_same_minimum(monkeypatch):
    chain = ladder(6, 12, 5, 4)
    monkeypatch.setattr("meshwright.compiler.solver.pricing.LAZY", 0)
    run = search.Search(chain, Pricer(chain), 0.0)
    run.run()
    assert run.best is not None
    lazy = run.pricer.price(run.best, {})
    fresh = Pricer(chain).price(run.best, {}, everyone=True)
    assert lazy.value == pytest.approx(fresh.value, rel=1e-12)
    assert lazy.path == fresh.path
    assert len(lazy.results) < len(fresh.results)
    for low, exact in zip(lazy.tables, fresh.tables, strict=True):
        assert (low <= exact * (1 + 1e-9)).all()


def test_groups_priced_together_cost_and_find_the_same(monkeypatch):
    """Whether something is known already, and forgotten meanwhile, or not."""
    chain = random_chain(3, rows=2, transient=True, shared=True, variants=5)
    found = []
    for together, known in ((64, 1 << 23), (1, 1 << 23), (2, 1 << 23), (64, 300), (1, 300)):
        monkeypatch.setattr("meshwright.compiler.solver.pricing.TOGETHER", together)
        monkeypatch.setattr("meshwright.compiler.solver.pricing.KNOWN", known)
        pricer = Pricer(chain)
        run = search.Search(chain, pricer, 0.0).run()
        assert run.best is not None
        values = [pricer.price(run.best, fixed) for fixed in ({}, {0: 1}, {0: 2}, {})]
        tables = [table.tolist() for one in values for table in one.tables]
        found.append((run.bound, run.time, sorted(run.columns), tables, pricer.effort.spent))
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4]  # what is forgotten is counted again
    assert found[0][:-1] == found[3][:-1]
    assert found[0][-1] < found[3][-1]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 2), st.sampled_from([0.0, 0.2]))
def test_a_family_is_priced_as_its_members_are(seed, shared, memory, forbidden):
    """At multipliers that are even: the same minimum, and of what was not evaluated a bound."""
    chain = random_chain(seed, rows=2, transient=True, shared=shared, variants=4, alike=True, forbidden=forbidden)
    at = search.Search(chain, Pricer(chain), 0.0)._multipliers(memory, 1.0)
    few, all_ = Pricer(chain).price(at, {}), Pricer(chain).price(at, {}, everyone=True)
    assert few.value == pytest.approx(all_.value, rel=1e-12)
    for low, exact in zip(few.tables, all_.tables, strict=True):
        assert (low <= exact * (1 + 1e-9)).all()


def test_few_members_of_a_family_are_evaluated():
    """Of variants that pay something each, those that are worth nothing at these multipliers never are."""
    chain = ladder(6, 12, 5, 8)
    at = search.Search(chain, Pricer(chain), 0.0)._multipliers(0.0, 1.0)
    found = Pricer(chain).price(at, {})
    assert found.value == pytest.approx(Pricer(chain).price(at, {}, everyone=True).value, rel=1e-12)
    assert len(found.results) <= 2 * len(chain.kinds)


@pytest.mark.parametrize("seed", range(3))
def test_multipliers_that_name_some_of_a_family_serve_the_others(seed):
    """What they say of one is tried for those of which they say nothing, and is below what any choice costs."""
    chain = random_chain(seed, rows=3, transient=True, variants=4, alike=True)
    even = search.Search(chain, Pricer(chain), 0.0)._multipliers(0.5, 1.0)
    named = replace(even, alpha={(k, v): np.array([0.7, 0.2, 0.1]) if v == 1 else one for (k, v), one in even.alpha.items()})
    everywhere = replace(even, alpha=dict.fromkeys(even.alpha, np.array([0.7, 0.2, 0.1])))
    assert Pricer(chain).price(named, {}).value == pytest.approx(Pricer(chain).price(everywhere, {}, everyone=True).value)


@pytest.mark.parametrize("forbidden", [0.0, 0.25])
def test_wide_blocks_stay_certified(monkeypatch, forbidden):
    rng = np.random.default_rng(5)
    kind = Kind((random_block(rng, (2, 2, 2, 3, 3, 3), forbidden),), (np.zeros(RESOURCES),), (0,), (1,))
    bytes_row = np.array([0, 0, 1.0, 0])
    chain = Chain((kind,), (0, 0, 0), (), np.ones((1, 4)) * [1, 1, 0, 0], bytes_row, np.zeros(4))
    want = brute_force(chain)
    monkeypatch.setattr("meshwright.compiler.solver.elimination.WIDTHS", (18,))
    assert Pricer(chain).largest <= 18
    got = solve(chain)
    assert got.bound <= want.time * (1 + EXACT)
    assert want.time * (1 - EXACT) <= got.time <= want.time * 1.005


def test_time_limit_still_gives_a_certified_answer():
    chain = replace(ladder(10, 12, 8, 4), capacity=60.0)
    got = solve(chain, gap=0.0, limit=0.0)
    assert got.bytes_ + got.transient <= 60.0
    assert 0 < got.bound <= got.time


def test_bad_chains_are_refused():
    chain = random_chain(0)
    with pytest.raises(ValueError, match=">= 0"):
        replace(chain, bytes_row=-chain.bytes_row)
    with pytest.raises(ValueError, match="sequence must name"):
        replace(chain, sequence=(7,))
    wide = Kind(chain.kinds[0].variants, chain.kinds[0].variant_costs, (2,), (1,))
    if wide.states((2,)) != 2:
        with pytest.raises(ValueError, match="enters with"):
            replace(chain, kinds=(chain.kinds[0], wide, chain.kinds[2]))
