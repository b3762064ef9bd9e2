"""Plan files: whatever is in them, they run nothing but the given model's own graph; what differs or is damaged is refused."""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.compiler.structure.same import aligned
from meshwright.errors import MeshwrightError
from meshwright.ir.graph import GraphError
from meshwright.ir.operators import overload
from meshwright.ir.serialize import plan_hash
from meshwright.ir.writing.plans import plan_to_file
from meshwright.passes import cut_stages, rank_program
from meshwright.passes.typecheck import typecheck
from meshwright.passes.verify import verify
from meshwright.planner import capture_model, rules_of


@dataclass
class Output:
    loss: torch.Tensor
    hidden: torch.Tensor


class Net(nn.Module):
    """Two equal blocks with a norm, a buffer, and perhaps tied ends."""

    def __init__(self, eps: float = 1e-5, act: Callable[..., Any] = torch.relu, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 8)) for _ in range(2))
        self.act = act
        if tied:
            self.blocks[1][0].weight = self.blocks[0][0].weight
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> Output:
        for block in self.blocks:
            x = x + self.act(block(x)) * self.scale
        return Output(x.square().mean(), x)


class Asserting(Net):
    """It asserts of what it is given."""

    def forward(self, x: torch.Tensor) -> Output:
        torch._assert_async(x.abs().max() < 100.0, "too large")
        torch._assert_async((x.sum(1) > -5.0).all(), "negative")
        return super().forward(x)


EXAMPLE: dict[str, Any] = {"x": torch.zeros(4, 8)}


def loss_of(output: Output) -> torch.Tensor:
    return output.loss * 2


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Any]]:
    """Plans as files hold them, by what is special about them."""
    zero = mw.plan(Net(), "cpu:1x2", EXAMPLE, pins={"dp": 2, "tp": 1, "zero": 3})
    tied = mw.plan(Net(tied=True), "cpu:1x2", EXAMPLE, pins={"dp": 1, "tp": 2}, loss_fn=loss_of)
    staged = mw.plan(Net(), "cpu:1x2", EXAMPLE, pins={"pp": 2, "microbatches": 2, "schedule": "1f1b"})
    asserted = mw.plan(Asserting(), "cpu:1x2", EXAMPLE, pins={"dp": 2, "tp": 1})
    made = {"zero": zero, "tied": tied, "pp": staged, "asserted": asserted}
    return {name: json.loads(json.dumps(plan_to_file(plan))) for name, plan in made.items()}


@pytest.mark.parametrize("target", [
    "load_library./tmp/x.so", "load_library.x.y", "import_module.os.path", "_dir.x.y", "aten.__class__.mro",
    "aten.relu.__call__",
    "loaded_libraries.add.default", "aten.relu", "aten.from_file.default", "aten._print.default", "__class__.x.y",
    "os.system.x",
])
def test_only_operators_are_operators(target: str) -> None:
    with pytest.raises(GraphError):
        overload(target)


def test_nothing_in_a_file_controls_a_terminal(plans: dict[str, Any]) -> None:
    text = json.dumps(plans["zero"])
    for word in ("blocks.0.0", "adamw"):
        assert word in text
        with pytest.raises(mw.PlanError, match=r"\\x1b\[2J.*' has a character that cannot be printed; rename"):
            mw.Plan.from_dict(json.loads(text.replace(word, f"{word}\\u001b[2J")))


@pytest.mark.parametrize(("other", "words"), [
    (lambda: Net(eps=1e-3), ["blocks.0.1", "1e-05", "0.001"]), (lambda: Net(act=torch.tanh), ["relu", "tanh"]),
    (lambda: Net(tied=True), ["'blocks.0.0.weight'"]), (lambda: Net().double(), ["f32", "f64"]),
])
def test_another_model_is_named(plans: dict[str, Any], other: Callable[[], nn.Module], words: list[str]) -> None:
    with pytest.raises(mw.PlanError) as caught:
        same(plans["zero"], other())
    assert [word for word in words if word not in str(caught.value)] == []


def test_frozen_layers_and_loss_functions_are_named(plans: dict[str, Any]) -> None:
    frozen = Net()
    frozen.blocks[0][0].weight.requires_grad_(False)
    with pytest.raises(mw.PlanError, match=r"'blocks.0.0.weight' is trained there and frozen here"):
        same(plans["zero"], frozen)
    with pytest.raises(mw.PlanError, match="made for another model"):
        same(plans["tied"], Net(tied=True))


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Doubled(Rounded):
    """With another backward."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class Near(nn.Module):
    """A model whose shapes are the same whatever is ``changed`` of it."""

    def __init__(self, changed: str = "") -> None:
        super().__init__()
        self.changed, self.one, self.two = changed, nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(8), persistent=changed != "not saved")

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        is_, (a, b) = self.changed.__eq__, (self.one(x), self.two(x))
        y = b - a if is_("turned round") else a.detach() - b if is_("detached") else a - b
        y = nn.functional.dropout(y, 0.2 if is_("dropout") else 0.1, self.training)
        y = y[:, [0, 1, 2, 3, 4, 5, 7, 6] if is_("indices") else [1, 0, 2, 3, 4, 5, 6, 7]]
        y = nn.functional.gelu(y, approximate="tanh" if is_("gelu") else "none")
        y = (Doubled if is_("backward") else Rounded).apply(y)
        y = y + (torch.rand_like(y) if is_("noise") else torch.randn_like(y))
        self.calls.add_(2 if is_("count") else 1)
        loss = y.unflatten(1, (4, 2) if is_("view") else (2, 4)).mT.flatten(1)[:, 1:3].square().mean()
        if is_("order"):
            return {"most": y.amax().detach(), "loss": loss}
        return {"loss": loss, "least" if is_("name") else "most": y.amin().detach() if is_("output") else y.amax().detach()}


@pytest.fixture(scope="module")
def near() -> mw.Plan:
    plan = mw.Plan.from_dict(json.loads(json.dumps(plan_to_file(mw.plan(Near(), "cpu:1x2", EXAMPLE, pins={"dp": 2})))))
    aligned(plan.graph, capture_model(Near(), (), EXAMPLE, (), None, "fp32"))
    return plan


@pytest.mark.parametrize(("changed", "word"), [
    ("turned round", "aten.sub"), ("detached", "detach"), ("dropout", "0.1 there and 0.2 here"), ("indices", "aten.index"),
    ("gelu", "approximate: None there and 'tanh' here"), ("backward", "Doubled"), ("noise", "rand_like"), ("view", "(4, 2, 4)"),
    ("count", "1 there and 2 here"), ("not saved", "'calls' is a buffer there and a buffer that is not saved here"),
    ("name", "output"), ("output", "amin"),
])
def test_a_near_model_is_another(near: mw.Plan, changed: str, word: str) -> None:
    """Every parameter has the shape that it has in the plan."""
    with pytest.raises(mw.PlanError, match=f"made for another model.*{re.escape(word)}"):
        aligned(near.graph, capture_model(Near(changed), (), EXAMPLE, (), None, "fp32"))


def test_outputs_in_another_order_are_of_the_same_model(near: mw.Plan) -> None:
    """A dict's are compared by their keys; what is aligned has each under its own."""
    found = aligned(near.graph, capture_model(Near("order"), (), EXAMPLE, (), None, "fp32"))
    assert dict(found.output_tree) == dict(near.graph.output_tree)


def same(data: dict[str, Any], model: nn.Module, loss_fn: Any = None) -> mw.Plan:
    """The plan, for the model as it is captured now."""
    plan = mw.Plan.from_dict(data)
    example = {"x": torch.zeros(4, 8, dtype=next(model.parameters()).dtype)}
    from dataclasses import replace

    return replace(plan, graph=aligned(plan.graph, capture_model(model, (), example, (), loss_fn, plan.precision)))


# ----------------------------------------------------------------------------------------------------------------- mutants
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 7, 10**30, 1.5, float("nan"), float("inf"), "", "x", "dp", "load_library.x.y", "aten.tanh.default",
    [], {}, [[]], {"%": "x"}, {"torch": "load"}, {"torch": "float64"}, {"device": "cuda:0"}, {"map": [[1, 2]]},
)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a file."""
    if isinstance(data, dict | list):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield data, key
            yield from places(data[key])


def _copied(data: Any) -> Any:
    """Of something that may be nested deeper than ``copy.deepcopy`` goes."""
    return json.loads(json.dumps(data))


def mutant(data: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """The file with one to three things changed."""
    data = _copied(data)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        found = list(places(data))
        if not found:  # the last one was deleted
            break
        holder, key = generator.choice(found)
        other, elsewhere = generator.choice(found)
        kind = generator.randrange(8)
        old = holder[key]
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(generator.randrange(len(holder) + 1), _copied(old))
        elif kind == 2:
            holder[key] = _copied(other[elsewhere])
        elif kind == 3 and isinstance(old, int | float) and not isinstance(old, bool):
            holder[key] = old + generator.choice((-1, 1, 2, 0.5, 1 << 40))
        elif kind == 4 and isinstance(old, str):
            holder[key] = generator.choice((old[:-1], old + "x", old.upper(), old.replace("0", "1")))
        elif kind == 5 and isinstance(old, list) and len(old) > 1:
            generator.shuffle(old)
        elif kind == 6 and isinstance(old, bool):
            holder[key] = not old
        elif kind == 7:
            nest: Any = old
            for _ in range(generator.choice((1, 300))):
                nest = [nest]
            holder[key] = nest
        else:
            holder[key] = _copied(generator.choice(STRANGE))
    return data


def refreshed(data: dict[str, Any]) -> dict[str, Any]:
    """The file with the fingerprint of the graph that it holds now, which whoever alters a file can write."""
    try:
        mw.Plan.from_dict(data)
    except MeshwrightError as error:
        found = re.search(r"they are (\w{64}) on (.*)\); decisions", str(error))
        if found and isinstance(data["fingerprint"], dict):
            return {**data, "fingerprint": {**data["fingerprint"], "graph": found[1], "mesh": found[2]}}
    return data


def outcome(data: dict[str, Any], graph: Any) -> str:
    """"refused", or "legal": the given model's own graph, on programs that are verified for both ranks."""
    try:
        from dataclasses import replace

        plan = mw.Plan.from_dict(refreshed(data))
        plan = replace(plan, graph=aligned(plan.graph, graph))
        rules, _ = rules_of(plan.graph)
        for rank in range(plan.mesh.world if plan.mesh.world < 5 else 1):
            program = rank_program(plan, rules, rank)
            verify(program, plan.graph, rules)
            typecheck(program)
            cut_stages(program, plan.pipeline)
    except MeshwrightError:
        return "refused"
    return "legal"


@pytest.mark.parametrize("name", ["zero", "tied", "pp", "asserted"])
def test_mutants_are_refused_or_legal(plans: dict[str, Any], name: str) -> None:
    loss_fn = loss_of if name == "tied" else None
    model = Asserting() if name == "asserted" else Net(tied=name == "tied")
    graph = capture_model(model, (), EXAMPLE, (), loss_fn, "fp32")
    generator, found = random.Random(name), Counter[str]()
    assert outcome(plans[name], graph) == "legal"
    for _ in range(300):
        found[outcome(mutant(plans[name], generator), graph)] += 1
    assert found["refused"] > 150
    if name == "asserted":  # what is asserted, most of all
        for _ in range(100):
            data = copy.deepcopy(plans[name])
            at = data["graph"]["changes"]["ops"][generator.randrange(8)]
            place = generator.choice((1, 2))
            other = generator.choice((None, "mw.asserted", [{"%": "x"}], [True, ""], "aten.relu.default"))
            same, at[place] = other == at[place], other
            assert outcome(data, graph) == ("legal" if same else "refused")


# ------------------------------------------------------------------------------------------------------------- on two ranks
def two_ranks(rank: int, folder: str) -> list[str]:
    """A plan beside the model, contradicted, broken on one rank only, then run."""
    mesh, said = init_device_mesh("cpu", (2,)), []
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    path = f"{folder}/zero.json"

    def refuse(**given: Any) -> None:
        try:
            mw.autoparallel(given.pop("model", model), mesh, **{"plan": path, "progress": False, **given})
        except MeshwrightError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError(f"{given} was not refused")

    refuse(plan=path if rank == 0 else f"{folder}/missing.json")
    refuse(model=model if rank == 0 else Net(eps=1e-3))
    refuse(precision="bf16")
    refuse(optimizer="sgd")
    refuse(pins={"tp": 2})
    refuse(pins={"zero": 1})
    refuse(example_inputs={"x": torch.zeros(6, 8)})
    refuse(loss_fn=loss_of)
    want = model(x)
    want.loss.backward()
    for given in ({}, {"precision": "fp32", "optimizer": "adamw", "pins": {"dp": 2, "zero": 3}, "example_inputs": EXAMPLE}):
        parallel = mw.autoparallel(model, mesh, plan=path, progress=False, **given)
        found = parallel(x)
        assert type(found) is Output
        found.loss.backward()
        torch.testing.assert_close(found.loss, want.loss)
        for (name, p), q in zip(parallel.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
    return said


def test_plans_beside_a_model(pool: Callable, plans: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps(plans["zero"]))
    first, second = pool(2).run(two_ranks, str(tmp_path))
    assert first == second
    words = ["missing.json", "blocks.0.1", "precision='bf16'", "optimizer='sgd'", "tp=2", "zero=1", "[6, 8]", "another model"]
    assert [(word, text) for word, text in zip(words, first, strict=True) if word not in text] == []


def test_a_plan_found_again_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        mw.plan(Net(), "cpu:1x2", EXAMPLE, pins={"dp": 2, "zero": 3}).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    mw.Plan.load(tmp_path / "one").save(tmp_path / "three")
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()


def test_the_hash_of_a_plan_is_that_of_its_file(plans: dict[str, Any]) -> None:
    for data in plans.values():
        plan = mw.Plan.from_dict(data)
        assert plan_hash(mw.Plan.from_dict(json.loads(json.dumps(plan_to_file(plan))))) == plan_hash(plan)
