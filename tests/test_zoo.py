"""The zoo: its data are complete and stay blank where nothing was published; rows are priced, or say why not."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.cost.cluster import Cluster
from meshwright.cost.spread import spreads
from meshwright.errors import InputError
from meshwright.published import zoo
from meshwright.published.architectures import FAMILIES, Architecture, build
from meshwright.published.zoo import Comparison, Published, System

SYSTEMS = zoo.systems()
NAMES = (
    *(f"Megatron-LM GPT {size}B" for size in (1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0)), "GPT-3 175B",
    "LLaMA 1 65B", "Llama 2 70B", "Llama 3 70B", "Llama 3.1 405B, 8k, 8,192 GPUs", "Llama 3.1 405B, 8k, 16,384 GPUs",
    "Llama 3.1 405B, 131k, 16,384 GPUs", "PaLM 540B", "PaLM 2", "Gemini 1.0 Ultra", "Gemini 1.5 Pro", "DeepSeek 67B",
    "DeepSeek-V2", "DeepSeek-V3", "Kimi K2", "Solar Open", "GLM-5",
)
SMALL = Architecture("llama", layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=1000)


def named(name: str) -> System:
    (found,) = zoo.systems(name=name)
    return found


def small(**changes: object) -> System:
    degrees = {"dp": 2, "tp": 2, "pp": 1, "zero": 1, "recompute": "none"}
    published = Published(tflops=1.0)
    system = System("small", "2026-01", "here", degrees, published, cluster="a100:1x4", batch=8, sequence=64, model=SMALL)
    return replace(system, **changes)  # type: ignore[arg-type]


def test_every_system_of_the_seeds_is_there() -> None:
    assert tuple(system.name for system in SYSTEMS) == NAMES


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_an_entry_is_well_formed(system: System) -> None:
    assert len(system.source) > 10
    assert system.date[:2] == "20"
    if not system.obstacles():
        assert system.pins().dp == system.degrees.get("dp")
    degrees = system.degrees
    assert not set(degrees.get("undisclosed", ())) & set(degrees)
    if system.device is not None:
        Cluster.parse(f"{system.device}:1x1")
    if system.cluster is not None:
        assert Cluster.parse(system.cluster).device == Cluster.parse(f"{system.device}:1x1").device
        product = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
        assert "dp" not in degrees or degrees["dp"] * product == system.devices
    if "dp" in degrees and "microbatches" in degrees:
        assert system.batch is not None
        assert system.batch % (degrees["dp"] * degrees["microbatches"]) == 0


def test_blanks_stay_blank() -> None:
    for name in ("PaLM 2", "Gemini 1.0 Ultra", "Gemini 1.5 Pro"):
        system = named(name)
        assert set(vars(system.published).values()) == {None, "model"}
        assert (system.model, system.batch, system.sequence, system.cluster) == (None, None, None, None)
        row = zoo.price(system).as_dict()
        assert row["predicted"] is None
        assert "not disclosed: model, number of devices, batch, sequence" in row["reason"]
        assert row["published"]["tflops"] is None
    assert named("Gemini 1.5 Pro").device is None
    assert named("PaLM 2").shown_degrees == "pp=1 dp=? tp=? ep=?"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Llama 2", "not disclosed: number of devices"), ("67B", "not disclosed: number of devices"),
        ("Llama 3 70B", "not disclosed: batch"),
    ],
)
def test_what_cannot_be_priced_keeps_its_row(name: str, reason: str) -> None:
    row = zoo.price(named(name))
    assert reason in row.reason
    assert row.predicted is None
    assert row.ratio is None


def test_what_no_source_says_may_be_assumed_and_is_told_apart() -> None:
    system = named("DeepSeek-V2")
    assert (system.cluster, system.devices) == (None, None)
    assert "not disclosed: number of devices" in system.obstacles()
    taken = system.taken()
    assert (taken.obstacles(), taken.devices, taken.pins().dp) == ([], 1024, 64)
    assert "dp=?" in system.shown_degrees
    assert taken.pins().schedule == "1f1b"  # a split backward recomputes nothing, which the source does
    assert named("DeepSeek-V3").taken().pins().schedule == "1f1b"
    with pytest.raises(InputError, match="schedule is stated"):
        small(degrees={"dp": 4, "schedule": "gpipe"}, assumed={"schedule": "1f1b"})
    priced = zoo.price(small(cluster=None, assumed={"cluster": "a100:1x4"}))
    assert priced.as_dict()["assumed"] == {"cluster": "a100:1x4"}
    assert "(assumed: cluster=a100:1x4)" in " ".join(_text([priced]).split())
    for assumed, says in (({"batch": 4}, "batch is stated"), ({"dp": 4}, "dp is stated"), ({"size": 4}, "size cannot be")):
        with pytest.raises(InputError, match=says):
            small(assumed=assumed)


@pytest.mark.parametrize("name", ["GPT 1.7B", "GPT 39.1B", "GLM-5"])
def test_parameters_of_the_table(name: str) -> None:
    system = named(name)
    assert system.model is not None
    counted = sum(p.numel() for p in build(system.model, 2048, system.attention).parameters()) / 1e9
    assert counted == pytest.approx(system.published.parameters, rel=0.03)


def test_a_row_without_a_pipeline_is_priced() -> None:
    row = zoo.price(named("GPT 1.7B"))
    assert row.reason == ""
    assert row.predicted is not None
    assert row.predicted.fits
    assert row.predicted.layout == "dp=32 zero=0 1 micro-batch full recompute"
    assert row.ratio == pytest.approx(1.12, abs=0.01)  # as calibrated: a price that changes says so here
    assert zoo.recompute_flops(row.system) / 1e12 / 32 / row.predicted.step_seconds == pytest.approx(row.predicted.tflops)


def test_a_row_is_priced_in_its_precision() -> None:
    wide = replace(SMALL, hidden=2048, ffn=8192, heads=16, kv_heads=16)
    bf16, fp8 = (
        zoo.price(small(cluster="h100:1x4", device="h100", sequence=1024, model=wide, precision=precision)).predicted
        for precision in ("bf16", "fp8")
    )
    assert bf16 is not None
    assert fp8 is not None
    assert 0.5 * bf16.step_seconds < fp8.step_seconds < 0.95 * bf16.step_seconds


def test_a_row_with_a_pipeline_is_priced() -> None:
    row = zoo.price(small(degrees={"dp": 1, "tp": 2, "pp": 2, "microbatches": 4, "zero": 0}))
    assert row.reason == ""
    assert row.predicted is not None
    assert row.predicted.layout.startswith("pp=2 tp=2 zero=0 ")
    assert row.predicted.step_seconds > 0


def test_the_planners_own_best_is_not_slower() -> None:
    row = zoo.price(small(), search=True)
    assert row.predicted is not None
    assert row.best is not None
    assert row.best.step_seconds <= row.predicted.step_seconds * 1.01
    assert "times as fast" in _text([row], search=True)
    assert row.best.free_bytes > (row.predicted.free_bytes or 0.0)  # what ran is held to all there is, what we would do is not
    assert row.best.capacity_bytes < row.capacity_bytes
    assert "left free; rests on" in " ".join(_text([row], search=True).split())
    wide = replace(row, best=replace(row.best, hidden=0.25, gathers_over=1024))
    assert all(word in _text([wide], search=True) and word not in _text([row], search=True) for word in ("25%", "1024"))


def test_what_does_not_fit_is_priced_and_says_so() -> None:
    tight = small(batch=4096, sequence=4096, cluster="a10:1x4", model=replace(SMALL, layers=8))
    row = zoo.price(tight)
    assert row.predicted is not None
    assert not row.predicted.fits
    assert row.capacity_bytes is not None
    assert row.predicted.bytes_per_rank > row.capacity_bytes
    assert "does not fit" in _text([row])


def test_without_transformers_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers: pip install" in zoo.price(small()).reason
    assert build(Architecture("gpt", 1, 64, 4, 256, 100), 16) is not None  # built here


def test_the_architectures_have_a_loss() -> None:
    for family in ("gpt", "palm", "llama"):
        one = Architecture(family, layers=1, hidden=64, heads=4, kv_heads=1 if family == "palm" else 4, ffn=128, vocab=100)
        ids = torch.randint(0, 100, (2, 16))
        model = build(one, 16, "eager" if family == "gpt" else "sdpa").to_empty(device="cpu")
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.02)
        for buffer in model.buffers():
            buffer.zero_()  # no rotation, and no mask
        loss = model(input_ids=ids, labels=ids)["loss"]
        assert loss.item() == pytest.approx(math.log(100), abs=0.1)  # it knows nothing yet
    assert "palm" in FAMILIES


def test_both_attentions_of_the_gpt_agree() -> None:
    torch.manual_seed(0)
    one = Architecture("gpt", layers=1, hidden=64, heads=4, ffn=128, vocab=100)
    plain, eager = build(one, 16).to_empty(device="cpu"), build(one, 16, "eager").to_empty(device="cpu")
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.2)
    eager.load_state_dict(plain.state_dict())
    ids = torch.randint(0, 100, (2, 16))
    torch.testing.assert_close(plain(ids, ids)["loss"], eager(ids, ids)["loss"])


def test_bad_entries_are_refused(tmp_path: Path) -> None:
    entry = {"name": "x", "date": "2020", "source": "here", "degrees": {}}
    with pytest.raises(InputError, match="unknown keys colour"):
        System.of({**entry, "colour": 1})
    with pytest.raises(InputError, match="unknown degrees qp"):
        System.of({**entry, "degrees": {"qp": 2}})
    with pytest.raises(InputError, match="counts='x'"):
        System.of({**entry, "published": {"counts": "x"}})
    with pytest.raises(InputError, match="precision 'fp4' is none of fp32"):
        System.of({**entry, "precision": "fp4"})
    with pytest.raises(InputError, match="no architecture for family 'rnn'"):
        System.of({**entry, "model": {"family": "rnn", "layers": 1, "hidden": 1, "heads": 1, "ffn": 1, "vocab": 1}})
    with pytest.raises(InputError, match="no system named 'unheard'"):
        zoo.systems(name="unheard")


def test_rows_are_jsonable_and_notes_are_gathered() -> None:
    rows = [Comparison(system) for system in SYSTEMS]
    assert len(json.loads(json.dumps([row.as_dict() for row in rows]))) == len(NAMES)
    assert sum("fp16, priced as bf16" in note for note in zoo.notes(rows)) == 1
    assert "Kimi K2" in _text(rows)


def test_the_file_has_no_unknown_tables() -> None:
    data = tomllib.loads((Path(zoo.__file__).with_name("zoo.toml")).read_text(encoding="utf-8"))
    assert set(data) == {"system"}


def _text(rows: list[Comparison], search: bool = False) -> str:
    from rich.console import Console

    console = Console(width=300, emoji=False)
    with console.capture() as captured:
        console.print(zoo.table(rows, search))
    return captured.get()


@pytest.mark.slow
@pytest.mark.parametrize(
    "system", [s for s in SYSTEMS if s.taken().obstacles() or (s.model is not None and s.model.layers <= 40)],
    ids=lambda s: s.name,
)
def test_systems(system: System) -> None:
    """All but the deepest, which take minutes: ``meshwright zoo`` prices them (``benchmarks/results/zoo.md``)."""
    row = zoo.price(system)
    assert (row.predicted is None) == bool(system.taken().obstacles()), row.reason
    if "GPT" in system.name:
        assert row.ratio is not None
        assert spreads()["nodes"].low <= row.ratio <= 1.2  # 5 in 100 measured rows ran faster than that
