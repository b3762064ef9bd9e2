"""Tables of whole modules: what is given comes out as given, what is not is scaled by it, and bounds stay below."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.api import graph_of
from meshwright.compiler.placement.costs import BACKWARD, FORWARD
from meshwright.compiler.placement.placement import Placements
from meshwright.compiler.search.candidates import Floors
from meshwright.compiler.structure.measured import ModuleTimes
from meshwright.cost.cluster import Cluster
from meshwright.cost.tables import ClusterError
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.planner import make_plan
from meshwright.rules import rules_of

MODULES = """
[cluster]
devices = "mine:1x4"

[device.mine]
like = "a100-80g"

[[device.mine.modules]]
module = "model.layers.*"
dtype = "f32"
points = [[2, 1, 16], [8, 1, 16], [4, 2, 16], [2, 1, 4096]]
forward = {values = [3.0, 9.0, 2.0, 700.0], unit = "ms", source = "mine"}
backward = {values = [6.0, 20.0, 5.0, 1500.0], unit = "ms", source = "mine"}

[[device.mine.modules]]
module = "model.layers.*.mlp"
dtype = "f32"
points = [[2, 1, 16]]
forward = {values = [1.0], unit = "ms", source = "mine"}
backward = {values = [2.0], unit = "ms", source = "mine"}
"""
LAYER, MLP = MODULES.split("[[device.mine.modules]]")[1:]


def cluster_of(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return Cluster.from_toml(path)


def placements_of(graph: Graph, cluster: Cluster) -> Placements:
    return Placements(graph, cluster, rules_of(graph)[0], Pins(), itemsize=4, state_bytes=8.0, recompute=("none",))


def layer(graph: Graph, cluster: Cluster, tensor: int, samples: int) -> tuple[float, float]:
    """Seconds of a layer in the middle, forward and backward."""
    placement = placements_of(graph, cluster).of(tensor, samples)
    (row,) = {number for number in placement.sequence[2:-2] if placement.rows[number].block}
    found = placement.rows[row].activations["none"]
    return float(found[FORWARD]), float(found[BACKWARD])


@pytest.fixture(scope="module")
def graph() -> Graph:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=128, max_position_embeddings=16, use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros((8, 16), dtype=torch.int64, device="meta")
    return graph_of(model, {"input_ids": ids, "labels": ids})


def test_what_is_given_comes_out_as_given(graph: Graph, tmp_path: Path) -> None:
    mine = cluster_of(tmp_path, MODULES.replace(MLP, MLP.replace("mlp", "no_mlp")))
    assert layer(graph, mine, 1, 2) == pytest.approx((3e-3, 6e-3), rel=1e-4)  # of which the ends fuse more
    assert layer(graph, mine, 1, 8) == pytest.approx((9e-3, 20e-3), rel=1e-4)
    assert sum(layer(graph, mine, 2, 4)) == pytest.approx(7e-3, rel=0.03)  # not all is split as it is fastest


def test_what_is_not_given_is_scaled(graph: Graph, tmp_path: Path) -> None:
    mine, plain = cluster_of(tmp_path, MODULES.replace(MLP, MLP.replace("mlp", "no_mlp"))), Cluster.parse("a100-80g:1x4")

    def ratio(tensor: int, samples: int) -> float:
        return layer(graph, mine, tensor, samples)[0] / layer(graph, plain, tensor, samples)[0]

    assert min(ratio(1, 2), ratio(1, 8)) < ratio(1, 4) < max(ratio(1, 2), ratio(1, 8))
    assert ratio(1, 1) == pytest.approx(ratio(1, 2))  # beyond the ends
    assert ratio(4, 4) == pytest.approx(ratio(2, 4), rel=0.2)  # of the nearest degree


def test_the_innermost_table_counts(graph: Graph, tmp_path: Path) -> None:
    """Inside of a layer its own modules may be measured: they take that, the rest of the layer what its own table says."""
    one, both = (cluster_of(tmp_path, text) for text in (MODULES.replace(MLP, MLP.replace("mlp", "no_mlp")), MODULES))
    inner = cluster_of(tmp_path, MODULES.replace("model.layers.*\"", "no.layers\""))
    plain = Cluster.parse("a100-80g:1x4")
    outside = layer(graph, plain, 1, 2)[0] - (layer(graph, inner, 1, 2)[0] - 1e-3)  # the formula of the mlp
    assert layer(graph, both, 1, 2)[0] == pytest.approx(4e-3)
    assert 0 < outside < layer(graph, plain, 1, 2)[0] < layer(graph, one, 1, 2)[0]


def test_layers_of_other_tables_are_told_apart(graph: Graph, tmp_path: Path) -> None:
    text = MODULES.replace(MLP, MLP.replace("mlp", "x"))
    mine = cluster_of(tmp_path, text.replace("layers.*\"", "layers.3\""))
    placement = placements_of(graph, mine).of(1, 2)
    seconds = [float(placement.rows[n].activations["none"][FORWARD]) for n in placement.sequence if placement.rows[n].block]
    assert seconds[3] == pytest.approx(3e-3)
    assert max(seconds[:3] + seconds[4:]) < 1e-3


def test_another_dtype_or_model_is_left_alone(graph: Graph, tmp_path: Path) -> None:
    plain = layer(graph, Cluster.parse("a100-80g:1x4"), 1, 2)
    for old, new in (('"f32"', '"bf16"'), ("model.layers", "encoder.layers")):
        cluster = cluster_of(tmp_path, MODULES.replace(old, new))
        assert layer(graph, cluster, 1, 2) == plain
        assert len(make_plan(graph, cluster, Pins(tp=1, pp=1)).notes) == 2
    assert not make_plan(graph, cluster_of(tmp_path, MODULES), Pins(tp=1, pp=1)).notes


def test_tables_of_one_module_are_one_and_those_of_another_dtype_hide_none(graph: Graph, tmp_path: Path) -> None:
    mine = MODULES.replace(MLP, "").removesuffix("[[device.mine.modules]]")
    rows = [("[[2, 1, 16], [8, 1, 16]]", "[3.0, 9.0]", "[6.0, 20.0]"),
            ("[[4, 2, 16], [2, 1, 4096]]", "[2.0, 700.0]", "[5.0, 1500.0]")]
    head = "[[device.mine.modules]]" + LAYER[: LAYER.index("points")]
    unit = 'unit = "ms", source = "mine"'
    parts = [f"{head}points = {at}\nforward = {{values = {ahead}, {unit}}}\nbackward = {{values = {back}, {unit}}}\n"
             for at, ahead, back in rows]
    apart = mine.replace("[[device.mine.modules]]" + LAYER, "\n".join(parts))
    half = head.replace("f32", "bf16") + LAYER[LAYER.index("points"):]
    other = mine.replace("[[device.mine.modules]]", f"{half}\n[[device.mine.modules]]")
    single = mine + "\n" + parts[0].replace("layers.*", "layers.2").replace("3.0", "30.0")
    for tensor, samples in ((1, 2), (1, 8), (2, 4)):
        expected = layer(graph, cluster_of(tmp_path, mine), tensor, samples)
        assert layer(graph, cluster_of(tmp_path, apart), tensor, samples) == pytest.approx(expected)
        assert layer(graph, cluster_of(tmp_path, other), tensor, samples) == pytest.approx(expected)
    placement = placements_of(graph, cluster_of(tmp_path, single)).of(1, 2)
    seconds = [float(placement.rows[n].activations["none"][FORWARD]) for n in placement.sequence if placement.rows[n].block]
    assert seconds[2:4] == pytest.approx([30e-3, 3e-3])


def test_bounds_stay_below(graph: Graph, tmp_path: Path) -> None:
    """A table in which few samples take less than their share, and products faster than any formula."""
    text = MODULES.replace("[3.0, 9.0, 2.0, 700.0]", "[1e-7, 9.0, 2.0, 700.0]").replace("[6.0, 20.0", "[1e-7, 20.0")
    cluster, rules = cluster_of(tmp_path, text), rules_of(graph)[0]
    modules = ModuleTimes.of(graph, rules, cluster.device)
    assert modules is not None
    sample, placements = Floors(graph, rules, cluster.device, modules.least).sample, placements_of(graph, cluster)
    for tensor, samples in itertools.product((1, 2, 4), (1, 2, 4, 8)):
        assert sample * samples / tensor <= placements.of(tensor, samples).bound


def test_the_search_uses_them(graph: Graph, tmp_path: Path) -> None:
    """Where one sample a rank takes nearly nothing and four much, the batch is cut in pieces; its bound is below every plan."""
    table = """
points = [[1, 1, 16], [2, 1, 16], [4, 1, 16], [8, 1, 16]]
forward = {values = [0.01, 10.0, 40.0, 200.0], unit = "ms", source = "mine"}
backward = {values = [0.02, 20.0, 80.0, 400.0], unit = "ms", source = "mine"}
"""
    layers = LAYER[: LAYER.index("points")] + table
    cluster = cluster_of(tmp_path, MODULES.replace(LAYER, layers).replace(MLP, MLP.replace("mlp", "x")))
    best = make_plan(graph, cluster, Pins(tp=1, pp=1))
    assert best.certificate is not None
    pinned = [make_plan(graph, cluster, Pins(dp=4, tp=1, pp=1, microbatches=count)) for count in (1, 2)]
    assert best.predicted.step_seconds <= min(one.predicted.step_seconds for one in pinned) * 1.01
    assert all(best.certificate.bound_seconds <= one.predicted.step_seconds for one in pinned)
    plain = make_plan(graph, Cluster.parse("a100-80g:1x4"), Pins(tp=1, pp=1))
    assert plain.schedule.microbatches < best.schedule.microbatches


SMALL = {
    "products": """
[[device.mine.products]]
dtype = "f32"
shapes = [[16, 64, 64], [32, 64, 64], [64, 64, 64], [128, 64, 64]]
seconds = {values = [0.01, 0.02, 4.0, 9.0], unit = "ms", source = "mine"}
""",
    "attention": """
[[device.mine.attentions]]
dtype = "f32"
causal = true
shapes = [[1, 4, 16, 16, 16], [2, 4, 16, 16, 16], [4, 4, 16, 16, 16], [8, 4, 16, 16, 16]]
forward = {values = [0.01, 2.0, 20.0, 90.0], unit = "ms", source = "mine"}
backward = {values = [0.02, 5.0, 50.0, 200.0], unit = "ms", source = "mine"}
""",
    "collectives": "".join(f"""
[[node.office.collectives]]
kind = "{kind}"
ranks = 2
bytes = {{values = [4096, 8192, 16384, 32768, 65536], unit = "B", source = "mine"}}
seconds = {{values = [0.001, 0.002, 10.0, 90.0, 200.0], unit = "ms", source = "mine"}}
""" for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
}


@pytest.mark.parametrize("what", SMALL)
def test_what_few_samples_were_measured_to_save_is_in_no_bound(graph: Graph, tmp_path: Path, what: str) -> None:
    """Where a piece of the batch takes much less than its share, no pinned count of micro-batches is below the bound."""
    head = MODULES.split("[[device.mine.modules]]")[0].replace("mine:1x4", "mine@office:1x2")
    cluster = cluster_of(tmp_path, f'{head}[node.office]\nlike = "pcie4"\n{SMALL[what]}')
    for degrees in ({"tp": 1, "pp": 1}, {"tp": 2, "pp": 1}, {"pp": 2}):
        best = make_plan(graph, cluster, Pins.of({**degrees, "mlp_rows": 0, "loss_rows": 0}))
        assert best.certificate is not None
        pinned = [make_plan(graph, cluster, Pins.of({**degrees, "microbatches": count, "mlp_rows": 0, "loss_rows": 0}))
                  for count in (1, 2, 4, 8) if count <= 8 // best.mesh.size("dp")]
        assert best.certificate.bound_seconds <= min(one.predicted.step_seconds for one in pinned) * (1 + 1e-9)
        assert best.predicted.step_seconds <= min(one.predicted.step_seconds for one in pinned) * 1.02


@pytest.mark.parametrize(("old", "new", "message"), [
    ('layers.*.mlp"', 'layers.*"', r"modules: \[2, 1, 16\] \(model.layers.\*, f32\) stands there twice"),
    ("[4, 2, 16]", "[4, 2]", r"needs a point \[samples, tensor ranks, tokens"),
    ("[4, 2, 16]", "[2, 1, 16]", "stands there twice"),
    ('"model.layers.*"', '""', "module must be a path such as"), ("[1.0]", "[1.0, 2.0]", "2 seconds forward and 1 backward"),
    ('dtype = "f32"', 'dtype = "int3"', "dtype 'int3' is none of"), ("[1.0]", "[0.0]", "numbers above 0"),
])
def test_tables_that_cannot_be_read_say_why(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster_of(tmp_path, MODULES.replace(old, new, 1))
