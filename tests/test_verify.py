"""Verification: programs of real plans pass both checks on every rank; programs with one collective wrong do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.cost.cluster import Cluster
from meshwright.errors import VerifyError
from meshwright.ir.graph import Graph, Op, Param, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import Pins
from meshwright.ir.plan import GroupChoice, Plan, Schedule
from meshwright.ir.program import Program
from meshwright.ir.rule import OpRule
from meshwright.ir.sharding import Sharding
from meshwright.passes import lower, rank_program
from meshwright.passes.lower import _Lowering
from meshwright.passes.typecheck import typecheck
from meshwright.passes.verify import verify
from meshwright.planner import capture_model, make_plan, rules_of
from tests import models

SWAPS: Mapping[str, tuple[str, ...]] = {
    "mw.slice": ("mw.reduce_scatter",),
    "mw.vary": ("mw.identity", "mw.all_reduce", "mw.unvary"),
    "mw.unvary": ("mw.identity", "mw.vary"),
    "mw.term": ("mw.identity", "mw.vary"),
    "mw.all_gather": ("mw.gather_vary",),
    "mw.gather_vary": ("mw.all_gather",),
    "mw.reduce_scatter": ("mw.slice",),
    "mw.all_reduce": ("mw.identity", "mw.vary"),
    "mw.all_to_all": (),
    "mw.gather_linear": (),
}
"""{collective: what to put in its place that keeps the local shapes}; ``mw.identity`` is the collective left out."""


@dataclass(frozen=True)
class Planned:
    graph: Graph
    rules: Mapping[str, OpRule]

    def plan(self, cluster: str, **pins: Any) -> Plan:
        return make_plan(self.graph, Cluster.parse(cluster), Pins(**pins))

    def fails(self, program: Program) -> list[str]:
        """The checks that a program fails."""
        return [name for name, error in self.errors(program) if error is not None]

    def errors(self, program: Program) -> list[tuple[str, VerifyError | None]]:
        checks: tuple[tuple[str, Callable[[], None]], ...] = (
            ("verify", lambda: verify(program, self.graph, self.rules)), ("typecheck", lambda: typecheck(program))
        )
        return [(name, _error(check)) for name, check in checks]


def _error(check: Callable[[], None]) -> VerifyError | None:
    try:
        check()
    except VerifyError as error:
        return error
    return None


def _planned(graph: Graph) -> Planned:
    return Planned(graph, rules_of(graph)[0])


@lru_cache
def tiny(name: str) -> Planned:
    model, kwargs = models.make(name)
    return _planned(capture_model(model, (), kwargs, (), None, "fp32"))


@lru_cache
def large() -> Planned:
    """A Llama large enough that most of the Megatron form of sequence parallelism is the cheapest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.empty(8, 2048, dtype=torch.long, device="meta")
    return _planned(capture_model(model, (), {"input_ids": ids, "labels": ids.clone()}, (), None, "fp32"))


@lru_cache
def megatron(fused: bool, sequence: bool = True) -> Program:
    rows = {f"model.layers.*.{name}:linear": "dp=b0, tp=k" for name in ("self_attn.o_proj", "mlp.down_proj")}  # Megatron
    plan = large().plan("h100:1x4", dp=2, tp=2, sequence_parallel=sequence, operators=rows)
    return (rank_program if fused else lower)(plan, large().rules, 3)


# programs of real plans

PINS: tuple[dict[str, Any], ...] = (
    {}, {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}, {"dp": 4, "zero": 3},
    {"dp": 4, "shard": 2, "zero": 2}, {"dp": 2, "tp": 2, "microbatches": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3, "microbatches": 2},
)


@pytest.mark.parametrize("pins", PINS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_planned_programs_are_right_on_every_rank(name: str, pins: dict[str, Any]) -> None:
    planned = tiny(name)
    plan = planned.plan("cpu:1x4", **pins)
    for rank in range(4):
        program = rank_program(plan, planned.rules, rank)
        verify(program, planned.graph, planned.rules)
        typecheck(program)


@pytest.mark.parametrize("name", ["bert", "convnet", "masked_mean", "odd", "vit", "t5"])
def test_other_models_too(name: str) -> None:
    planned = tiny(name)
    for pins in ({}, {"dp": 2, "tp": 2}):
        plan = planned.plan("cpu:1x4", **pins)
        for rank in range(4):
            program = rank_program(plan, planned.rules, rank)
            verify(program, planned.graph, planned.rules)
            typecheck(program)


def test_dropout_and_one_device() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=16, bos_token_id=1, eos_token_id=1)
    ids = torch.randint(0, 64, (4, 8))
    graph = capture_model(GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids.clone()}, (), None, "fp32")
    planned = _planned(graph)
    for cluster, pins in (("cpu:1x4", {"dp": 2, "tp": 2, "microbatches": 2}), ("cpu:1x1", {})):
        program = rank_program(planned.plan(cluster, **pins), planned.rules, 0)
        assert any(op.target == "mw.dropout" for segment in program.segments for op in segment.graph.ops)
        assert planned.fails(program) == []


def test_large_program_uses_every_form() -> None:
    assert large().fails(megatron(True)) == large().fails(megatron(False)) == []
    programs = megatron(True), megatron(False), megatron(False, sequence=False)
    used = {op.target for program in programs for _, _, op in _ops(program)}
    assert used >= {"mw.slice", "mw.vary", "mw.gather_vary", "mw.gather_linear", "mw.reduce_scatter", "mw.all_reduce"}


# one thing wrong


def _ops(program: Program) -> Iterator[tuple[int, int, Op]]:
    for i, segment in enumerate(program.segments):
        for j, op in enumerate(segment.graph.ops):
            yield i, j, op


def _put(program: Program, segment: int, index: int, op: Op) -> Program:
    """The program with another operator at one place."""
    old = program.segments[segment]
    ops = (*old.graph.ops[:index], op, *old.graph.ops[index + 1 :])
    new = replace(old, graph=replace(old.graph, ops=ops))
    return replace(program, segments=(*program.segments[:segment], new, *program.segments[segment + 1 :]))


def _wrong(op: Op, ndim: int) -> Iterator[tuple[str, Op]]:
    """(what, the collective with that wrong)."""
    for target in SWAPS[op.target]:
        yield target, replace(op, target=target)
    for i, arg in enumerate(op.args):
        for dim in range(ndim) if type(arg) is int else ():
            if dim != arg:
                yield "dim", replace(op, args=(*op.args[:i], dim, *op.args[i + 1 :]))
    for i, (key, value) in enumerate(op.kwargs):
        other = {"dp": "tp", "tp": "dp"}[value] if key == "axis" else value + 1
        yield key, replace(op, kwargs=(*op.kwargs[:i], (key, other), *op.kwargs[i + 1 :]))


@pytest.mark.parametrize(("fused", "sequence"), [(True, True), (False, True), (False, False)])
def test_every_wrong_collective_is_caught(fused: bool, sequence: bool) -> None:
    program = megatron(fused, sequence)
    caught: dict[tuple[str, str], set[str]] = {}
    for i, j, op in _ops(program):
        if op.target not in SWAPS:
            continue
        ndim = len(program.segments[i].graph.values[op.inputs[0]].shape)
        for what, wrong in _wrong(op, ndim):
            errors = large().errors(_put(program, i, j, wrong))
            by = {name for name, error in errors if error is not None}
            assert by, f"{what} instead of {op}"
            for _, error in errors:
                assert error is None or (error.module in str(error) and error.node in str(error))
            caught[op.target, what] = caught.get((op.target, what), by) & by
    assert all("verify" in by for by in caught.values())
    # what spmd_types sees by itself: whatever leaves a gradient or a value unreduced where it is then taken as complete
    assert {key for key, by in caught.items() if "typecheck" in by} >= {
        ("mw.all_reduce", "mw.identity"),
        *([("mw.reduce_scatter", "mw.slice")] if sequence else [("mw.vary", "mw.identity"), ("mw.vary", "axis")]),
    }


def _first(program: Program, target: str, reads: str = "") -> tuple[int, int, Op]:
    return next((i, j, op) for i, j, op in _ops(program) if op.target == target and reads in op.inputs[0])


def test_dropped_all_reduce() -> None:
    planned = tiny("llama")
    program = rank_program(planned.plan("cpu:1x4", tp=4, sequence_parallel=False), planned.rules, 1)
    i, j, op = _first(program, "mw.all_reduce", "linear")
    errors = dict(planned.errors(_put(program, i, j, replace(op, target="mw.identity"))))
    for error in errors.values():
        assert error is not None
        assert error.module.startswith("model.layers.0")
        assert error.module in str(error)
    assert "+tp" in str(errors["verify"])


def test_dropped_reduce_scatter_under_sequence_parallelism() -> None:
    program = megatron(False)
    i, j, op = _first(program, "mw.reduce_scatter", "linear")
    errors = dict(large().errors(_put(program, i, j, replace(op, target="mw.slice"))))
    error = errors["verify"]
    assert error is not None
    assert error.module == "model.layers.0.self_attn.o_proj"
    assert "model.layers.0.self_attn.o_proj: " in str(error)
    assert "+tp" in error.found


def test_missing_gradient_reduction_of_a_norm_weight() -> None:
    program = megatron(False)
    at = next(i for i, item in enumerate(program.stored) if item.fqns[0] == "model.layers.0.input_layernorm.weight")
    item = program.stored[at]
    assert item.late_axes == ("tp",)
    for wrong in ((), ("dp",), ("dp", "tp")):
        stored = (*program.stored[:at], replace(item, late_axes=wrong), *program.stored[at + 1 :])
        errors = dict(large().errors(replace(program, stored=stored)))
        error = errors["verify"]
        assert error is not None, wrong
        assert error.module == "model.layers.0.input_layernorm"
        assert str(error).startswith("model.layers.0.input_layernorm: ")
        assert wrong or errors["typecheck"] is not None


def test_wrong_split_dim() -> None:
    program = megatron(False)
    i, j, op = _first(program, "mw.gather_vary")
    wrong = replace(op, args=(op.args[0], 0))
    errors = dict(large().errors(_put(program, i, j, wrong)))
    assert errors["verify"] is not None
    assert "model.layers.0" in str(errors["verify"])
    assert "dim 0" in errors["verify"].expected


def test_parameter_stored_wrong() -> None:
    """A weight whose gradient nobody sums, and one split along the other dim."""
    program = megatron(True)
    for at, item in enumerate(program.stored):
        if "layers.1" not in item.fqns[0]:
            continue
        changes = [replace(item, data_axes=())]
        if len(item.shape) == 2:
            changes.append(replace(item, tensor=Sharding(item.tensor.dims[::-1])))
        for wrong in changes:
            stored = (*program.stored[:at], wrong, *program.stored[at + 1 :])
            error = large().errors(replace(program, stored=stored))[0][1]
            assert error is not None
            assert "layers.1" in str(error)


@lru_cache
def projections() -> tuple[Planned, Program]:
    """GPT-2 with a sequence large enough that the Megatron form is the cheapest, over tp: q, k and v are one weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=2, n_head=8, vocab_size=4096, n_positions=2048, use_cache=False,
                                           resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, eos_token_id=1, bos_token_id=1))
    ids = torch.empty(8, 2048, dtype=torch.long, device="meta")
    planned = _planned(capture_model(model, (), {"input_ids": ids, "labels": ids.clone()}, (), None, "fp32"))
    return planned, rank_program(planned.plan("h100:1x4", tp=4, sequence_parallel=False), planned.rules, 1)


def test_fused_projections_are_split_within_each_part() -> None:
    """Heads stay on their ranks: one reduction per half of a block, and nothing gathers queries, keys or values."""
    planned, program = projections()
    assert planned.fails(program) == []
    fused = {item.fqns[0].split(".", 3)[-1]: item for item in program.stored if item.fused > 1 and ".h.0." in item.fqns[0]}
    assert {name: (item.fused, item.fused_dim, item.tensor.dims[item.fused_dim]) for name, item in fused.items()} == {
        "attn.c_attn.weight": (3, 1, ("tp",)), "attn.c_attn.bias": (3, 0, ("tp",)),
    }
    graph = [segment.graph for segment in program.segments if segment.path][-1]
    communicating = [op.target for op in graph.ops if dict(op.kwargs).get("axis") and len(graph.values[op.inputs[0]].shape) > 2]
    assert sorted(communicating) == ["mw.all_reduce"] * 2 + ["mw.vary"] * 2


def test_fused_projections_stored_wrong() -> None:
    """Parts that are not those of the reader, and a plain weight said to have parts."""
    planned, program = projections()
    for at, item in enumerate(program.stored):
        for parts in {1, 2, 3} - {item.fused}:
            if ".h.1." in item.fqns[0] and len(item.shape) == 2:
                stored = (*program.stored[:at], replace(item, fused=parts), *program.stored[at + 1 :])
                error = planned.errors(replace(program, stored=stored))[0][1]
                assert error is not None
                assert "transformer.h.1" in str(error)


def test_outputs_and_loss() -> None:
    program = megatron(True)
    loss = next(port for port in program.outputs if port.name == program.loss)
    other = next(port for port in program.outputs if port.name != program.loss)
    pending = replace(loss, time="sum")
    whole = replace(other, sharding=Sharding.whole(3))
    assert other.sharding != whole.sharding
    for wrong in (pending, whole):
        ports = tuple(wrong if port.name == wrong.name else port for port in program.outputs)
        assert "verify" in large().fails(replace(program, outputs=ports))
    assert large().fails(replace(program, outputs=tuple(whole if p is other else p for p in program.outputs))) == [
        "verify", "typecheck"
    ]
    assert "verify" in large().fails(replace(program, loss=None))


def test_wrong_literals_are_caught() -> None:
    program = megatron(True)
    tried = 0
    for i, j, op in _ops(program):
        sizes = op.args[1] if op.target == "aten.reshape.default" else ()
        if not sizes or program.segments[i].path != "model.layers.0":
            continue
        wrong = replace(op, args=(op.args[0], (sizes[0], sizes[1] * 2, sizes[2] // 2, *sizes[3:])))
        by = large().fails(_put(program, i, j, wrong))
        assert by == ["verify", "typecheck"]
        tried += 1
    assert tried >= 4


# plans written by hand


def test_a_bias_looked_up_at_made_positions_is_exchanged_for_heads() -> None:
    """Its places are a piece of what each rank makes: nothing but ``verify`` knows that it is one; it has a gradient."""
    model, kwargs = models.make("t5")
    long = {name: torch.ones(4, 8, dtype=torch.long) for name in kwargs}
    planned = _planned(capture_model(model, (), long, (), None, "fp32"))
    plan = planned.plan("cpu:1x8", dp=2, tp=1, cp=4, ulysses=2, zero=0, recompute="full", attention="all-gather")
    moved = set[str]()
    for rank in range(8):
        program = rank_program(plan, planned.rules, rank)
        assert planned.fails(program) == []
        moved.update(name for _, _, op in _ops(program) if op.target == "mw.all_to_all" for name in op.inputs)
    assert any(name.startswith("unsqueeze") for name in moved)


def _graph(*ops: Op, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """A graph with input ``x``, parameter ``w`` and the scalar loss ``loss``; ``pos`` and ``column`` are whole numbers."""
    whole = ("pos", "column")
    values = {
        name: Value(name, shape, torch.int64 if name in whole else torch.float32, name not in ("x", *whole))
        for name, shape in shapes.items()
    }
    return Graph(values, ("x",), (Param("w", ("inner.w",), True),), ops, {"loss": Ref("loss")}, "loss")


def _op(name: str, target: str, *args: Any, **kwargs: Any) -> Op:
    return Op(name, f"aten.{target}", args, tuple(kwargs.items()), (name,), "inner")


POSITIONS = _graph(
    _op("product", "mul.Tensor", Ref("x"), Ref("w")),
    _op("pos", "arange.default", 8),
    _op("column", "unsqueeze.default", Ref("pos"), 1),
    _op("sum", "add.Tensor", Ref("product"), Ref("column")),
    _op("loss", "sum.default", Ref("sum")),
    shapes={"x": (8, 4), "w": (4,), "product": (8, 4), "pos": (8,), "column": (8, 1), "sum": (8, 4), "loss": ()},
)


def _positions(rows: str, made: str) -> Plan:
    """The rows split over one axis, the positions made in pieces over one."""
    assignments = {name: {rows: "dim0"} for name in ("product", "sum", "loss")}
    assignments |= {name: {made: "dim0"} for name in ("pos", "column")}
    copies = {"x": Sharding(((rows,), ()))}
    return Plan(POSITIONS, Mesh.of(a=2, b=2), assignments, copies, (GroupChoice("", data_axes=(rows,)),))


@pytest.mark.parametrize("rows", ["a", "b"])
@pytest.mark.parametrize("rank", range(4))
def test_a_made_piece_is_told_by_its_reader(rows: str, rank: int) -> None:
    """On rank 0 a piece of arange over either axis looks the same; its reader tells which one it must be."""
    planned = _planned(POSITIONS)
    program = lower(_positions(rows=rows, made=rows), planned.rules, rank)
    assert planned.fails(program) == []
    i, j, op = next((i, j, op) for i, j, op in _ops(program) if op.target == "aten.arange.start_step")
    start, _, step = op.args
    assert "verify" in planned.fails(_put(program, i, j, replace(op, args=((start + 4) % 8, (start + 4) % 8 + 4, step))))


def test_a_made_piece_that_moves() -> None:
    """Made over one axis and read over the other: the collective between says so."""
    planned = _planned(POSITIONS)
    for rank in range(4):
        program = lower(_positions(rows="a", made="b"), planned.rules, rank)
        assert planned.fails(program) == []


def test_a_piece_of_what_is_repeated_moves() -> None:
    """Rows are gathered, repeated to the columns of each rank, and exchanged: nothing but ``verify`` knows them as pieces."""
    graph = _graph(
        _op("narrow", "neg.default", Ref("x")),
        _op("wide", "expand.default", Ref("narrow"), (8, 4)),
        _op("product", "mul.Tensor", Ref("wide"), Ref("w")),
        _op("loss", "sum.default", Ref("product")),
        shapes={"x": (8, 1), "w": (4,), "narrow": (8, 1), "wide": (8, 4), "product": (8, 4), "loss": ()},
    )
    whole = {name: replace(graph.values[name], differentiable=False) for name in ("narrow", "wide")}
    graph = replace(graph, values={**graph.values, **whole})
    planned = _planned(graph)
    split = {"narrow": {"a": "dim0"}, "wide": {"a": "dim1"}, "product": {"a": "dim0"}, "loss": {"a": "dim0"}}
    for rank in range(2):
        program = lower(Plan(graph, Mesh.of(a=2), split, {}, (GroupChoice("", data_axes=("a",)),)), planned.rules, rank)
        assert "mw.all_to_all" in {op.target for _, _, op in _ops(program)}
        assert planned.fails(program) == []


def test_micro_batches_of_other_rows_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product reads all rows of a micro-batch, the sum those of a rank: cut before they are split over it, both are of the
    same rows of the batch; cut after, they are not."""
    graph = _graph(
        _op("product", "mul.Tensor", Ref("x"), Ref("w")),
        _op("sum", "mul.Tensor", Ref("product"), Ref("x")),
        _op("loss", "sum.default", Ref("sum")),
        shapes={"x": (8, 4), "w": (4,), "product": (8, 4), "sum": (8, 4), "loss": ()},
    )
    planned = _planned(graph)
    split = {"product": {"a": "dim0"}, "sum": {"a": "dim0"}, "loss": {"a": "dim0"}}
    schedule = Schedule(2, dict.fromkeys(split, "dim0"))
    plan = Plan(graph, Mesh.of(a=2), split, {}, (GroupChoice("", data_axes=("a",)),), schedule)
    assert planned.fails(lower(plan, planned.rules, 1)) == []
    mixed = replace(plan, assignments={**split, "product": {}})
    program = lower(mixed, planned.rules, 1)
    assert planned.fails(program) == []
    monkeypatch.setattr(_Lowering, "_framed", lambda self, sharding, dim: sharding)
    error = planned.errors(lower(mixed, planned.rules, 1))[0][1]
    assert error is not None
    assert "rows" in error.expected
    i, j, op = _first(program, "mw.unvary")
    assert planned.fails(_put(program, i, j, replace(op, target="mw.identity"))) == ["verify", "typecheck"]


# beside a real process group


def _beside_a_group(rank: int) -> tuple[bool, float]:
    planned = _planned(POSITIONS)
    group = dist.group.WORLD
    failed = planned.fails(lower(_positions(rows="a", made="a"), planned.rules, rank))
    total = torch.ones(1)
    dist.all_reduce(total)
    return failed == [] and dist.group.WORLD is group, float(total)


def test_typecheck_leaves_a_process_group_alone(pool: Callable[[int], Any]) -> None:
    """Two processes, a program of four ranks: the check makes no group and needs none."""
    assert pool(2).run(_beside_a_group) == [(True, 2.0)] * 2
