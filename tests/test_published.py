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


def test_columns_become_hardware_and_kernels(published, steps):
    roce = next(row for row in steps.values() if "RoCE" in row["interconnect"])
    assert published.cluster_of(roce).node.name == "roce1600"
    named = next(row for row in steps.values() if "kernel=flash_attention2" in row["notes"])
    assert published.cluster_of(named).device.attention_kernel == "flash2"
    older = next(row for row in steps.values() if "kernel=torch" in row["notes"])
    assert published.kernel_of(older) == "eager"


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
        ({"vocab": ""}, "does not state vocab"), ({"step_time_s": ""}, "neither a step time nor a peak memory"),
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
