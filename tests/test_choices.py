"""Which assignments are open to an operator: what roles and pins forbid, and that something always remains."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from meshwright.api import plan
from meshwright.compiler.capture.capture import capture
from meshwright.compiler.placement.choices import Scope, choices
from meshwright.compiler.placement.pinned import check_tensor_pins
from meshwright.compiler.search.blockwise import solve_layout
from meshwright.compiler.search.candidates import Layout
from meshwright.compiler.search.task import Task, Timing
from meshwright.compiler.structure.dims import batch_size, handed_on
from meshwright.compiler.structure.structure import Structure
from meshwright.cost.cluster import Cluster
from meshwright.footprint import Footprints
from meshwright.ir.graph import Graph, Op
from meshwright.ir.mesh import Mesh
from meshwright.ir.pins import PinError, Pins
from meshwright.ir.plan import PlanError
from meshwright.ir.rule import place
from meshwright.ir.sharding import Sharding
from meshwright.planner import make_plan, rules_of
from meshwright.views.facts import facts_of
from tests.test_planner import Stack, graph_of, of_models


def scope_of(graph: Graph, mesh: Mesh, roles: Mapping[str, str], pins: Pins, microbatches: int = 1) -> Scope:
    return Scope(Structure(graph, rules_of(graph)[0]), mesh, roles, pins, microbatches)


def open_to(graph: Graph, op: Op, roles: Mapping[str, str], pins: Pins = Pins(), size: int = 2) -> list[dict[str, str]]:  # noqa: B008
    mesh = Mesh(tuple(roles), (size,) * len(roles))
    return choices(op, rules_of(graph)[0][op.name], scope_of(graph, mesh, roles, pins), None)


def linears(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.target == "aten.linear.default"]


GRAPH = graph_of(Stack(2, 16), 4, 6, 16)


def test_a_free_axis_may_split_anything() -> None:
    found = open_to(GRAPH, linears(GRAPH)[2], {"x": "any"})
    assert found[0] == {}
    assert {next(iter(a.values())) for a in found[1:]} == {"b0", "b1", "k", "n"}


def test_two_free_axes_are_chosen_jointly() -> None:
    one, two = (open_to(GRAPH, linears(GRAPH)[2], dict.fromkeys(axes, "any")) for axes in ("x", "xy"))
    both = [a for a in two if len(a) == 2]
    assert {(a["x"], a["y"]) for a in both} >= {("b0", "n"), ("n", "b0"), ("n", "n"), ("b0", "k")}
    assert len(two) > len(one)
    assert len({tuple(sorted(a.items())) for a in two}) == len(two)


def test_a_data_axis_splits_the_batch_and_nothing_else() -> None:
    for op in GRAPH.ops[:-1]:
        assert all(set(a.values()) <= {"b0", "dim0"} for a in open_to(GRAPH, op, {"dp": "data"}))
    assert open_to(GRAPH, linears(GRAPH)[2], {"dp": "data"}) == [{"dp": "b0"}]


def test_a_tensor_axis_splits_every_weight_and_never_the_batch() -> None:
    for op in linears(GRAPH):
        assert {a["tp"] for a in open_to(GRAPH, op, {"tp": "tensor"})} == {"k", "n"}


def test_what_does_not_divide_is_left_whole() -> None:
    graph = graph_of(Stack(2, 6), 4, 5, 6)
    for op in linears(graph):
        found = open_to(graph, op, {"x": "any"}, size=4)
        assert {} in found
        assert all("k" not in a.values() or graph.values[op.inputs[1]].shape[1] % 4 == 0 for a in found)


@pytest.mark.parametrize("name", ["uneven", "bert", "t5"])
def test_choices_on_other_meshes_are_not_taken_for_these(name: str) -> None:
    """One structure serves meshes of all sizes and counts of micro-batches, in any order; each gets what it would alone."""
    graph = graph_of(Stack(2, 6), 12, 5, 6) if name == "uneven" else of_models(name)
    rules, _ = rules_of(graph)
    shared, checked = Structure(graph, rules), 0
    sizes = [(2, 2), (1, 4), (3, 2), *([(4, 1), (2, 2), (2, 5), (6, 2), (4, 4)] if name == "uneven" else [])]
    for roles, (first, second), count in itertools.product(
        ({"dp": "data", "tp": "tensor"}, {"x": "any", "y": "any"}), sizes, (1, 2),
    ):
        mesh = Mesh(tuple(roles), (first, second))
        try:
            times = shared.schedule(count).time
        except PlanError:
            continue
        alone = Scope(Structure(graph, rules), mesh, roles, Pins(), count)
        for op in graph.ops:
            found = choices(op, rules[op.name], Scope(shared, mesh, roles, Pins(), count), times.get(op.name))
            assert found == choices(op, rules[op.name], alone, times.get(op.name))
            checked += len(found) > 1
    assert checked > 100


def test_an_axis_of_one_device_is_idle() -> None:
    for op in GRAPH.ops:
        assert open_to(GRAPH, op, {"x": "any"}, size=1) == [{}]


def test_sequence_parallelism_splits_what_blocks_hand_on() -> None:
    last = [GRAPH.producers[name] for name in handed_on(GRAPH)]
    assert last
    for index in last:
        on = open_to(GRAPH, GRAPH.ops[index], {"tp": "tensor"}, Pins(sequence_parallel=True, tp=2))
        assert [a["tp"] for a in on] == ["dim1"]
        off = open_to(GRAPH, GRAPH.ops[index], {"tp": "tensor"}, Pins(sequence_parallel=False, tp=2))
        assert off == [{}]  # whole on every rank
    off = [open_to(GRAPH, op, {"tp": "tensor"}, Pins(sequence_parallel=False, tp=2)) for op in linears(GRAPH)]
    assert all([set(a) for a in found] == [{"tp"}] for found in off)


class Branches(nn.Module):
    """What two row parallel products make, one of them scaled, is added; ``seen``: one of them is read by others too."""

    def __init__(self, seen: bool = False) -> None:
        super().__init__()
        self.up, self.a, self.b, self.seen = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(32, 8), seen

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.up(x).relu()
        a, b = self.a(h), self.b(h)
        return ((x + (a.transpose(0, 1).transpose(0, 1) * x + b)).tanh() * (a.exp() if self.seen else 1) - y).square().mean()


@pytest.mark.parametrize("seen", [False, True])
def test_pending_sums_pass_where_they_meet(seen: bool) -> None:
    """Through the products and the addition in which they meet, and nowhere else: not to the stream, and not where one of them
    has to be whole."""
    graph = capture(Branches(seen), (torch.randn(4, 6, 8), torch.randn(4, 6, 8)), {})
    found = Structure(graph, rules_of(graph)[0]).meeting
    targets = [op.target for op in graph.ops if op.name in found]
    assert targets == ([] if seen else ["aten.transpose.int", "aten.transpose.int", "aten.mul.Tensor", "aten.add.Tensor"])
    for op in graph.ops:
        if op.name in found:
            assert {"x": found[op.name]} in open_to(graph, op, {"x": "tensor"})
            assert {"x": found[op.name]} not in open_to(graph, op, {"x": "data"})


class Routed(nn.Module):
    """A layer beside whose weights that of a gate is slight, and that of ``small`` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate, self.small = (nn.Linear(16, n) for n in (64, 16, 2, 16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.up(self.down(x)) * self.gate(self.small(x)).sum(-1, keepdim=True)).sum(-1) - y).square().mean()


def test_slight_weights_may_lie_whole() -> None:
    graph = capture(Routed(), (torch.randn(4, 6, 16), torch.randn(4, 6)), {})
    whole = [graph.values[op.args[1].name].shape for op in linears(graph) if {} in open_to(graph, op, {"x": "tensor"})]
    assert whole == [(2, 16)]


@pytest.mark.parametrize("sequence", [False, True])
def test_more_tensor_ranks_than_key_heads_split_the_query_heads(sequence: bool) -> None:
    """Two key heads on eight ranks: each has both, and attends with the queries of two heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
                         num_key_value_heads=2, vocab_size=4096, max_position_embeddings=1024, use_cache=False)
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(8, 1024, dtype=torch.int64)
    pins = {"tp": 8, "sequence_parallel": sequence}
    found = plan(model, "h100:1x8", ((), {"input_ids": ids, "labels": ids}), precision="bf16", pins=pins)
    attends = [op.name for op in found.graph.ops if op.target == "aten.scaled_dot_product_attention.default"]
    assert [found.assignments[name] for name in attends] == [{"tp": "shared"}] * 2


def test_a_sequence_that_tp_does_not_divide() -> None:
    graph = graph_of(Stack(2, 16), 4, 1, 16)
    op = graph.ops[graph.producers[handed_on(graph)[0]]]
    with pytest.raises(PinError, match=r"sequence of length 1 .* cannot be split over tp=2"):
        open_to(graph, op, {"tp": "tensor"}, Pins(sequence_parallel=True, tp=2))


def test_the_sequence_is_the_first_dim_but_the_batch() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(2, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stack(x.transpose(0, 1))

    graph = graph_of(Turned(), 4, 6, 16)
    for name in handed_on(graph):
        on = open_to(graph, graph.ops[graph.producers[name]], {"tp": "tensor"}, Pins(sequence_parallel=True, tp=2))
        assert [a["tp"] for a in on] == ["dim0"]


def test_a_pinned_tensor_is_read_so() -> None:
    pins = Pins(tensors={"layers.1.up.weight": "[f@tp, h]"})
    up = linears(GRAPH)[2]
    assert up.module == "layers.1.up"
    assert open_to(GRAPH, up, {"tp": "tensor"}, pins) == [{"tp": "n"}]
    assert len(open_to(GRAPH, linears(GRAPH)[0], {"tp": "tensor"}, pins)) == 2
    with pytest.raises(PinError, match="names axis 'cp'"):
        open_to(GRAPH, up, {"tp": "tensor"}, Pins(tensors={"*.up.weight": "[f@cp, h]"}))


def test_a_pin_of_a_parameter_names_one() -> None:
    """A name that the model does not have would be a pin that does nothing."""
    check_tensor_pins(Pins(tensors={"layers.*.up.weight": "[f@tp, h]"}), GRAPH)
    with pytest.raises(PinError, match=r"names no parameter of the model; did you mean 'layers\.\d\.up\.weight'"):
        check_tensor_pins(Pins(tensors={"layers.0.upp.weight": "[f@tp, h]"}), GRAPH)
    with pytest.raises(PinError, match="has 1 dims, the parameter has 2"):
        check_tensor_pins(Pins(tensors={"*.up.weight": "[f@tp]"}), GRAPH)


def test_dims_are_known_by_where_they_come_from() -> None:
    graph = of_models("llama")
    assert batch_size(graph) == 4
    scope = scope_of(graph, Mesh.of(tp=2), {"tp": "tensor"}, Pins())
    logits = next(name for name in graph.outputs if len(graph.values[name].shape) == 3)
    assert scope.classes.find((logits, 0)) in scope.structure.batch
    assert scope.classes.find((logits, 1)) in scope.structure.sequence
    assert scope.classes.find((logits, 2)) not in scope.structure.batch | scope.structure.sequence


def test_only_layers_hand_on() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    graph = graph_of(Two(), 4, 8)
    assert [block.path for block in graph.blocks] == ["a", "b"]
    assert handed_on(graph) == []


def test_what_is_made_of_parameters_leaves_the_sum_to_them() -> None:
    """Turned weights (gpt2) and position biases (t5): no gradient is summed between operators under data parallelism."""
    for name in ("gpt2", "t5"):
        graph = of_models(name)
        plan = make_plan(graph, Cluster.parse("h100:1x4"), Pins(dp=4))
        moved = [step for step in facts_of(plan).collectives if step.backward]
        assert not moved
    scope = scope_of(of_models("gpt2"), Mesh.of(dp=2), {"dp": "data"}, Pins())
    turned = next(op for op in scope.graph.ops if op.target == "aten.t.default")
    assert choices(turned, rules_of(scope.graph)[0][turned.name], scope, None) == [{"dp": "~"}]


def test_experts_of_the_whole_batch_leave_no_sum() -> None:
    """Tokens are sorted over the whole batch, so every data rank reads the turned scales for all of it."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.up(x).flatten(0, 1)
            return (rows[rows[:, 0].argsort()] * self.scale.neg()).square().mean()

    graph = graph_of(Sorted(), 8, 4, 8)
    scope = scope_of(graph, Mesh.of(dp=2), {"dp": "data"}, Pins())
    turned = [op for op in graph.ops if scope.of_every_sample.intersection(op.outputs)]
    assert turned
    for op in turned:
        assert {} in choices(op, rules_of(graph)[0][op.name], scope, None)
    make_plan(graph, Cluster.parse("h100:1x4"), Pins(dp=4, zero=2))


class Tiled(nn.Module):
    """Positions made of a parameter, copied for every sample, and turned over by an operator that no axis may split there."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip, self.positions, self.up = flip, nn.Parameter(torch.randn(6, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = self.up(self.positions).repeat(x.shape[0], 1)
        copies = copies.flip(0) if self.flip else copies
        return (x + copies.view(x.shape)).square().mean()


@pytest.mark.parametrize("flip", [False, True])
def test_copies_of_parameters_for_every_sample_leave_data_parallelism(flip: bool) -> None:
    """What no axis may split is read whole, so what it reads is left whole as well."""
    graph = graph_of(Tiled(flip), 4, 6, 8)
    scope = scope_of(graph, Mesh.of(dp=2), {"dp": "data"}, Pins())
    (repeat,) = (op for op in graph.ops if op.target == "aten.repeat.default")
    found = choices(repeat, rules_of(graph)[0][repeat.name], scope, None)
    assert found == ([{}, {"dp": "~"}] if flip else [{"dp": "dim0"}])
    for pins in (Pins(dp=2, zero=3), Pins()):
        make_plan(graph, Cluster.parse("h100:1x2"), pins)


def test_a_parameter_without_a_gradient_leaves_data_parallelism() -> None:
    """A detached parameter is read by every sample, and nothing is to be summed."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.up = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.up(x) * self.scale.detach()).square().mean()

    graph = graph_of(Detached(), 4, 6, 8)
    plan = make_plan(graph, Cluster.parse("h100:1x2"), Pins(dp=2, zero=3))
    (scaled,) = (op for op in graph.ops if op.target == "aten.mul.Tensor")
    rule = rules_of(graph)[0][scaled.name]
    assert plan.assignments[scaled.name] == {"dp": rule.results[0][0]}  # each rank scales its own samples
    (scale,) = (name for name in scaled.inputs if not graph.values[name].differentiable)
    needs = [graph.values[name].differentiable for name in scaled.inputs]
    placed = place(rule, plan.assignments[scaled.name], plan.mesh, needs)
    assert placed.operands[scaled.inputs.index(scale)] == Sharding.whole(1)  # whole everywhere, and no gradient pending


def test_a_weight_is_split_where_it_hands_on() -> None:
    """Sequence parallelism pinned: what a linear hands on is split along the sequence by its reader."""
    graph = graph_of(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), 4, 6, 16)
    assert handed_on(graph)[0] == "linear"
    pins = Pins(sequence_parallel=True, tp=2)
    assert all({a["tp"] for a in open_to(graph, op, {"tp": "tensor"}, pins)} == {"k", "n"} for op in linears(graph))


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the operator whose choices fit nothing around it; without pins it blames none."""
    monkeypatch.setattr(Scope, "of_every_sample", frozenset())
    graph, cluster = graph_of(Tiled(True), 4, 6, 8), Cluster.parse("h100:1x2")
    rules = rules_of(graph)[0]
    text = r"nothing runs on dp=2 x tp=1 .* aten\.(repeat|flip)\.default of the model \(.*\) fits nothing around it; "
    with pytest.raises(PinError, match=text + "change one of the pins dp, zero"):
        make_plan(graph, cluster, Pins(dp=2, zero=3))
    assert make_plan(graph, cluster, Pins()).mesh.world == 2  # the joint search and the layouts do without data ranks
    task = Task.of(graph, cluster, rules, Pins(), precision="fp32", state_bytes=8.0, gap=0.01)
    layout = Layout(Mesh.of(dp=2, tp=1), {"dp": "data", "tp": "tensor"})
    with pytest.raises(PlanError, match=text + "another rule"):
        solve_layout(task, layout, 1, Footprints(rules, 8.0, cluster.device).fits, Timing())


class JoinedKeys(nn.Module):
    """Writes into an empty tensor, as attention of DeepSeek does."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(64, 96), nn.Linear(64, 32), nn.Linear(128, 64)

    def forward(self, x):
        keys = x.new_empty(*x.shape[:2], 128)
        keys[..., :96] = self.first(x)
        keys[..., 96:] = self.second(x)
        return self.out(keys).square().mean()


def test_a_rank_makes_no_more_of_an_empty_tensor_than_is_written_there():
    found = plan(JoinedKeys(), "h100:1x4", (torch.empty(8, 128, 64),), pins={"dp": 4, "tp": 1})
    made = [op for op in found.graph.ops if op.target == "aten.full.default"]
    assert [found.assignments[op.name] for op in made] == [{"dp": "dim0"}]
