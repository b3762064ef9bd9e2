"""A parallel module without an example: its first call is the example, as with torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from meshwright.errors import InputError

Build = Callable[[tuple[Any, ...], Mapping[str, Any]], nn.Module]


class Deferred(nn.Module):
    """Built on the first call; until then it has no parameters to ask for."""

    def __init__(self, build: Build, training: bool) -> None:
        super().__init__()
        self.training = training
        self.__dict__["_build"], self.__dict__["_built"] = build, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The parallel module's output; plans and builds it first if this is the first call."""
        if self.__dict__["_built"] is None:
            built = self.__dict__["_build"](args, kwargs)
            if built.training != self.training:  # else its sub-modules are in the modes in which they were captured
                built.train(self.training)
            self.__dict__["_built"] = built
        return self.__dict__["_built"](*args, **kwargs)

    def train(self, mode: bool = True) -> Deferred:
        """Also before the first call."""
        super().train(mode)
        if self.__dict__["_built"] is not None:
            self.__dict__["_built"].train(mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the parallel module."""
        return iter(self._module("its parameters").named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Of the parallel module."""
        return iter(self._module("its buffers").named_buffers(*args, **kwargs))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the parallel module."""
        return self._module("its state dict").state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the parallel module."""
        return self._module("to load a state dict").load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Of the parallel module, as a part of the module that is loaded."""
        for path, module in self._module("to load a state dict").named_modules():
            module._load_from_state_dict(state_dict, f"{prefix}{path}{'.' if path else ''}", *args)

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """Of the parallel module."""
        return self._module("its sub-modules").named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Any:
        """Of the parallel module."""
        return self._module("its sub-modules").named_children()

    def apply(self, fn: Any) -> Any:
        """Of the parallel module."""
        return self._module("to apply a function").apply(fn)

    def _apply(self, fn: Any, recurse: bool = True) -> Deferred:
        self._module("to be moved or cast")._apply(fn, recurse)
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Of the parallel module."""
        self._module(f"to register {name!r}").register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Of the parallel module."""
        self._module(f"to register {name!r}").register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Of the parallel module."""
        self._module(f"to add {name!r}").add_module(name, module)

    register_module = add_module

    def __repr__(self) -> str:
        built = self.__dict__["_built"]
        return super().__repr__() if built is None else repr(built)

    def __delattr__(self, name: str) -> None:
        delattr(self._module(f"to delete {name!r}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(nn.Module()):
            super().__setattr__(name, value)
        else:
            setattr(self._module(f"to set {name!r}"), name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._module(repr(name)), name)

    def _module(self, what: str) -> nn.Module:
        built = self.__dict__["_built"]
        if built is None:
            raise InputError(f"the parallel module was asked for {what} before its first call, and there was no example to "
                             "plan with; pass example_inputs=(args, kwargs) to autoparallel, or call it once first")
        return built  # type: ignore[no-any-return]
