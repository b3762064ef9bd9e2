"""Contents of parameters: copied, or made by the model's own initialization, share by share."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.declared.operator import Operators
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import Program, Stored
from meshwright.ir.sharding import Sharding
from meshwright.runtime.groups import Groups
from meshwright.runtime.state.layout import box, owner, take
from meshwright.runtime.state.materialize import MaterializeError, fill
from tests.programs import LiveBytes

MESH = Mesh.of(dp=2, tp=2)


def program_of(model: nn.Module, mesh: Mesh, rank: int, split: bool = True) -> Program:
    """Every tensor of the model, the first dim split over tp, the share again over dp (parameters)."""
    names: dict[int, tuple[Tensor, list[str], bool, bool]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, held in (("p", module._parameters), ("b", module._buffers)):
            for name, tensor in held.items():
                if tensor is not None:
                    persistent = name not in module._non_persistent_buffers_set
                    entry = names.setdefault(id(tensor), (tensor, [], kind == "b", persistent))
                    entry[1].append(f"{path}.{name}" if path else name)
    stored = tuple(
        Stored(
            f"v{i}", tuple(fqns), tuple(tensor.shape), tensor.dtype, not is_buffer, is_buffer, persistent,
            Sharding(tuple(("tp",) if split and dim == 0 and not is_buffer else () for dim in range(tensor.ndim))),
            () if is_buffer or not split else ("dp",), () if is_buffer or not split else ("dp",),
        )
        for i, (tensor, fqns, is_buffer, persistent) in enumerate(names.values())
    )
    return Program(mesh, rank, (), (), (), stored, (), None, (), Operators())


def materialize(model: Any, shapes: nn.Module, mesh: Mesh, split: bool = True, seed: int = 3) -> dict[str, Tensor]:
    """Fill every rank's shares in turn and put them together again; replicas must agree. ``shapes``: what is stored."""
    whole: dict[str, Tensor] = {}
    for rank in range(mesh.world):
        program = program_of(shapes, mesh, rank, split)
        groups = Groups(mesh, rank, torch.device("cpu"), None, {})
        boxes = {s.value: box(s, mesh, groups.coordinates) for s in program.stored}
        tensors = {s.value: torch.empty([n for _, n in boxes[s.value]], dtype=s.dtype) for s in program.stored}
        fill(program, tensors, groups, model, seed)
        for s in program.stored:
            at = take(whole.setdefault(s.fqns[0], torch.zeros(s.shape, dtype=s.dtype)), boxes[s.value])
            if owner(s, mesh, groups.coordinates):
                at.copy_(tensors[s.value])
            else:
                torch.testing.assert_close(at, tensors[s.value], msg=f"replicas of {s.fqns[0]} differ")
    return whole


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.attend = nn.MultiheadAttention(10, 2)
        self.table = Table(5)


class Table(nn.Module):
    """A table that only the constructor makes, beside a parameter that ``reset_parameters`` sets."""

    def __init__(self, size: int, step: float = 0.5) -> None:
        super().__init__()
        self.size, self.step = size, step
        self.register_buffer("angles", torch.arange(size) * step, persistent=False)
        self.register_buffer("order", torch.arange(size))


def test_real_weights_are_copied_and_left() -> None:
    model = Small()
    before = copy.deepcopy(model.state_dict())
    found = materialize(model, model, MESH)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
        torch.testing.assert_close(tensor, before[name])
        assert found[name].data_ptr() != tensor.data_ptr()
    torch.testing.assert_close(found["table.angles"], torch.arange(5) * 0.5)


def test_a_function_is_asked_for_boxes() -> None:
    model = Small()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    found = materialize(lambda stored, box_: take(state[stored.fqns[0]].detach(), box_).double(), model, MESH)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, state[name].detach())


def test_meta_weights_come_from_the_modules_own_initialization() -> None:
    with torch.device("meta"):
        meta = Small()
    found = materialize(meta, meta, MESH)
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers())), "the model was changed"
    bound = 1 / math.sqrt(6)
    assert 0.5 * bound < found["first.weight"].abs().max() <= bound
    torch.testing.assert_close(found["norm.running_var"], torch.ones(10))
    assert found["norm.num_batches_tracked"] == 0
    assert found["attend.in_proj_bias"].abs().sum() == 0
    assert 0 < found["attend.in_proj_weight"].std() < 1
    torch.testing.assert_close(found["table.angles"], torch.arange(5) * 0.5)
    assert torch.equal(found["table.order"], torch.arange(5))


def test_the_draw_depends_on_the_seed_and_not_on_the_plan() -> None:
    with torch.device("meta"):
        meta = Small()
    state = torch.get_rng_state()
    split = materialize(meta, meta, MESH)
    assert torch.equal(state, torch.get_rng_state())
    whole = materialize(meta, meta, Mesh.of(dp=1, tp=1), split=False)
    other = materialize(meta, meta, MESH, seed=4)
    for name, tensor in split.items():
        torch.testing.assert_close(tensor, whole[name])
    assert not torch.equal(split["first.weight"], other["first.weight"])


class Bare(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) * scale)


def test_a_module_that_cannot_be_initialized_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare(2.0))
    message = r"module '1' \(Bare\) is on the meta device and nothing initializes its 'weight'"
    with pytest.raises(MaterializeError, match=message):
        materialize(model, model, MESH)
    assert all(p.is_meta for p in model.parameters())
    model[1].scale = 2.0  # what the constructor was given is there: it can be built anew
    torch.testing.assert_close(materialize(model, model, MESH)["1.weight"], torch.full((3,), 2.0))


def test_another_model_is_refused() -> None:
    other = nn.ModuleDict({"first": nn.Linear(6, 10), "norm": nn.BatchNorm1d(10), "attend": nn.Module()})
    with pytest.raises(MaterializeError, match=r"no module 'attend\.out_proj'|'attend' \(Module\) has no 'in_proj_weight'"):
        materialize(other, Small(), MESH)


def test_transformers_models_from_meta() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.1,
    )
    with torch.device("meta"):
        meta = transformers.LlamaForCausalLM(config)
    real = transformers.LlamaForCausalLM(config)
    found = materialize(meta, meta, MESH)
    buffers = dict(real.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    for name, tensor in found.items():
        if name in buffers:
            torch.testing.assert_close(tensor, buffers[name])
        elif "norm" in name:
            torch.testing.assert_close(tensor, torch.ones_like(tensor))
        else:
            assert 0.08 < tensor.std() < 0.12, name


def test_an_ancestors_initialization_reaches_its_children() -> None:
    """GPT-2 draws the projections into the residual stream again, narrower, from the module above them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=8, n_head=2)
    with torch.device("meta"):
        meta = transformers.GPT2LMHeadModel(config)
    found = materialize(meta, meta, MESH)
    assert 0.018 < found["transformer.h.0.attn.c_attn.weight"].std() < 0.022
    assert 0.004 < found["transformer.h.0.attn.c_proj.weight"].std() < 0.006
    assert "lm_head.weight" not in found, "the tied weight is one"


def test_never_more_than_one_sub_module_beside_the_share() -> None:
    layers, width = 12, 256
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    mesh = Mesh.of(dp=2, tp=4)
    program = program_of(model, mesh, 0)
    groups = Groups(mesh, 0, torch.device("cpu"), None, {})
    one = 4 * width * (width + 1)
    with LiveBytes() as live:
        tensors = {s.value: torch.empty([n for _, n in box(s, mesh, groups.coordinates)]) for s in program.stored}
        fill(program, tensors, groups, model, 0)
    share = sum(tensor.nbytes for tensor in tensors.values())
    assert share == layers * one / 8
    assert share + one <= live.peak <= share + 1.1 * one + width * width * 4 / 8
