"""The benchmark of published runs: rows are read right, and go through the planner."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from meshwright.cost.collectives import Network
from meshwright.footprint import Footprints, footprints
from meshwright.ir.mesh import Mesh
from meshwright.planner import rules_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # dataclasses look their module up
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


@pytest.fixture(scope="module")
def rows(published: ModuleType) -> ModuleType:
    return sys.modules["rows"]


@pytest.fixture(scope="module")
def steps() -> dict[str, dict[str, str]]:
    with (ROOT / "benchmarks" / "data" / "steps.csv").open(encoding="utf-8") as file:
        return {row["row_id"]: row for row in csv.DictReader(file)}


SMALL = {
    "row_id": "S1", "source": "here", "model_name": "small", "family": "llama", "n_layers": "2", "hidden": "256",
    "n_heads": "4", "n_kv_heads": "2", "ffn_hidden": "512", "vocab": "1000", "gpu": "A100-80GB", "n_gpus": "4",
    "gpus_per_node": "8", "dtype": "bf16", "tp": "2", "sp": "yes", "pp": "1", "dp": "2", "zero/fsdp": "1", "micro_batch": "2",
    "global_batch_seqs": "8", "seq_len": "128", "recompute": "none", "step_time_s": "0.01", "trust": "A", "notes": "",
}


def test_every_row_of_the_data_names_a_known_cluster_and_legal_pins(rows, steps):
    for row in steps.values():
        cluster = rows.cluster_of(row)
        assert cluster.world == int(float(row["n_gpus"]))
        pins = rows.pins_of(row, cluster.world)
        assert pins.dp == cluster.world // int(float(row["tp"]) * float(row["pp"]) * float(row["cp"] or 1))
        assert rows.shape_of(row).batch >= 1


def test_columns_become_hardware(rows):
    row = {"gpu": "H100-80GB", "n_gpus": "16", "gpus_per_node": "8"}
    wires = {"": "dgx-h100", "NVLink4 + EFA": "p5", "8x400Gb NDR": "dgx-h100", "GCP A3 Mega": "a3-mega"}
    assert {text: rows.cluster_of({**row, "interconnect": text}).node.name for text in wires} == wires
    older = {**row, "gpu": "A100-80GB"}
    wires = {"": "dgx-a100", "EFA": "p4d", "1600Gbps RoCE/node": "dgx-a100", "PCIe, 1x100 Gb/s": "pcie4"}
    assert {text: rows.cluster_of({**older, "interconnect": text}).node.name for text in wires} == wires


def test_a_cluster_whose_collectives_were_measured_has_them(rows):
    """What ``hardware.csv`` has of that cluster comes out: bus bandwidths of 256 MiB."""
    row = {"gpu": "H100-80GB", "n_gpus": "32", "gpus_per_node": "8", "interconnect": "EFA-like HF cluster"}
    speeds = {("all_gather", 1): 249.8, ("all_gather", 4): 119.0, ("reduce_scatter", 2): 181.6, ("all_reduce", 4): 160.1}
    for (kind, nodes), gbytes in speeds.items():
        ranks = 8 * nodes
        network = Network(rows.cluster_of({**row, "n_gpus": str(ranks)}), Mesh.of(a=ranks))
        sent = (2 if kind == "all_reduce" else 1) * 2**28 * (ranks - 1) / ranks
        assert network.seconds(kind, "a", 2**28) == pytest.approx(sent / gbytes / 1e9, rel=1e-3)
    assert not rows.cluster_of({**row, "interconnect": "EFA"}).node.measured


@pytest.mark.parametrize(
    ("wires", "nics", "gbits"),
    [
        ("", 8, 200), ("something new", 8, 200), ("8x200Gb HDR IB", 8, 200), ("4 x 200 Gbps per node", 4, 200),
        ("1600Gbps RoCE/node", 8, 200), ("1.6 Tb/s per node", 8, 200), ("NVLink 300GB/s + 100 Gb/s per GPU", 8, 100),
        ("100 Gbit Ethernet", 8, 12.5), ("HDR100 InfiniBand", 8, 100), ("DGX A100 SuperPOD 8xHDR200", 8, 200),
        ("4xHDR", 4, 200), ("EDR", 8, 100),
    ],
)
def test_stated_bandwidths_become_nics(rows, wires, nics, gbits):
    node = rows.cluster_of({"gpu": "A100", "n_gpus": "16", "gpus_per_node": "8", "interconnect": wires}).node
    assert (node.nics, node.nic_bandwidth * 8 / 1e9) == (nics, pytest.approx(gbits))


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("A100-80GB", "a100-80g"), ("NVIDIA A100-SXM4-40GB", "a100-40g"), ("A100 40 GB (DGX-A100)", "a100-40g"),
        ("H100-80GB (700W, HBM3)", "h100-80g"), ("NVIDIA H800", "h800-80g"), ("A800-SXM4-80GB", "a800-80g"), ("H200", "h200"),
        ("B200 180GB", "b200"), ("GB200", "gb200"), ("Tesla V100-SXM2-32GB", "v100-32g"), ("RTX 4090", "rtx4090"),
        ("TPU v4", "tpu-v4"), ("A10", "a10"), ("L40S", "l40s"), ("GH200", "gh200-96g"), ("GH200 144GB", "gh200-144g"),
        ("MI300X", "mi300x"), ("A10G", "a10g"), ("H100 PCIe", "h100-pcie-80g"), ("NVIDIA H100 80GB PCIe", "h100-pcie-80g"),
        ("H100 NVL 94GB", "h100-nvl-94g"), ("H100-96GB (HBM2e)", "h100-96g"),
    ],
)
def test_spellings_of_devices(rows, gpu, device):
    assert rows.cluster_of({"gpu": gpu, "n_gpus": "8"}).device.name == device


@pytest.mark.parametrize("gpu", ["GB300", "H20", "MI250", "TPU v6"])
def test_devices_that_are_not_known_are_refused(rows, gpu):
    with pytest.raises(rows.Unpriced, match="no device of the catalogue"):
        rows.cluster_of({"gpu": gpu, "n_gpus": "8"})


def test_devices_that_do_not_fill_nodes(rows):
    worlds = {"12": (3, 4), "8": (1, 8), "2": (1, 2), "1,024": (128, 8), "": (2, 8)}
    for world, shape in worlds.items():
        cluster = rows.cluster_of({"gpu": "A100", "n_gpus": world, "gpus_per_node": "8", "tp": "8", "dp": "2"})
        assert (cluster.nodes, cluster.per_node) == shape
    assert rows.cluster_of({"gpu": "GB200", "n_gpus": "72"}).nodes == 1


def test_columns_become_kernels(rows):
    cases = {
        "kernel=flash_attention2 + RMS kernel": ("flash2", False, False),
        "kernel=flash_attentionv1.0.8": ("flash1", False, False), "kernel=torch": ("torch", False, False),
        "kernel=fused": ("scores", False, False), "flash attention": ("flash", False, False),
        "FlashAttention in Triton (attn_impl=triton)": ("triton", False, False),
        "FlashAttention-2": ("flash2", False, False), "no flash attention": ("scores", False, False),
        "NeMo2; TP comm overlap": ("flash3", True, True), "torch.compile": (None, True, False),
        "no torch.compile": (None, False, False), "compile=off": (None, False, False), "": (None, False, False),
    }
    for notes, (kernel, fused, overlapped) in cases.items():
        row = {"gpu": "H100-80GB", "n_gpus": "8", "notes": notes}
        device = rows.cluster_of(row).device
        assert (rows.kernel_of(row), device.fused, device.overlapped) == (kernel, fused, overlapped)
        assert device.attention_kernel == (kernel if kernel in device.attention else "flash2")


def test_a_row_may_have_run_on_the_kernels_of_its_time(rows):
    dates = {
        "A et al. (2104.04473)": (2021, 4), "README (Sept 2020)": (2020, 12), "C 2205.05198": (2022, 5),
        "D 2302.13971": (2023, 2), "B 2311.05610": (2023, 11), "E 2407.21783": (2024, 7), "a sheet": None,
    }
    assert {text: rows.published_in({"source": text}) for text in dates} == dates
    kernels = [rows.kernels_of({"gpu": "A100", "source": text, "notes": ""}) for text in dates]
    assert kernels == [("scores",)] * 3 + [("scores", "flash1"), ("flash1", "flash2"), ("flash2",), ("flash1", "flash2")]
    assert rows.kernels_of({"gpu": "A100", "source": "2020", "notes": "kernel=torch"}) == ("torch",)
    assert rows.kernels_of({"gpu": "A100", "source": "", "notes": "flash attention"}) == ("flash1", "flash2")
    assert rows.kernels_of({"gpu": "A100", "source": "", "notes": "FlashAttention-2"}) == ("flash2",)


def test_what_a_row_leaves_open_is_priced_every_way(rows):
    said = {**SMALL, "dtype": "bf16 (fp32 grad accumulation)", "notes": "FlashAttention-2, fused_crossentropy"}
    assert rows.completions_of(said) == ({**said, "attention": "flash2"},)
    completions = rows.completions_of({**said, "recompute": ""})
    assert [completion["recompute"] for completion in completions] == ["none", "full"]
    piped = {**said, "pp": "2", "tp": "1", "n_layers": "8", "vpp": ""}
    cases = {"1F1B": [("1", "1f1b"), ("4", "interleaved1f1b")], "": [("1", ""), ("4", "interleaved1f1b")],
             "interleaved": [("2", "interleaved1f1b"), ("4", "interleaved1f1b")], "GPipe": [(None, "GPipe")]}
    for schedule, wanted in cases.items():
        completions = rows.completions_of({**piped, "schedule": schedule})
        assert [(completion.get("vpp") or None, completion["schedule"]) for completion in completions] == wanted
    assert len(rows.completions_of({**piped, "vpp": "2"})) == 1
    notes = ("FlashAttention-2", "FlashAttention-2; torch.compile", "FlashAttention-2; sharded cross entropy")
    losses = [rows.completions_of({**said, "notes": words}) for words in notes]
    assert [[rows.cluster_of(way).device.merged_loss for way in ways] for ways in losses] == [[True, False], [False], [False]]
    assert [[rows.cluster_of(way).device.sharded_loss for way in ways] for ways in losses] == [[False, False], [False], [True]]


def test_torch_runs_whole_blocks_again_before_its_checkpoint_stops_early(rows):
    cases = {"": False, "torch 1.13": True, "torch 2.0 (a repository)": True, "torch 2.1": False, "torch 2.10": False}
    row = {"gpu": "A100", "n_gpus": "8", "schedule": "FSDP"}
    assert {notes: rows.cluster_of({**row, "notes": notes}).device.repeats for notes in cases} == cases
    assert rows.cluster_of({**row, "schedule": "1F1B", "notes": ""}).device.repeats


def test_stages_start_as_the_software_cuts_them(rows):
    """Where the head weighs more than a layer: Megatron-LM has as many layers in each, others may count the head."""
    piped = {**SMALL, "pp": "2", "tp": "1", "n_layers": "8", "vocab": "128000", "vpp": "1"}
    even, blocks = ("layers.4",), [f"layers.{number}" for number in range(8)]
    told = {"": [even, None], "stages cut by cost": [None], "stages of as many layers": [even]}
    for words, wanted in told.items():
        ways = rows.completions_of({**piped, "notes": f"FlashAttention-2, fused_crossentropy, bf16 gradient sums; {words}"})
        assert [rows.pins_of(way, 4, blocks).stage_cuts for way in ways] == wanted
    megatron = rows.completions_of({**piped, "vpp": "2", "notes": "FlashAttention-2"})
    assert [rows.pins_of(way, 4, blocks).stage_cuts for way in megatron] == [("layers.2", "layers.4", "layers.6")]


def test_gradients_are_summed_in_16_or_32_bits_where_nothing_tells(rows):
    def narrow(**columns: str) -> list[bool]:
        ways = rows.completions_of({**SMALL, "notes": "FlashAttention-2, fused_crossentropy", **columns})
        return [rows.cluster_of(way).device.narrow_sums for way in ways]

    assert narrow() == [True, False]
    told = {"zero/fsdp": "3"}, {"micro_batch": "4"}, {"dtype": "bf16 FSDP"}, {"recompute": "selective"}, {"dtype": "fp32"}
    for known in told:
        assert narrow(**known) == [False], known
    assert narrow(dtype="bf16 (fp32 grad accumulation)") == [False]
    assert narrow(notes="FlashAttention-2, fused_crossentropy; bf16 gradient sums") == [True]


def test_notes_say_what_software_holds(rows):
    row = {**SMALL, "notes": "gradients in DDP buckets; gathered inputs kept; gathered logits; tied embeddings=yes"}
    plain, device = rows.cluster_of(SMALL).device, rows.cluster_of(row).device
    assert (device.buckets, device.keeps_gathered, plain.buckets, plain.keeps_gathered) == (True, True, False, False)
    assert (rows.shape_of(row).tied, rows.shape_of(SMALL).tied) == (True, False)
    assert rows.shape_of(row).architecture.extra == {"tie_word_embeddings": True}
    whole = {**row, "sp": "no"}
    pins = [rows.pins_of(one, 4).operators for one in (whole, {**whole, "dp": "1", "tp": "4"}, row, {**SMALL, "sp": "no"})]
    assert [{key: text for key, text in one.items() if "loss" in key or "cross" in key} for one in pins] == [
        {"*:cross_entropy": "dp=b0"}, {"*:cross_entropy": ""}, {"*:cross_entropy": "dp=b0"}, {}]


def test_tensor_parallelism_is_columns_then_rows(published, rows):
    """What a search finds faster where gathered inputs are kept, the second product of attention by columns too, no software
    runs: it gathers once more a layer, and keeps that."""
    row = {**SMALL, "notes": "FlashAttention-2; gathered inputs kept; sharded cross entropy", "zero/fsdp": "0", "dp": "1",
           "tp": "4", "n_heads": "4", "n_kv_heads": "4", "global_batch_seqs": "32", "micro_batch": "8", "hidden": "512",
           "ffn_hidden": "1408", "seq_len": "512"}
    assert rows.pins_of(row, 4).operators == {"*embed_tokens:embedding": "tp=v", "*o_proj:linear": "tp=k",
                                              "*down_proj:linear": "tp=k"}
    assert rows.pins_of({**row, "tp": "2", "dp": "2", "family": "dense-gpt"}, 4).operators["*out:linear"] == "dp=b0, tp=k"
    assert "*o_proj:linear" in rows.pins_of({**row, "family": "dense-gpt", "n_kv_heads": "2"}, 4).operators
    assert rows.pins_of({**row, "tp": "1", "dp": "4"}, 4).operators == {}
    plan, _ = published.planned(published.graph_of(row), rows.cluster_of(row), rows.pins_of(row, 4), "bf16")
    second = [op.name for op in plan.graph.ops if op.module.endswith(("o_proj", "down_proj"))]
    assert len(second) == 4
    assert all(dict(plan.assignments[name]) == {"tp": "k"} for name in second)


KINDS = {"activations", "gathered", "gradients", "transient"}


def held(published, rows, row: dict[str, str], kinds: set[str], **software: bool) -> float:
    """Bytes of a rank of these kinds beyond those of a program of this package, of one plan under other software."""
    graph = published.graph_of(row)
    cluster = rows.cluster_of(row)
    plan = published.planned(graph, cluster, rows.pins_of(row, 4), "bf16")[0]
    devices = [cluster.device, cluster.with_kernels(**software).device]
    found = [Footprints(rules_of(graph)[0], 8.0, device).fits(plan).bytes_by_kind for device in devices]
    own, other = (sum(bytes_ for kind, bytes_ in one.items() if kind in kinds) for one in found)
    return other - own


def test_what_software_sums_gradients_in_is_held(published, rows):
    """Of a Llama of few words and short sequences: DDP's buckets are two bytes a parameter of the rank, fp32 sums are two more
    than sums in bf16."""
    row = {**SMALL, "sp": "no", "tp": "1", "dp": "4", "micro_batch": "1", "vocab": "64", "seq_len": "16", "sums": "fp32",
           "attention": "flash2", "loss": "merged", "n_layers": "8"}
    elements = 8 * 256 * (2 * 256 * 1.5 + 3 * 512) + 2 * 64 * 256
    sums = {"gradients", "transient"}
    assert held(published, rows, row, sums, narrow_sums=True) == pytest.approx(-2 * elements, rel=0.2)
    assert held(published, rows, row, sums, buckets=True) == pytest.approx(2 * elements, rel=0.2)


def test_what_linears_gathered_is_kept_or_gathered_again(published, rows):
    """Under sequence parallelism, of 8 layers of 2 x 4,096 tokens and a width of 256: what a layer's linears gather twice, of
    which the rank has a half anyway; the worst moment is in the last layer's backward."""
    row = {**SMALL, "vocab": "64", "seq_len": "4096", "sums": "fp32", "attention": "flash2", "loss": "merged", "n_layers": "8"}
    gathered = 2 * 4096 * 256 * 2
    assert held(published, rows, row, {"activations"}, keeps_gathered=True) == pytest.approx(8 * 2 * gathered / 2, rel=0.1)


def test_a_loss_in_place_of_16_bit_logits_holds_them_three_times(published, rows):
    """Of many words and narrow layers: of the logits in 16 bits the softmax, its copy and the gradient; this package holds them
    and their gradient in fp32."""
    row = {**SMALL, "sp": "no", "tp": "1", "dp": "4", "vocab": "32000", "sums": "fp32", "attention": "flash2", "loss": "eager",
           "seq_len": "2048"}
    logits = 2 * 2048 * 32000
    kinds = {"activations", "transient"}
    assert held(published, rows, row, kinds, narrow_loss=True) == pytest.approx((3 * 2 - 2 * 4) * logits, rel=0.01)


def test_what_a_gated_activation_makes_in_between_is_not_kept(published, rows):
    """Of eight layers of long sequences: silu's result, as wide as the inner values."""
    row = {**SMALL, "tp": "1", "dp": "4", "vocab": "64", "seq_len": "4096", "sums": "fp32", "attention": "flash2",
           "loss": "merged", "n_layers": "8"}
    inner = 2 * 4096 * 512 * 2
    assert held(published, rows, row, {"activations"}, fused_activations=True) == pytest.approx(-8 * inner, rel=0.02)


def test_units_of_their_own_and_flat_ones_gather_less(published, rows):
    """Under ZeRO-3 of many words the worst moment is in the loss: the root has gathered embedding and head, and the last block
    has been asked for. As units of their own the head alone is there. Of short sequences it is where gradients are reduced,
    which a unit that is one flat tensor does as they are, not in fp32."""
    row = {**SMALL, "sp": "no", "tp": "1", "dp": "4", "zero/fsdp": "3", "vocab": "32000", "sums": "fp32", "attention": "flash2",
           "loss": "merged", "n_layers": "4", "seq_len": "256"}
    table, block = 2 * 32000 * 256, 2 * 256 * (2 * 256 * 1.5 + 3 * 512)
    assert held(published, rows, row, {"gathered"}, own_units=True) == pytest.approx(-table - block, rel=0.01)
    assert held(published, rows, {**row, "seq_len": "64"}, KINDS, flat_units=True) < -1.5 * table


def test_what_linears_gather_lies_in_one_buffer(published, rows):
    """Under sequence parallelism what is gathered along the second dim is put in order, beside what was received; where the
    sequence is the first dim there are the buffer and the gradient."""
    row = {**SMALL, "vocab": "64", "seq_len": "4096", "sums": "fp32", "attention": "flash2", "loss": "merged", "n_layers": "8"}
    gathered = 2 * 4096 * 256 * 2
    assert held(published, rows, row, {"transient"}, gather_buffer=True) == pytest.approx(-gathered, rel=0.02)


def test_a_figure_is_of_the_rank_that_its_condition_names(published):
    row = {**SMALL, "pp": "2", "tp": "1", "dp": "2", "peak_mem_GB": "1", "schedule": "gpipe", "global_batch_seqs": "4",
           "vocab": "32000", "attention": "flash2", "loss": "merged", "sums": "fp32", "cuts": "even"}
    first, last, fullest = (published.price({**row, "condition": of}).predicted_gb for of in ("rank0; x", "rank 3", ""))
    assert first < 0.8 * last
    assert last == fullest


def test_a_figure_of_what_is_reserved_is_compared_with_what_is_reserved(published):
    """What a row says was reserved, in GiB, is more than what is alive, and no bytes of 10^9 to a GB."""
    row = {**SMALL, "peak_mem_GB": "1", "attention": "flash2", "loss": "eager", "sums": "fp32", "vocab": "32000"}
    alive = published.price({**row, "mem_kind": "torch max_memory_allocated, GiB"})
    reserved = published.price({**row, "mem_kind": "torch max_memory_reserved of rank 0 in GiB"})
    assert alive.predicted_gb < reserved.predicted_gb < 2 * alive.predicted_gb
    assert reserved.measured_gb == pytest.approx(2**30 / 1e9)


def test_torchs_cross_entropy_and_kept_logits_are_held(published, rows):
    """Of many words and narrow layers the worst moment is in the loss: torch's own holds three times the logits in fp32 there,
    one more than this package's; two micro-batches' logits in bf16 are what pipeline engines keep."""
    row = {**SMALL, "sp": "no", "tp": "1", "dp": "4", "vocab": "32000", "sums": "fp32", "attention": "flash2", "loss": "eager"}
    logits = 2 * 128 * 32000
    kinds = {"activations", "transient"}
    assert held(published, rows, row, kinds, plain_loss=True) == pytest.approx(4 * logits, rel=1e-3)
    assert held(published, rows, row, kinds, kept_logits=2) == pytest.approx(2 * 2 * logits, rel=1e-3)
    said = rows.cluster_of({**row, "notes": "torch cross entropy; outputs of two micro-batches kept"}).device
    assert (said.plain_loss, said.kept_logits) == (True, 2)
    tracker, narrow = MemTracker(), torch.zeros(256, 32000, dtype=torch.bfloat16, requires_grad=True)
    with tracker:
        torch.nn.functional.cross_entropy(narrow.float(), torch.zeros(256, dtype=torch.int64)).backward()
    total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert total == pytest.approx(3 * 4 * logits, rel=0.01)


def test_values_that_are_a_slice_keep_the_whole_product(rows, published):
    """Of 3 layers of 4 heads of 64: queries and keys lie there beside what attention keeps, with what turns them, and of
    several samples its result once more."""
    row = {**SMALL, "sp": "no", "tp": "1", "dp": "4", "vocab": "64", "seq_len": "2048", "sums": "fp32", "attention": "flash2",
           "loss": "merged", "n_layers": "3"}
    one = 2048 * 256 * 2
    for samples, each in ((1, one + one / 2 + one), (2, 2 * (2 * one + one / 2 + one))):  # two queries share a key; 4 turns
        said = {**row, "micro_batch": str(samples)}
        assert held(published, rows, said, {"activations"}, keeps_heads=True) == pytest.approx(3 * each, rel=0.02)
    said = rows.cluster_of({**row, "notes": "heads of one product; flat optimizer state"}).device
    assert (said.keeps_heads, said.flat_state) == (True, True)


def test_stages_of_as_many_modules_count_embedding_norm_and_head(rows):
    """Of 40 layers 43 modules: with two stages the first has the embedding and 21 layers, with four 10, 11, 11 and 8."""
    row = {**SMALL, "n_layers": "40", "pp": "2", "dp": "1", "tp": "2", "notes": "stages of as many modules"}
    blocks = [f"layers.{i}" for i in range(40)]
    assert {rows.cuts_of(way) for way in rows.completions_of(row)} == {"modules"}
    assert rows.pins_of(row, 4, blocks).stage_cuts == ("layers.21",)
    four = {**row, "pp": "4", "tp": "1"}
    assert rows.pins_of(four, 4, blocks).stage_cuts == ("layers.10", "layers.21", "layers.32")


def test_what_ran_out_of_memory_did_not_run(rows, steps):
    """No configuration stands in both files with the same kernels, and almost every row says which."""
    with (ROOT / "benchmarks" / "data" / "out_of_memory.csv").open(encoding="utf-8") as file:
        out = list(csv.DictReader(file))
    keys = ("n_gpus", "tp", "sp", "pp", "dp", "micro_batch", "seq_len", "recompute")

    def stated(row: dict[str, str]) -> tuple[object, ...]:
        return rows.kernel_of(row), rows.normed(row), *(rows.text_of(row, key).removesuffix(".0") for key in keys)

    open_ = [row for row in out if rows.kernel_of(row) is None]
    assert (len(out), len(open_)) == (257, 7)
    ran = {stated(row) for row in steps.values()}
    assert not [row["row_id"] for row in out if stated(row) in ran]


def test_plain_collectives_receive_pieces_and_come_back_late(published, rows):
    """Logits gathered over two tensor ranks, on each: half of them beside what is received and what is joined; and with a queue
    of launches between, other memory meanwhile, but less where attention makes the host wait."""
    row = {**SMALL, "sp": "no", "vocab": "32000", "sums": "fp32", "attention": "flash2", "loss": "eager", "n_layers": "24",
           "recompute": "none", "seq_len": "512"}
    notes = "gathered logits"
    assert rows.cluster_of({**row, "notes": notes}).device.plain_collectives
    assert rows.cluster_of({**row, "notes": f"{notes}; heads of one product"}).device.packed
    reserved = []
    for software in ({"plain_collectives": False}, {"plain_collectives": True, "packed": True}, {"plain_collectives": True}):
        said = {**row, "notes": notes}
        cluster = rows.cluster_of(said).with_kernels(**software)
        plan, _ = published.planned(published.graph_of(said), cluster, rows.pins_of(said, 4), "bf16")
        held = footprints(plan, rules_of(plan.graph)[0], 8.0, device=cluster.device, room=1e15)[0]
        reserved.append(held.reserved)
    logits = 2 * 2 * 512 * 32000
    assert reserved[0] + logits / 4 < reserved[1] < reserved[2]


def test_rows_have_the_room_that_context_and_communicators_leave(rows, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    room = importlib.import_module("room")
    device, way = rows.cluster_of(SMALL).device, {**SMALL, "n_gpus": "8", "zero/fsdp": "1"}
    taken = [device.memory_bytes - room.CONTEXT - room.room_of({**way, **degrees}) for degrees in (
        {"dp": "8", "tp": "1", "sp": "no"}, {"dp": "4", "tp": "2"}, {"dp": "2", "tp": "2", "pp": "2"},
        {"dp": "1", "tp": "1", "pp": "8", "sp": "no"})]
    pair, group = room.PAIR, room.GROUP
    assert taken == [group, 2 * group + pair, group + 4 * pair, group + 2 * pair]
    early = room.room_of({**way, "dp": "8", "tp": "1", "sp": "no", "notes": "torch 1.12"})
    assert early == device.memory_bytes - device.reserve_bytes - group


def test_rows_are_judged_by_what_the_allocator_reserves(published, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fits = importlib.import_module("fits")
    out, ran = tmp_path / "out_of_memory.csv", tmp_path / "ran.csv"
    wide = {**SMALL, "row_id": "S2", "micro_batch": "4096", "global_batch_seqs": "8192", "vocab": "128000"}
    for path, some in ((ran, [SMALL, {**SMALL, "gpu": "Other"}]), (out, [wide, SMALL])):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, SMALL)
            writer.writeheader()
            writer.writerows(some)
    assert fits.main([str(ran), str(out), "--json", "--cache", str(tmp_path)]) == 0
    *judged, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(one["row"], one["ran"]): one["fits"] for one in judged if not one["reason"]}
    assert found == {("S1", True): True, ("S1", False): True, ("S2", False): False}
    assert all(one["gib"] <= one["reserved_gib"] for one in judged)
    totals = [one for one in last["counts"] if one[0] in ("out of memory", "ran")]
    assert totals == [["ran", 1, 0, 0], ["out of memory", 2, 1, 1]]
    assert list(tmp_path.glob("*.held.json"))  # what rows hold is kept, and not replayed again
    monkeypatch.setattr(fits, "make_plan", None)
    assert fits.main([str(ran), str(out), "--cache", str(tmp_path)]) == 0
    assert "predicted not to fit" in capsys.readouterr().out


def test_state_is_split_over_all_data_ranks_unless_the_row_says_otherwise(rows):
    assert rows.pins_of(SMALL, 4).shard == 2
    assert rows.pins_of({**SMALL, "zero/fsdp": "HSDP 3"}, 4).shard is None
    assert rows.pins_of({**SMALL, "zero/fsdp": "0"}, 4).shard is None


def test_deepspeed_moves_every_parameter_alone(rows):
    row = {"gpu": "A100-80GB", "n_gpus": "8"}
    assert rows.cluster_of({**row, "notes": "DeepSpeed"}).device.alone
    assert not rows.cluster_of({**row, "schedule": "FSDP"}).device.alone


def test_an_rms_norm_is_one_kernel_unless_the_row_names_others(rows):
    notes = {"": True, "kernel=flash_attention2 + RMS kernel": True, "kernel=flash_attention2": False}
    assert {text: rows.normed({"notes": text}) for text in notes} == notes


@pytest.mark.parametrize(("attention", "masks", "products"), [("torch", True, 2), ("scores", False, 2), ("flash", False, 0)])
def test_attention_kernels_capture_as_what_they_run(published, rows, attention, masks, products):
    graph = published.captured.__wrapped__(rows.Shape("gpt", 2, 64, 4, 4, 128, 100, 0, 0, 2, 16), attention, "bf16")
    targets = [op.target for op in graph.ops]
    assert targets.count("aten.matmul.default") == 2 * products
    assert targets.count("aten.scaled_dot_product_attention.default") == (0 if products else 2)
    assert any(target.startswith("aten.masked_fill") for target in targets) == masks
    weights = [graph.values[param.value].shape for param in graph.params]
    assert (128, 64) in weights  # [out, in]


@pytest.mark.parametrize(("family", "attention", "batch"), [("gpt", "torch", 20), ("llama", "flash", 1), ("gpt", "scores", 8)])
def test_a_kept_graph_of_another_batch_is_what_would_be_captured(published, rows, tmp_path, family, attention, batch):
    """But for what it says of the user's tensors, which nobody asks of a published run."""
    shape, what = rows.Shape(family, 2, 64, 4, 4, 128, 100, 0, 0, batch, 16), (attention, "bf16", True)
    kept, made = published._kept_graph(shape, what, tmp_path), published.captured.__wrapped__(shape, *what)
    assert replace(kept, signature=made.signature) == made
    assert published._kept_graph(shape, what, tmp_path) == kept == published._kept_graph(shape, what, None)
    assert len(list(tmp_path.iterdir())) == 1 + (batch != 8)


@pytest.mark.parametrize(("norms", "kernels"), [(False, 0), (True, 5)])
def test_a_norm_is_one_operator_where_the_software_has_a_kernel_for_it(published, rows, norms, kernels):
    shape = rows.Shape("llama", 2, 64, 4, 4, 128, 100, 0, 0, 2, 16)
    graph = published.captured.__wrapped__(shape, "flash", "bf16", norms)
    assert sum(op.target.startswith("aten.rms_norm") for op in graph.ops) == kernels


@pytest.mark.parametrize(("columns", "accumulates"), [
    ({"vpp": "3", "source": "2205.05198"}, True), ({"recompute": "selective", "source": "someone 2023"}, True),
    ({"schedule": "1F1B-interleaved"}, True), ({"vpp": "3", "source": "2104.04473"}, False),
    ({"vpp": "1", "schedule": "1F1B", "recompute": "full", "source": "someone 2023"}, False), ({"notes": "NeMo"}, True),
])
def test_gradients_are_added_up_in_products_where_the_columns_speak_of_megatron(rows, columns, accumulates):
    row = {"gpu": "A100", "n_gpus": "8", "source": "", **columns}
    assert rows.cluster_of(row).device.accumulates == accumulates


def test_recomputation_stops_early_where_it_is_torchs(rows):
    row = {"gpu": "A100-80GB", "n_gpus": "8"}
    said = [{"schedule": "FSDP"}, {"dtype": "bf16-amp(FSDP MP=DEFAULT)"}, {"schedule": "1F1B"}, {}]
    assert [rows.cluster_of({**row, **more}).device.repeats for more in said] == [False, False, True, True]


def test_schedules_and_throughputs_become_pins_and_seconds(rows):
    row = {"pp": "4", "tp": "1", "global_batch_seqs": "32", "micro_batch": "1", "seq_len": "128", "n_gpus": "8", "dp": "2"}
    cases = {("2", "1F1B-interleaved"): ("interleaved1f1b", 2), ("", "interleaved 1F1B"): ("interleaved1f1b", None),
             ("1", "1F1B"): ("1f1b", 1), ("", ""): ("1f1b", 1), ("2", ""): ("interleaved1f1b", 2), ("", "GPipe"): ("gpipe", 1),
             ("", "ZB-H1"): ("zb", 1), ("", "zbv"): ("zbv", None)}
    for (vpp, schedule), wanted in cases.items():
        pins = rows.pins_of({**row, "vpp": vpp, "schedule": schedule}, 8)
        assert (pins.schedule, pins.virtual_stages) == wanted
    with pytest.raises(rows.Unpriced, match="schedule 'DualPipe' is not planned"):
        rows.pins_of({**row, "schedule": "DualPipe"}, 8)
    assert rows.measured_seconds({**row, "tokens_per_s_per_gpu": "512"}) == 1.0
    assert rows.measured_seconds({**row, "global_batch_seqs": "", "tokens_per_s_per_gpu": "32"}) == 1.0
    assert rows.measured_seconds({**row, "tokens_per_s_per_gpu": "512", "step_time_s": "3"}) == 3.0
    assert rows.measured_seconds(row) is None


def test_stages_of_equal_layers_where_no_other_cut_is_faster(rows):
    row = {**SMALL, "pp": "2", "tp": "1", "n_layers": "4", "vocab": "100"}
    blocks = ["a", "b", "c", "d"]
    assert rows.pins_of(row, 4, blocks).stage_cuts == ("c",)
    assert rows.pins_of(row, 4, blocks[:3]).stage_cuts is None
    assert rows.pins_of({**row, "vocab": "10000"}, 4, blocks).stage_cuts is None  # the head weighs more than a layer
    assert rows.pins_of({**row, "vpp": "2"}, 4, blocks).stage_cuts == ("b", "c", "d")


def test_batches_that_are_not_stated(rows):
    row = {"n_gpus": "16", "tp": "4", "micro_batch": "2", "seq_len": "100", "family": "llama"}
    assert rows.batch_of(row) == 8
    assert rows.batch_of({**row, "notes": "grad_accum=4; other"}) == 32
    assert rows.batch_of({**row, "step_time_s": "2", "tokens_per_s_per_gpu": "50"}) == 16
    assert rows.batch_of({"n_gpus": "16"}) == 0
    assert rows.pins_of(row, 16).microbatches == 1


def test_words_become_levels_and_recomputation(rows):
    levels = {"": None, "3.0": 3, "ZeRO-1": 1, "FSDP": 3, "none": 0, "DDP": 0, "distributed optimizer": 1, "2": 2}
    assert {text: rows.zero_of({"zero/fsdp": text}) for text in levels} == levels
    again = {"": "none", "None": "none", "no": "none", "selective": "selective", "full": "full", "yes": "full"}
    assert {text: rows.recompute_of({"recompute": text}) for text in again} == again
    with pytest.raises(rows.Unpriced, match="recompute = 'perhaps' is not known"):
        rows.recompute_of({"recompute": "perhaps"})


def test_with_stages_gradients_are_reduced_once(rows):
    levels = [("2", 2, 1, True), ("3", 2, 1, True), ("1", 2, 1, False), ("2", 1, 2, False), ("", 2, None, False)]
    for level, pp, planned, said in levels:
        row = {**SMALL, "zero/fsdp": level, "pp": str(pp), "dp": "", "n_gpus": str(2 * pp)}
        assert rows.pins_of(row, 2 * pp).zero == planned
        assert ("reduced once a step" in rows.assumed(row)) == said
    alone = {**SMALL, "zero/fsdp": "3", "pp": "2", "dp": "", "n_gpus": "4", "tp": "1", "global_batch_seqs": "4"}
    assert rows.pins_of(alone, 4).zero == 3  # of one micro-batch they are reduced once whatever the level
    assert "reduced once a step" not in rows.assumed(alone)


def test_balanced_routing_is_read_from_the_notes(rows):
    stated = {"Force balance; TP4": 1.0, "token drop CF1": 1.0, "force-balanced? dropless": 1.06, "": 1.06}
    for notes, expected in stated.items():
        row = {**SMALL, "ep": "2", "notes": notes}
        assert rows.imbalance_of(row) == expected
        assert ("1.06 times the mean" in rows.assumed(row)) == (expected > 1)


def test_experts_over_devices_side_by_side_share_the_tensor_ranks(rows):
    """Megatron-Core's parallel folding: ep x etp devices in a row, tp of which are one data rank."""
    folded = {("2", "8", "EP8 ETP1"): 4, ("1", "8", "ETP=1"): 8, ("4", "8", "ETP2"): 4}
    wanted = {**folded, ("2", "8", ""): 8, ("4", "2", "etp 4"): 2}
    for (tp, ep, notes), ranks in wanted.items():
        row = {**SMALL, "tp": tp, "ep": ep, "dp": "8", "n_gpus": str(8 * int(tp)), "notes": notes}
        assert rows.expert_ranks(row) == ranks
        assert rows.pins_of(row, 8 * int(tp)).ep == ranks
    with pytest.raises(rows.Unpriced, match="share tensor ranks"):
        rows.expert_ranks({**SMALL, "tp": "4", "ep": "2", "notes": "etp 1"})


def test_a_rate_alone_is_read(rows):
    assert rows.measured_tflops({"measured_tflops_per_gpu": "150"}, 1e15) == 150
    assert rows.measured_tflops({"mfu": "41.2%"}, 1e15) == pytest.approx(412)
    assert rows.measured_tflops({"mfu": "0.41"}, 1e15) == pytest.approx(410)
    assert rows.counted({"notes": "TF incl recompute", "recompute": "full"}) == 4 / 3
    assert rows.counted({"notes": "TF incl recompute", "recompute": "none"}) == 1


def test_a_row_goes_through_the_planner(published):
    result = published.price({**SMALL, "notes": "FlashAttention-2, fused_crossentropy; fp32 gradients"})
    assert result.reason == ""
    assert result.low_seconds == result.high_seconds == pytest.approx(result.predicted_seconds)
    assert 1e-5 < result.predicted_seconds < 0.1
    assert result.predicted_gb > 0
    assert result.error == pytest.approx(result.predicted_seconds / 0.01 - 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "Other"}, "no device of the catalogue for 'Other'"), ({"dtype": "int8"}, "no price for dtype 'int8'"),
        ({"vocab": ""}, "does not state vocab"), ({"step_time_s": ""}, "neither a step time nor a rate nor a peak memory"),
        ({"family": "rnn"}, "no architecture for family 'rnn'"), ({"family": ""}, "does not state family"),
        ({"tp": "3"}, "tp 3 x pp 1 x cp 1 do not divide 4 devices"),
        ({"dp": "8"}, "dp 8 x tp 2 x pp 1 x cp 1 are not 4 devices"),
        ({"ffn_hidden": ""}, "does not state ffn_hidden"), ({"n_heads": "3"}, "do not divide"),
        ({"gpu": ""}, "does not state gpu"), ({"micro_batch": "", "global_batch_seqs": ""}, "does not state the global batch"),
        ({"ep": "2", "dp": "1"}, "pin ep=2"), ({"tp": "many"}, "tp = 'many' is no degree"),
        ({"pp": "0"}, "pp = '0' is no degree"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(published, change, reason):
    result = published.price({**SMALL, **change})
    assert result.predicted_seconds is None
    assert reason in result.reason


def test_blank_columns_are_named(published):
    result = published.price({**SMALL, "dtype": "", "global_batch_seqs": "", "zero/fsdp": "", "sp": "", "recompute": ""})
    assert result.predicted_seconds is not None
    assert result.reason == ("assumed: dtype bf16, 4 sequences a step, attention of flash1 or flash2, "
                             "recomputation of none or all, a loss of one kernel or of many")
    assert result.low_seconds < result.predicted_seconds < result.high_seconds


def test_an_empty_row_is_a_row(published):
    result = published.price({})
    assert (result.reason, result.row) == ("the source does not state gpu", "")


def test_command_on_a_file_of_ones_own(published, tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, SMALL)
        writer.writeheader()
        writer.writerows([SMALL, {**SMALL, "gpu": "Other"}])
    assert published.main([str(path), "--json", "--cache", str(tmp_path / "kept")]) == 0
    *rows, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["no device" in row["reason"] for row in rows] == [False, True]
    assert {line["priced"] for line in last["sources"]} == {0, 1}
    monkeypatch.setattr(published, "price", None)  # what rows took is kept
    assert published.main([str(path), "--json", "--cache", str(tmp_path / "kept")]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [*rows, last]
    assert published.main([str(path), "--json", "--peaks"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1  # no row states a peak


def test_rank_correlation(published):
    result = published.price({**SMALL, "vocab": ""})
    from dataclasses import replace

    rows = [replace(result, predicted_seconds=float(p), measured_seconds=float(m)) for p, m in ((1, 1), (2, 3), (3, 2), (4, 4))]
    assert published.rank_correlation(rows) == pytest.approx(0.8)
    assert published.rank_correlation(rows[:3]) is None
    assert published.regrets(rows) == [{"source": "here", "model": "small", "device": "A100-80GB", "rows": 4, "regret": 0,
                                        "regret_of_three": 0}]
    held = [replace(row, measured_gb=10.0, predicted_gb=gb) for row, gb in zip(rows, (9.0, 12.0, 10.0, None), strict=True)]
    both = {"rows": 3, "mean": pytest.approx(0.1), "bias": pytest.approx(1 / 30), "worst": pytest.approx(0.2)}
    named = ("all", "training runs", "here")
    assert published.peaks(held) == [{"source": name, **both} for name in named]
    apart = {line["source"]: line["rows"] for line in published.peaks([replace(held[0], profile=True), *held[1:]])}
    assert apart == {"all": 3, "training runs": 2, "profiles": 1, "here": 3}
    worse = [replace(rows[0], predicted_seconds=9.0), *rows[1:]]
    assert published.regrets(worse)[0]["regret"] == 2.0
