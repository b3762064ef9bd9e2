"""Collective prices: the closed forms, the topology, and measurements that nobody here made."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.cluster import Cluster
from meshwright.cost.collectives import COLLECTIVES, Network, P, S, algorithms, expression, traffic
from meshwright.ir.mesh import Mesh

HARDWARE = Path(__file__).parent.parent / "benchmarks" / "data" / "hardware.csv"


def busbw(spec: str, kind: str, bytes_: float) -> float:
    """GB/s as nccl-tests prints it."""
    cluster = Cluster.parse(spec)
    ranks = cluster.world
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "p2p": 1.0}.get(kind, (ranks - 1) / ranks)
    return factor * bytes_ / Network(cluster, Mesh.of(a=ranks)).seconds(kind, "a", bytes_) / 1e9


def measured(platform: str, quantity: str, condition: str) -> float:
    """The row of hardware.csv whose condition begins like this."""
    with HARDWARE.open(encoding="utf-8") as file:
        found = [
            row for row in csv.DictReader(file)
            if row["platform"] == platform and row["quantity"] == quantity and row["condition"].startswith(condition)
        ]
    assert len(found) == 1, found
    return float(found[0]["value"].split("-")[0].split(" ")[0])


NCCL = [
    # cluster, kind, bytes, platform, quantity, condition, tolerance
    ("a100:1x8", "all_reduce", 4e9, "1 node A100 SXM", "all_reduce_busbw", "8 GPUs", 0.05),
    ("h200:1x8", "all_reduce", 16e9, "1 node H200", "all_reduce_busbw", "8 GPUs, NVLS", 0.05),
    ("h200:1x4", "all_reduce", 16e9, "1 node H200", "all_reduce_busbw", "4 GPUs", 0.05),
    ("h200:1x8", "all_gather", 16e9, "1 node H200", "all_gather_busbw", "8 GPUs", 0.05),
    ("h200:1x8", "reduce_scatter", 16e9, "1 node H200", "reduce_scatter_busbw", "8 GPUs", 0.05),
    ("h200:1x2", "p2p", 16e9, "1 node H200", "p2p pairwise_busbw", "unidirectional", 0.10),
    ("b200:1x8", "all_reduce", 16e9, "1 node B200", "all_reduce_busbw", "8 GPUs, NVLS", 0.05),
    ("b200:1x4", "all_reduce", 16e9, "1 node B200", "all_reduce_busbw", "4 GPUs ring", 0.05),
    ("h100:1x8", "all_reduce", 16e9, "1 node DGX H100", "all_reduce_busbw", "8 GPUs, message 16 GB", 0.05),
    ("h100:1x8", "all_reduce", 256e6, "1 node DGX H100", "all_reduce_busbw", "8 GPUs, message 256 MB", 0.05),
    ("h100:1x8", "all_reduce", 1e6, "1 node DGX H100", "all_reduce_busbw", "8 GPUs, message 1 MB", 0.25),
    ("h800:1x8", "all_reduce", 16e9, "1 node H800", "all_reduce_busbw", "8 GPUs", 0.05),
    ("a100@p4d:2x8", "all_reduce", 2e9, "AWS p4de 2 nodes", "all_reduce_busbw", "16 GPUs @2 GB", 0.12),
    ("a100@p4d:2x8", "all_reduce", 256e6, "AWS p4de 2 nodes", "all_reduce_busbw", "16 GPUs @256 MB", 0.12),
    ("h100@p5:2x8", "all_reduce", 16e9, "AWS p5 2 nodes", "all_reduce_busbw", "16 GPUs @16 GB", 0.05),
    ("h100@p5:2x8", "all_reduce", 256e6, "AWS p5 2 nodes", "all_reduce_busbw", "16 GPUs @256 MB", 0.12),
    ("h100@p5:2x8", "all_reduce", 1e6, "AWS p5 2 nodes", "all_reduce_busbw", "16 GPUs @1 MB", 0.12),
    ("gb200:1x72", "all_reduce", 8e9, "GB200 NVL72", "all_reduce_busbw", "72 GPUs @8 GB", 0.05),
    ("gb200:1x72", "all_reduce", 512e6, "GB200 NVL72", "all_reduce_busbw", "72 GPUs @512 MB", 0.25),
    ("gb200:3x4", "all_reduce", 8e9, "GB200 NVL4 x3 over IB", "all_reduce_busbw", "12 GPUs", 0.12),
    ("gb200:3x8", "all_reduce", 8e9, "GB200 NVL8 x3 over IB", "all_reduce_busbw", "24 GPUs", 0.15),
    ("a800:1x8", "all_reduce", 1e9, "Galvatron profile 1 node", "all_reduce_busbw", "8 consecutive", 0.08),
    ("a800:1x4", "all_reduce", 1e9, "Galvatron profile 1 node", "all_reduce_busbw", "4 consecutive", 0.08),
]


@pytest.mark.parametrize(("spec", "kind", "bytes_", "platform", "quantity", "condition", "tolerance"), NCCL)
def test_measured_bus_bandwidth(spec, kind, bytes_, platform, quantity, condition, tolerance):
    want = measured(platform, quantity, condition)
    if platform.endswith("over IB"):  # the row prints "ring / tree"; NCCL takes the faster
        with HARDWARE.open(encoding="utf-8") as file:
            row = next(row for row in csv.DictReader(file) if row["platform"] == platform)
        want = float(row["value"].split("/")[1].split()[0])
    assert busbw(spec, kind, bytes_) == pytest.approx(want, rel=tolerance)


def test_the_seeds_closed_forms():
    assert sympy.simplify(traffic("all_reduce") - 2 * S * (P - 1) / P) == 0
    assert sympy.simplify(traffic("all_gather") - S * (P - 1) / P) == 0
    assert sympy.simplify(traffic("reduce_scatter") - S * (P - 1) / P) == 0
    assert sympy.simplify(traffic("all_gather") + traffic("reduce_scatter") - traffic("all_reduce")) == 0
    ddp, zero3 = traffic("all_reduce"), 2 * traffic("all_gather") + traffic("reduce_scatter")
    assert sympy.simplify(zero3 / ddp) == sympy.Rational(3, 2)
    b, s, h = sympy.symbols("b s h", positive=True)
    layer = 4 * traffic("all_reduce").subs(S, b * s * h)  # two all-reduces forward, two backward
    assert sympy.simplify(layer - 8 * b * s * h * (P - 1) / P) == 0
    assert traffic("p2p").subs(S, b * s * h) == b * s * h


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_large_messages_take_the_traffic_over_the_bandwidth(kind):
    cluster = Cluster.parse("a100:1x8")
    seconds = Network(cluster, Mesh.of(a=8)).seconds(kind, "a", 1e15)
    bandwidth = cluster.node.link_bandwidth * cluster.node.ring_efficiency
    assert seconds == pytest.approx(float(traffic(kind).subs({S: 1e15, P: 8})) / bandwidth, rel=1e-3)


def test_expressions_print_and_agree_with_the_network():
    cluster = Cluster.parse("h100:4x8")
    network = Network(cluster, Mesh.of(a=32))
    symbols = dict(zip(("P", "n", "d", "w", "R", "X", "a_l", "a_x", "l0", "h_l", "h_x"), (
        32, 4, 8, 450e9 * 0.81, 450e9 * 0.686, 8 * 50e9 * 0.94 * 0.5**cluster.node.congestion, 2e-6, 10e-6, 10e-6,
        3.4e-6, 14e-6), strict=True))
    for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
        formula = expression(kind)
        assert "S" in str(formula)
        free = sorted(formula.free_symbols, key=str)
        want = sympy.lambdify(free, formula)(*({"S": 1e8, **symbols}[symbol.name] for symbol in free))
        assert network.seconds(kind, "a", 1e8) == pytest.approx(want, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(["x", "y", "z"]), st.sampled_from(COLLECTIVES), st.floats(1e3, 1e10),
    st.sampled_from([(2, 4, 2), (4, 2, 2)]),
)
def test_names_do_not_matter_and_equal_groups_cost_the_same(names, kind, bytes_, sizes):
    cluster = Cluster.parse("h100:2x8")
    one, other = Network(cluster, Mesh(("x", "y", "z"), sizes)), Network(cluster, Mesh(tuple(names), sizes))
    for a, b in zip(("x", "y", "z"), names, strict=True):
        assert one.seconds(kind, a, bytes_) == other.seconds(kind, b, bytes_)
    merged = Network(cluster, Mesh.of(p=sizes[0], q=sizes[1] * sizes[2]))
    assert merged.seconds(kind, "q", bytes_) == one.seconds(kind, ("y", "z"), bytes_) == one.seconds(kind, ("z", "y"), bytes_)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(COLLECTIVES), st.floats(0, 1e10), st.floats(0, 1e10), st.sampled_from(["a", "b", "c"]))
def test_prices_grow_with_bytes_and_merging_messages_pays(kind, x, y, axis):
    network = Network(Cluster.parse("a100:4x8"), Mesh.of(a=4, b=4, c=2))
    low, high = sorted((x, y))
    assert network.seconds(kind, axis, low) <= network.seconds(kind, axis, high)
    apart = network.seconds(kind, axis, x) + network.seconds(kind, axis, y)
    assert network.seconds(kind, axis, x + y) <= apart * (1 + 1e-12)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_groups_of_one_are_free_and_arrays_agree_with_numbers(kind):
    network = Network(Cluster.parse("h100:2x8"), Mesh.of(one=1, dp=2, tp=8))
    assert network.seconds(kind, "one", 1e9) == 0.0
    sizes = np.array([0.0, 1e3, 1e6, 1e9])
    prices = network.seconds(kind, "tp", sizes)
    assert isinstance(prices, np.ndarray)
    assert prices.tolist() == pytest.approx([network.seconds(kind, "tp", float(size)) for size in sizes])


def test_stride_decides_between_nvlink_and_network():
    cluster = Cluster.parse("h100:8x8")
    near, far = Network(cluster, Mesh.of(dp=8, tp=8)), Network(cluster, Mesh.of(tp=8, dp=8))
    assert far.seconds("all_gather", "tp", 1e9) > 5 * near.seconds("all_gather", "tp", 1e9)
    assert near.seconds("all_gather", "dp", 1e9) == far.seconds("all_gather", "tp", 1e9)


def test_groups_that_communicate_at_the_same_time_share_the_nics():
    """Eight groups of one rank per node each get an eighth; one group of all ranks gets all of it."""
    cluster = Cluster.parse("h100:2x8")
    strided = Network(cluster, Mesh.of(dp=2, tp=8))
    per_rank = cluster.node.nics * cluster.node.nic_bandwidth * cluster.node.nic_efficiency / 8
    assert strided.seconds("p2p", "dp", 1e12) == pytest.approx(1e12 / per_rank, rel=1e-2)
    whole = Network(cluster, Mesh.of(a=16))
    assert whole.seconds("all_gather", "a", 1e12) < strided.seconds("all_gather", "dp", 1e12)


def test_strided_groups_share_the_nics_as_measured():
    """Groups of 2 and of 4 across the same two nodes, all at once: twice as many ranks per node, twice the bandwidth."""
    platform, quantity = "Galvatron profile inter-node strided", "all_reduce_busbw"
    want = measured(platform, quantity, "group of 4") / measured(platform, quantity, "group of 2")
    network = Network(Cluster.parse("a800:2x8"), Mesh.of(node=2, pair=2, rest=4))
    two = 1e9 / network.seconds("all_reduce", "node", 1e9)
    four = 1.5e9 / network.seconds("all_reduce", ("node", "pair"), 1e9)
    assert four / two == pytest.approx(want, rel=0.3)


def test_in_switch_reduction_pays_for_eight_not_for_two():
    cluster = Cluster.parse("h100:1x8")
    network = Network(cluster, Mesh.of(a=4, b=2))
    ring, _, switch = network.terms("all_reduce", ("a", "b"))
    assert switch[0] < ring[0]
    ring, _, switch = network.terms("all_reduce", "b")
    assert switch[0] > ring[0]


def test_algorithms_are_named():
    assert [item.name for item in algorithms("all_reduce")] == ["ring", "tree", "switch"]


def test_torus_rings_use_every_dim_both_ways():
    cluster = Cluster.parse("tpu-v4:8x8x8")
    network = Network(cluster, Mesh.of(x=8, y=8, z=8))
    one = network.seconds("all_gather", "z", 1e9)
    link = cluster.node.link_bandwidth * cluster.node.ring_efficiency
    assert one == pytest.approx(1e9 * 7 / 8 / (2 * link), rel=0.05)
    assert network.seconds("all_gather", "x", 1e9) == pytest.approx(one, rel=1e-6)  # uniform: every axis costs the same
    assert network.seconds("all_gather", ("y", "z"), 1e9) < 0.6 * network.seconds("all_gather", "z", 1e9) * 63 / 64 * 8 / 7
    half = Network(cluster, Mesh.of(x=8, y=8, z=2, w=4))
    assert half.seconds("all_gather", "w", 1e9) > one * 6 / 7 * 1.5  # a line of 4 has no way round


def test_links_between_every_two_devices_add_up():
    assert busbw("mi300x:1x8", "all_reduce", 16e9) == pytest.approx(
        measured("1 node MI300X", "all_reduce_busbw", "8 GPUs"), rel=0.05)
    assert busbw("mi300x:1x2", "all_reduce", 16e9) == pytest.approx(
        measured("1 node MI300X", "all_reduce_busbw", "2 GPUs"), rel=0.10)


def test_large_groups_reach_less_of_each_others_links_and_wait_for_every_step_of_a_ring():
    per_rank = [busbw(f"h100:{nodes}x8", "all_gather", 1e12) for nodes in (2, 8, 64)]
    congestion = Cluster.parse("h100:2x8").node.congestion
    assert congestion > 0
    assert per_rank[1] / per_rank[0] == pytest.approx(0.25**congestion, rel=0.03)
    assert per_rank[2] / per_rank[0] == pytest.approx((1 / 32) ** congestion, rel=0.08)
    cluster = Cluster.parse("h100:64x8")
    waiting = Network(cluster, Mesh.of(a=512)).seconds("all_gather", "a", 1.0)
    assert waiting == pytest.approx(63 * 14e-6 + 448 * 3.4e-6, rel=0.02)


def test_mesh_larger_than_the_cluster():
    with pytest.raises(ValueError, match=r"32 ranks.*16 devices"):
        Network(Cluster.parse("h100:2x8"), Mesh.of(a=32))


def test_unknown_collective():
    with pytest.raises(ValueError, match="known: all_reduce"):
        Network(Cluster.parse("h100:2x8"), Mesh.of(a=16)).seconds("gossip", "a", 1.0)


def test_uneven_groups_take_their_worst():
    """Three ranks of a 4-device node and one of the next: the group that crosses is the price."""
    cluster = Cluster.parse("h100:3x4")
    network = Network(cluster, Mesh.of(a=2, b=6))
    inside = Network(Cluster.parse("h100:1x6"), Mesh.of(b=6))
    assert network.seconds("all_gather", "b", 1e9) > inside.seconds("all_gather", "b", 1e9)


def test_no_order_of_sizes_is_cheaper_by_name():
    cluster = Cluster.parse("a100:2x8")
    prices = {
        sizes: Network(cluster, Mesh(("a", "b"), sizes)).seconds("all_reduce", ("a", "b"), 1e8)
        for sizes in itertools.permutations((2, 8))
    }
    assert len(set(prices.values())) == 1
