"""Byte units. Bytes are the only unit inside the package; this file is the one place that turns them into text."""

from __future__ import annotations

import re

from lightning_memsave.core.errors import setting_error

KIB, MIB, GIB = 2**10, 2**20, 2**30
_ROUNDED_UP = 1023.95 / 1024  # of a unit: what would be 1024.0 of the next smaller one


def format_bytes(num_bytes: int | None) -> str:
    """Return bytes as text in binary units.

    >>> format_bytes(400_257_000), format_bytes(512), format_bytes(3 * GIB), format_bytes(MIB - 1), format_bytes(None)
    ('381.7 MiB', '512 B', '3.0 GiB', '1.0 MiB', 'n/a')
    """
    if num_bytes is None:
        return "n/a"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= _ROUNDED_UP * unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": KIB, "mib": MIB, "gib": GIB}


def counted(number: int, noun: str) -> str:
    """Return a number of things, as a person would write it.

    >>> counted(1, "region"), counted(2, "region")
    ('1 region', '2 regions')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parse_bytes(name: str, value: object) -> int:
    """Parse a size into bytes: a whole number, or a text with a unit.

    `KiB`, `MiB`, `GiB` (powers of 1024), `kB`, `MB`, `GB` (of 1000).

    Args:
        name: what the setting is called in errors.
        value: what the user wrote.

    Raises:
        ValueError: it is no positive size.

    >>> parse_bytes("budget", "1.5GiB"), parse_bytes("budget", 512), parse_bytes("budget", "2 MB")
    (1610612736, 512, 2000000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if found and found[2].lower() in _UNITS:
        num_bytes = int(float(found[1]) * _UNITS[found[2].lower()])
    else:
        num_bytes = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if num_bytes <= 0:
        raise setting_error(name, "must be a positive size", value, 'For example "2GiB", "500MB" or a number of bytes.')
    return num_bytes
