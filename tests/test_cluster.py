"""Clusters: strings, files, graphs, and errors that say what to do."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import torch

from meshwright.compiler.rules import builtin_rules
from meshwright.cost import compute
from meshwright.cost.catalogue import Device, catalogue
from meshwright.cost.cluster import Cluster, ClusterError, device_for, known_devices, known_nodes
from meshwright.cost.collectives import Network
from meshwright.cost.form import check_form
from meshwright.ir.declared.operator import Work
from meshwright.ir.mesh import Mesh
from meshwright.planner import cluster_in, described
from tests.handmade import handmade_plan


def test_string_gives_nodes_devices_and_numbers_of_the_datasheet():
    cluster = Cluster.parse("h100:16x8")
    assert (cluster.nodes, cluster.per_node, cluster.world) == (16, 8, 128)
    assert cluster.device.flops(torch.bfloat16) == 989e12
    assert cluster.device.memory_bandwidth == 3.35e12
    assert cluster.node.nic_bandwidth == 400e9 / 8


def test_alias_and_other_node_of_the_catalogue():
    assert Cluster.parse("a100-80gb:1x8") == Cluster.parse("a100:1x8") == Cluster.parse(" a100 : 1x8".replace(" ", ""))
    assert Cluster.parse("a100@p4d:2x8").node.nics == 4
    assert Cluster.parse("a100:2x8").node.nics == 8


def test_every_device_on_its_node_has_a_source_for_every_number():
    texts = catalogue()["sources"]
    for name in known_devices():
        cluster = Cluster.parse(f"{name}:2x2")
        assert all(source in texts.values() for source in cluster.device.sources.values()), name
        assert cluster.memory_bytes > 2**30
    for name in known_nodes():
        node = Cluster.parse(f"h100@{name}:2x2").node
        assert set(node.sources.values()) <= set(texts.values())


def test_the_devices_that_the_field_trains_on_are_there():
    wanted = ("v100", "a100-40g", "a100", "h100", "h800", "h200", "b200", "gb200", "a10", "l40s", "4090", "tpu-v4", "tpu-v5")
    assert [Cluster.parse(f"{name}:1x1").world for name in wanted] == [1] * 13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:2x8", r"unknown device 'h10'; the nearest is 'h100'; known: a10, a100-40g"),
        ("h100@p55:2x8", r"unknown node 'p55'; the nearest is 'p5'"),
        ("h100:2", r"needs two sizes.*'h100:2x8'"),
        ("h100:0x8", "size of 0"),
        ("h100 2x8", "unknown device"),
        ("h100:1x9999999999", "too many devices; give at most 4194304"), ("h100:2097152x4", "too many devices"),
        ("tpu-v4:1x" + "9" * 5000, "too many devices"), ("h100:524288x8 + a100:1x8", "4194312 devices is too large"),
        ("h100:1x\u0664", "cannot read cluster"),
        ("tpu-v4:4x4x4x4", "torus of 3 dims"),
    ],
)
def test_bad_strings_say_what_is_wrong(text, message):
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(text)


def test_graph_carries_devices_switches_nics_and_links():
    graph = Cluster.parse("h100:2x8").graph()
    kinds = nx.get_node_attributes(graph, "kind")
    counts = {kind: list(kinds.values()).count(kind) for kind in ("device", "switch", "nic")}
    assert counts == {"device": 16, "switch": 3, "nic": 16}
    path = nx.shortest_path(graph, ("device", 0), ("device", 8))
    edges = [graph.edges[edge] for edge in itertools.pairwise(path)]
    assert min(edge["bandwidth"] for edge in edges) == 50e9
    assert sum(edge["latency"] for edge in edges) > 0


def test_torus_graph_has_the_degree_of_its_dims():
    graph = Cluster.parse("tpu-v4:4x4x8").graph()
    assert {degree for _, degree in graph.degree} == {6}
    assert graph.number_of_nodes() == 128


def test_two_kinds_of_device_are_described_and_refused_for_planning():
    cluster = Cluster.parse("h100:2x8 + a100:1x8")
    assert cluster.world == 24
    assert cluster.graph().nodes[("device", 20)]["device"] == "a100-80g"
    assert cluster.memory_bytes == Cluster.parse("h100:1x1").memory_bytes  # the smaller one's
    with pytest.raises(ClusterError, match="h100-80g and a100-80g"):
        _ = cluster.device


def test_with_memory_overrides_the_capacity_and_the_reserve():
    cluster = Cluster.parse("cpu:1x4").with_memory(1000)
    assert (cluster.memory_bytes, cluster.device.reserve_bytes, cluster.world) == (1000, 0, 4)


def test_with_kernels_changes_only_the_software():
    cluster = Cluster.parse("h100:1x8")
    assert cluster.with_kernels(attention="flash3").device.attention_forward > cluster.device.attention_forward
    assert not cluster.device.fused  # programs run one kernel after the other
    compiled = cluster.with_kernels(fused=True)
    assert compiled.device.fused
    assert compiled.with_kernels(attention="flash3").with_kernels(attention="flash2", fused=False) == cluster
    with pytest.raises(ClusterError, match="known: flash1, flash2, flash3, triton"):
        cluster.with_kernels(attention="flash9")


def test_products_in_another_format():
    cluster = Cluster.parse("h100:1x8")
    assert cluster.with_products("").device == cluster.device
    assert cluster.with_products("tf32").device.products == "tf32"
    with pytest.raises(ClusterError, match="a100-80g lists no peak for f8e4m3; known: bf16, f16, tf32, f32"):
        Cluster.parse("a100:1x8").with_products("f8e4m3")


MEASURED = """
[cluster]
devices = "mine@office:2x4"
[device.mine]
like = "a100-80g"
[[device.mine.products]]
dtype = "bf16"
shapes = [[4096, 4096, 4096], [512, 512, 512]]
seconds = {values = [1000, 50], unit = "us", source = "us"}
[node.office]
like = "pcie4"
[[device.mine.streams]]
kind = "norm"
dtype = "bf16"
bytes = {values = [1000000, 1000], unit = "B", source = "us"}
seconds = {values = [20, 4], unit = "us", source = "us"}

[[device.mine.attentions]]
dtype = "bf16"
causal = true
shapes = [[2, 8, 1024, 1024, 64]]
forward = {values = [500], unit = "us", source = "us"}
backward = {values = [1500], unit = "us", source = "us"}

[[node.office.collectives]]
kind = "all_reduce"
ranks = 4
bytes = {values = [1e9, 1e6], unit = "B", source = "us"}
seconds = {values = [0.5, 0.002], unit = "s", source = "us"}
"""


def measured(tmp_path, old: str = "", new: str = "") -> Cluster:
    path = tmp_path / "mine.toml"
    assert old in MEASURED
    path.write_text(MEASURED.replace(old, new))
    return Cluster.from_toml(path)


def test_measured_tables_stand_before_the_formulas_and_scale_what_they_do_not_have(tmp_path):
    mine, plain = measured(tmp_path), Cluster.parse("a100@pcie4:2x4")
    mesh = Mesh.of(node=2, pair=2, rest=2)
    ours, theirs = Network(mine, mesh), Network(plain, mesh)
    group = ("pair", "rest")
    assert ours.seconds("all_reduce", group, 1e9) == pytest.approx(0.5)
    assert ours.seconds("all_reduce", group, 1e6) == pytest.approx(0.002)
    both = ours.seconds("all_reduce", group, np.array([1e6, 1e9]))
    assert both == pytest.approx([0.002, 0.5])
    ratio = 0.5 / theirs.seconds("all_reduce", group, 1e9)
    assert ours.seconds("all_reduce", group, 8e9) == pytest.approx(ratio * theirs.seconds("all_reduce", group, 8e9))
    assert ours.seconds("all_reduce", "rest", 1e9) == pytest.approx(ratio * theirs.seconds("all_reduce", "rest", 1e9))
    for kind, axes in (("all_gather", group), ("all_reduce", "node")):  # another kind; a group across nodes
        assert ours.seconds(kind, axes, 1e9) == theirs.seconds(kind, axes, 1e9)


def test_tables_of_one_group_are_one_and_rows_that_stand_twice_are_refused(tmp_path):
    start = MEASURED.index("[[node.office.collectives]]")
    table = MEASURED[start:]
    small, large = table.replace("1e9, ", "").replace("0.5, ", ""), table.replace(", 1e6", "").replace(", 0.002", "")
    mesh = Mesh.of(node=2, pair=4)
    for parts in ((small, large), (large, small)):
        network = Network(measured(tmp_path, table, "\n".join(parts)), mesh)
        assert [network.seconds("all_reduce", "pair", size) for size in (1e6, 1e9)] == pytest.approx([0.002, 0.5])
    for part in (table, *MEASURED[MEASURED.index("[[device.mine.products]]"):start].strip().split("\n\n")):
        with pytest.raises(ClusterError, match="stands there twice; leave one, or give their mean"):
            measured(tmp_path, table, f"{table}\n{part.split('[node.office]')[0]}")


def test_a_torus_takes_what_was_measured_of_as_many_ranks(tmp_path):
    head = '[cluster]\ndevices = "tpu-v4@office:4x4x4"\n[node.office]\nlike = "tpu-v4-torus"\n'
    tables = MEASURED[MEASURED.index("[[node.office.collectives]]"):]
    path = tmp_path / "mine.toml"
    path.write_text(head + tables + tables.replace("ranks = 4", "ranks = 64\nnodes = 16").replace("0.5", "0.25"))
    network = Network(Cluster.from_toml(path), Mesh.of(dp=16, tp=4))
    assert [network.seconds("all_reduce", "tp", size) for size in (1e6, 1e9)] == pytest.approx([0.002, 0.5])
    assert [network.seconds("all_reduce", ("dp", "tp"), size) for size in (1e6, 1e9)] == pytest.approx([0.002, 0.25])


def test_measured_products_stand_before_the_formula(tmp_path):
    linear = builtin_rules().operators["aten.linear.default"]

    def seconds(cluster: Cluster, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> float:
        return compute.seconds(linear, Work(((m, k), (n, k)), ((m, n),), dtype, dtype), cluster.device)[0]

    mine, plain = measured(tmp_path), Cluster.parse("a100:1x8")
    assert seconds(mine, 4096, 4096, 4096) == pytest.approx(1e-3)
    assert seconds(mine, 512, 512, 512) == pytest.approx(5e-5)
    ratio = 1e-3 / seconds(plain, 4096, 4096, 4096)
    assert seconds(mine, 8192, 8192, 8192) == pytest.approx(ratio * seconds(plain, 8192, 8192, 8192))
    assert seconds(mine, 4096, 4096, 4096, torch.float32) == seconds(plain, 4096, 4096, 4096, torch.float32)
    small, large = (seconds(mine, n, n, n) / seconds(plain, n, n, n) for n in (512, 4096))
    assert min(small, large) < seconds(mine, 2048, 2048, 2048) / seconds(plain, 2048, 2048, 2048) < max(small, large)


def test_measured_streams_and_attention_stand_before_the_formulas(tmp_path):
    operators, mine, plain = builtin_rules().operators, measured(tmp_path).device, Cluster.parse("a100:1x8").device
    half = torch.bfloat16

    def norm(device: Device, rows: int) -> tuple[float, float]:
        return compute.seconds(operators["aten.layer_norm.default"], Work(((rows, 250),), ((rows, 250),), half, half), device)

    assert norm(mine, 1000)[0] == pytest.approx(20e-6)  # 2 x 1000 x 250 x 2 bytes
    assert norm(mine, 10000)[0] == pytest.approx(20e-6 * 10)
    assert norm(mine, 1)[0] == pytest.approx(4e-6)
    assert norm(mine, 1000)[1] > norm(mine, 1000)[0]  # more bytes, at the same speed
    pointwise = Work(((1000, 250),), ((1000, 250),), half, half)
    gelu = operators["aten.gelu.default"]
    assert compute.seconds(gelu, pointwise, mine) == compute.seconds(gelu, pointwise, plain)

    def attention(device: Device, batch: int, causal: bool, heads: int = 8) -> tuple[float, float]:
        shape = (batch, heads, 1024, 64)
        work = Work((shape,) * 3, (shape,), half, half, kwargs=(("is_causal", causal),))
        return compute.seconds(operators["aten.scaled_dot_product_attention.default"], work, device)

    assert attention(mine, 2, True) == pytest.approx((500e-6, 1500e-6))
    assert attention(mine, 4, True)[0] == pytest.approx(attention(plain, 4, True)[0] * 500e-6 / attention(plain, 2, True)[0])
    assert attention(mine, 2, False) == attention(plain, 2, False)
    one = "[2, 8, 1024, 1024, 64]"
    rows = MEASURED[MEASURED.index("[[device.mine.attentions]]"):MEASURED.index("[[node.office.collectives]]")]
    more = rows.replace(one, f"{one}, [4, 4, 1024, 1024, 64]").replace("[500]", "[500, 900]").replace("[1500]", "[1500, 2700]")
    both = measured(tmp_path, rows, more).device
    assert attention(both, 2, True) == pytest.approx((500e-6, 1500e-6))
    assert attention(both, 4, True, 4) == pytest.approx((900e-6, 2700e-6))  # as many FLOPs


@pytest.mark.parametrize(("old", "new", "message"), [
    ('kind = "norm"', 'kind = "matmul"', "kind 'matmul' is none of pointwise"), ("[20, 4]", "[20]", "2 bytes and 1 seconds"),
    ("causal = true", "causal = 1", "causal must be true or false"),
    ("[1500]", "[1500, 2]", "1 seconds forward and 2 backward"),
    ("[2, 8, 1024, 1024, 64]", "[2, 8, 1024]", r"needs a shape \[batch, heads"),
    ("ranks = 4", "ranks = 0", "0 ranks on 1 nodes is no group"), ("ranks = 4", "ranks = 5\nnodes = 2", "5 ranks on 2 nodes"),
    ("[0.5, 0.002]", "[0.5]", "2 bytes and 1 seconds"), ("[0.5, 0.002]", "[0.5, -1]", "numbers above 0"),
    ('"all_reduce"', '"gossip"', "kind 'gossip' is none of all_reduce"),
    ('unit = "us"', 'unit = "miles"', "unknown unit 'miles'"),
    ("[512, 512, 512]", "[512, 512]", "needs a shape"), ("[1000, 50]", "[1000]", "every one of 1 seconds needs a shape"),
    ('dtype = "bf16"', 'dtype = "int3"', "dtype 'int3' is none of"), ("values = [1000, 50], ", "", "products: seconds must be"),
])
def test_measured_tables_that_cannot_be_read_say_why(tmp_path, old, new, message):
    with pytest.raises(ClusterError, match=message):
        measured(tmp_path, old, new)


def test_clocks_follow_the_power():
    full, limited = Cluster.parse("h100:1x8").device, Cluster.parse("h100-96g:1x8").device
    assert limited.matmul_efficiency == pytest.approx(full.matmul_efficiency * ((500 / 700 - 0.1) / 0.9) ** (1 / 3))
    assert limited.attention_forward < full.attention_forward
    assert (limited.peak["bf16"], limited.memory_efficiency) == (full.peak["bf16"], full.memory_efficiency)


def test_a_limit_of_power_of_a_users_own(tmp_path):
    path = tmp_path / "mine.toml"
    text = '[cluster]\ndevices = "mine:1x8"\n[device.mine]\nlike = "h100"\npower = {value = %d, unit = "W", source = "us"}\n'
    path.write_text(text.replace('"h100"', '"h100-80g"') % 350)
    assert Cluster.from_toml(path).device.matmul_efficiency < Cluster.parse("h100-96g:1x8").device.matmul_efficiency
    path.write_text(text.replace('"h100"', '"h100-80g"') % 60)
    with pytest.raises(ClusterError, match="runs at 60 W, no more than the 70 W that it idles at"):
        Cluster.from_toml(path)


def test_toml_of_a_users_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[cluster]\ndevices = "mine@slow:2x4"\n'
        '[device.mine]\nlike = "a100-80g"\nmemory = {value = 10, unit = "GiB", source = "label"}\n'
        '[node.slow]\nlike = "pcie4"\nnic = {value = 25, unit = "Gb/s", source = "label"}\n',
        encoding="utf-8",
    )
    cluster = Cluster.from_toml(path)
    assert cluster.world == 8
    assert cluster.memory_bytes == 10 * 2**30
    assert cluster.node.nic_bandwidth == 25e9 / 8
    assert cluster.device.sources["memory_bytes"] == "label"
    assert cluster.device.flops(torch.bfloat16) == 312e12


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('memory = {value = 10, source = "x"}', "must be {value"),
        ('memory = {value = 10, unit = "Gib", source = "x"}', "unknown unit 'Gib'"),
        ('like = "nothing"', "device 'mine' is like 'nothing', which is not in the catalogue; the nearest is"),
        ('attention_kernel = "other"', "runs attention kernel 'other'"),
    ],
)
def test_bad_tables_say_what_is_wrong(tmp_path, table, message):
    path = tmp_path / "bad.toml"
    head = "" if table.startswith("like") else 'like = "a100-80g"\n'
    path.write_text(f'[cluster]\ndevices = "mine:1x4"\n[device.mine]\n{head}{table}\n', encoding="utf-8")
    with pytest.raises(ClusterError, match=message):
        Cluster.from_toml(path)


FILE = """[cluster]
devices = "mine@office:1x4"
[device.mine]
like = "a100-80g"
memory_bandwidth = {value = 1500, unit = "GB/s", source = "label"}
memory = {value = 48, unit = "GiB", source = "label"}
units = {value = 100, unit = "1", source = "label"}
[[device.mine.products]]
dtype = "f32"
shapes = [[4096, 4096, 4096]]
seconds = {values = [610], unit = "us", source = "mine"}
[node.office]
like = "pcie4"
link = {value = 25, unit = "GB/s", source = "label"}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[610]", '["x"]', "seconds needs finite numbers above 0, not 'x'"), ("[610]", "[[1]]", r"not \[1\]"),
        ("[610]", "610", "a list"), ("[610]", "[nan]", "finite"), ("[610]", "[1e400]", "finite"), ("[610]", "[0]", "above 0"),
        ("[610]", "[true]", "finite"), ('"us"', "3", "unknown unit 3"), ("value = 1500", "value = 0", "above 0"),
        ("[[device.mine.products]]", "[device.mine.products]", "tables of their own"),
        ("value = 1500", "value = nan", "finite"), ("value = 25", "value = 0", "above 0"),
        ("value = 48", "value = 1", "more memory than that"), ("value = 100", "value = 0.5", "1 to 1e\\+06 as a whole number"),
        ('like = "a100-80g"', 'like = "mine"', "like itself, by way of 'mine'"),
        ('like = "a100-80g"', "like = []", "not a text"),
        ('like = "pcie4"', 'like = "pcie4"\nper_node = "x"', "not a whole number from 1 to 4194304"),
        ("[device.mine]", "[device]\nother = 3\n[device.mine]", "a table"),
        ("memory =", "memroy =", r"unknown 'memroy' in \[device.mine\]; did you mean 'memory'\? Known: "),
        ("[[device.mine.products]]", "[[device.mine.product]]", r"'product' in \[device.mine\]; did you mean 'products'"),
        ('dtype = "f32"', 'dtype = "f32"\nfoo = 3', r"'foo' in \[\[device.mine.products\]\], table 1; known: dtype, shapes"),
        ("values = [610]", "values = [610], unti = 1", "'unti' in seconds of .*did you mean 'unit'"),
        ("value = 48", "value = 48, vlaue = 9", "'vlaue' in device.mine.memory; did you mean 'value'"),
        ("[node.office]", 'peak.zz = 1\n[node.office]', "unknown 'peak'"),
        ("units =", 'peak.zz = 1\nunits =', "unknown 'zz' in device.mine.peak; known: f64, f32"),
        ("units =", 'attention.flahs3 = {forward = 1, backward = 1}\nunits =', "did you mean 'flash3'"),
        ("[node.office]", "[foo]\n[node.office]", "unknown 'foo' in the file; known: cluster, sources, device, node"),
        ("[node.office]", "[nodes.office]", "unknown 'nodes' in the file; did you mean 'node'"),
        ("[cluster]", "[cluster]\ndevice = 1", r"'device' in \[cluster\]; did you mean 'devices'"),
        ("[node.office]", "[node.spare]\nnick = 1\n[node.office]", r"'nick' in \[node.spare\]; did you mean 'nic'"),
        ('"us"', '"GB"', "seconds has unit 'GB', which does not fit; fitting: us, ms, s"),
        ('48, unit = "GiB"', '48, unit = "us"', "memory has unit 'us', which does not fit; fitting: B, MB, GB, MiB, GiB"),
        ("units =", 'power = {value = 4, unit = "s", source = ""}\nunits =', "unit 's', which does not fit; fitting: W"),
        ("[610]", "[1e-320]", "is 1e-320 us; give 1e-12 to 1e\\+06 seconds"), ("[610]", f"[1{'0' * 400}]", "give 1e-12 to 1e"),
        ("[610]", f"[0x{'f' * 9999}]", "is more digits than Python writes us; give"),
        ("value = 48", "value = 1e300", "is 1e\\+300 GiB; give 1 to 1e\\+18 bytes"),
        ("[4096, 4096, 4096]", f"[4096, 4096, 1{'0' * 400}]", "whole numbers from 1 to 1099511627776"),
        ("units =", 'matmul_efficiency = {value = 5, unit = "1", source = ""}\nunits =', "is 5; give 1e-06 to 1 of the whole"),
        ('like = "pcie4"', 'like = "pcie4"\nkind = "torus"', "torus of no dims; give torus_dims"),
        ('source = "mine"', "source = [1]", "say in a text"), ("like = ", "node = 1\nlike = ", "mine.node is 1, not a text"),
        ("like = ", "aliases = [1]\nlike = ", "not a list of texts"), ("like = ", f"title = {'[' * 9999}", "no TOML file"),
    ],
)
def test_files_with_odd_values_are_refused(tmp_path, old, new, message):
    path = tmp_path / "odd.toml"
    path.write_text(FILE, encoding="utf-8")
    assert Cluster.from_toml(path).device.measured[0].seconds == pytest.approx((610e-6,))
    path.write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(ClusterError, match=message):
        Cluster.from_toml(path)


def test_the_catalogue_has_the_form_of_a_file():
    known = catalogue()
    check_form(known, known)
    with pytest.raises(ClusterError, match="devise"):
        check_form({**known, "devise": {}}, known)


def test_a_file_of_ones_own_is_like_any_name_of_the_catalogue(tmp_path):
    path = tmp_path / "like.toml"
    path.write_text('[cluster]\ndevices = "Mine:1x4"\n[device.Mine]\nlike = "h100"\n', encoding="utf-8")
    device, plain = Cluster.from_toml(path).device, Cluster.parse("h100:1x4").device
    assert replace(device, name=plain.name, title=plain.title) == plain


@pytest.mark.parametrize("number", ['nic = {value = 0, unit = "Gb/s", source = "none"}',
                                    'nics = {value = 0, unit = "1", source = "none"}'])
def test_several_nodes_without_a_network_are_refused(tmp_path, number):
    """One node needs none, and neither does a plan that is read again; a torus has links instead."""
    path = tmp_path / "cluster.toml"

    def write(sizes):
        path.write_text(f'[cluster]\ndevices = "h100@mine:{sizes}"\n[node.mine]\nlike = "pcie4"\n{number}\n')

    write("2x3")
    with pytest.raises(ClusterError, match=r"node 'mine' has nics? = 0, so that nothing.*or one node, 'h100@mine:1x3'"):
        Cluster.from_toml(path)
    write("1x2")
    cluster = Cluster.from_toml(path)
    assert (cluster.nodes, cluster.world) == (1, 2)
    plan = replace(handmade_plan(), mesh=Mesh(("dp",), (2,)), cluster=str(cluster), devices=described(cluster))
    assert cluster_in(plan).world == 2
    assert Cluster.parse("tpu-v4:2x2x4").nodes > 1


def test_a_device_that_lacks_numbers_names_what_has_them(tmp_path):
    path = tmp_path / "cluster.toml"
    text = '[cluster]\ndevices = "mine@dgx-h100:1x2"\n[device.mine]\nmemory = {value = 48, unit = "GiB", source = "label"}\n'
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"device 'mine' lacks reserve, .*; give these, or .* like = ") as caught:
        Cluster.from_toml(path)
    path.write_text(text + re.search(r"like = \"[^\"]+\"", str(caught.value))[0])
    assert Cluster.from_toml(path).memory_bytes == 48 * 2**30


def test_files_that_cannot_be_opened(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ClusterError, match=r"cannot be read: .*; name a cluster file"):
            Cluster.from_toml(path)


def test_toml_without_a_cluster(tmp_path):
    path = tmp_path / "none.toml"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ClusterError, match=r"no line devices"):
        Cluster.from_toml(path)


@pytest.mark.parametrize(
    ("name", "gib", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80g"), ("NVIDIA A100-SXM4-40GB", 39, "a100-40g"), ("NVIDIA A10", 22, "a10"),
        ("NVIDIA H100 80GB HBM3", 79, "h100-80g"), ("NVIDIA H200", 140, "h200"), ("NVIDIA GB200", 184, "gb200"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"), ("Tesla V100-SXM2-32GB", 32, "v100-32g"),
    ],
)
def test_device_for_what_a_driver_reports(name, gib, device):
    assert device_for(name, gib * 2**30) == device


def test_device_for_an_unknown_name():
    with pytest.raises(ClusterError, match="pass a Cluster"):
        device_for("Other 1", 2**30)


def test_a_node_used_in_part_brings_its_part_of_the_nics():
    assert Cluster.parse("h100:2x4").island.nics == 4
    assert Cluster.parse("a100@p4d:2x1").island.nics == 1
