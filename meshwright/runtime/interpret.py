"""Run a ``Graph`` eagerly, operator by operator: what it means, and the oracle of the capture's tests.

``mw.*`` targets come from ``operators`` (by default ``meshwright.runtime.ops``), all others are torch's (``ir.operators``).
Autograd works through it as through any eager code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.errors import InputError
from meshwright.ir.declared.experts import EXPERTS
from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import ASSERTED, Graph, Op, Ref, arguments
from meshwright.ir.operators import argument_names, overload
from meshwright.runtime.custom import custom_function
from meshwright.runtime.experts.mixture import experts
from meshwright.runtime.ops import OPS


def asserted(condition: torch.Tensor, message: str) -> torch.Tensor:
    """The condition, a tensor of one element; InputError if it does not hold."""
    if not condition:
        raise InputError(f"the forward asserts of its inputs what does not hold: {message or 'it does not say what'}. One "
                         f"process would raise, too")
    return condition


_OWN: Mapping[str, Callable[..., Any]] = {CUSTOM: custom_function, EXPERTS: experts, ASSERTED: asserted}


def run(
    graph: Graph, env: Mapping[str, torch.Tensor], operators: Mapping[str, Callable[..., Any]] = OPS
) -> dict[str, torch.Tensor]:
    """{value name: tensor} of the outputs, the loss and the mutated buffers' new values.

    ``env`` holds the tensors of ``graph.inputs`` and ``graph.params`` by value name; constants, and what is made of nothing,
    lie on the device of these. Intermediate values are freed after their last use.
    """
    device = next(iter(env.values())).device if env else torch.device("cpu")
    wanted = set(graph.outputs) | ({graph.loss} if graph.loss else set())
    last = {name: index for index, op in enumerate(graph.ops) for name in op.inputs}
    values: dict[str, Any] = {name: tensor.to(device) for name, tensor in graph.constants.items()} | dict(env)
    for index, op in enumerate(graph.ops):
        result = call(op, lambda ref: values[ref.name], operators, device)
        results = result if isinstance(result, tuple | list) else (result,)
        values.update(zip(op.outputs, results, strict=False))
        for name in op.inputs:
            if last[name] == index and name not in wanted:
                values.pop(name, None)
    return {name: values[name] for name in wanted}


def call(
    op: Op, read: Callable[[Ref], Any], operators: Mapping[str, Callable[..., Any]] = OPS, device: torch.device | None = None
) -> Any:
    """What one operator returns on the tensors that ``read`` gives for its operands; ``device``: where it makes one of nothing.
    Raises GraphError for an unknown one."""
    own = _OWN.get(op.target) or operators.get(op.target)
    args, kwargs = arguments(op, read)
    if own is not None:
        return own(*args, **kwargs)
    function = overload(op.target)
    if device is not None and not op.inputs and "device" in argument_names(function):
        kwargs["device"] = device
    return function(*args, **kwargs)
