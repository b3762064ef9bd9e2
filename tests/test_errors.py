"""Every error that leaves the package is a MeshwrightError, and survives the way to another rank."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.compiler.search import search
from meshwright.compiler.search.errors import DoesNotFitError
from meshwright.errors import MeshwrightError

INTERNAL: Mapping[str, str] = {
    "Beaten": "of one chain; blockwise makes it a NoBetterError",
    "ChanceError": "of a trace that seeds or draws where a graph cannot; capture makes it a CaptureError",
    "DataDependentError": "of a trace, in the place of torch's error; the trace raises that one",
    "DoesNotFitError": "of one candidate of the search; the sweep makes it an OutOfMemoryError",
    "Infeasible": "of one chain; the search makes it an OutOfMemoryError, PinError or PlanError",
    "MismatchError": "of one operator; verify makes it a VerifyError",
    "NoBetterError": "of one candidate; the sweep notes its bound",
    "NoSolutionError": "of one linear program; caught where a bound is made",
    "NotKeptError": "of an autograd.Function that no graph keeps; capture makes it a CaptureError",
    "StageError": "of one cut; evaluate makes it a DoesNotFitError",
    "UnsolvedError": "of one linear program; caught where a bound is made",
    "_DemandError": "of one factor of a custom function's rule; caught beside it",
    "_NoChainError": "of operators that sort; the search for chains of experts passes them over",
    "_PartsError": "of one product inside a mixture; caught where its rule is made",
    "_TooLargeError": "of a mask that is too large to evaluate; caught beside it",
    "_WholeBatchError": "of one operator; split_time makes it a PlanError, or runs the operator behind the micro-batches",
    "_WholeError": "of one factor of a custom function's rule; caught beside it",
}
"""Exceptions that never leave the package, and who catches them."""


def exceptions() -> dict[str, type[BaseException]]:
    """{name: class} of all that the package defines."""
    found: dict[str, type[BaseException]] = {}
    for info in pkgutil.walk_packages(mw.__path__, "meshwright."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == info.name:
                found[name] = value
    return found


def test_public_errors_have_one_base_and_are_exported() -> None:
    public = {name: cls for name, cls in exceptions().items() if name not in INTERNAL}
    assert len(public) > 10
    assert [name for name, cls in public.items() if not issubclass(cls, MeshwrightError)] == []
    assert [name for name, cls in public.items() if getattr(mw, name, None) is not cls] == []
    assert set(INTERNAL) <= set(exceptions())


def test_errors_keep_the_types_that_python_has_for_such_mistakes() -> None:
    for cls in (mw.PlanError, mw.PinError, mw.RuleError, mw.GraphError, mw.MeshError, mw.ShardingError, mw.ClusterError):
        assert issubclass(cls, ValueError)
    assert issubclass(mw.InputError, TypeError)
    assert issubclass(mw.MissingCheckpointError, FileNotFoundError)
    assert issubclass(mw.RunError, RuntimeError)


@pytest.mark.parametrize("error", [
    mw.PlanError("words"), mw.VerifyError("node", "module", "this", "that"), mw.MissingCheckpointError("words"),
    mw.OutOfMemoryError("words", 3.0, 2.0, {"weights": 1.0}), mw.CaptureError("words", module="a.b", source="x.py:1"),
], ids=lambda error: type(error).__name__)
def test_errors_reach_other_ranks_as_they_are(error: MeshwrightError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum()


def test_a_search_none_of_whose_candidates_can_be_made_to_fit_says_what_the_nearest_needs() -> None:
    refusal = DoesNotFitError("stage 1 does not fit", 2.0**40)
    with mock.patch.object(search, "_plan_of", side_effect=refusal), pytest.raises(mw.OutOfMemoryError) as caught:
        mw.plan(_Net(), "cpu:1x2", {"x": torch.zeros(4, 8)}, pins={"pp": 2})
    assert "the nearest needs 1" in str(caught.value)
    assert "stage 1 does not fit" in str(caught.value)
