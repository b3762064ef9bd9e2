"""A plan run on CPU processes, its loss and gradients compared with a single process: what ``verify`` does after the checks.

The single process runs the given model itself, or, without one that has contents and a loss, the plan's graph operator by
operator. Both compute in fp32, whatever the plan's precision is, so that what differs is the order of sums and nothing else;
dropout is off, since pieces draw apart. Contents are the given model's, or random; indices are drawn from the range that the
model can look up.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.commands.answers import in_width
from meshwright.errors import InputError, RunError
from meshwright.ir.declared.draws import draws
from meshwright.ir.declared.experts import Experts
from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.operators import find
from meshwright.ir.plan import Plan
from meshwright.ir.signature import example_of, name_arguments, rebuild_arguments, split_arguments
from meshwright.passes.bounds import find_bounds
from meshwright.runtime.interpret import run

T = TypeVar("T")
TOLERANCE = 1e-4
"""Of a tensor's largest element: sums of fp32 in another order differ by less, a wrong or missing collective by far more."""
LEAST = 1e-3
"""Of the largest gradient: what is smaller throughout is rounding (a key's bias under softmax has no gradient)."""
_RATES = frozenset({"p", "dropout_p", "dropout"})
_NARROW = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Compared:
    """What was found. ``loss``, ``alone``: of the processes and of the single one; ``worst``: (name, relative difference) of
    the gradients, largest first; ``notes``: what is otherwise than in the plan."""

    world: int
    mesh: str
    loss: float
    alone: float
    worst: tuple[tuple[str, float], ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Up to the order of sums; what is no number is equal to nothing."""
        off = abs(self.loss - self.alone) / max(abs(self.alone), LEAST)
        return off <= TOLERANCE and all(one <= TOLERANCE for _, one in self.worst)

    def __str__(self) -> str:
        words = "equal up to the order of sums" if self.equal else "NOT EQUAL"
        wrong = [f"  {name}: gradient off by {one:.2g} of its largest element"
                 for name, one in self.worst if not one <= TOLERANCE]
        name, one = self.worst[0] if self.worst else ("no parameter", 0.0)
        lines = [f"ran on {self.world} CPU processes ({self.mesh}) and on one: {words}",
                 f"  loss {self.loss:.8g}, on one process {self.alone:.8g}",
                 f"  gradients of {len(self.worst)} parameters, off by at most {one:.2g} of the largest element ({name})"]
        return "\n".join(map(in_width, [*lines, *wrong[:10], *(f"  {note}" for note in self.notes)]))

    def as_json(self) -> dict[str, Any]:
        """The fields, and whether they are equal."""
        return {"equal": self.equal, "world": self.world, "mesh": self.mesh, "loss": self.loss, "loss_alone": self.alone,
                "gradients": dict(self.worst), "notes": list(self.notes)}


def compare(
    plan: Plan, model: nn.Module | None, modules: Sequence[str], notes: Sequence[str], report: Callable[[str, float], None]
) -> Compared:
    """Run ``plan`` on as many CPU processes as it has devices. ``model``: whose contents are taken; ``modules``: imported by
    every process first. Raises InputError for what cannot be compared, RunError for a process that failed."""
    drawn, signature = any(draws(op) for op in plan.graph.ops), plan.graph.signature
    plan = _plain(plan)
    graph = plan.graph
    contents, inputs = _contents(graph, model), _inputs(graph)
    report("the single process", 0.1)
    own = None if drawn or model is None or signature is None else _of_model(model, graph, signature, inputs)
    alone, wanted = own or _single(graph, contents, inputs)
    report(f"{plan.mesh.world} processes", 0.4)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        plan.save(Path(folder, "plan.json"))
        torch.save({"contents": contents, "inputs": inputs, "modules": list(modules)}, Path(folder, "given.pt"))
        _start(plan.mesh.world, folder)
        found = torch.load(Path(folder, "found.pt"), weights_only=True)
    top = max((one.abs().max().item() for one in wanted.values() if one.numel()), default=0.0)
    worst = [(name, _off(found["gradients"][name], want, LEAST * top)) for name, want in wanted.items() if want.numel()]
    return Compared(plan.mesh.world, str(plan.mesh), found["loss"], alone,
                    tuple(sorted(worst, key=lambda pair: -pair[1] if pair[1] == pair[1] else -math.inf)), tuple(notes))


def _off(have: Tensor, want: Tensor, least: float) -> float:
    if have.shape != want.shape:
        return math.inf
    off = (have.double() - want.double()).abs().max().item()
    return off / max(want.abs().max().item(), least, 1e-30) if off else 0.0


# --- what is run ------------------------------------------------------------------------------------------------------------


def _plain(plan: Plan) -> Plan:
    """The plan in fp32, without dropout, its loss an output of its own. Raises InputError for what draws all the same."""
    graph = plan.graph
    ops = tuple(_undrawn(op) for op in graph.ops)
    if drawing := [op for op in ops if draws(op)]:
        op = drawing[0]
        raise InputError(f"{op.target} of {op.module or 'the model'} draws random numbers, which pieces draw apart: no single "
                         "process has the same, so the plan's programs are checked and not run")
    ends = [Ref(graph.loss)] if graph.loss else [Ref(name) for name in graph.outputs if graph.values[name].differentiable]
    if not ends:
        raise InputError("the plan's graph has no output with a gradient, so there is nothing to compare")
    graph = replace(graph, ops=ops, output_tree=(graph.output_tree, tuple(ends)), signature=None, changes=None)
    return replace(plan, graph=_widened(graph), precision="fp32", predicted=None, certificate=None)


def _undrawn(op: Op) -> Op:
    """The call with its rates of dropout at 0 and without training, where it draws."""
    overload = find(op.target)
    if overload is None or not draws(op):
        return op
    names = [argument.name for argument in overload._schema.arguments]
    off: Mapping[str, Any] = {name: False if name in ("train", "training") else 0.0 for name in names
                              if name in _RATES or name in ("train", "training")}
    args = tuple(off.get(name, arg) if not isinstance(arg, Ref) else arg for name, arg in zip(names, op.args, strict=False))
    return replace(op, args=args, kwargs=tuple((name, off.get(name, arg)) for name, arg in op.kwargs))


def _widened(graph: Graph) -> Graph:
    """The graph with fp32 in the place of narrower floats."""
    values = {name: replace(value, dtype=torch.float32) if value.dtype in _NARROW else value
              for name, value in graph.values.items()}
    ops = tuple(replace(op, args=_wide(op.args), kwargs=_wide(op.kwargs)) for op in graph.ops)
    constants = {name: one.float() if one.dtype in _NARROW else one for name, one in graph.constants.items()}
    return replace(graph, values=values, ops=ops, constants=constants)


def _wide(one: T) -> T:
    found: object = one
    if isinstance(one, torch.dtype) and one in _NARROW:
        found = torch.float32
    elif isinstance(one, tuple | list):
        found = type(one)(_wide(item) for item in one)
    elif isinstance(one, CustomFunction):
        found = replace(one, forward=_widened(one.forward), backward=_widened(one.backward))
    elif isinstance(one, Experts):
        found = replace(one, graph=_widened(one.graph))
    return found  # type: ignore[return-value]


@torch.no_grad()
def _contents(graph: Graph, model: nn.Module | None) -> dict[str, Tensor]:
    """{name: contents} of parameters and buffers: the model's where it has any, else random, so that products keep their
    scale."""
    known = {} if model is None else {**dict(model.named_parameters(remove_duplicate=False)),
                                      **dict(model.named_buffers(remove_duplicate=False))}
    random, found = torch.Generator().manual_seed(0), {}
    for param in graph.params:
        value = graph.values[param.value]
        given = next((known[fqn] for fqn in param.fqns if fqn in known and not known[fqn].is_meta), None)
        if given is not None:
            found[param.fqn] = given.detach().to(value.dtype).clone()
        elif not value.dtype.is_floating_point:
            found[param.fqn] = torch.ones(value.shape, dtype=value.dtype) * (value.dtype == torch.bool)
        elif param.buffer or len(value.shape) < 2:  # variances, tables of positions, scales: near 1
            found[param.fqn] = torch.empty(value.shape, dtype=value.dtype).uniform_(0.5, 1.5, generator=random)
        else:
            scale = math.prod(value.shape[1:]) ** -0.5
            found[param.fqn] = torch.randn(value.shape, generator=random).mul_(scale).to(value.dtype)
    return found


def _inputs(graph: Graph) -> dict[str, Tensor]:
    """A batch of random numbers; whole numbers within what is looked up with them, ones where nothing is."""
    random, bounds = torch.Generator().manual_seed(1), find_bounds(graph)
    size: dict[str, int] = {}
    if bounds is not None:
        for limit in bounds.limits:
            for name in _makers(bounds.graph, limit.value).intersection(graph.inputs):
                size[name] = min(size.get(name, limit.high), limit.high)
    found = {}
    for name in graph.inputs:
        value = graph.values[name]
        if value.dtype.is_floating_point:
            found[name] = torch.randn(value.shape, generator=random).to(value.dtype)
        elif name in size and value.dtype != torch.bool:
            found[name] = torch.randint(0, max(1, size[name]), value.shape, generator=random).to(value.dtype)
        else:
            found[name] = torch.ones(value.shape, dtype=value.dtype)
    return found


def _makers(graph: Graph, value: str) -> set[str]:
    """The values that this one is made of, itself among them."""
    needed, left = set[str](), [value]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            maker = graph.producers.get(name)
            left += graph.ops[maker].inputs if maker is not None else ()
    return needed


def _single(graph: Graph, contents: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients on one process."""
    leaves = {param.value: contents[param.fqn].clone().requires_grad_(param.trainable)
              for param in graph.params if param.value not in graph.constants}
    values = run(graph, {**inputs, **leaves})
    loss = _loss([values[ref.name] for ref in graph.output_tree[1]])
    loss.backward()
    return loss.item(), {param.fqn: _gradient(leaves[param.value])
                         for param in graph.params if param.trainable and param.value in leaves}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _of_model(
    model: nn.Module, graph: Graph, signature: Mapping[str, Any], inputs: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]] | None:
    """The same of the model itself; None where it has no contents, or no loss that is known by its name or by being alone."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return None
    args, kwargs, _ = example_of(signature)
    named = rebuild_arguments(signature, iter([inputs[name] for name in graph.inputs]), name_arguments(signature, args, kwargs))
    args, kwargs = split_arguments(signature, named)
    output = model.train()(*args, **kwargs)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, Tensor) or found.ndim or not found.requires_grad:
        return None
    found.backward()
    known = dict(model.named_parameters(remove_duplicate=False))
    return found.item(), {param.fqn: _gradient(known[param.fqn])
                          for param in graph.params if param.trainable and param.fqn in known}


def _loss(ends: Sequence[Tensor]) -> Tensor:
    """The loss, or for a model without one a number that every output is part of."""
    if len(ends) == 1 and not ends[0].ndim:
        return ends[0]
    return torch.stack([end.square().mean() for end in ends]).sum()


# --- the processes ----------------------------------------------------------------------------------------------------------


def _start(world: int, folder: str) -> None:
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    try:
        start_processes(_process, (world, folder), nprocs=world, start_method="spawn")
    except ProcessExitedException as error:
        raise RunError(f"a process of the run ended by itself ({error}); is there memory for {world} processes?") from error
    except ProcessRaisedException as error:
        last = str(error).strip().splitlines()[-1]
        raise RunError(f"a process of the run failed: {last}") from error


def _process(rank: int, world: int, folder: str) -> None:
    """One of the processes: what it finds, rank 0 writes."""
    import torch.distributed as dist

    from meshwright.commands.models import imported
    from meshwright.passes import cut_stages
    from meshwright.programs import checked_program
    from meshwright.runtime.module import build
    from meshwright.runtime.state.layout import take

    torch.set_num_threads(1)
    given = torch.load(Path(folder, "given.pt"), weights_only=True)
    for name in given["modules"]:
        imported(name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        plan = Plan.load(Path(folder, "plan.json"))
        program = cut_stages(checked_program(plan, rank), plan.pipeline)
        everything = program.stages.stored if program.stages else program.stored
        names = [(fqn, one) for one in everything for fqn in one.fqns if one.value not in plan.graph.constants]
        parallel = build(program, lambda stored, box: take(given["contents"][stored.fqns[0]], box),
                         device=torch.device("cpu"), names=names)
        ends = parallel(**given["inputs"])[1]
        loss = _loss(ends)
        loss.backward()
        whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        with torch.no_grad():
            for parameter in parallel.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        gradients = parallel.full_state_dict()
        if rank == 0:
            torch.save({"loss": whole.item(), "gradients": gradients}, Path(folder, "found.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()
