"""The versions this package is made for, checked once at import."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

SUPPORTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 13), (2, 14)),
    "lightning": ((2, 6), (2, 7)),
}
"""Lowest version and first one beyond, as (major, minor): private names of both are used, so each minor is tested."""


def check_versions(supported: dict[str, tuple[tuple[int, int], tuple[int, int]]] = SUPPORTED) -> None:
    """Raise when an installed version is outside the supported range.

    Raises:
        ImportError: names the package, its version, the range and the remedy.

    >>> check_versions({"torch": ((1, 0), (1, 13))})
    Traceback (most recent call last):
        ...
    ImportError: lightning-memsave needs torch >= 1.0 and < 1.13, found ... Install one, ...
    """
    for package, (lowest, beyond) in supported.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not lowest <= Version(found).release[:2] < beyond:
            low, high = (".".join(map(str, bound)) for bound in (lowest, beyond))
            raise ImportError(
                f"lightning-memsave needs {package} >= {low} and < {high}, found {found}. "
                f"Install one, for example: pip install '{package}>={low},<{high}'."
            )
