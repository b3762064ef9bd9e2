"""Bad input gets a clear error and changes nothing: the model's parameters are what they were, and a good call works after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright import api
from meshwright.errors import InputError
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import Plan, PlanError


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().sum() * scale


EXAMPLE: dict[str, Any] = {"x": torch.zeros(4, 8)}


def plan(**changed: Any) -> Plan:
    """A plan of Net; some argument is another."""
    given: dict[str, Any] = {"cluster": "cpu:1x2", "example_inputs": EXAMPLE, "loss_fn": lambda y: y, **changed}
    return mw.plan(Net(), given.pop("cluster"), given.pop("example_inputs"), **given)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"tpp": 2}, ["unknown pin 'tpp'", "did you mean 'tp'?", "Known pins: dp, shard"]),
        ({"model layers": 2}, ["unknown pin 'model layers'; known pins: dp, shard"]),
        ({"dp": 0}, ["dp=0 is not a positive integer"]),
        ({"dp": True}, ["dp=True is not a positive integer"]),
        ({"zero": 4}, ["zero=4", "0 (replicas), 1, 2 and 3"]),
        ({"recompute": "some"}, ["recompute='some' is unknown", "none, selective, full"]),
        ({"dp": 4, "shard": 3}, ["shard=3 must divide dp=4"]),
        ({"shard": 2, "zero": 0}, ["shard=2 and zero=0 contradict"]),
        ({"sequence_parallel": True, "tp": 1}, ["sequence_parallel=True needs tp > 1"]),
        ({"sequence_parallel": True, "dp": 2}, ["sequence_parallel=True needs tp > 1: dp=2", "leaves no ranks for it"]),
        ({"dp": 2, "tp": 2}, ["dp=2 x tp=2 make 4 devices", "the 2 there are"]),
        ({"dp": 1, "tp": 1, "pp": 1}, ["pp=1 x dp=1 x tp=1 make 1 devices but there are 2"]),
        ({"dp": 2, "microbatches": 4}, ["4 samples does not divide into dp=2 ranks x microbatches=4"]),
        ({"dp": 1, "tp": 2, "tensors": {"up.weight": "[_@ep, _]"}}, ["names axis 'ep'", "dp, tp"]),
        ({"dp": 1, "tp": 2, "tensors": {"up.weight": "[_@tp]"}}, ["has 1 dims, the parameter has 2"]),
        ({"dp": 1, "tp": 2, "tensors": {"up.weight": "[_@dp, _]"}}, ["cannot be", "up.weight"]),
    ],
)
def test_pins(pins: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PinError) as caught:
        plan(pins=pins)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("pins", [{"tp": 3}, {"axes": {"x": 8}}, {"dp": 2, "tp": 2}])
def test_pins_that_no_model_can_have_are_refused_before_the_capture(pins: dict[str, Any]) -> None:
    with mock.patch.object(api, "capture_model", side_effect=AssertionError("captured")), pytest.raises(PinError):
        plan(pins=pins)


@pytest.mark.parametrize("pins", [{"attention": "ring"}, {"cp": 2, "pp": 2}, {"tp": 3, "ulysses": 2}])
def test_pins_that_ask_what_the_model_can_do_are_refused_with_it_at_hand(pins: dict[str, Any]) -> None:
    """What is named instead can be tried with the model alone."""
    with mock.patch.object(api, "capture_model", wraps=api.capture_model) as captured:
        with pytest.raises(PinError, match="nearest legal setting: "):
            plan(pins=pins)
        assert captured.call_count == 1


def test_dp_beyond_the_batch() -> None:
    with pytest.raises(PinError, match="batch of 4 samples leaves some of dp=8 ranks without any"):
        plan(cluster="cpu:1x8", pins={"dp": 8})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizer": "adamx"}, ["optimizer 'adamx' is unknown", "adamw", "bytes of state per parameter"]),
        ({"optimizer": 1e300}, ["optimizer=1e+300", "up to 1,048,576"]),
        ({"precision": "fp4"}, ["precision 'fp4' is unknown", "fp32, tf32, bf16, fp16, fp8"]),
        ({"example_inputs": {"y": torch.zeros(4, 8)}}, ["argument 'x' of forward(x, scale) is missing"]),
        ({"example_inputs": ((torch.zeros(4, 8), 1.0, 2.0), {})}, ["2"]),
        ({"example_inputs": {}}, ["'x'"]),
        ({"example_inputs": {"x": torch.zeros(0, 8)}}, ["batch has no samples"]),
        ({"example_inputs": {"x": torch.zeros(4, 8).to_sparse()}}, ["'x' is f32[4, 8] (torch.sparse_coo)", "plain dense"]),
        ({"example_inputs": {"x": torch.ones(4, 8, dtype=torch.uint16)}}, ["'x' is torch.uint16[4, 8]", "plain dense"]),
        ({"example_inputs": {"x": torch.nested.nested_tensor([torch.ones(8)])}}, ["'x' is a nested tensor", "plain dense"]),
        ({"example_inputs": None}, ["no example inputs", "example_inputs=(args, kwargs)"]),
    ],
)
def test_options_and_examples(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        plan(**changed)
    assert [word for word in words if word not in str(caught.value)] == []


def test_precisions_that_are_planned_only() -> None:
    api._check_runs("tf32")
    with pytest.raises(InputError, match="'fp8' is planned and priced, but not run by this version; run one of fp32, tf32,"):
        api._check_runs("fp8")


def test_an_unknown_device() -> None:
    with pytest.raises(ValueError, match="h1000"):
        plan(cluster="h1000:1x2")


def test_an_example_of_the_wrong_shape_names_the_module() -> None:
    with pytest.raises(mw.CaptureError, match="up"):
        plan(example_inputs={"x": torch.zeros(4, 9)})


def test_a_failed_plan_leaves_the_model_alone() -> None:
    model = Net()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    for bad in ({"pins": {"dp": 3}}, {"optimizer": "adamx"}):
        with pytest.raises((PinError, InputError)):
            mw.plan(model, "cpu:1x2", EXAMPLE, loss_fn=lambda y: y, **bad)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())
    assert model.training


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "no JSON"), ("[]", "no meshwright plan"), ("{}", "no meshwright plan")],
)
def test_a_damaged_plan_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=words):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    assert Plan.load(path).mesh.world == 2
    text = path.read_text()
    data = json.loads(text)
    for short in (text[: len(text) // 2], *(json.dumps({**data, key: {}}) for key in ("decisions", "graph"))):
        path.write_text(short)
        with pytest.raises(PlanError):
            Plan.load(path)


def _errors(rank: int, folder: str) -> dict[str, str]:
    """What a world of one says to bad input, by case; afterwards a good call works."""
    mesh, said = init_device_mesh("cpu", (1,)), {}
    model = Net()

    def loud(case: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (InputError, PinError, PlanError) as error:
            said[case] = str(error)

    loud("string mesh", lambda: mw.autoparallel(model, "h100:1x1", EXAMPLE))  # type: ignore[arg-type]
    loud("named mesh", lambda: mw.autoparallel(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), EXAMPLE,
                                               pins={"dp": 2}, progress=False))
    two = mw.plan(model, "cpu:1x2", EXAMPLE, loss_fn=lambda y: y)
    loud("another world", lambda: mw.autoparallel(model, mesh, plan=two, progress=False))
    one = mw.plan(model, "cpu:1x1", EXAMPLE, loss_fn=lambda y: y)
    one.save(f"{folder}/plan{rank}.json")
    loud("another model", lambda: mw.autoparallel(Net(16), mesh, plan=f"{folder}/plan{rank}.json", progress=False))
    later = mw.autoparallel(model, mesh, loss_fn=lambda y: y, progress=False)
    loud("too early", lambda: list(later.parameters()))
    parallel = mw.autoparallel(model, mesh, EXAMPLE, loss_fn=lambda y: y, progress=False)
    loud("another shape", lambda: parallel(x=torch.zeros(6, 8)))
    loud("another dtype", lambda: parallel(x=torch.zeros(4, 8, dtype=torch.float64)))
    loud("another constant", lambda: parallel(x=torch.zeros(4, 8), scale=2.0))
    loud("another name", lambda: parallel(y=torch.zeros(4, 8)))
    with torch.inference_mode():
        made = torch.zeros(4, 8)
    loud("made for inference", lambda: parallel(x=made))
    x = torch.randn(4, 8)
    said["after"] = str(torch.allclose(parallel(x=x), Net.forward(model, x)))
    return said


RUN_TIME: dict[str, list[str]] = {
    "string mesh": ["DeviceMesh", "meshwright.plan"],
    "named mesh": ["dp=2 contradicts the mesh", "size 1"],
    "another world": ["for 2 devices", "the mesh has 1"],
    "another model": ["'up.weight' of shape (16, 8)", "(32, 16)"],
    "too early": ["its parameters", "before its first call", "example_inputs"],
    "another shape": ["x", "4", "6"],
    "another dtype": ["x", "f32", "f64"],
    "another constant": ["scale", "2.0"],
    "another name": ["argument 'x' of forward(x, scale) is missing"],
    "made for inference": ["'x' was made under torch.inference_mode()", "x.clone()"],
    "after": ["True"],
}


def test_at_run_time(pool: Callable[[int], Any], tmp_path: Path) -> None:
    said = pool(1).run(_errors, str(tmp_path))[0]
    assert list(said) == list(RUN_TIME)
    missing = {case: (word, said[case]) for case, words in RUN_TIME.items() for word in words if word not in said[case]}
    assert missing == {}


def _wrong_size(rank: int) -> str:
    """A mesh over one of two processes."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(1)) if rank == 0 else DeviceMesh("cpu", torch.arange(1), _init_backend=False)
    with pytest.raises(InputError, match="the mesh has 1 devices but 2 processes run"):
        mw.autoparallel(Net(), mesh, EXAMPLE, loss_fn=lambda y: y, progress=False)
    return "raised"


def test_a_mesh_that_does_not_match_the_world(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_wrong_size) == ["raised"] * 2


def test_the_pins_of_a_dict_are_pins() -> None:
    assert Pins.of({"dp": 2}) == Pins(dp=2)
    assert Pins.of(None) == Pins()
