"""Exported programs: trained on by a process without the model, to the last bit; whatever is wrong in a folder is refused."""

from __future__ import annotations

import copy
import gc
import hashlib
import importlib.util
import json
import math
import random
import shutil
import sys
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ir.serialize import digest
from meshwright.ir.signature import AttributeDict
from tests.exports import without
from tests.test_plan_files import mutant

SOURCE = '''
import dataclasses, torch
from torch import nn
from torch.nn import functional as F

@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: torch.Tensor

class Net(nn.Module):
    """Blocks with dropout, a table that is in no state dict, a tied weight, a literal."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
                                    for _ in range(2))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.rand(6, 16), persistent=False)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, ids, labels):
        x = self.embed(ids) + self.table
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.2, self.training) * self.scale
        logits = self.head(x) * torch.tensor([0.5, 2.0]).sum()
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), x)

class Norm(nn.Module):
    """Running statistics."""

    def __init__(self):
        super().__init__()
        self.inside, self.norm, self.out = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, x, y):
        return {"loss": F.mse_loss(self.out(F.relu(self.norm(self.inside(x)))), y)}
'''
PINS: Mapping[str, Mapping[str, Any]] = {
    "tp": {"tp": 2}, "zero": {"dp": 2, "zero": 3, "recompute": "full", "microbatches": 2},
    "pp": {"pp": 2, "microbatches": 2, "schedule": "1f1b"}, "norm": {"dp": 2, "zero": 2},
}


def model_of(folder: str, name: str) -> nn.Module:
    """From a file that no other process knows."""
    spec = importlib.util.spec_from_file_location("secret_model", Path(folder) / "secret_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["secret_model"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(3)
    return module.Norm() if name == "norm" else module.Net()


def batches(name: str) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        if name == "norm":
            yield {"x": torch.randn(8, 16, generator=generator), "y": torch.randn(8, 4, generator=generator)}
        else:
            ids = torch.randint(0, 24, (4, 6), generator=generator)
            yield {"ids": ids, "labels": ids.roll(1)}


def steps(parallel: Any, name: str) -> list[Any]:
    """Losses of two steps and of an evaluation, and the weights afterwards, this rank's."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    *training, last = batches(name)
    losses = []
    for batch in training:
        output = parallel(**batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        loss.backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parallel.eval()
    with torch.no_grad():
        output = parallel(**last)
        losses.append((output["loss"] if isinstance(output, dict) else output.loss).item())
    parallel.train()
    state = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in parallel.state_dict().items()}
    return [losses, {key: x.double().sum().item() for key, x in state.items()}, list(state)]


def exporting(rank: int, folder: str, names: list[str]) -> dict[str, Any]:
    """{name: what the run that exported did after that}."""
    found = {}
    for name in names:
        model, example = model_of(folder, name), next(batches(name))
        parallel = mw.autoparallel(model, init_device_mesh("cpu", (2,)), ((), example), pins=PINS[name], progress=False)
        next_step = parallel(**example)
        (next_step["loss"] if isinstance(next_step, dict) else next_step.loss).backward()  # the place in the random numbers
        for parameter in parallel.parameters():
            parameter.grad = None
        parallel.export(f"{folder}/{name}")
        parallel.export(f"{folder}/{name}-bare", weights=False)
        parallel.save(f"{folder}/{name}-checkpoint")
        found[name] = steps(parallel, name)
    return found


def loading(rank: int, folder: str, names: list[str]) -> dict[str, Any]:
    """{name: what a process without the model does, with the weights of the export and with those of a checkpoint}."""
    found = {}
    mesh = init_device_mesh("cpu", (2,))
    with without("secret_model", "transformers", "meshwright.planner", "ortools"):
        for name in names:
            parallel = mw.load(f"{folder}/{name}", mesh)
            first = steps(parallel, name)
            bare = mw.load(f"{folder}/{name}-bare", mesh)
            try:
                bare(**next(batches(name)))
            except mw.RunError as error:
                assert "without weights" in str(error), error  # noqa: PT017 - on every rank
            else:
                raise AssertionError("it ran without weights")
            by_hand = mw.load(f"{folder}/{name}-bare", mesh)
            graph = by_hand.plan.graph
            by_hand.load_state_dict({fqn: torch.full(graph.values[param.value].shape, 0.1)
                                     for param in graph.params if not param.buffer for fqn in param.fqns}, strict=False)
            assert math.isfinite(steps(by_hand, name)[0][-1])
            bare.load(f"{folder}/{name}-checkpoint")
            assert steps(bare, name) == first
            bare.save(f"{folder}/{name}-after")
            bare.export(f"{folder}/{name}-again")
            assert steps(mw.load(f"{folder}/{name}-again", mesh), name)[2] == first[2]
            output = parallel(**next(batches(name)))
            assert type(output) is (dict if name == "norm" else AttributeDict)
            found[name] = first
    return found


@pytest.fixture(scope="module")
def folder(_workers: Any, tmp_path_factory: Any) -> Iterator[Path]:
    """Exports under every plan, the source of their model gone, and what the exporting run did."""
    path = tmp_path_factory.mktemp("exports")
    (path / "secret_model.py").write_text(SOURCE)
    done = _workers.run(2, exporting, str(path), list(PINS))
    (path / "secret_model.py").unlink()
    (path / "done.json").write_text(json.dumps(done))
    return path


def test_a_process_without_the_model_goes_on_to_the_last_bit(pool: Callable, folder: Path) -> None:
    done = json.loads((folder / "done.json").read_text())
    found = pool(2).run(loading, str(folder), list(PINS))
    assert json.loads(json.dumps(found)) == done
    for name in PINS:
        assert len(list((folder / name / "programs").iterdir())) == 1  # two ranks, one role


# ------------------------------------------------------------------------------------------------------------------ mutants
def seal(path: Path, plan: bool = True, state: bool = False) -> None:
    """The checksums of an altered folder made right: what a forger would do."""
    index = json.loads((path / "export.json").read_text())
    if plan:
        index["plan"] = hashlib.sha256((path / "plan.json").read_bytes()).hexdigest()
    if state:
        index["state"] = hashlib.sha256((path / "state" / "checkpoint.json").read_bytes()).hexdigest()
    index["digest"] = digest({key: value for key, value in index.items() if key != "digest"})
    (path / "export.json").write_text(json.dumps(index))


def outcome(path: Path) -> str:
    """"refused" by a MeshwrightError, or "legal": a program that was exported, verified for its plan."""
    from meshwright import exported
    from meshwright.passes import cut_stages
    from meshwright.programs import checked_program

    try:
        found = exported._read(path)
        for rank in range(2):
            whole = checked_program(found.plan, rank)
            exported._check_program(whole, found, path)
            exported._names(found, cut_stages(whole, found.plan.pipeline), path)
    except MeshwrightError:
        return "refused"
    return "legal"


@pytest.mark.parametrize("name", ["zero", "pp"])
@pytest.mark.parametrize("file", ["export.json", "plan.json"])
@pytest.mark.parametrize("forged", [False, True])
def test_mutants_are_refused_or_legal(folder: Path, tmp_path: Path, name: str, file: str, forged: bool) -> None:
    path = tmp_path / name
    shutil.copytree(folder / name, path)
    assert outcome(path) == "legal"
    text = {one: (path / one).read_text() for one in ("export.json", "plan.json")}
    generator, found = random.Random(f"{name} {file}"), Counter[str]()
    for _ in range(60):
        for one, content in text.items():
            (path / one).write_text(content)
        data = mutant(json.loads(text[file]), generator)
        (path / file).write_text(json.dumps(data))
        if forged and isinstance(data, dict):
            if file == "plan.json":
                seal(path)
            else:
                seal(path, plan=False)
        same = json.loads((path / file).read_text()) == json.loads(text[file])
        found["same" if same else outcome(path)] += 1
    assert found["refused"] > (36 if forged else 54)
    assert forged or not found["legal"]


@pytest.mark.parametrize("file", ["export.json", "plan.json", "programs", "state/checkpoint.json"])
def test_broken_files_are_refused(folder: Path, tmp_path: Path, file: str) -> None:
    path = tmp_path / "zero"
    shutil.copytree(folder / "zero", path)
    broken = next((path / file).iterdir()) if file == "programs" else path / file
    content = broken.read_bytes()
    cut, other = content[: len(content) // 2], content.replace(b"1", b"2", 1)
    for new in (b"", cut, b"\xff\xfe" + content, b"[" * 10_000, b"{}", b"[]", other):
        broken.write_bytes(new)
        assert outcome(path) == "refused"
    broken.unlink()
    assert outcome(path) == "refused"
    broken.mkdir()
    assert outcome(path) == "refused"


def refusals(rank: int, folder: str, rules: bool) -> list[str]:
    """What two ranks say to folders that are not theirs to run."""
    mesh, said = init_device_mesh("cpu", (2,)), []

    def refuse(path: str, **given: Any) -> None:
        try:
            mw.load(f"{folder}/{path}", **{"mesh": mesh, **given})
        except MeshwrightError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError(f"{path} {given} was not refused")

    def altered(path: str, **fields: Any) -> str:
        if rank == 0:
            shutil.copytree(f"{folder}/zero", f"{folder}/{path}")
            index = Path(folder, path, "export.json")
            data = {**json.loads(index.read_text()), **fields}
            index.write_text(json.dumps({**data, "digest": digest({k: v for k, v in data.items() if k != "digest"})}))
        dist.barrier()
        return path

    def with_rule(path: str) -> str:
        """The folder of a run in which somebody had registered a rule."""
        plan = json.loads(Path(folder, "zero", "plan.json").read_text())
        decisions = {**plan["decisions"], "registered": {"aten.relu.default": "*b -> *b"}}
        text = json.dumps({**plan, "decisions": decisions})
        altered(path, plan=hashlib.sha256(text.encode()).hexdigest())
        if rank == 0:
            Path(folder, path, "plan.json").write_text(text)
        dist.barrier()
        return path

    refuse("zero" if rank else "nowhere")
    refuse("zero" if rank else "tp")
    refuse("zero", mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    refuse("zero", classes=[Counter])
    refuse(altered("torch", versions={"meshwright": "0.1.0", "torch": "1.13.1"}))
    refuse(altered("format", meshwright_export=7))
    refuse(with_rule("rules"))
    altered("weights")
    if rank == 0:
        file = next(Path(folder, "weights", "state").glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    dist.barrier()
    refuse("weights")
    return said


def test_what_cannot_run_here_is_named_on_every_rank(pool: Callable, folder: Path, tmp_path: Path) -> None:
    for name in ("zero", "tp"):
        shutil.copytree(folder / name, tmp_path / name)
    first, second = pool(2).run(refusals, str(tmp_path), False)
    assert first == second
    words = ["nowhere", "different exports", "tp=2", "Counter", "torch 1.13.1", "format 7", "aten.relu.default", "damaged"]
    assert [(word, text) for word, text in zip(words, first, strict=True) if word not in text] == []


# ------------------------------------------------------------------------------------------------------------ one process
Pair = namedtuple("Pair", "loss parts")


class Pairs(nn.Module):
    """Named tuples within a list within a ModelOutput."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        y = self.inside(x)
        return Pair(y.sum(), [BaseModelOutput(last_hidden_state=y), {"y": y}])


def alone(rank: int, folder: str) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    mesh, x = init_device_mesh("cpu", (1,)), torch.randn(2, 4)
    parallel = mw.autoparallel(Pairs(), mesh, (x,), progress=False)
    parallel.export(f"{folder}/pairs")
    want, found = parallel(x), mw.load(f"{folder}/pairs", mesh)(x)
    assert type(want) is Pair
    assert found.loss == want.loss
    assert found[0] == want.loss
    assert torch.equal(found.parts[0].last_hidden_state.full_tensor(), want.parts[0][0].full_tensor())
    assert torch.equal(found.parts[0][0].full_tensor(), found.parts[1]["y"].full_tensor())
    found = mw.load(f"{folder}/pairs", mesh, classes=[Pair, BaseModelOutput])(x)
    assert type(found) is Pair
    assert type(found.parts[0]) is BaseModelOutput
    copied = copy.deepcopy(mw.load(f"{folder}/pairs", mesh))
    assert torch.equal(copied(x).loss, want.loss)
    Path(folder, "mine").mkdir()
    Path(folder, "mine", "letter.txt").write_text("dear")
    with pytest.raises(mw.ExportError, match="no exported program"):
        parallel.export(f"{folder}/mine")
    parallel.export(f"{folder}/pairs")  # in the old one's place
    mw.export(parallel.plan, f"{folder}/plan-alone")
    seen, before = set[str](), gc.get_threshold()
    gc.callbacks.append(lambda phase, info: seen.add(Path(sys._getframe(1).f_code.co_filename).name))
    gc.set_threshold(1, 1 << 20)
    bare = mw.load(f"{folder}/plan-alone", mesh)
    gc.set_threshold(*before)
    gc.callbacks.pop()
    assert seen
    assert not seen & {"lower.py", "verify.py", "assemble.py", "names.py", "hooks.py"}  # making it is collected in nowhere
    bare.load_state_dict(parallel.state_dict())
    assert torch.equal(bare(x).loss, want.loss)


def test_outputs_come_back_by_name_or_as_given_classes(pool: Callable, tmp_path: Path) -> None:
    pool(1).run(alone, str(tmp_path))


def test_ranks_that_work_with_other_key_heads_have_programs_of_their_own() -> None:
    """Of 32 tensor ranks every one is lowered, where no processes run: two key heads are shared by sixteen each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from meshwright import exported

    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=32,
                         num_key_value_heads=2, vocab_size=256, max_position_embeddings=64, use_cache=False)
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(4, 64, dtype=torch.int64)
    pins: dict[str, Any] = {"dp": 4, "tp": 32, "operators": {"*:scaled_dot_product_attention": "dp=b0, tp=shared"}}
    plan = mw.plan(model, "h100:16x8", ((), {"input_ids": ids, "labels": ids}), pins=pins)
    lowered = exported._representatives(plan)
    assert {plan.mesh.coordinates(rank)["tp"] for rank in lowered} == set(range(32))
