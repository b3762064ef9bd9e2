"""What made a file, and by which prices."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """Of meshwright and of torch, without what names a build."""
    try:
        own = version("meshwright")
    except PackageNotFoundError:
        own = "0"
    return {"meshwright": own, "torch": torch.__version__.partition("+")[0]}


@cache
def prices() -> str:
    """A digest of this version and of what its predictions are made with: the catalogue, the formulas, the spread of published
    runs. Predictions of another one are stale."""
    found = hashlib.sha256(versions()["meshwright"].encode())
    folder = resources.files("meshwright") / "cost"
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        if file.name.endswith((".py", ".toml")):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]
