"""Calibration: known constants come back, a source that is left out has no say, and what is written is what is read."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from meshwright.cost import spread
from meshwright.cost.catalogue import catalogue
from meshwright.cost.cluster import Cluster
from meshwright.ir.mesh import Mesh

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def calibrate() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("calibrate", ROOT / "benchmarks" / "calibrate.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["calibrate"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


ROW = {
    "row_id": "S1", "source": "here", "source_ref": "someone/something@HEAD", "model_name": "small", "family": "llama",
    "n_layers": "2", "hidden": "256", "n_heads": "4", "n_kv_heads": "2", "ffn_hidden": "512", "vocab": "1000",
    "gpu": "A100-80GB", "n_gpus": "4", "gpus_per_node": "8", "dtype": "bf16", "tp": "2", "sp": "yes", "pp": "1", "dp": "2",
    "zero/fsdp": "1", "micro_batch": "2", "global_batch_seqs": "8", "seq_len": "128", "recompute": "none",
    "step_time_s": "0.01", "trust": "A", "notes": "FlashAttention-2",
}


def cases(calibrate, count: int, source: str = "a/a") -> list:
    rows = [{**ROW, "row_id": f"{source}{i}", "source_ref": source, "seq_len": str(128 + i)} for i in range(count)]
    return [calibrate.Case(row, (row,), source, (source, "small", "a100")) for row in rows]


def test_regret_is_what_the_first_choice_costs(calibrate):
    one, two = cases(calibrate, 2)
    slow = calibrate.Case({**two.row, "step_time_s": "0.012"}, two.completions, two.source, two.group)
    right = [calibrate.Judged(one, "node", 0.0, 0.0), calibrate.Judged(slow, "node", 0.0, 0.1)]
    wrong = [calibrate.Judged(one, "node", 0.0, 0.3), calibrate.Judged(slow, "node", 0.0, -0.1)]
    assert calibrate.regret_of(right) == {"groups": 1, "first within 5%": 1, "first three within 5%": 1, "worst": 0}
    assert calibrate.regret_of(wrong)["worst"] == pytest.approx(0.2)
    assert calibrate.apart_of(wrong) == pytest.approx(np.exp(0.4) - 1, abs=1e-3)


def test_a_configuration_that_was_measured_twice_is_no_choice(calibrate):
    one, two = cases(calibrate, 2)
    again = replace(one, row={**one.row, "step_time_s": "0.013", "notes": "FlashAttention-2; a later version"})
    both = [calibrate.Judged(one, "node", 0.0, 0.3), calibrate.Judged(again, "node", 0.0, 0.0)]
    assert calibrate.regret_of(both) == {"groups": 0}
    other = calibrate.Judged(replace(two, row={**two.row, "step_time_s": "0.012"}), "node", 0.0, 0.0)
    assert calibrate.regret_of([*both, other])["worst"] == pytest.approx(0.012 / 0.0115 - 1)


def test_errors_that_are_linear_give_the_constants_back_and_one_wild_row_does_not_pull(calibrate):
    random = np.random.default_rng(0)
    slopes = random.normal(size=(200, 3))
    wanted = np.array([0.1, -0.05, 0.2])
    priors = [calibrate.Prior(1.0, 10.0)] * 3
    errors = -slopes @ wanted
    errors[7] += 5.0
    found = calibrate.solve(errors, slopes, np.ones(200), np.zeros(3), priors)
    assert found == pytest.approx(wanted, abs=0.01)
    tight = [calibrate.Prior(1.0, 1e-4)] * 3  # what a constant is at all outweighs few rows
    assert calibrate.solve(errors, slopes, np.ones(200), np.zeros(3), tight) == pytest.approx(0.0, abs=1e-3)


def test_a_source_that_is_left_out_has_no_say(calibrate):
    both = [*cases(calibrate, 6, "a/a"), *cases(calibrate, 6, "b/b")]
    path = ("device", "a100-80g", "matmul_efficiency")
    x = np.array([calibrate.PRIORS[path[2]].x(0.7)])
    slopes = np.full((12, 1), -1.0)
    found = []
    for theirs in (0.3, -0.3):
        calibration = calibrate.Calibration(calibrate.Pricer(catalogue(), None), both, (path,), x)
        errors = np.array([0.1] * 6 + [theirs] * 6)
        found.append((calibration.without("b/b", errors, slopes)[path], calibration.without("a/a", errors, slopes)[path]))
        judged = calibration.linear(errors, slopes)
        moved = [calibrate.PRIORS[path[2]].x(one) - x[0] for one in found[-1]]  # without b, without a
        assert [one.fitted for one in judged] == list(errors)
        assert [one.left_out for one in judged] == pytest.approx([0.1 - moved[1]] * 6 + [theirs - moved[0]] * 6)
    assert found[0][0] == found[1][0]  # whatever b measured
    assert found[0][0] > 0.7  # predicted too slow by a's rows: faster
    assert found[0][1] > found[1][1]


def test_sources_are_who_measured(calibrate):
    rows = [{"source_ref": "mosaicml/llm-foundry@HEAD:x"}, {"source_ref": "NVIDIA/dgxc@v1:a"}, {"source_ref": "NVIDIA/dgxc@v2"},
            {"source_ref": "huggingface/nanotron:docs"}, {"source_ref": "a copy (who/nanotron-playbook:data"},
            {"source": "Llama 3 Herd of Models (2407)", "source_ref": "seeds"}]
    names = [calibrate.source_of(row) for row in rows]
    assert names == ["mosaicml/llm-foundry", "nvidia/dgxc", "nvidia/dgxc", "nanotron", "nanotron", "llama 3 herd of"]


def test_rows_are_thinned_evenly_in_every_model(calibrate):
    kept = calibrate.thinned(cases(calibrate, 9), 3)
    assert [case.row["seq_len"] for case in kept] == ["128", "132", "136"]
    assert len(calibrate.thinned([*cases(calibrate, 2), *cases(calibrate, 5, "b/b")], 3)) == 5


def test_other_constants_reach_the_devices_that_have_them(calibrate):
    path = ("device", "a100-80g", "matmul_efficiency")
    tables = calibrate.patched(catalogue(), {path: 0.5})
    assert catalogue()["device"]["a100-80g"]["matmul_efficiency"]["value"] != 0.5
    for spec, reached in (("a100:1x8", True), ("a100-40g:1x8", True), ("h100:1x8", False)):
        cluster = Cluster.parse(spec).with_kernels("flash1", fused=False)
        other = calibrate.recast(cluster, tables)
        assert calibrate.uses(cluster, catalogue(), path) == reached
        assert (other.device.matmul_efficiency == 0.5) == reached
        assert (other.device.attention_kernel, other.device.fused) == ("flash1", False)
    values = {("node", "dgx-a100", "congestion"): 0.5}
    assert calibrate.recast(Cluster.parse("h100:4x8"), calibrate.patched(catalogue(), values)).node.congestion == 0.5


def test_a_calibration_of_ones_own_rows(calibrate, monkeypatch):
    """Times that the model itself makes at other constants: the fit finds its way to them."""
    path = ("device", "a100-80g", "memory_efficiency")
    pricer = calibrate.Pricer(catalogue(), None)
    monkeypatch.setitem(calibrate.PRIORS, "memory_efficiency", calibrate.Prior(0.5, 5.0))
    row = {**ROW, "hidden": "1024", "ffn_hidden": "2048", "vocab": "32000", "seq_len": "512"}
    case = calibrate.Case(row, (row,), "a/a", ("a/a", "small", "a100"))
    seconds = 0.01 * np.exp(pricer.errors(case, [{path: 0.55}])[0])
    mine = calibrate.Case({**row, "step_time_s": str(seconds)}, ({**row, "step_time_s": str(seconds)},), "a/a", case.group)
    start = np.array([calibrate.PRIORS["memory_efficiency"].x(0.7)])
    calibration = calibrate.Calibration(pricer, [mine], (path,), start)
    calibration.run(3, lambda text: None)
    assert calibration.values(calibration.x)[path] == pytest.approx(0.55, rel=0.03)


def test_what_is_written_is_what_is_read(calibrate, tmp_path):
    for name in ("catalogue.toml", "spread.toml"):
        shutil.copy(calibrate.COST / name, tmp_path / name)
    values = {("device", "h100-80g", "depth"): 93.25, ("node", "dgx-a100", "congestion"): 0.125}
    spreads = {"all": spread.Spread(0.8, 1.3, 7), "many nodes": spread.Spread(0.9, 2.0, 12)}
    calibrate.write(values, tmp_path)
    calibrate.write_spread(spreads, 0.07, "0123456789abcdef", tmp_path)
    before, after = catalogue(), tomllib.loads((tmp_path / "catalogue.toml").read_text())
    for kind, name, key in values:
        assert after[kind][name][key].pop("value") == pytest.approx(values[kind, name, key], rel=1e-3)
    changed = {(k, n, key) for k in ("device", "node") for n in before[k] for key in before[k][n]
               if after[k][n][key] != before[k][n][key]}
    assert changed == set(values)
    text = tomllib.loads((tmp_path / "spread.toml").read_text())
    assert text["regime"]["many nodes"] == {"low": 0.9, "high": 2.0, "rows": 12}
    assert (text["order"]["apart"], text["made"]["of"]) == (0.07, "0123456789abcdef")


def test_a_spread_says_of_which_rows_and_constants_it_is(calibrate, tmp_path):
    other = {("device", "h100-80g", "depth"): 93.25}
    changed = tmp_path / "steps.csv"
    changed.write_text(calibrate.FILES[0].read_text(encoding="utf-8").replace("R00000", "R99999"), encoding="utf-8")
    digests = [calibrate.origin(), calibrate.origin(tables=calibrate.patched(catalogue(), other)),
               calibrate.origin([changed, calibrate.FILES[1]])]
    assert (len(set(digests)), digests[0]) == (3, calibrate.origin())


def test_the_spread_of_the_package_is_of_its_rows_and_constants(calibrate):
    """Where rows or constants changed, `calibrate.py --most 30 --linear --rounds 0 --cache FOLDER --write` is due."""
    made = tomllib.loads((calibrate.COST / "spread.toml").read_text(encoding="utf-8"))["made"]
    assert made == {"of": calibrate.origin()}


def test_plans_are_priced_at_constants_beside_without_a_search(calibrate, tmp_path):
    """As a search prices them, and kept: what a row took is not asked for again."""
    row = {**ROW, "hidden": "512", "ffn_hidden": "1024", "pp": "2", "tp": "1"}
    case = calibrate.Case(row, (row,), "a/a", ("a/a", "small", "a100"))
    pricer, way = calibrate.Pricer(catalogue(), tmp_path), calibrate.Way.of(row, tmp_path)
    path = ("device", "a100-80g", "memory_efficiency")
    tables = calibrate.patched(catalogue(), {path: 0.5})
    made = way.plan(catalogue())
    assert way.error(way.again(made, catalogue())) == pytest.approx(way.error(made), rel=1e-9)
    assert way.error(way.again(made, tables)) == pytest.approx(way.error(way.plan(tables)), rel=1e-6)
    known = pricer.slopes(case, {}, [{path: 0.5}])
    assert known[1][0] == pytest.approx(way.error(way.again(made, tables)) - way.error(made))
    assert known == calibrate.Pricer(catalogue(), tmp_path).slopes(case, {}, [{path: 0.5}])
    assert len(list(tmp_path.glob("*.slopes.json"))) == 1


def test_spreads_hold_most_rows(calibrate):
    items = [calibrate.Judged(case, "node", 0.0, error)
             for case, error in zip(cases(calibrate, 101), np.linspace(-0.5, 0.5, 101), strict=True)]
    found = calibrate.spreads_of(items)
    assert set(found) == {"all", "node"}
    assert found["node"].low == pytest.approx(np.exp(-0.45), rel=0.02)
    assert found["node"].high == pytest.approx(np.exp(0.45), rel=0.02)


@pytest.mark.parametrize(("sizes", "per_node", "wanted"), [
    ({"dp": 8}, 8, "node"), ({"dp": 16, "tp": 2}, 8, "nodes"), ({"dp": 128, "tp": 2}, 8, "many nodes"),
    ({"dp": 1, "tp": 16}, 8, "tensor across nodes"), ({"pp": 2, "tp": 4}, 8, "pipeline in a node"),
    ({"pp": 4, "dp": 32, "tp": 8}, 8, "pipeline"),
])
def test_regimes(sizes, per_node, wanted):
    assert spread.regime(Mesh(tuple(sizes), tuple(sizes.values())), per_node) == wanted


def test_devices_that_were_not_calibrated_have_wider_intervals(monkeypatch):
    mesh = Mesh.of(dp=8)
    assert [spread.calibrated(name) for name in ("a100-40g", "h100-80g", "h100-96g", "mi300x", "l40s", "mine")] == [
        True, True, True, False, False, False]
    few = Mesh(("pp", "dp"), (2, 4))
    known = {"all": spread.Spread(0.9, 1.2, 300), "pipeline in a node": spread.Spread(0.8, 1.1, 19)}
    with monkeypatch.context() as patch:  # rows too few for quantiles: at least what all rows say
        patch.setattr(spread, "spreads", lambda: known)
        assert spread.spread(Cluster.parse("a100:1x8"), few)[:2] == (0.8, 1.2)
    assert spread.spread(Cluster.parse("a100:1x8"), Mesh.of(tp=16)) == spread.spreads()[spread.ALL]  # of no regime of its own
    own, other = (spread.spread(Cluster.parse(f"{name}:1x8"), mesh) for name in ("a100", "l40s"))
    assert other.low < own.low <= 1 <= own.high < other.high
