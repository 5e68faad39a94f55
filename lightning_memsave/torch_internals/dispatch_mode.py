"""torch's mode that sees each operation below autograd, which is private, with types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from typing_extensions import Self  # in `typing` from Python 3.11 on


class DispatchMode(TorchDispatchMode):
    """`TorchDispatchMode`, whose own methods have no types (seen in torch 2.13)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]  # untyped in torch


def count_edits_of_lists(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Count the edits of `torch._foreach_*_` in the versions of its tensors, which torch leaves out below a mode.

    Args:
        func: what was called below a mode, and returned nothing.
        args: its arguments; the first is the list that was edited.

    Returns:
        The tensors; none of another function.
    """
    if not func._schema.name.startswith("aten::_foreach_"):
        return []
    edited = [tensor for tensor in args[0] if not tensor.is_inference()]
    torch.autograd.graph.increment_version(edited)
    return edited
