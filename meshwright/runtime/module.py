"""``ParallelModule``: the program as an ``nn.Module`` that looks like the model it came from.

Its parameters and buffers are this rank's shares, as DTensors under the model's fully qualified names, in the model's order
(a tied weight is one parameter under all its names), so optimizers and ``torch.distributed.checkpoint`` work as they are. A
call takes the same global batch on every rank (or DTensors, each rank bringing its share), runs the program, and gives back
the single process's output: scalars whole, other tensors as DTensors.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.errors import CheckpointError, InputError, MeshwrightError, RunError, StageWarning
from meshwright.ir.gradients.hooks import HookGuard
from meshwright.ir.graph import Graph, collector_paused, map_refs
from meshwright.ir.mesh import PP
from meshwright.ir.program import Program, Stored
from meshwright.ir.signature import rebuild_output
from meshwright.runtime.assemble import assemble, data_meshes, fused_axes, rest_dtype
from meshwright.runtime.checks.calls import Agreement, check_bounds, digest_of_input, same_initialization, same_weights
from meshwright.runtime.checks.edits import Role
from meshwright.runtime.checks.empty import ALL_OF_ONE, Made, all_of_one
from meshwright.runtime.checks.gradients import (
    IN_EVALUATION,
    differentiable,
    refuse_surroundings,
    refuse_tracing,
    refused,
    untransformed,
    unwritten,
)
from meshwright.runtime.checks.hooks import accumulators, check_accumulators
from meshwright.runtime.checks.outputs import OutputTensor
from meshwright.runtime.checks.ports import Ports
from meshwright.runtime.checks.relatives import Relatives
from meshwright.runtime.checks.strangers import check_whose_mode
from meshwright.runtime.checks.tensors import TensorPlace, check_tensors, originals
from meshwright.runtime.draws import seed_of_copy, seed_of_module
from meshwright.runtime.engine import Engine
from meshwright.runtime.groups import Groups, make_groups
from meshwright.runtime.pipeline.pipeline import PipelineStages, run_pipeline
from meshwright.runtime.state import checkpoint
from meshwright.runtime.state.additions import Closed, Contents, check_contents, held_elsewhere, refuse_attribute
from meshwright.runtime.state.layout import local_of
from meshwright.runtime.state.lending import Lender
from meshwright.runtime.state.materialize import MaterializeError, Source, fill
from meshwright.runtime.state.names import (
    Modes,
    ModuleKind,
    check_complete,
    holder,
    hook_on_one_stage,
    kinds_of,
    no_hook,
    refuse_own_state,
)
from meshwright.runtime.state.norms import clip
from meshwright.runtime.state.optimizer import NOTHING, Nothing, nothing_on, with_nothing
from meshwright.runtime.state.reading import let_operators_know
from meshwright.runtime.step import run_step
from meshwright.runtime.verdict import interrupting, of_rank_zero, together
from meshwright.runtime.whole import Whole, adopt, cut_as, let_anomalies_be_found, let_optimizers_know

T = TypeVar("T")
UNCOMPILED = "a parallel module runs its program as it is, whatever is compiled around it; leave fullgraph=True out"
"""What torch.compile says of a call that it is to have in one graph."""


def build(
    program: Program, source: nn.Module | Source | None, *, device: torch.device | None = None,
    names: Sequence[tuple[str, Stored]] | None = None, kinds: Mapping[str, ModuleKind] | None = None,
) -> ParallelModule:
    """The parallel module of this rank. Every rank calls this, each with its own program.

    ``source``: the model, whose weights are copied (or, on the meta device, initialized, share by share); or a function
    (stored, box) -> that box of the tensor; or None, and the caller sees to the contents. ``device``: where to compute;
    default: this rank's GPU if the process group has NCCL, else the CPU. ``names``: (name, stored) in the
    order of the state dict, and ``kinds`` what the sub-modules are, where the source is no model. Raises MeshError if the
    program's mesh is not the world's; what one rank alone cannot do (no memory, an initialization that fails there), all ranks
    raise as MaterializeError.
    """
    device = device or _default_device()
    stages = program.stages
    sharing = [stored.holders for stored in stages.stored if stored.trainable and len(stored.holders) > 1] if stages else []
    groups = make_groups(program.mesh, device, fused_axes(program), PP if stages else None, sharing)
    if groups.rank != program.rank:
        raise InputError(f"this is rank {groups.rank}, the program is that of rank {program.rank}")
    let_optimizers_know()
    let_operators_know(Whole)
    let_operators_know(OutputTensor)
    let_anomalies_be_found()
    model = source if isinstance(source, nn.Module) else None
    meshes = data_meshes(stages.stored if stages else program.stored, groups)

    def make() -> Engine | PipelineStages:
        return PipelineStages(program, groups, meshes) if stages else assemble(program, groups, meshes)

    engine = together(lambda: _of_this_rank(make, "make room for"))
    named = together(lambda: _ordered(program, model) if names is None else list(names))
    paths: list[str] | None = None
    given = {} if model is None else dict([*model.named_parameters("", True, False), *model.named_buffers("", True, False)])
    seed = of_rank_zero(seed_of_module(model, same_weights(given), any(tensor.is_meta for tensor in given.values())))
    if model is not None:
        named = _as_first(named, [fqn for fqn, _ in named])
        listed = together(lambda: list(kinds_of(model).items()))
        kinds = dict(_as_first(listed, [path for path, _ in listed]))
        paths = ["", *kinds]
    same_initialization(together(lambda: _of_this_rank(lambda: fill(program, engine.tensors, groups, source, seed, paths),
                                                       "fill")))
    if stages and all_of_one(stages.stored):
        warnings.warn(StageWarning(ALL_OF_ONE), stacklevel=2)
    with collector_paused():
        return ParallelModule(program, groups, engine, seed, model, named, kinds)


def _as_first(mine: list[T], names: Sequence[str]) -> list[T]:
    """What is called so, in rank 0's order; what rank 0 does not have comes last. Every rank calls this."""
    at = {name: index for index, name in enumerate(of_rank_zero(list(names)))}
    order = sorted(range(len(names)), key=lambda index: at.get(names[index], len(at)))
    return [mine[index] for index in order]


def _of_this_rank(step: Callable[[], T], what: str) -> T:
    """What ``step`` returns. Raises MaterializeError for what it raises, if that is no error of our own."""
    try:
        return step()
    except MeshwrightError:
        raise
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise MaterializeError(f"rank {rank} could not {what} its parameters and buffers ({type(error).__name__}: {error}); "
                               f"see the cause on that rank. Nothing was built on any rank") from error


def _default_device() -> torch.device:
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class ParallelModule(Closed):
    """See the file's head. Made by ``build``; ``plan`` is whatever the caller puts there; ``watch`` is called at every call,
    with (training, args, kwargs, targets), and may raise, or give the (difference, graph) of another mode, which
    ``lower_mode`` makes this rank's program of, on all ranks together; ``exporter`` is what ``export`` calls."""

    def __init__(
        self, program: Program, groups: Groups, engine: Engine | PipelineStages, seed: int, model: nn.Module | None,
        names: Sequence[tuple[str, Stored]], kinds: Mapping[str, ModuleKind] | None = None,
    ) -> None:
        super().__init__()
        self._kinds = kinds_of(model) if kinds is None else kinds
        self.plan: Any = None
        self.watch: Callable[[bool, tuple[Any, ...], dict[str, Any], tuple[Any, ...]], Any] | None = None
        self.lower_mode: Callable[[Graph], Program] | None = None
        self.exporter: Callable[[ParallelModule, Path, bool], None] | None = None
        self._others: dict[tuple[bool, bool], tuple[Engine, Lender]] = {}
        self._program, self._groups, self._seed, self._calls, self._copies = program, groups, seed, 0, 0
        self._agreement, self._ports = Agreement(groups), Ports(groups)
        self._engine = (engine,)  # in a tuple: its units are no submodules of this one
        self._names = list(names)
        self.__dict__[NOTHING] = nothing_on(groups.device) if program.stages else None  # not registered
        self._places: list[TensorPlace] = []
        for path in self._kinds:
            holder(self, path.split("."), self._kinds)
        for fqn, stored in self._names:
            if stored.value in engine.tensors:
                tensor = engine.tensors[stored.value]
                adopt(tensor, Role(stored.fqns[0], program.stages is not None, id(tensor), order=self._agreement.order))
                self._register(fqn, stored, tensor)
            else:
                *above, key = fqn.split(".")
                where = holder(self, above, self._kinds)
                where.__dict__["_elsewhere"].add(key)
                where.__dict__["_tensors"] += [] if stored.buffer else [key]
                for depth in range(1, len(above) + 1 if stored.trainable else 1):
                    holder(self, above[:depth], self._kinds).__dict__.setdefault(NOTHING, nothing_on(groups.device))
        self._modes = Modes.of(self, self._kinds)
        for tensor in self.parameters():
            if isinstance(tensor, DTensor) and tensor.requires_grad:
                tensor.register_hook(cut_as(tensor))
        self._faults, self._made = list[str](), Made(groups.device) if program.stages else None
        for fqn, parameter in self.named_parameters():  # after the hooks of our own
            refuse: Any = hook_on_one_stage(fqn, self._faults) if program.stages else no_hook
            parameter.register_hook = parameter.register_post_accumulate_grad_hook = refuse  # type: ignore[method-assign]
        everything = program.stages.stored if program.stages else ()
        self._shared = [stored for stored in everything if stored.trainable and len(stored.holders) > 1]
        self._accumulators = accumulators(self.named_parameters())
        self._originals = originals(model)
        self._relatives = Relatives(self, model, self._originals, self._places, groups)
        self._hooks = None if model is None else HookGuard(model)
        if model is not None and not model.training:
            self.eval()
        self._model: Callable[[], nn.Module | None] = (lambda: None) if model is None else weakref.ref(model)
        self._of_model = frozenset() if model is None else _attributes(model) - vars(self).keys() - set(dir(type(self)))
        self._built_with = [Contents.of(path, module) for path, module in self.named_modules()]
        self._untold = None if model is None else model.training  # the mode of the model, until this module's is set
        self.__dict__["_closed"] = "the parallel module"

    def __setattr__(self, name: str, value: Any) -> None:
        """What the model has under this name the graph has read; what it has not is the caller's own. A tensor or a sub-module
        of the model may have the name of something that is this module's own: that is what the attribute is."""
        if name in self.__dict__ and not isinstance(value, Tensor | nn.Module):
            object.__setattr__(self, name, value)
            return
        if name in self.__dict__.get("_of_model", ()):
            model = self._model()
            if model is None or getattr(model, name, None) is not value:
                refuse_attribute(name, "the parallel module")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """As of any module; what other stages of a pipeline hold is said."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__["_elsewhere"]:
                raise held_elsewhere(name, sys._getframe(1)) from None
            raise

    # --- the call -----------------------------------------------------------------------------------------------------

    @torch.compiler.disable(reason=UNCOMPILED)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns what the model does; a torch.compile around it runs it as it is. Raises InputError on every rank,
        changing nothing, if the call of one rank is not as planned, or not that of the others."""
        refuse_tracing()
        if torch.is_inference_mode_enabled():  # what is gathered in it could not be trained afterwards
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **kwargs)
        self._check()
        engine = self._engine[0]
        engine.reshard()  # what a forward without a backward gathered may have been written since
        engine, inputs, changes = self._agreed(args, kwargs)
        self._calls += 1
        with interrupting():
            values = self._run(engine, inputs)
        self._mutate(engine, values)
        for tensor, changed in changes:
            tensor.copy_(changed)
        program = engine.program
        outputs = {port.name: self._ports.present(values.get(port.name), port, program) for port in program.outputs}
        if program.signature is None:
            return map_refs(program.output_tree, lambda ref: outputs[ref.name])
        return rebuild_output(program.output_tree, program.signature["output"], outputs, program.classes)

    def _run(self, engine: Engine | PipelineStages, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Local values of outputs and of buffers' new contents."""
        program, seed = engine.program, (self._seed, self._calls)
        if isinstance(engine, PipelineStages):
            return run_pipeline(engine, inputs, self._trainable, seed, self.training)
        if engine is not self._engine[0]:
            with torch.no_grad():
                values = run_step(engine, inputs, self._trainable, seed, self.training)
            return {name: refused(value, IN_EVALUATION) for name, value in values.items()}
        values = run_step(engine, inputs, self._trainable, seed, self.training)
        if program.microbatches == 1:
            trained = self._trainable()
            values = differentiable(values, [port.name for port in program.outputs], trained if engine.units else (),
                                    unwritten(trained, gathered=bool(engine.units)))
        return values

    def train(self, mode: bool = True) -> ParallelModule:
        """Dropout, batch statistics and buffers' updates on or off, as in the model."""
        self._engine[0].train(mode)
        super().train(mode)
        self._modes.set(mode)
        self._untold = None
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank; ``Nothing`` where its stage of a pipeline holds none."""
        own = super().named_parameters(prefix, recurse, remove_duplicate)
        yield from with_nothing(own, self.__dict__.get(NOTHING) if recurse else None, prefix)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What DistributedDataParallel asks of a module before it sends anything."""
        raise RunError("DistributedDataParallel around a parallel module would average gradients that are sums already, and "
                       "send weights to ranks that hold others; take it away, and call the parallel module itself")

    def _trainable(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad and not isinstance(p, Nothing)]

    def _agreed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Engine | PipelineStages, dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """What runs, and the call's inputs, once every rank has found them in order and the same (see
        ``runtime.checks.calls``)."""
        given: dict[str, Tensor] = {}
        problem: Exception | None = None
        other: Any = None
        try:
            other = self._watched(args, kwargs)
            given = self._ports.given(self._program, args, kwargs)
            self._check_call(given)
        except MeshwrightError as error:
            problem = error
        said: dict[str, Any] = {"training": self.training, "gradients": torch.is_grad_enabled()}
        said |= {} if other is None else {"graph": other.difference}
        if problem is None:
            said |= {f"argument {name!r}": digest_of_input(tensor, self._agreement.first) for name, tensor in given.items()}
        with untransformed():
            self._agreement.reach(problem, said)
        engine = self._engine[0]
        if other is not None:
            engine = self._other_engine(other)
            given = self._ports.given(engine.program, args, kwargs)
        bounds = engine.program.bounds
        if bounds is not None:  # after the agreement: all ranks look at the same, so all raise
            check_bounds(bounds, given)
        return (engine, *self._ports.bind(engine.program, given))

    def _watched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_contents(self._built_with)
        check_accumulators(self._accumulators)
        check_whose_mode(self._model(), self._untold)
        self._modes.check(self.training)
        self._relatives.check(torch.is_grad_enabled())
        refuse_surroundings()
        if self.watch is None:
            return None
        targets = kwargs.get("targets", ()) if self._program.signature and self._program.signature.get("targets") else ()
        given = {name: value for name, value in kwargs.items() if name != "targets" or not targets}
        targets = tuple(targets) if isinstance(targets, tuple | list) else (targets,)
        return self.watch(self.training, args, given, targets)

    def _other_engine(self, other: Any) -> Engine:
        """What runs in this mode where that is another graph: made at its first call. Every rank calls this."""
        mode = self.training, torch.is_grad_enabled()
        if mode not in self._others:
            lower = self.lower_mode
            assert lower is not None, "who watches can lower"
            program = lower(other.graph)
            groups, wanted = self._groups, fused_axes(program)
            if wanted - groups.by_axes.keys():
                groups = make_groups(program.mesh, groups.device, wanted)
            tensors = self._engine[0].tensors
            everything = self._program.stages.stored if self._program.stages else self._program.stored
            held = {fqn: (one, rest_dtype(one, self._program), tensors.get(one.value))
                    for one in everything for fqn in one.fqns}
            lender = Lender(held, groups, program)
            engine = together(lambda: assemble(program, groups, lend=lender))  # which runs to the letter: eval() is in it
            self._others[mode] = engine, lender
        return self._others[mode][0]

    def _check_call(self, given: Mapping[str, Tensor]) -> None:
        changed = None if self._hooks is None else self._hooks.changed()
        if changed is not None:
            raise InputError(f"{changed}; the parallel module runs the graph as it was captured. Remove it, or register it "
                             f"before autoparallel")
        for name, tensor in given.items():
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InputError(f"input {name!r} requires a gradient, which a parallel module does not compute. Give "
                                 f"{name}.detach(), or make what computes it a part of the model")
            if unpack_dual(tensor).tangent is not None:
                raise InputError(f"input {name!r} has a tangent (torch.autograd.forward_ad), which a parallel module does not "
                                 f"carry on. Give unpack_dual({name}).primal, and differentiate by loss.backward()")
            if tensor.is_meta:
                raise InputError(f"input {name!r} is on the meta device, so it has no contents; give a real tensor")

    @torch.no_grad()
    def _mutate(self, engine: Engine | PipelineStages, values: Mapping[str, Tensor]) -> None:
        """Buffers get what the forward made them. The training graph without what eval() switches off changes none."""
        if engine is self._engine[0]:
            for old, new in engine.program.mutations if self.training else ():
                local_of(engine.tensors[old]).copy_(values[new])
            return
        lender = next(lender for other, lender in self._others.values() if other is engine)
        stored = {one.value: one for one in engine.program.stored}
        for old, new in engine.program.mutations:
            lender.give_back(stored[old], values[new])

    # --- where this rank is --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process."""
        return self._groups.rank

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of inputs and outputs that are DTensors; None in a world without a process group."""
        return self._groups.device_mesh

    @property
    def data_size(self) -> int:
        """Into how many pieces the batch is cut: ``num_replicas`` of a ``DistributedSampler``."""
        return self._groups.mesh.size(self._batch_axes())

    @property
    def data_rank(self) -> int:
        """Which of them is this rank's."""
        return self._groups.mesh.index(self._groups.coordinates, self._batch_axes())

    def _batch_axes(self) -> tuple[str, ...]:
        return max((port.sharding.dims[0] for port in self._program.inputs if port.shape), key=len, default=())

    # --- gradients and weights -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; returns the norm before, the same on every rank.

        Every element counts once, wherever it lies and however often it is replicated or tied. Every rank calls this.
        """
        self._check("clip_grad_norm_")
        everything = self._program.stages.stored if self._program.stages else self._program.stored
        tensors = self._engine[0].tensors
        pieces = [(stored, tensors.get(stored.value)) for stored in everything]
        return clip(pieces, self._groups, self._program.mesh, max_norm, float(norm_type), error_if_nonfinite)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The single process's state dict: plain CPU tensors on rank 0, an empty dict elsewhere. Every rank calls this."""
        self._check("full_state_dict")
        return checkpoint.gather_state_dict(self._entries(), self._groups, lambda stored: rest_dtype(stored, self._program))

    def save(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint that ``load`` reads under any plan and world; see ``runtime.state.checkpoint.save``. A learning
        rate scheduler is the caller's: its ``state_dict()`` is to be kept beside."""
        self._check("save")
        counters = {"seed": self._seed, "calls": self._calls}
        checkpoint.save(self._entries(changing=True), self._groups, folder, optimizer, counters)

    def load(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read a checkpoint in place, the optimizer's options and the place in the random numbers too, so that the run goes on
        as if it had not been interrupted, whatever torch.manual_seed says; see ``runtime.state.checkpoint.load``."""
        self._check("load")
        self._engine[0].reshard()
        counters = checkpoint.load(self._entries(changing=True), self._groups, folder, optimizer)
        self._seed, self._calls = counters["seed"], counters["calls"]

    def export(self, folder: str | os.PathLike[str], *, weights: bool = True) -> None:
        """Write what ``meshwright.load`` makes this module of again, without the model: see ``meshwright.exported``. Without
        ``weights`` the parameters are left out, and a checkpoint must bring them. Every rank calls this."""
        if self.exporter is None:
            raise RunError("this parallel module was built from a program alone and has no plan to export; make it with "
                           "meshwright.autoparallel")
        self._check("export")
        self.exporter(self, Path(folder), weights)

    @property
    def resting(self) -> list[str]:
        """Paths of the sub-modules that were in eval() when the model was captured in training."""
        return [path for path, _, kind in self._modes.modules if not kind.training]

    @property
    def names(self) -> list[tuple[str, Stored]]:
        """(name, what is stored under it) in the order of the state dict, those of all stages."""
        return list(self._names)

    def save_contents(self, folder: Path, weights: bool) -> None:
        """Write everything that it holds, as a checkpoint; without ``weights`` not the parameters of floating-point numbers."""
        checkpoint.save(self._contents(weights), self._groups, folder, None, {"seed": self._seed, "calls": self._calls})

    def load_contents(self, folder: Path, weights: bool) -> None:
        """Read what ``save_contents`` wrote."""
        counters = checkpoint.load(self._contents(weights), self._groups, folder, None)
        self._seed, self._calls = counters["seed"], counters["calls"]

    def _contents(self, weights: bool) -> checkpoint.Entries:
        tensors = self._engine[0].tensors
        everything = {**self._entries(changing=True), **{
            fqn: (stored, tensors.get(stored.value)) for fqn, stored in self._names
        }}
        return {fqn: entry for fqn, entry in everything.items()
                if weights or entry[0].buffer or not entry[0].dtype.is_floating_point}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``, into the shares that are there (``assign`` is refused): DTensors, or the whole
        tensors of one process, which are taken from the first rank. What other stages of a pipeline hold is passed over."""
        if assign:
            raise CheckpointError("assign=True would take the parameters from under the engine; load into them (assign=False)")
        self._check("load_state_dict")
        self._engine[0].reshard()
        mine = {place.fqn for place in self._places}
        others = {fqn for fqn, _ in self._names} - mine
        if self._program.stages and strict:
            together(lambda: check_complete(self.state_dict().keys(), state_dict))
        return super().load_state_dict({key: x for key, x in state_dict.items() if key not in others}, strict)

    def apply(self, fn: Callable[[nn.Module], None]) -> ParallelModule:
        """Refused: what such a function looks for in modules (their class, their options) is not here."""
        raise RunError("the sub-modules of a parallel module only hold its tensors: a function applied to them finds no "
                       "Linear, no LayerNorm. Apply it to the model before autoparallel, or loop over "
                       "parallel.named_parameters()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a pickle would hold process groups."""
        raise RunError("a parallel module holds process groups and cannot be pickled: write parallel.save(folder, optimizer), "
                       "which any plan reads, parallel.export(folder), which needs no model, or its state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A parallel module of its own under the same plan (a moving average of the weights). Every rank calls this."""
        self._check("copy.deepcopy")
        program, groups = self._program, self._groups
        meshes = data_meshes(program.stages.stored if program.stages else program.stored, groups)
        engine = PipelineStages(program, groups, meshes) if program.stages else assemble(program, groups, meshes)
        self._copies += 1
        twin = ParallelModule(program, groups, engine, seed_of_copy(self._seed, self._copies), None, self._names, self._kinds)
        twin.plan, twin._calls, twin._originals, twin.exporter = self.plan, self._calls, self._originals, self.exporter
        twin.watch, twin.lower_mode, twin._of_model = self.watch, self.lower_mode, self._of_model
        twin._model, untold = self._model, self._untold
        memo[id(self)] = twin
        with torch.no_grad():
            for value, old in self._engine[0].tensors.items():
                new = engine.tensors[value]
                local_of(new).copy_(local_of(old))
                memo[id(old)] = new
                if not isinstance(new, nn.Parameter):
                    continue
                new.requires_grad_(old.requires_grad)  # without its gradient, as torch copies parameters
        twin.train(self.training)
        twin._untold = untold
        for (_, mine, _), (_, its, _) in zip(self._modes.modules, twin._modes.modules, strict=True):
            its.training = mine.training
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        """``.to()`` and its kin: only what changes nothing; the plan settled device and dtype."""
        for tensor in (*self.parameters(), *self.buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=self._groups.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise RunError(f"parameters are {probe.dtype} on {probe.device} by the plan and cannot become "
                                   f"{moved.dtype} on {moved.device}; plan with another precision or build on another device")
        return self

    def _entries(self, changing: bool = False) -> checkpoint.Entries:
        """The state dict of the whole model, in its order; without tensors where they are another stage's. ``changing``: with
        what the forward changes and the state dict leaves out; every rank calls it then."""
        tensors = self._engine[0].tensors
        kept = [(fqn, stored) for fqn, stored in self._names if stored.persistent or not stored.buffer]
        if changing:
            everything = self._program.stages.stored if self._program.stages else self._program.stored
            changed = {old for old, _ in self._program.mutations}
            if dist.is_initialized():
                of_ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(of_ranks, sorted(changed))
                changed = {old for theirs in of_ranks for old in theirs}
            known = {stored.value for _, stored in kept}
            kept += [(one.fqns[0], one) for one in everything if one.value in changed - known]
        return {fqn: (stored, tensors.get(stored.value)) for fqn, stored in kept}

    def _register(self, fqn: str, stored: Stored, tensor: Tensor) -> None:
        """Put a tensor under its name."""
        *path, key = fqn.split(".")
        module = holder(self, path, self._kinds)
        table: dict[str, Any] = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
        table[key] = tensor
        module.__dict__["_tensors"] += [key] if isinstance(tensor, nn.Parameter) else []
        if not isinstance(tensor, nn.Parameter) and not stored.persistent:
            module._non_persistent_buffers_set.add(key)
        self._places.append(TensorPlace(fqn, stored, tensor, table, key))

    def _check(self, method: str = "") -> None:
        """``method``: that every rank has to call."""
        check_tensors(self._places, self._originals, self._shared, self._groups, self._faults, self._made)
        if method:
            self._agreement.on(method)


def _attributes(model: nn.Module) -> frozenset[str]:
    """Names that the model's own code may have given values: of the instance, and of its classes that are not torch's."""
    of_classes = (vars(kind) for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    named = {name for table in of_classes for name, value in table.items() if not callable(value)} - set(dir(nn.Module))
    return frozenset({*named, *(vars(model).keys() - vars(nn.Module()).keys())})


def _ordered(program: Program, model: nn.Module | None) -> list[tuple[str, Stored]]:
    """(name, stored) for every registered name, in the model's order; without a model, as the program lists them."""
    everything = program.stages.stored if program.stages else program.stored
    by_name = {fqn: stored for stored in everything for fqn in stored.fqns if stored.value not in program.constants}
    if model is None:
        return list(by_name.items())
    refuse_own_state(model)
    names = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()) if tensor is not None
    ]
    strangers = [name for name in names if name not in by_name and name in model.state_dict(keep_vars=True)]
    if strangers:
        raise InputError(f"the model has {strangers[0]!r}, the program does not: it was planned for another model")
    return [(name, by_name[name]) for name in names if name in by_name]
