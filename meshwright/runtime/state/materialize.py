"""Contents of the parameters and buffers: copied from the given model, or made by the model's own initialization.

Only this rank's boxes are kept, and only one sub-module is ever whole. For a sub-module that owns a tensor on the meta device

1. its tensors are made real on the CPU, unset (NaN);
2. its own initialization runs, then its ancestors', innermost first, as when the model was built: ``reset_parameters`` /
   ``_reset_parameters``, then ``_init_weights(module)`` of the nearest ancestor that has it (transformers). What is still
   on the meta device does not feel it;
3. tensors still unset (a rotary table, a plain ``nn.Parameter``) come from building the sub-module anew, if it is a leaf whose
   constructor arguments are all attributes of it;
4. if that cannot be, the error names the module.

Every sub-module draws from a generator state of its own (seed, its index in the model), the same on every rank: so replicas
agree, and the weights do not depend on the plan. The index is that of rank 0's model, for each process may have the modules in
an order of its own. The model is left as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.errors import MeshwrightError
from meshwright.ir.program import Program, Stored
from meshwright.runtime.checks.calls import digest
from meshwright.runtime.groups import Groups
from meshwright.runtime.state.layout import Box, box, local_of, take

Source = Callable[[Stored, Box], Tensor]
"""(stored, box) -> the box's contents, on any device, of any dtype."""


class MaterializeError(MeshwrightError):
    """A tensor whose contents are nowhere to be had."""


@torch.no_grad()
def fill(
    program: Program, tensors: Mapping[str, Tensor], groups: Groups, source: nn.Module | Source | None, seed: int,
    paths: Sequence[str] | None = None,
) -> dict[str, int]:
    """Write this rank's box of every stored tensor; without a source, of the program's constants. Returns {name: digest} of the
    whole tensors that were initialized. ``paths``: of the modules, in the order in which they count; default: the source's.
    Raises MaterializeError naming the module that cannot be initialized."""
    made: dict[str, int] = {}

    def write(stored: Stored, contents: Tensor) -> None:
        local_of(tensors[stored.value]).copy_(contents)

    boxes = {stored.value: box(stored, program.mesh, groups.coordinates) for stored in program.stored}
    rest = [stored for stored in program.stored if stored.value not in program.constants]
    for stored in program.stored:
        if stored.value in program.constants:
            write(stored, take(program.constants[stored.value], boxes[stored.value]))
    if source is None:
        return made
    if not isinstance(source, nn.Module):
        for stored in rest:
            write(stored, source(stored, boxes[stored.value]))
        return made
    own = [path for path, _ in source.named_modules(remove_duplicate=False)]
    order = {path: index for index, path in enumerate(own if paths is None else paths)}
    owners: dict[str, list[Stored]] = {}
    for stored in rest:
        owners.setdefault(stored.fqns[0].rpartition(".")[0], []).append(stored)
    for path, owned in sorted(owners.items(), key=lambda item: order.get(item[0], -1)):
        if path not in order:
            raise MaterializeError(f"the model has no module {path!r}, which should hold {owned[0].fqns[0]!r}; build from the "
                                   f"model that was planned")
        with _real(source, path, owned, seed + order[path]) as (wholes, initialized):
            for stored in owned:
                whole = wholes[stored.fqns[0].rpartition(".")[2]]
                write(stored, take(whole, boxes[stored.value]))
                if initialized:
                    made[stored.fqns[0]] = digest(whole, everything=False)
            del whole
        del wholes  # or this one would live until the next is made
    return made


@contextmanager
def _real(model: nn.Module, path: str, owned: Sequence[Stored], seed: int) -> Iterator[tuple[Mapping[str, Tensor], bool]]:
    """The sub-module's tensors by name, real while the context lasts, and whether they had to be initialized."""
    chain = _chain(model, path)
    module = chain[0]
    names = [stored.fqns[0].rpartition(".")[2] for stored in owned]
    have: dict[str, Tensor | None] = {**module._buffers, **module._parameters}
    lacking = [name for name in names if have.get(name) is None]
    if lacking:
        raise MaterializeError(f"module {path!r} ({type(module).__name__}) has no {lacking[0]!r}; build from the model that "
                               f"was planned")
    if not any(tensor is not None and tensor.is_meta and name in names for name, tensor in have.items()):
        yield {name: tensor for name, tensor in have.items() if tensor is not None}, False
        return
    before = [(one, dict(one._parameters), dict(one._buffers)) for one in chain]
    try:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            _initialize(chain, path)
        yield {name: t for name, t in {**module._buffers, **module._parameters}.items() if t is not None}, True
    finally:
        for one, parameters, buffers in before:
            one._parameters.clear()
            one._parameters.update(parameters)
            one._buffers.clear()
            one._buffers.update(buffers)


def _chain(model: nn.Module, path: str) -> list[nn.Module]:
    """The sub-module and its ancestors, innermost first."""
    chain = [model]
    for name in path.split(".") if path else ():
        chain.append(getattr(chain[-1], name))
    return chain[::-1]


def _initialize(chain: Sequence[nn.Module], path: str) -> None:
    """Give the innermost module of the chain real, initialized tensors."""
    module = chain[0]
    have = (*module._parameters.items(), *module._buffers.items())
    blank = {name: _blank(tensor) for name, tensor in have if tensor is not None and tensor.is_meta}
    versions = {name: tensor._version for name, tensor in blank.items()}
    for name, tensor in blank.items():
        (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[name] = tensor  # type: ignore[assignment]
    for one in chain:
        for hook in ("reset_parameters", "_reset_parameters"):
            if callable(found := getattr(one, hook, None)):
                found()
                break
    for at, one in enumerate(chain):
        root = next((ancestor for ancestor in chain[at:] if callable(getattr(ancestor, "_init_weights", None))), None)
        if root is not None:
            root._init_weights(one)  # type: ignore[operator]
    unset = [name for name, tensor in blank.items() if _unset(module, name, tensor, versions[name])]
    if unset:
        _rebuild(module, path, unset)


def _blank(meta: Tensor) -> Tensor:
    """An unset tensor on the CPU: NaN where there is one."""
    real = torch.empty_like(meta, device="cpu")
    if real.is_floating_point() or real.is_complex():
        real.fill_(float("nan"))
    return nn.Parameter(real, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else real


def _unset(module: nn.Module, name: str, blank: Tensor, version: int) -> bool:
    now = module._parameters.get(name, module._buffers.get(name))
    if now is None or now is not blank or not now.numel():
        return now is None or now.is_meta
    if now._version != version:
        return False
    return not (now.is_floating_point() or now.is_complex()) or bool(now.isnan().all())


def _rebuild(module: nn.Module, path: str, unset: Sequence[str]) -> None:
    """Take the unset tensors from a second module of the same kind."""
    parameters = [p for p in inspect.signature(type(module).__init__).parameters.values() if p.name != "self"]
    arguments = {p.name: getattr(module, p.name) for p in parameters if hasattr(module, p.name)}
    missing = [p.name for p in parameters if p.name not in arguments and p.default is p.empty and p.kind not in _OPEN]
    twin = None
    if not missing and not any(True for _ in module.children()):
        with torch.device("cpu"):
            twin = type(module)(**arguments)
    have: dict[str, Tensor | None] = {} if twin is None else {**twin._parameters, **twin._buffers}
    for name in unset:
        old = module._parameters.get(name, module._buffers.get(name))
        new = have.get(name)
        if new is None or old is None or new.shape != old.shape:
            raise MaterializeError(
                f"module {path!r} ({type(module).__name__}) is on the meta device and nothing initializes its {name!r}: give "
                f"the class a reset_parameters() that does, or build from a model with real weights"
            )
        (module._parameters if name in module._parameters else module._buffers)[name] = new  # type: ignore[assignment]


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
