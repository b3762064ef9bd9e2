"""The sub-modules of a parallel module: they bear the model's names, hold its tensors, and run nothing.

A loop over modules finds what it looks for, because ``isinstance`` answers for the module that a name stands for (its
``kind``). What the loop then does is right, or refused with the name:

    parameters, buffers        those that run
    train(), eval()            as the model's; modes in which it was not captured are refused at the next call (``Modes``)
    hooks, attributes, calls   refused: nothing would read them
    what a kind can beside     refused (``reset_running_stats`` of a batch norm), asking by ``hasattr`` too: a loop that resets
                               what can be reset would reset nothing, and not know
    tensors of other stages    of a pipeline: refused, where they are is said
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.errors import AbsentError, CheckpointError, InputError, RunError
from meshwright.runtime.state.additions import Closed, held_elsewhere, refuse_attribute
from meshwright.runtime.state.optimizer import NOTHING, with_nothing


@dataclass(frozen=True)
class ModuleKind:
    """What a sub-module of the model is: its class, whether it was in training mode when the model was captured, and whether
    it is after the model's ``train()`` and after its ``eval()``."""

    type: type
    training: bool
    after: tuple[bool, bool] = (True, False)


def kinds_of(model: nn.Module | None) -> dict[str, ModuleKind]:
    """{path: what is there}. A model in eval() is captured as its train() leaves it."""
    if model is None:
        return {}
    train, rest = _modes_after(model)
    return {path: ModuleKind(type(module), module.training if model.training else train.get(path, True),
                             (train.get(path, True), rest.get(path, False)))
            for path, module in model.named_modules(remove_duplicate=False) if path}


def _modes_after(model: nn.Module) -> tuple[dict[str, bool], dict[str, bool]]:
    """{path: whether it is in training mode} after ``train()``, and after the ``eval()`` that follows, where a class has a
    ``train`` of its own (one that keeps norms in eval(), say). Asked of a copy without memory."""
    if all(type(module).train is nn.Module.train and "train" not in vars(module) for module in model.modules()):
        return {}, {}
    copied, found = _without_memory(model), []
    for mode in (True, False):
        try:
            copied.train(mode)
            found.append({path: module.training for path, module in copied.named_modules(remove_duplicate=False)})
        except Exception:  # it wants contents; modes other than the captured ones are refused at the next call
            copied = _without_memory(model)
            found.append({})
    return found[0], found[1]


def _without_memory(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {
        id(x): nn.Parameter(x.to("meta"), x.requires_grad) if isinstance(x, nn.Parameter) else x.to("meta")
        for x in (*model.parameters(), *model.buffers())
    })


_OWN_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state")
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


def refuse_own_state(model: nn.Module) -> None:
    """Raise InputError if ``state_dict()`` of the model has more than its parameters and buffers by their names: the parallel
    module's has these, and those who read it would miss the rest."""
    for path, module in model.named_modules():
        found = [name for name in _OWN_STATE if not _of_torch(type(module), name)]
        found += [name for name in _STATE_HOOKS if getattr(module, name)]
        if found:
            raise InputError(f"module {path or '(root)'!r} ({type(module).__name__}) changes what state_dict() gives "
                             f"({found[0].lstrip('_')}), and that of a parallel module would be its parameters and buffers by "
                             f"their names alone. What to do: keep what it adds in a buffer, or take it out before "
                             f"autoparallel and change what parallel.full_state_dict() gives")


def check_complete(wanted: Iterable[str], given: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a state dict that leaves out tensors which this rank of a pipeline holds: torch's own error
    would end this rank alone, and the state dict of another pipeline has the tensors of its own stages only."""
    absent = [name for name in wanted if name not in given]
    if absent:
        more = f" ({len(absent)} in all)" if len(absent) > 1 else ""
        raise CheckpointError(f"the state dict has no {absent[0]!r}{more}, which a rank of the pipeline holds. The "
                              f"state_dict() of a module in a pipeline has what the rank's own stages hold, and another plan "
                              f"cuts them otherwise: parallel.save(folder, optimizer) and load(folder, optimizer) go from any "
                              f"plan to any other, full_state_dict() gives the whole (on rank 0). With strict=False what is "
                              f"left out stays as it is")


def _of_torch(kind: type, name: str) -> bool:
    """Whether the class has torch's own method of this name."""
    owner = next(one for one in kind.__mro__ if name in vars(one))
    return owner.__module__.startswith("torch.nn.")


NO_HOOK = (
    "a hook here would not be called: the parallel module runs a graph, and gathers and reduces its parameters by itself. "
    "Change gradients between loss.backward() and optimizer.step(), or those of activations by a torch.autograd.Function in "
    "the model, before autoparallel"
)


def no_hook(*_: Any, **__: Any) -> Any:
    """Raises RunError, in the place of every way to register a hook."""
    raise RunError(NO_HOOK)


def hook_on_one_stage(fqn: str, faults: list[str]) -> Callable[..., Any]:
    """A function in the place of those that register a hook on a parameter that other ranks of a pipeline do not have. An error
    here they would not come to know of, and wait: it is kept in ``faults``, and all raise it at the next call."""

    def record(*_: Any, **__: Any) -> Any:
        faults.append(f"parameter {fqn!r} was given a hook: {NO_HOOK}")
        return RemovableHandle(OrderedDict())

    return record


class NamedModule(Closed):
    """See the file's head. ``path``: of the module that it stands for; ``_elsewhere``: tensors of it on other ranks."""

    def __init__(self, path: str, kind: ModuleKind) -> None:
        super().__init__(path)
        self.__dict__.update(_path=path, _kind=kind.type, training=kind.training,
                             _closed="a sub-module of a parallel module")

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """The class of the module that this stands for, so that ``isinstance`` finds it."""
        return self.__dict__.get("_kind", NamedModule)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            pass
        if name in self.__dict__["_elsewhere"]:
            raise held_elsewhere(f"{self.__dict__['_path']}.{name}", sys._getframe(1))
        kind, path = self.__dict__["_kind"], self.__dict__["_path"]
        if callable(getattr(kind, name, None)) and not name.startswith("__"):
            raise RunError(f"{name}() of sub-module {path!r} of a parallel module: it holds the tensors of a {kind.__name__} "
                           f"under their names, and does nothing with them; call it on the model, before autoparallel")
        raise AbsentError(f"sub-module {path!r} of a parallel module has no attribute {name!r}: it holds the tensors of a "
                          f"{kind.__name__} under their names, and nothing else; ask the model that was parallelized")

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank; ``Nothing`` where other stages of a pipeline have what is trained of this module."""
        own = super().named_parameters(prefix, recurse, remove_duplicate)
        return with_nothing(own, self.__dict__.get(NOTHING) if recurse else None, prefix)

    def extra_repr(self) -> str:
        """What other stages of a pipeline hold of it, by name."""
        names = ", ".join(sorted(self.__dict__["_elsewhere"]))
        return f"held by other stages of the pipeline, not by this rank: {names}" if names else ""

    def __setattr__(self, name: str, value: Any) -> None:
        """Tensors only (``checks.tensors`` says what becomes of those): nothing reads other attributes."""
        if name != "training" and not isinstance(value, Tensor | nn.Module | None) and name not in self.__dict__:
            refuse_attribute(name, "a sub-module of a parallel module")
        super().__setattr__(name, value)

    register_forward_hook: Any = no_hook
    register_forward_pre_hook: Any = no_hook
    register_backward_hook: Any = no_hook
    register_full_backward_hook: Any = no_hook
    register_full_backward_pre_hook: Any = no_hook

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RunError."""
        raise RunError("sub-modules of a parallel module hold its parameters under their names; only the whole can be called")


class Several(NamedModule):
    """Of a container: its parts by number or name, as the model's. A parameter that another stage of a pipeline holds counts,
    and is refused when it is asked for."""

    def _names(self) -> list[str]:
        return [*self._modules, *self.__dict__["_tensors"]]

    def __len__(self) -> int:
        return len(self._names())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys() if issubclass(self.__class__, nn.ModuleDict | nn.ParameterDict) else self.values())

    def __contains__(self, key: Any) -> bool:
        return key in self._names()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [getattr(self, name) for name in self._names()[key]]
        return getattr(self, key if isinstance(key, str) else self._names()[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse_attribute(str(key), "a sub-module of a parallel module")

    def __delitem__(self, key: Any) -> None:
        names = self._names()[key] if isinstance(key, slice) else [key if isinstance(key, str) else self._names()[key]]
        for name in names:
            delattr(self, name)

    def keys(self) -> Any:
        """As of a dict."""
        return self._names()

    def values(self) -> Any:
        """As of a dict."""
        return [getattr(self, name) for name in self._names()]

    def items(self) -> Any:
        """As of a dict."""
        return [(name, getattr(self, name)) for name in self._names()]


_SEVERAL = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def holder(root: nn.Module, path: Sequence[str], kinds: Mapping[str, ModuleKind]) -> nn.Module:
    """The sub-module of this path, made if it is not there. The dicts are written directly: a model may have names that are
    methods here."""
    found = root
    for depth, name in enumerate(path, 1):
        if found._modules.get(name) is None:
            at = ".".join(path[:depth])
            kind = kinds.get(at, ModuleKind(NamedModule, True))
            found._modules[name] = (Several if issubclass(kind.type, _SEVERAL) else NamedModule)(at, kind)
        child = found._modules[name]
        assert child is not None
        found = child
    return found


@dataclass(frozen=True)
class Modes:
    """The sub-modules, and what each is in the model."""

    modules: tuple[tuple[str, nn.Module, ModuleKind], ...]

    @staticmethod
    def of(root: nn.Module, kinds: Mapping[str, ModuleKind]) -> Modes:
        """Those of a parallel module as it is built."""
        return Modes(tuple((path, module, kinds.get(path, ModuleKind(NamedModule, True)))
                           for path, module in root.named_modules() if path))

    def set(self, training: bool) -> None:
        """As the model's ``train(training)`` leaves them."""
        for _, module, kind in self.modules:
            module.training = kind.after[0 if training else 1]

    def check(self, training: bool) -> None:
        """Raise RunError if a sub-module is in another mode than the graph knows: as the model's ``eval()`` leaves them in
        eval(), and as they were captured in train()."""
        for path, module, kind in self.modules:
            if module.training == (kind.training if training else kind.after[1]):
                continue
            now = "train" if module.training else "eval"
            if training and module.training:
                remedy = f"call parallel.get_submodule({path!r}).eval() after parallel.train(), as for the model"
            elif training:
                remedy = f"call {now}() on that module of the model (or train() on the model) before autoparallel, or " \
                         f"parallel.train() here"
            else:
                remedy = "call parallel.eval(), which sets all of them: what draws or counts in train() does not in eval()"
            whole = "train" if training else "eval"
            raise RunError(f"sub-module {path!r} is in {now}() while the parallel module is in {whole}(), and the model was "
                           f"not captured so; {remedy}")
