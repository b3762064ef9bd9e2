"""README's Limits: what it says of things that are not refused, and are not as in the single process, is so."""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.api import autoparallel
from meshwright.errors import MeshwrightError
from tests.bodies import BODIES
from tests.looped import whole
from tests.strangers import Stranger, data

PINS: Mapping[str, Mapping[str, Any]] = {"dp": {"dp": 2, "zero": 2, "microbatches": 1}, "pp": {"pp": 2, "microbatches": 2}}


class Net(nn.Module):
    """Two linears, and what ``more`` makes of the hidden."""

    def __init__(self, more: Callable[[Tensor], Any] = lambda h: 0.0, drop: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.more, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), more, nn.Dropout(drop)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.two(self.drop(self.one(x).tanh()))
        return {"loss": y.square().mean() + self.more(y), "y": y}


class Gives(Net):
    """Something else beside the loss."""

    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.two(self.one(x).tanh())
        return {"loss": y.square().mean(), "what": self.what(y)}


class Cached:
    """A key/value cache, as some library has it."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept


class Colour(Enum):
    RED = 1


@dataclass
class Pair:
    one: Any
    two: Any


def x_of(seed: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def made(model: nn.Module, way: str, x: Any = None) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    given = ((), {"x": x_of() if x is None else x})
    return autoparallel(model, mesh, given, pins=dict(PINS[way]), progress=False)


def value(model: Any) -> float:
    return float(model(x=x_of())["loss"].detach())


def unnoticed(rank: int, way: str) -> dict[str, Any]:
    """What is read while the model is captured, and not again."""
    torch.manual_seed(0)
    found = {}
    os.environ["A_FACTOR"] = "1.0"
    parallel = made(Net(lambda y: float(os.environ["A_FACTOR"])), way)
    before = value(parallel)
    os.environ["A_FACTOR"] = "5.0"
    found["environment"] = value(parallel) - before
    start = time.time()
    parallel = made(Net(lambda y: float(time.time() > start + 10**6)), way)
    found["clock"] = value(parallel) - value(parallel)
    networkx.A_FACTOR = 1.0
    parallel = made(Net(lambda y: networkx.A_FACTOR), way)
    before = value(parallel)
    networkx.A_FACTOR = 5.0
    found["package"] = value(parallel) - before
    del networkx.A_FACTOR
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "factor"
        file.write_text("1.0")
        parallel = made(Net(lambda y: float(file.read_text())), way)
        before = value(parallel)
        file.write_text("5.0")
        found["file"] = value(parallel) - before
    model = Net(lambda y: 3.0 if torch.compiler.is_compiling() else 0.0)
    found["is_compiling"] = round(value(made(model, way)) - value(model), 3)
    model = Net(lambda y: 0.0 if type(y) is Tensor else 3.0)
    found["exact type"] = round(value(made(model, way)) - value(model), 3)
    return found


def surroundings(rank: int, way: str) -> dict[str, Any]:
    """What is done to the model, to seeds, and to inputs and weights through ``.data``, after the build; where weights lie."""
    torch.manual_seed(0)
    model = Net(drop=0.5)
    parallel = made(model, way)
    found: dict[str, Any] = {}
    parallel(x=x_of())["loss"].backward()
    model.zero_grad()
    norm = float(parallel.clip_grad_norm_(100.0))
    found["zero_grad of the model"] = norm > 0
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    found["clip_grad_norm_ of the model"] = float(parallel.clip_grad_norm_(100.0)) == norm
    said = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        said.append(value(parallel))
    found["seeded again"] = len(set(said)) == 3
    found["data_ptr"] = {parameter.data_ptr() for parameter in parallel.parameters()} == {0}
    return found


def asserted(rank: int, way: str) -> dict[str, str]:
    """What a forward asserts: of inputs it is checked, of weights and activations it is not."""
    def checks(of: str) -> Callable[[Any], None]:
        def hook(module: Any, given: Any, kwargs: Any) -> None:
            what = {"inputs": kwargs["x"], "weights": module.one.weight}[of]
            torch._assert_async((what.abs() < 1e-3).all(), "too large")
        return lambda model: model.register_forward_pre_hook(hook, with_kwargs=True)

    found = {}
    for of in ("inputs", "weights"):
        model = Net()
        with torch.no_grad():
            model.one.weight.mul_(1e-4)
        checks(of)(model)
        parallel = made(model, way, x_of() * 1e-4)
        with torch.no_grad():
            for p in parallel.parameters():
                p.add_(1.0)
        try:
            parallel(x=x_of())
            found[of] = "ran"
        except MeshwrightError as error:
            found[of] = f"refused: {error}"
        except RuntimeError as error:
            found[of] = f"raised: {error}"
    return found


def padded(rank: int) -> dict[str, bool]:
    """The fast path of ``nn.TransformerEncoder`` in ``eval()``: zeros at padded positions, for one process alone."""
    torch.manual_seed(0)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)

        def forward(self, x: Tensor, hidden: Tensor) -> dict[str, Tensor]:
            y = self.layers(x, src_key_padding_mask=hidden)
            return {"loss": y.square().mean(), "y": y}

    model = Masked()
    x, hidden = torch.randn(8, 4, 8), torch.zeros(8, 4, dtype=torch.bool)
    hidden[:, 3] = True
    parallel: Any = autoparallel(model, init_device_mesh("cpu", (2,)), ((), {"x": x, "hidden": hidden}), pins={"dp": 2},
                                 progress=False)
    with torch.no_grad():
        trained = model(x, hidden)["y"]
        rested = model.eval()(x, hidden)["y"]
        parallel.eval()
        found = whole(parallel(x=x, hidden=hidden)["y"])
    return {"zeros alone": bool((rested[:, 3] == 0).all()), "as in training": torch.allclose(found, trained, atol=1e-5),
            "else the same": torch.allclose(found[:, :3], rested[:, :3], atol=1e-5)}


GIVEN: Mapping[str, tuple[Callable[[Tensor], Any], str]] = {
    "number": (lambda y: 3, "int"), "text": (lambda y: "a", "str"), "nothing": (lambda y: None, "NoneType"),
    "list": (lambda y: [y, (1.5, y)], "list"), "ordered": (lambda y: OrderedDict(a=y), "AttributeDict"),
    "dataclass": (lambda y: Pair(y, "b"), "Pair"), "size": (lambda y: y.shape, "tuple"),
    "cache": (Cached, "NoneType"), "fraction": (lambda y: Fraction(1, 2), "refused"),
    "complex": (lambda y: 1j, "refused"), "set": (lambda y: {1, 2}, "refused"),
    "numbers as keys": (lambda y: {1: y}, "refused"), "array": (lambda y: np.ones(2), "refused"),
    "deque": (lambda y: deque([y]), "refused"), "enumeration": (lambda y: Colour.RED, "refused"),
    "dtype": (lambda y: y.dtype, "refused"), "device": (lambda y: y.device, "refused"),
    "range": (lambda y: range(3), "refused"),
}


def given_back(rank: int, way: str) -> dict[str, str]:
    """What becomes of an output."""
    found = {}
    for name, (what, _) in GIVEN.items():
        torch.manual_seed(0)
        try:
            found[name] = type(made(Gives(what), way)(x=x_of())["what"]).__name__
        except MeshwrightError:
            found[name] = "refused"
    return found


def test_what_is_not_noticed(pool: Callable[[int], Any]) -> None:
    """The old value is used on; a forward that asks whether it is compiled, or for an exact type, is told something else."""
    for found in pool(2).run(unnoticed, "dp"):
        assert found == {"environment": 0.0, "clock": 0.0, "package": 0.0, "file": 0.0, "is_compiling": 3.0, "exact type": 3.0}


def test_what_does_not_reach_the_parallel_module(pool: Callable[[int], Any]) -> None:
    """It has gradients, and random numbers, of its own."""
    for found in pool(2).run(surroundings, "pp"):
        assert all(found.values()), found


@pytest.mark.parametrize("way", PINS)
def test_what_is_asserted_of_inputs_is_checked(pool: Callable[[int], Any], way: str) -> None:
    """Of weights it is not."""
    for found in pool(2).run(asserted, way):
        assert found["weights"] == "ran"
        assert "too large" in found["inputs"]


def test_the_fast_path_is_not_taken(pool: Callable[[int], Any]) -> None:
    """Padded positions hold what training computes, the others what one process does."""
    for found in pool(2).run(padded):
        assert all(found.values()), found


def test_outputs_are_of_the_kinds_that_are_named(pool: Callable[[int], Any]) -> None:
    """Others are None where they are somebody's own, and refused where they are a library's."""
    for found in pool(2).run(given_back, "pp"):
        assert found == {name: kind for name, (_, kind) in GIVEN.items()}


@pytest.mark.parametrize("pins", [
    {"ep": 2}, {"dp": 2, "tp": 2}, {"dp": 3}, {"pp": 2, "microbatches": 3}, {"pp": 2, "schedule": "whirled"}, {"zero": 4},
    {"dp": 2, "recompute": "some"}, {"sp": 2}, {"tp": -2}, {"dp": "2"}, {"cp": 2, "attention": "round"}, {"pp": 2, "dp": 2},
], ids=str)
def test_pins_of_what_does_not_run_are_refused(pins: dict[str, Any]) -> None:
    """Degrees that the devices do not have, experts that have a weight each, schedules and forms that nobody knows."""
    torch.manual_seed(0)
    model = Stranger(BODIES["experts"][0](), *BODIES["experts"][1:])
    with pytest.raises(MeshwrightError):
        mw.plan(model, "cpu:1x2", ((), {name: x.float() for name, x in data().items()}), pins=pins)
