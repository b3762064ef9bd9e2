"""How a call binds to the inputs of a captured graph, and how its output is put together again; JSON-able, pure Python.

    signature = {"parameters": [{"name", "kind", "default"?: SPEC}...], "bound": {name: SPEC}, "targets": [SPEC...],
                 "output": TYPE}
    SPEC = {"tensor": path, "shape": [..], "dtype": "f32"}         a leaf: the next graph input
         | {"constant": value}                                     None, bool, int, float, str: a call must equal it
         | {"sequence": "list" | "tuple", "items": [SPEC...]}
         | {"mapping": class or "", "items": {key: SPEC}}          dicts, and dataclasses by attribute
         | {"opaque": text}                                        a default that was not given: a call must not give it
    TYPE = "leaf" | {"kind": "tuple" | "list" | "dict" | "namedtuple" | "object", "class": "module:Name", "items": ...,
                     "fields"?: [names of a named tuple's items]}

``describe`` flattens example arguments into a signature (tensors in order of the forward's parameters), ``bind`` flattens
a call against it, ``flatten_output`` and ``rebuild_output`` do the same for the result. An argument may be given by position
or by name in either call; one that is left out must have had its default in the example.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from numbers import Number
from typing import Any

import torch

from meshwright.errors import InputError, NotKeptError
from meshwright.ir.sharding import DTYPE_NAMES, DTYPES

Spec = Mapping[str, Any]
_CONSTANTS = (type(None), bool, int, float, str)
_OF_LIBRARIES = frozenset({"numpy", "torch", *sys.stdlib_module_names})
"""Whose objects hold what somebody computed, and are no caches."""


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes too, and whose values other than None are in order by number: stands in for an output
    class that is not at hand (a dataclass, a ModelOutput).

    >>> output = AttributeDict(loss=1.5, cache=None, logits="l")
    >>> output.loss, output["logits"], output[1], output[:2]
    (1.5, 'l', 'l', (1.5, 'l'))
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return self.to_tuple()[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are there, in order."""
        return tuple(value for value in self.values() if value is not None)


class AttributeTuple(tuple[Any, ...]):
    """A tuple whose items have names too: stands in for a named tuple whose class is not at hand.

    >>> pair = AttributeTuple((1, 2), ["left", "right"])
    >>> pair.right, pair[0], pair
    (2, 1, (1, 2))
    """

    _fields: tuple[str, ...]

    def __new__(cls, items: Iterable[Any], fields: Iterable[str]) -> AttributeTuple:
        """``fields``: a name for every item."""
        found = super().__new__(cls, items)
        found._fields = tuple(fields)
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return self[self.__dict__["_fields"].index(name)]
        except (KeyError, ValueError):
            raise AttributeError(name) from None

    def __getnewargs__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(self), self._fields


# ---------------------------------------------------------------------------------------------------------------- arguments
def describe(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any] = ()
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """(signature without "output", tensor leaves in order). Raises InputError if the arguments do not fit ``forward``."""
    parameters = list(inspect.signature(forward).parameters.values())
    bound = _bind_names([_parameter(p) for p in parameters], args, kwargs, "the example inputs")
    leaves: list[torch.Tensor] = []
    specs = {name: _describe(value, name, leaves) for name, value in bound.items()}
    signature = {
        "parameters": [_parameter(p) for p in parameters],
        "bound": specs,
        "targets": [_describe(value, f"targets[{i}]", leaves) for i, value in enumerate(targets)],
    }
    return signature, leaves


def bind(
    signature: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """The call's tensors in the order of ``Graph.inputs``. Raises InputError naming the argument that does not fit."""
    given = _bind_names(signature["parameters"], args, kwargs, "the call")
    defaults = {p["name"]: p["default"] for p in signature["parameters"] if "default" in p}
    leaves: list[torch.Tensor] = []
    named = {parameter["name"] for parameter in signature["parameters"]}
    free = [[name for name in names if name not in named and "[" not in name] for names in (given, signature["bound"])]
    if set(free[0]) == set(free[1]):
        _check_order(free[0], free[1], "the arguments of **")
    for name, spec in signature["bound"].items():
        if name in given:
            _match(spec, given.pop(name), name, leaves)
        elif repr(spec) != repr(defaults.get(name)):
            raise InputError(f"argument {name!r} is missing: the plan was made with {_show(spec)}; pass it, or plan without it")
    for name, value in given.items():
        spec = defaults.get(name)
        if spec is None or "opaque" in spec:
            raise InputError(f"argument {name!r} ({_show_value(value)}) was not given when the plan was made; leave it out, "
                             f"or plan again with it among the example inputs")
        _match(spec, value, name, leaves)
    if len(targets) != len(signature["targets"]):
        raise InputError(f"the plan was made with {len(signature['targets'])} targets for the loss function; "
                         f"the call gives {len(targets)}")
    for index, (spec, value) in enumerate(zip(signature["targets"], targets, strict=True)):
        _match(spec, value, f"targets[{index}]", leaves)
    return leaves


def example_of(signature: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """(args, kwargs, targets) that fit a signature, their tensors on the meta device. InputError for a dataclass: its class is
    known to the caller only."""

    def make(spec: Spec) -> Any:
        if "tensor" in spec:
            return torch.empty(spec["shape"], dtype=DTYPES[spec["dtype"]], device="meta")
        if "constant" in spec:
            return spec["constant"]
        if "sequence" in spec:
            items = [make(item) for item in spec["items"]]
            return items if spec["sequence"] == "list" else tuple(items)
        if spec["mapping"]:
            raise InputError(f"the plan was made with an argument of class {spec['mapping']}; give example_inputs with one")
        return {key: make(item) for key, item in spec["items"].items()}

    args, kwargs = split_arguments(signature, {name: make(spec) for name, spec in signature["bound"].items()})
    return args, kwargs, [make(spec) for spec in signature["targets"]]


def name_arguments(signature: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """{parameter name: argument} of a call."""
    return _bind_names(signature["parameters"], args, kwargs, "the call")


def rebuild_arguments(signature: Mapping[str, Any], leaves: Iterable[torch.Tensor], example: Mapping[str, Any]) -> Any:
    """``example`` ({name: argument}) with its tensors replaced in order by ``leaves``."""
    stream = iter(leaves)
    return {name: _replace(spec, example[name], stream) for name, spec in signature["bound"].items()}


def split_arguments(
    signature: Mapping[str, Any], named: Mapping[str, Any], given: int | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a call with these named arguments ("name[0]" are items of ``*name``). ``given``: how many of them were
    given by position, which hooks and wrappers of the forward see; else as many as can be."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_position = True
    for parameter in signature["parameters"]:
        name, kind = parameter["name"], parameter["kind"]
        by_position = by_position and (given is None or len(args) < given or kind == "positional")
        if kind == "*":
            args += [value for key, value in named.items() if key.startswith(f"{name}[")] if by_position else []
            by_position = False
        elif name in named and by_position and kind != "keyword":
            args.append(named[name])
        elif name in named:
            kwargs[name] = named[name]
        else:
            by_position = False
    known = {parameter["name"] for parameter in signature["parameters"]}
    kwargs |= {key: value for key, value in named.items() if key not in known and "[" not in key}
    return args, kwargs


def _parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    kinds: Mapping[Any, str] = {
        parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**", parameter.KEYWORD_ONLY: "keyword",
        parameter.POSITIONAL_ONLY: "positional",
    }
    result: dict[str, Any] = {"name": parameter.name, "kind": kinds.get(parameter.kind, "either")}
    if parameter.default is not parameter.empty:
        plain = type(parameter.default) in _CONSTANTS
        result["default"] = {"constant": parameter.default} if plain else {"opaque": repr(parameter.default)}
    return result


def _bind_names(parameters: Sequence[Spec], args: Sequence[Any], kwargs: Mapping[str, Any], who: str) -> dict[str, Any]:
    """{parameter name: given value}, in the order of the parameters; items of ``*name`` are "name[i]"."""
    bound: dict[str, Any] = {}
    rest = dict(kwargs)
    position = 0
    for parameter in parameters:
        name, kind = parameter["name"], parameter["kind"]
        if kind == "*":
            bound |= {f"{name}[{i}]": value for i, value in enumerate(args[position:])}
            position = len(args)
        elif kind == "**":
            bound |= rest
            rest = {}
        elif kind != "keyword" and position < len(args):
            if name in rest:
                raise InputError(f"{who}: argument {name!r} is given by position and by name")
            bound[name] = args[position]
            position += 1
        elif name in rest:
            bound[name] = rest.pop(name)
        elif "default" not in parameter:
            raise InputError(f"{who}: argument {name!r} of forward({_names(parameters)}) is missing")
    if position < len(args):
        raise InputError(f"{who}: {len(args)} positional arguments, forward({_names(parameters)}) takes {position}")
    if rest:
        raise InputError(f"{who}: unexpected argument {next(iter(rest))!r}; forward takes ({_names(parameters)})")
    return bound


def _names(parameters: Sequence[Spec]) -> str:
    return ", ".join((p["kind"] if p["kind"] in ("*", "**") else "") + p["name"] for p in parameters)


def _describe(value: Any, path: str, leaves: list[torch.Tensor]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided or value.dtype not in DTYPE_NAMES:
            raise InputError(f"argument {path!r} is {_show_value(value)}, which cannot be cut into pieces; give a plain dense "
                             f"tensor (.to_dense(), to_padded_tensor, int64)")
        leaves.append(value)
        return {"tensor": path, "shape": list(value.shape), "dtype": DTYPE_NAMES[value.dtype]}
    if type(value) in _CONSTANTS:
        return {"constant": value}
    if isinstance(value, list | tuple):
        items = [_describe(item, f"{path}[{i}]", leaves) for i, item in enumerate(value)]
        return {"sequence": "list" if isinstance(value, list) else "tuple", "items": items}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": "", "items": {key: _describe(item, f"{path}.{key}", leaves) for key, item in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items_ = {f.name: _describe(getattr(value, f.name), f"{path}.{f.name}", leaves) for f in dataclasses.fields(value)}
        return {"mapping": _class_path(type(value)), "items": items_}
    raise InputError(f"argument {path!r} is a {type(value).__name__}; arguments may be tensors, None, bool, int, float, str, "
                     f"and lists, tuples, dicts and dataclasses of these. Leave it out, or wrap the model in a module that "
                     f"makes it")


def _match(spec: Spec, value: Any, path: str, leaves: list[torch.Tensor]) -> None:
    """Append the tensors of ``value`` to ``leaves``; InputError where it differs from ``spec``."""
    if "tensor" in spec:
        if not isinstance(value, torch.Tensor):
            raise InputError(f"argument {path!r} is {_show_value(value)}; the plan was made with {_show(spec)}")
        if value.is_nested or list(value.shape) != spec["shape"] or DTYPE_NAMES.get(value.dtype) != spec["dtype"]:
            raise InputError(f"argument {path!r} is {_show_value(value)}; the plan was made with {_show(spec)}. Pass that "
                             f"shape and dtype (the GLOBAL batch), or plan again for this one")
        leaves.append(value)
    elif "constant" in spec:
        if type(value) is not type(spec["constant"]) or repr(value) != repr(spec["constant"]):  # NaN is one, -0.0 is not 0.0
            raise InputError(f"argument {path!r} is {_show_value(value)}; the plan was made with {_show(spec)}, which is "
                             f"fixed in its graph. Pass the same, or plan again")
    elif "sequence" in spec:
        if not isinstance(value, list | tuple) or len(value) != len(spec["items"]):
            many = f" of {len(value)}" if isinstance(value, list | tuple) else ""
            raise InputError(f"argument {path!r} is {_show_value(value)}{many}; the plan was made with a {spec['sequence']} of "
                             f"{len(spec['items'])}")
        for index, (item, element) in enumerate(zip(spec["items"], value, strict=True)):
            _match(item, element, f"{path}[{index}]", leaves)
    else:
        found = _fields(value)
        if found is None or set(found) != set(spec["items"]):
            raise InputError(f"argument {path!r} is {_show_value(value)}; the plan was made with keys {sorted(spec['items'])}")
        _check_order(list(found), list(spec["items"]), f"the keys of argument {path!r}")
        for key, item in spec["items"].items():
            _match(item, found[key], f"{path}.{key}", leaves)


def _check_order(found: Sequence[str], planned: Sequence[str], what: str) -> None:
    """Raise InputError for names in another order: a forward may go through them."""
    if found != planned:
        raise InputError(f"{what} come in the order {found}; the plan was made with {planned}, and a forward that goes through "
                         f"them would compute something else. Give them in that order")


def _fields(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _replace(spec: Spec, value: Any, leaves: Any) -> Any:
    if "tensor" in spec:
        return next(leaves)
    if "sequence" in spec:
        items = [_replace(item, element, leaves) for item, element in zip(spec["items"], value, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if "mapping" in spec:
        found = _fields(value) or {}
        items_ = {key: _replace(item, found[key], leaves) for key, item in spec["items"].items()}
        return dataclasses.replace(value, **items_) if spec["mapping"] else items_
    return value


def _show(spec: Spec) -> str:
    if "tensor" in spec:
        return f"{spec['dtype']}{spec['shape']}"
    if "constant" in spec:
        return repr(spec["constant"])
    return f"a {spec['sequence']}" if "sequence" in spec else "a mapping"


def _show_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        layout = "" if value.layout is torch.strided else f" ({value.layout})"
        return f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}{list(value.shape)}{layout}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


# ------------------------------------------------------------------------------------------------------------------- output
def flatten_output(
    output: Any, leaf: Callable[[torch.Tensor], Any], classes: dict[str, type], path: str = ""
) -> tuple[Any, Any]:
    """(tree, type): the tree of tuples, lists and dicts with ``leaf(tensor)`` at its tensors, and how to rebuild it.

    Numbers, strings and None stay; an object that is no container (a key/value cache) cannot be an output of a graph and
    becomes None. ``classes`` gets the dataclasses and named tuples by the names that they have in the type. Raises NotKeptError
    for what would be lost: the output as a whole, a set, keys that are no strings, numbers that are not Python's, members of
    an enumeration, and whatever is of Python's own kinds, of NumPy's or of torch's (arrays, deques, dtypes, functions).
    """
    names = _names_of_items(output)
    if not isinstance(output, torch.Tensor) and (dataclasses.is_dataclass(output) or hasattr(output, "_fields")):
        classes[_class_path(type(output))] = type(output)
    if isinstance(output, torch.Tensor):
        return leaf(output), "leaf"
    if type(output) in _CONSTANTS:
        return output, "leaf"
    if isinstance(output, tuple | list):
        pairs = [flatten_output(item, leaf, classes, f"{path}[{index}]") for index, item in enumerate(output)]
        tree = tuple(pair[0] for pair in pairs) if isinstance(output, tuple) else [pair[0] for pair in pairs]
        kind = "namedtuple" if names else "tuple" if isinstance(output, tuple) else "list"
        kind_of: dict[str, Any] = {"kind": kind, "class": "", "items": [pair[1] for pair in pairs]}
        if names:
            kind_of |= {"class": _class_path(type(output)), "fields": list(names)}
        return tree, kind_of
    if (isinstance(output, Mapping) and all(isinstance(key, str) for key in output)) or dataclasses.is_dataclass(output):
        fields = output if isinstance(output, Mapping) else _fields(output) or {}
        items = {key: flatten_output(item, leaf, classes, f"{path}.{key}") for key, item in fields.items()}
        plain = type(output) is dict
        type_ = {"kind": "dict" if plain else "object", "class": "" if plain else _class_path(type(output)),
                 "items": {key: pair[1] for key, pair in items.items()}}
        return {key: pair[0] for key, pair in items.items()}, type_
    known = type(output).__module__.partition(".")[0] in _OF_LIBRARIES
    if not path or known or isinstance(output, Mapping | Set | Number | str | bytes | Iterator | Enum):
        keys = " with keys that are no strings" if isinstance(output, Mapping) else ""
        what = f"the output{f' {path}' if path else ''} is a {type(output).__name__}{keys}"
        raise NotKeptError(f"{what}, which the parallel module could "
                           f"not give back", "let the forward return tensors, None, bool, int, float, str, and lists, tuples, "
                           "named tuples, dicts with strings as keys, and dataclasses of these")
    return None, "leaf"


def _names_of_items(output: Any) -> Sequence[str]:
    """What the items of a tuple are called too: those of a named tuple, and of what ``x.max(0)`` gives."""
    if isinstance(output, tuple) and hasattr(type(output), "n_sequence_fields"):
        return tuple(getattr(type(output), "__match_args__", ()))
    return tuple(getattr(output, "_fields", ())) if isinstance(output, tuple | list) else ()


def rebuild_output(output_tree: Any, output_type: Any, values: Mapping[str, Any], classes: Mapping[str, type]) -> Any:
    """The user's container with ``values`` at the ``Ref``s (anything with a ``name``). ``classes``: those that the capture of
    the model met, by name; nothing is imported. Any other becomes an ``AttributeDict`` (a plain tuple for a named tuple)."""
    if output_type == "leaf":
        return values[output_tree.name] if hasattr(output_tree, "name") else output_tree
    kind, items = output_type["kind"], output_type["items"]
    if kind in ("tuple", "list", "namedtuple"):
        parts = [rebuild_output(tree, type_, values, classes) for tree, type_ in zip(output_tree, items, strict=True)]
        cls = classes.get(output_type["class"])
        if cls is None and "fields" in output_type:
            return AttributeTuple(parts, output_type["fields"])
        return parts if kind == "list" else cls(*parts) if cls else tuple(parts)
    fields = {key: rebuild_output(output_tree[key], type_, values, classes) for key, type_ in items.items()}
    cls = classes.get(output_type["class"])
    return fields if kind == "dict" else _made(cls, fields) if cls else AttributeDict(fields)


def _made(cls: type, fields: Mapping[str, Any]) -> Any:
    """An object of the class with these fields. A dataclass is not initialized again: its fields are what the model left there,
    which its ``__init__`` may not take, or make others of."""
    if issubclass(cls, Mapping):
        return cls(**fields)
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def classes_by_name(output_type: Any, given: Iterable[type]) -> dict[str, type]:
    """The classes under the names that they have in ``output_type``. Raises InputError for one that is not there."""
    wanted = set(_classes(output_type))
    found = {_class_path(cls): cls for cls in given}
    if strangers := sorted(found.keys() - wanted):
        known = f"its classes are {', '.join(sorted(wanted))}" if wanted else "it is made of tensors, tuples, lists and dicts"
        raise InputError(f"the output holds no {strangers[0]}; {known}")
    return found


def _classes(output_type: Any) -> Iterable[str]:
    if isinstance(output_type, Mapping):
        items = output_type["items"]
        yield from [output_type["class"]] if output_type["class"] else []
        for item in items.values() if isinstance(items, Mapping) else items:
            yield from _classes(item)


def _class_path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
