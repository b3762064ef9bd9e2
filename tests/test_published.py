"""The benchmark of published runs: rows are read right, and go through the planner."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


def test_every_row_of_the_data_names_a_known_cluster_and_legal_pins(published, steps):
    for row in steps.values():
        cluster = published.cluster_of(row)
        assert cluster.world == int(float(row["n_gpus"]))
        assert published.pins_of(row, cluster.world).dp == cluster.world // int(
            float(row["tp"]) * float(row["pp"]) * float(row["cp"] or 1)
        )


def test_columns_become_hardware(published):
    row = {"gpu": "H100-80GB", "n_gpus": "16", "gpus_per_node": "8"}
    wires = {"": "dgx-h100", "NVLink4 + EFA": "p5", "8x400Gb NDR": "dgx-h100"}
    assert {text: published.cluster_of({**row, "interconnect": text}).node.name for text in wires} == wires
    older = {**row, "gpu": "A100-80GB"}
    wires = {"": "dgx-a100", "EFA": "p4d", "1600Gbps RoCE/node": "roce1600", "8x200Gb HDR IB": "dgx-a100"}
    assert {text: published.cluster_of({**older, "interconnect": text}).node.name for text in wires} == wires


def test_columns_become_kernels(published):
    cases = {
        "kernel=flash_attention2 + RMS kernel": ("flash2", True, False),
        "kernel=flash_attentionv1.0.8": ("flash1", True, False), "kernel=torch": ("torch", True, False),
        "kernel=fused": ("scores", True, False), "flash attention": ("flash", True, False),
        "NeMo2; TP comm overlap": ("flash3", False, True), "": (None, True, False),
    }
    for notes, (kernel, eager, overlapped) in cases.items():
        row = {"gpu": "H100-80GB", "n_gpus": "8", "notes": notes}
        device = published.cluster_of(row).device
        assert (published.kernel_of(row), not device.fused, device.overlapped) == (kernel, eager, overlapped)
        assert device.attention_kernel == (kernel if kernel and kernel.startswith("flash") else "flash2")


def test_a_row_older_than_flash_attention_ran_on_scores(published):
    dates = {"A et al. (2104.04473)": (2021, 4), "README (Sept 2020)": (2020, 12), "B 2311.05610": (2023, 11), "a sheet": None}
    assert {text: published.published_in({"source": text}) for text in dates} == dates
    kernels = [published.kernel_of({"source": text, "notes": ""}) for text in dates]
    assert kernels == ["scores", "scores", None, None]
    assert published.kernel_of({"source": "2020", "notes": "kernel=torch"}) == "torch"


@pytest.mark.parametrize(("attention", "masks", "products"), [("torch", True, 2), ("scores", False, 2), ("flash", False, 0)])
def test_attention_kernels_capture_as_what_they_run(published, attention, masks, products):
    graph = published.captured.__wrapped__("dense-gpt", 2, 64, 4, 4, 128, 100, 0, 0, 2, 16, attention, "bf16")
    targets = [op.target for op in graph.ops]
    assert targets.count("aten.matmul.default") == 2 * products
    assert targets.count("aten.scaled_dot_product_attention.default") == (0 if products else 2)
    assert any(target.startswith("aten.masked_fill") for target in targets) == masks
    weights = [graph.values[param.value].shape for param in graph.params]
    assert (128, 64) in weights  # [out, in]


@pytest.mark.parametrize(("norms", "kernels"), [("", 0), ("kernel", 5)])
def test_a_norm_is_one_operator_where_the_software_has_a_kernel_for_it(published, norms, kernels):
    graph = published.captured.__wrapped__("llama", 2, 64, 4, 4, 128, 100, 0, 0, 2, 16, "flash", "bf16", norms)
    assert sum(op.target.startswith("aten.rms_norm") for op in graph.ops) == kernels


def test_recomputation_stops_early_where_it_is_torchs(published):
    row = {"gpu": "A100-80GB", "n_gpus": "8"}
    said = [{"schedule": "FSDP"}, {"dtype": "bf16-amp(FSDP MP=DEFAULT)"}, {"schedule": "1F1B"}, {}]
    assert [published.cluster_of({**row, **more}).device.repeats for more in said] == [False, False, True, True]


def test_schedules_and_throughputs_become_pins_and_seconds(published):
    row = {"pp": "4", "tp": "1", "global_batch_seqs": "32", "micro_batch": "1", "seq_len": "128", "n_gpus": "8", "dp": "2"}
    cases = {("2", "1F1B-interleaved"): ("interleaved1f1b", 2), ("", "interleaved 1F1B"): ("interleaved1f1b", None),
             ("1", "1F1B"): ("1f1b", 1), ("", ""): ("1f1b", 1)}
    for (vpp, schedule), wanted in cases.items():
        pins = published.pins_of({**row, "vpp": vpp, "schedule": schedule}, 8)
        assert (pins.schedule, pins.virtual_stages) == wanted
    assert published.measured_seconds({**row, "tokens_per_s_per_gpu": "512"}) == 1.0
    assert published.measured_seconds({**row, "global_batch_seqs": "", "tokens_per_s_per_gpu": "32"}) == 1.0
    assert published.measured_seconds({**row, "tokens_per_s_per_gpu": "512", "step_time_s": "3"}) == 3.0
    assert published.measured_seconds(row) is None


def test_a_row_goes_through_the_planner(published):
    result = published.price(SMALL)
    assert result.reason == ""
    assert 1e-5 < result.predicted_seconds < 0.1
    assert result.predicted_gb > 0
    assert result.error == pytest.approx(result.predicted_seconds / 0.01 - 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "Other"}, "no device of the catalogue for 'Other'"), ({"dtype": "fp8"}, "no price for dtype 'fp8'"),
        ({"vocab": ""}, "does not state vocab"), ({"step_time_s": ""}, "neither a step time nor a rate nor a peak memory"),
        ({"family": "rnn"}, "no architecture for family 'rnn'"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(published, change, reason):
    result = published.price({**SMALL, **change})
    assert result.predicted_seconds is None
    assert reason in result.reason


def test_command_on_a_file_of_ones_own(published, tmp_path, capsys):
    path = tmp_path / "mine.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, SMALL)
        writer.writeheader()
        writer.writerows([SMALL, {**SMALL, "gpu": "Other"}])
    assert published.main([str(path), "--json"]) == 0
    *rows, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(row["reason"]) for row in rows] == [False, True]
    assert {line["priced"] for line in last["sources"]} == {0, 1}


def test_rank_correlation(published):
    result = published.price({**SMALL, "vocab": ""})
    from dataclasses import replace

    rows = [replace(result, predicted_seconds=float(p), measured_seconds=float(m)) for p, m in ((1, 1), (2, 3), (3, 2), (4, 4))]
    assert published.rank_correlation(rows) == pytest.approx(0.8)
    assert published.rank_correlation(rows[:3]) is None
