"""Byte units. Bytes are the only unit inside the package; this file is the one place that turns them into text."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_bytes(num_bytes: int | None) -> str:
    """Bytes as text in binary units.

    >>> format_bytes(400_257_000), format_bytes(512), format_bytes(3 * GIB), format_bytes(None)
    ('381.7 MiB', '512 B', '3.0 GiB', 'n/a')
    """
    if num_bytes is None:
        return "n/a"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"
