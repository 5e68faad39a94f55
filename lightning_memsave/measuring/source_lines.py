"""Origins of tensors: the lines of the user's code that made them, told from the running frames."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

from lightning_memsave.torch_internals.autograd_graph import WeakStorage

_LIBRARIES = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}
    | {"lightning_memsave", "contextlib", "functools"}
)
_NOT_A_USERS = ("torch.optim", "lightning.pytorch.loops", "pytorch_lightning.loops")
"""A user's line below one of these is the call of `fit`, which made nothing."""
Line = tuple[CodeType, int]


def user_line(depth: int = 1) -> Line | None:
    """Return the innermost running line that belongs neither to torch nor to Lightning nor to this package.

    Args:
        depth: frames to skip.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _LIBRARIES:
            return frame.f_code, frame.f_lineno
        if module.startswith(_NOT_A_USERS):
            return None
        frame = frame.f_back
    return None


def line_text(line: Line | None) -> str:
    """Return a line for people: the file's last two names, the number, and the function."""
    if line is None:
        return "the backward pass, the optimizer, or a library"
    code, number = line
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{number} {code.co_name}"


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A tensor that a measured step made and left alive."""

    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    line: str
    storage: WeakStorage
