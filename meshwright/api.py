"""The way through: a module, a mesh and an example become a plan, and the plan a running module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.compiler.placement.pin_conflicts import asks, check_agreement
from meshwright.compiler.structure.calls.guard import CallWatch
from meshwright.compiler.structure.pieces import as_in
from meshwright.compiler.structure.same import aligned
from meshwright.cost.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError, RunError
from meshwright.ir.declared.experts import IMBALANCE, with_imbalance
from meshwright.ir.declared.precision import PRECISIONS
from meshwright.ir.declared.registered import registered_of
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan, PlanError
from meshwright.ir.program import Program
from meshwright.ir.serialize import plan_hash, plan_to_dict
from meshwright.ir.signature import bind, example_of
from meshwright.planner import MOST_STATE, OPTIMIZERS, Timing, capture_model, check_early, make_plan
from meshwright.programs import check_given, checked_program, degrees_of, device_of, mesh_pins, order_of
from meshwright.progress import progress as shown
from meshwright.rules import rules_of, rules_of_plan
from meshwright.runtime.verdict import of_rank_zero, together


def plan(
    model: nn.Module, cluster: Cluster | str, example_inputs: Any = None, *, loss_fn: Callable[..., Any] | None = None,
    optimizer: str | float = "adamw", precision: str = "fp32", pins: Pins | Mapping[str, Any] | str | None = None,
    strict: bool = False, progress: bool = False, timing: Timing | None = None, cache: str | Path | None = None,
    headroom: float | None = None, expert_imbalance: float = IMBALANCE,
) -> Plan:
    """Plan ``model`` on ``cluster`` ("h100:8x8", a Cluster): no processes, no GPU, any size; meta parameters are enough.

    ``example_inputs``: (args, kwargs), args or kwargs at the GLOBAL batch, with the loss function's targets as a third
    item; None takes ``model.dummy_inputs``. The loss is what ``loss_fn(output, *targets)`` returns, or else the output's
    "loss", or its only scalar with a gradient. ``optimizer``: a name or the bytes of state per parameter. ``strict``: refuse
    operators without a sharding rule instead of replicating them. ``cache``: a folder in which plans are kept and looked for
    (``meshwright.cache``). ``headroom``: the part of a device's memory, beside what its context takes, that a plan leaves free
    for communicators and the allocator; None: 3%, or nothing on a cluster whose memory you gave (``Cluster.with_memory``).
    ``expert_imbalance``: where experts are split over devices, the rows of the device that gets most over the mean, as times
    and memory count them. Raises InputError, CaptureError, ClusterError, PinError, PlanError.
    """
    timing = timing or Timing()
    checked = _check_options(optimizer, precision, pins)
    where = (Cluster.parse(cluster) if isinstance(cluster, str) else cluster).with_headroom(headroom)
    args, kwargs, targets = example_call(model, example_inputs)
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and not x.is_nested and x.ndim]
    check_early(checked, where, given[0].shape[0] if given else 0)
    with shown(progress) as report:
        report("capturing the model", 0.0)
        graph = with_imbalance(capture_model(model, args, kwargs, targets, loss_fn, precision), expert_imbalance)
        timing.mark("capture")
        return _found(graph, where, checked, optimizer, precision, strict, cache, progress, report, timing)


def graph_of(
    model: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None, optimizer: str | float = "adamw",
    precision: str = "fp32",
) -> Graph:
    """The captured graph, of which many plans can be made (``planner.make_plan``); options as in ``plan``, checked."""
    _check_options(optimizer, precision, None)
    return capture_model(model, *example_call(model, example_inputs), loss_fn, precision)


def autoparallel(
    model: nn.Module, mesh: DeviceMesh | Cluster | str, example_inputs: Any = None, *,
    loss_fn: Callable[..., Any] | None = None, optimizer: str | float | None = None, precision: str | None = None,
    pins: Pins | Mapping[str, Any] | str | None = None, plan: Plan | str | Path | None = None, progress: bool = True,
    strict: bool = False, cache: str | Path | None = None, headroom: float | None = None, expert_imbalance: float = IMBALANCE,
) -> nn.Module:
    """Parallelize ``model`` over ``mesh``: an ``nn.Module`` whose loss, gradients and steps equal the single device's.

    Call on every rank with the same arguments. A DeviceMesh whose axes are named dp, tp, cp, pp, ep pins those degrees; any
    other is only a set of devices. ``plan``: a Plan or its file, skips the search; the model is captured all the same (with the
    loss_fn that the plan was made with) and must compute what the plan's graph does, and arguments that contradict the plan are
    refused. ``cache``: a folder in which plans are kept: a second start of the same script finds its plan there, skips the
    search, and says so (in a line on stderr with ``progress``, and in the plan's notes). Without an example the first call is
    the example. See ``plan`` for the other arguments (``optimizer``: "adamw" and ``precision``: "fp32" if not given, or the
    plan's) and the errors.
    """
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"autoparallel runs on a torch DeviceMesh, got {type(mesh).__name__}; to plan for a cluster without "
                         "its devices use meshwright.plan(model, cluster, ...)")
    if example_inputs is None and plan is None and getattr(model, "dummy_inputs", None) is None:
        from meshwright.runtime.deferred import Deferred

        def build(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.Module:
            return autoparallel(model, mesh, (args, kwargs), loss_fn=loss_fn, optimizer=optimizer, precision=precision,
                                pins=pins, progress=progress, strict=strict, cache=cache, headroom=headroom,
                                expert_imbalance=expert_imbalance)

        return Deferred(build, model.training)

    first = progress and (not dist.is_initialized() or dist.get_rank() == 0)

    def prepare() -> tuple[Plan | None, Graph, Pins, int]:
        given = None if plan is None else plan if isinstance(plan, Plan) else Plan.load(plan)
        checked = mesh_pins(mesh, _check_options(optimizer or "adamw", precision or "fp32", pins))
        _check_runs(precision or "fp32" if given is None else given.precision)
        if given is None:
            args, kwargs, targets = example_call(model, example_inputs)
            captured = capture_model(model, args, kwargs, targets, loss_fn, precision or "fp32")
            return None, with_imbalance(captured, expert_imbalance), checked, len(args)
        check_given(given, mesh, checked, optimizer, precision)
        _check_shapes(given.graph, model)
        graph, positional = _capture_again(given, model, example_inputs, loss_fn)
        if asks(checked):
            known = replace(given, graph=aligned(given.graph, graph))
            check_agreement(known, checked, rules_of_plan(known), degrees_of(known))
        return given, graph, checked, positional

    with shown(first) as report:
        report("capturing the model", 0.0)
        given, graph, checked, positional = together(prepare)

        def search() -> Plan:
            if given is not None:
                return given
            where = _cluster_of(mesh).with_headroom(headroom)
            return _found(graph, where, checked, "adamw" if optimizer is None else optimizer, precision or "fp32",
                          strict, cache, progress, report)

        found = _agree(search, graph)
    return _build(found, model, mesh, loss_fn, positional)


def _found(
    graph: Graph, cluster: Cluster, pins: Pins, optimizer: str | float, precision: str, strict: bool, cache: str | Path | None,
    progress: bool, report: Callable[[str, float], None], timing: Timing | None = None,
) -> Plan:
    """The plan, from the cache if there is one that has it."""

    def search() -> Plan:
        return make_plan(graph, cluster, pins, optimizer=optimizer, precision=precision, strict=strict, timing=timing,
                         progress=report)

    if cache is None:
        return search()
    from meshwright.cache import cached

    plan = cached(cache, graph, cluster, pins, {"optimizer": optimizer, "precision": precision, "strict": strict}, search)
    if progress and plan.notes and "taken from the cache" in plan.notes[-1]:
        print(f"meshwright: the plan was {plan.notes[-1]}", file=sys.stderr)
    return plan


def _capture_again(plan: Plan, model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None) -> tuple[Graph, int]:
    """The model as it is now, on the example or on what the plan was made with, and how many arguments that gives by position.
    Raises InputError where they differ."""
    signature = plan.graph.signature
    if example is None and signature is None:
        raise InputError("the plan does not say what a call looks like; give example_inputs")
    args, kwargs, targets = example_of(signature) if example is None else example_call(model, example)
    if example is not None and signature is not None:
        bind(signature, args, kwargs, targets)
    return as_in(capture_model(model, tuple(args), kwargs, tuple(targets), loss_fn, plan.precision), plan.graph), len(args)


def _check_shapes(graph: Graph, model: nn.Module) -> None:
    """Raise PlanError for a model that cannot even be called as the plan's was; ``aligned`` compares the rest."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for param in (param for param in graph.params if not param.buffer):
        for fqn in param.fqns:
            want = graph.values[param.value].shape
            if shapes.get(fqn) != want:
                raise PlanError(f"the plan was made for a model with parameter {fqn!r} of shape {want}; this model has "
                                f"{shapes.get(fqn, 'none of that name')}")


def _build(
    plan: Plan, model: nn.Module, mesh: DeviceMesh, loss_fn: Callable[..., Any] | None, positional: int,
) -> nn.Module:
    """The rank's program, checked on every rank before one goes on, and the module that runs it."""
    from meshwright.exported import Exporter
    from meshwright.passes import cut_stages
    from meshwright.passes.mode import in_mode
    from meshwright.runtime.module import build

    rank = dist.get_rank() if dist.is_initialized() else 0
    parallel = build(together(lambda: cut_stages(checked_program(plan, rank), plan.pipeline)), model, device=device_of(mesh))
    parallel.plan = plan

    def recapture(model: nn.Module, args: Any, kwargs: Any, targets: Any, training: bool, functional: bool) -> Graph:
        return as_in(capture_model(model, args, kwargs, targets, loss_fn, plan.precision, training, functional), plan.graph)

    def other_mode(graph: Graph) -> Program:
        first = of_rank_zero(replace(graph, classes={}))

        def lowered() -> Program:
            own = _as_first(graph, first)
            return checked_program(replace(in_mode(plan, own, rules_of(own)[0]), registered=registered_of(own)), rank)

        return together(lowered)

    parallel.watch = CallWatch(model, plan.graph, recapture, positional, loss_fn)
    parallel.lower_mode = other_mode
    parallel.exporter = Exporter(plan, parallel.watch.unexportable)
    return parallel


def _agree(search: Callable[[], Plan], graph: Graph) -> Plan:
    """Rank 0's plan on every rank, for the graph that each captured. What rank 0 raises, every rank raises; so they do where a
    rank captured another graph, or orders the pipeline's schedule otherwise, saying what differs."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _aligned(search(), graph)
    message: Any = None
    if dist.get_rank() == 0:
        try:
            message = "plan", plan_to_dict(_aligned(search(), graph))
        except Exception as error:
            portable = error if isinstance(error, MeshwrightError) else RunError(f"{type(error).__name__}: {error}")
            message = "error", portable
    kind, content = of_rank_zero(message)
    if kind == "error":
        raise content

    def read() -> Plan:
        found = Plan.from_dict(content)
        try:
            return replace(found, graph=_as_first(graph, found.graph))
        except PlanError as error:
            if not error.difference:
                raise
            raise PlanError(
                f"rank {dist.get_rank()} captured another model than rank 0 ({error.difference}; 'this model' is rank "
                f"{dist.get_rank()}'s). Build the same model with the same example inputs on every rank; its forward must not "
                f"ask for the rank, the time or the environment, and must add up what it makes in one order: where it walks a "
                f"set, in that of a list"
            ) from error

    found = together(read)
    mine = together(lambda: (plan_hash(found), order_of(found)))
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    for what, remedy in enumerate((
        "captured another model than rank 0 (tensors that are no parameters hold other numbers); build the same model with the "
        "same example inputs on every rank",
        "order the plan's pipeline schedule otherwise than rank 0; register the same schedule in every process",
    )):
        odd = [rank for rank, values in enumerate(seen) if values[what] != seen[0][what]]
        if odd:
            raise PlanError(f"ranks {odd} {remedy}")
    return found


def _as_first(graph: Graph, first: Graph) -> Graph:
    """The graph with its operators in the order of rank 0's, under the names that they have there, and its output's dicts in
    their order. Each rank may have captured them in an order of its own: ranks exchange values one after the other, calls of a
    module are counted (`drop@1`), and what is drawn depends on the name."""
    own = aligned(first, as_in(graph, first))
    signature = None if own.signature is None or first.signature is None else \
        {**own.signature, "output": first.signature["output"]}
    return replace(own, output_tree=first.output_tree, signature=signature,
                   ops=tuple(replace(op, module=said.module, source=said.source)
                             for op, said in zip(own.ops, first.ops, strict=True)))


def _aligned(plan: Plan, graph: Graph) -> Plan:
    return replace(plan, graph=aligned(plan.graph, as_in(graph, plan.graph)))


def _check_options(optimizer: str | float, precision: str, pins: Pins | Mapping[str, Any] | str | None) -> Pins:
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)} or give the bytes of "
                         "state per parameter as a number")
    if not isinstance(optimizer, str) and not (isinstance(optimizer, int | float) and 0 <= optimizer <= MOST_STATE):
        raise InputError(f"optimizer={optimizer!r}: the bytes of state per parameter are a number of 0 or more, up to "
                         f"{MOST_STATE:,}")
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return Pins.of(pins)


def _check_runs(precision: str) -> None:
    """Raise InputError for what is only planned."""
    if not PRECISIONS[precision].runs:
        able = ", ".join(name for name, one in PRECISIONS.items() if one.runs)
        raise InputError(f"precision {precision!r} is planned and priced, but not run by this version; run one of {able}")


def _cluster_of(mesh: DeviceMesh) -> Cluster:
    """The topology behind a DeviceMesh: its kind of device, in nodes of as many as run on this host."""
    world = mesh.size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    local = local if local and world % local == 0 else world
    if mesh.device_type == "cpu":
        return Cluster.parse(f"cpu:{world // local}x{local}")
    from meshwright.cost.cluster import device_for

    name = device_for(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    return Cluster.parse(f"{name}:{world // local}x{local}")


def example_call(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """(args, kwargs, targets) from what a user may give as example inputs; a target alone is the only one. Raises InputError
    without a model or an example."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    if example is None:
        example = getattr(model, "dummy_inputs", None)
        if example is None:
            raise InputError("no example inputs: pass example_inputs=(args, kwargs) at the global batch")
    if isinstance(example, Mapping):
        return (), dict(example), ()
    if not isinstance(example, tuple | list):
        return (example,), {}, ()
    if len(example) in (2, 3) and isinstance(example[0], tuple | list) and isinstance(example[1], Mapping):
        targets = example[2] if len(example) == 3 else ()
        return tuple(example[0]), dict(example[1]), tuple(targets) if isinstance(targets, tuple | list) else (targets,)
    return tuple(example), {}, ()
