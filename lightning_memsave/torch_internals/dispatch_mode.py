"""torch's mode that sees each operation below autograd, which is private, with types."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
