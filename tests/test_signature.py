"""Binding a call to a graph's inputs, and rebuilding its output."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import deque, namedtuple
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from meshwright.errors import InputError, NotKeptError
from meshwright.ir.graph import Ref
from meshwright.ir.signature import (
    AttributeDict,
    bind,
    describe,
    flatten_output,
    name_arguments,
    rebuild_arguments,
    rebuild_output,
    split_arguments,
)

Pair = namedtuple("Pair", "left right")
X, Y = torch.zeros(2, 3), torch.ones(4, dtype=torch.int64)


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    weight: float = 1.0


@dataclasses.dataclass
class Halved:
    """One field is changed by ``__init__``, another is none of its arguments."""

    x: torch.Tensor
    weight: float
    half: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.weight /= 2
        self.half = self.weight / 2


def forward(x: Any, y: Any = None, *, flag: bool = True, mode: Any = str, **rest: Any) -> Any:
    return x


def signature_of(*args: Any, targets: tuple = (), **kwargs: Any) -> Any:
    return json.loads(json.dumps(describe(forward, args, kwargs, targets)[0]))


class TestBind:
    def test_by_position_or_by_name(self):
        signature = signature_of(X, Y)
        for args, kwargs in (((X, Y), {}), ((X,), {"y": Y}), ((), {"y": Y, "x": X}), ((X, Y), {"flag": True})):
            assert [tensor is want for tensor, want in zip(bind(signature, args, kwargs), (X, Y), strict=True)] == [True, True]

    def test_nested_arguments_and_targets(self):
        signature = signature_of({"a": X, "b": [Y, 3]}, Batch(X), targets=(Y,))
        bound = bind(signature, ({"a": X, "b": (Y, 3)}, Batch(X)), {}, (Y,))
        assert [tuple(tensor.shape) for tensor in bound] == [(2, 3), (4,), (2, 3), (4,)]

    def test_keys_in_another_order_are_refused(self):
        """A forward may go through them: ``torch.cat(list(x.values()))``."""
        signature = signature_of({"a": X, "b": [Y, 3]}, Batch(X))
        with pytest.raises(InputError, match=r"come in the order \['b', 'a'\]"):
            bind(signature, ({"b": (Y, 3), "a": X}, Batch(X)), {})

    def test_numbers_are_the_same_to_the_letter(self):
        """NaN is itself, and a zero has a sign."""
        signature = signature_of(float("nan"), 0.0)
        assert bind(signature, (float("nan"), 0.0), {}) == []
        with pytest.raises(InputError, match=r"-0\.0; the plan was made with 0\.0"):
            bind(signature, (float("nan"), -0.0), {})

    def test_keyword_arguments_beyond_the_named(self):
        assert len(bind(signature_of(X, extra=Y), (X,), {"extra": Y})) == 2

    @pytest.mark.parametrize(("args", "kwargs", "message"), [
        ((), {"y": Y}, r"'x' of forward.*is missing"),
        ((X,), {}, r"argument 'y' is missing: the plan was made with i64\[4\]"),
        ((X, None), {}, r"'y' is None; the plan was made with i64\[4\]"),
        ((X[:1], Y), {}, r"'x' is f32\[1, 3\]; the plan was made with f32\[2, 3\]"),
        ((X.double(), Y), {}, r"'x' is f64\[2, 3\]; the plan was made with f32\[2, 3\]"),
        ((X, Y), {"flag": False}, "'flag' is False; the plan was made with True"),
        ((X, Y), {"flag": 1}, "'flag' is 1; the plan was made with True"),
        ((torch.nested.nested_tensor([X, X]), Y), {}, r"'x' is a nested tensor; the plan was made with f32"),
        ((X, Y), {"mode": int}, r"'mode'.*was not given when the plan was made"),
        ((X, Y), {"other": X}, r"'other' \(f32\[2, 3\]\) was not given"),
        ((X, Y), {"x": X}, "'x' is given by position and by name"),
        ((X, Y, X), {}, "3 positional arguments"),
    ])
    def test_what_does_not_fit(self, args, kwargs, message):
        with pytest.raises(InputError, match=message):
            bind(signature_of(X, Y), args, kwargs)

    def test_nested_arguments_that_do_not_fit(self):
        signature = signature_of([X, {"k": Y}])
        with pytest.raises(InputError, match=r"'x\[1\]\.k' is 3"):
            bind(signature, ([X, {"k": 3}],), {})
        with pytest.raises(InputError, match="a list of 2"):
            bind(signature, ([X],), {})
        with pytest.raises(InputError, match="keys"):
            bind(signature, ([X, {}],), {})

    def test_the_number_of_targets(self):
        with pytest.raises(InputError, match=r"1 targets.*gives 0"):
            bind(signature_of(X, targets=(Y,)), (X,), {})

    def test_unexpected_argument_of_a_closed_signature(self):
        with pytest.raises(InputError, match="unexpected argument 'z'"):
            describe(lambda x: x, (X,), {"z": 1})


def test_arguments_are_rebuilt_around_new_leaves():
    def function(first, *others, last, **rest):
        return first, others, last, rest

    args, kwargs = (Pair(X, 1), [Y], X), {"last": Batch(X, 2.0), "more": {"k": Y}}
    signature, leaves = describe(function, args, kwargs)
    named = rebuild_arguments(signature, [leaf + 1 for leaf in leaves], name_arguments(signature, args, kwargs))
    new_args, new_kwargs = split_arguments(signature, named)
    first, others, last, rest = function(*new_args, **new_kwargs)
    assert isinstance(first, Pair)
    assert torch.equal(first.left, X + 1)
    assert torch.equal(others[0][0], Y + 1)
    assert last.weight == 2.0
    assert torch.equal(rest["more"]["k"], Y + 1)


class Colour(Enum):
    RED = 1


class TestOutput:
    def roundtrip(self, output: Any) -> Any:
        tensors: dict[str, torch.Tensor] = {}

        def leaf(tensor: torch.Tensor) -> Ref:
            tensors[f"t{len(tensors)}"] = tensor
            return Ref(f"t{len(tensors) - 1}")

        classes: dict[str, type] = {}
        tree, type_ = flatten_output(output, leaf, classes)
        return rebuild_output(tree, json.loads(json.dumps(type_)), tensors, classes)

    def test_plain_containers(self):
        assert self.roundtrip(X) is X
        output = self.roundtrip((X, [Y, 2.5, None], {"k": "text", "t": X}))
        assert output[0] is X
        assert output[1][0] is Y
        assert output[1][1:] == [2.5, None]
        assert output[2]["k"] == "text"
        assert output[2]["t"] is X

    def test_classes(self):
        pair = self.roundtrip(Pair(X, Y))
        assert isinstance(pair, Pair)
        assert pair.right is Y
        batch = self.roundtrip(Batch(X, 3.0))
        assert isinstance(batch, Batch)
        assert batch.weight == 3.0

    def test_model_output_without_its_cache(self):
        output = hf.modeling_outputs.CausalLMOutputWithPast(loss=X.sum(), logits=X, past_key_values=hf.DynamicCache())
        again = self.roundtrip(output)
        assert type(again) is type(output)
        assert again.logits is X
        assert again[1] is X
        assert again.past_key_values is None

    def test_what_max_gives_keeps_its_names(self):
        again = self.roundtrip({"best": X.max(0)})["best"]
        assert torch.equal(again.values, X.max(0).values)
        assert torch.equal(again[1], again.indices)

    def test_dataclasses_are_as_the_model_left_them(self):
        again = self.roundtrip(Halved(X, 4.0))
        assert type(again) is Halved
        assert (again.x is X, again.weight, again.half) == (True, 2.0, 1.0)

    @pytest.mark.parametrize(("output", "words"), [
        ({"levels": {0: X}}, ".levels is a dict with keys that are no strings"), ({"pair": (X, {X})}, ".pair[1] is a set"),
        ([X, 1j], "[1] is a complex"), ([X, b"a"], "[1] is a bytes"), ((x for x in [X]), "the output is a generator"),
        ([X, np.float64(0.5)], "[1] is a float64"), (hf.DynamicCache(), "the output is a DynamicCache"),
        ({"a": np.zeros(2)}, ".a is a ndarray"), ((X, deque([X])), "[1] is a deque"), ([X, torch.float32], "[1] is a dtype"),
        ([X, range(3)], "[1] is a range"), ([X, Colour.RED], "[1] is a Colour"), ([X, len], "[1] is a builtin_function"),
        ([X, torch.distributions.Normal(X, 1.0)], "[1] is a Normal"),
    ], ids=range(14))
    def test_what_would_be_lost_is_refused(self, output, words):
        with pytest.raises(NotKeptError, match=re.escape(words)):
            self.roundtrip(output)

    @pytest.mark.parametrize("path", ["no_such_module:Output", "subprocess:Popen", "builtins:eval"])
    def test_classes_that_the_capture_did_not_meet_become_attribute_dicts(self, path):
        type_ = {"kind": "object", "class": path, "items": {"loss": "leaf"}}
        again = rebuild_output({"loss": Ref("a")}, type_, {"a": X}, {"mine:Output": dict})
        assert type(again) is AttributeDict
        assert again.loss is again["loss"] is X
        with pytest.raises(AttributeError):
            _ = again.logits
