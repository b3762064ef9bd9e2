"""What made a file."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """Of meshwright and of torch, without what names a build."""
    try:
        own = version("meshwright")
    except PackageNotFoundError:
        own = "0"
    return {"meshwright": own, "torch": torch.__version__.partition("+")[0]}
