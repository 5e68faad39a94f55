"""One call of a function, as whoever keeps tensors for it sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """The function that is running, as the user called it."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int = 0
    """Tells the calls of a scope apart."""

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


NO_CALL = Call("", (), {})
