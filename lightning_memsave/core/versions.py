"""The versions this package is made for, looked at once at import."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import Version

Bounds = tuple[tuple[int, int], tuple[int, int]]
TESTED: Mapping[str, Bounds] = {
    "torch": ((2, 10), (2, 15)),
    "lightning": ((2, 5), (2, 6)),
}
"""Lowest and highest (major, minor) that tests have run on; `docs/compatibility.md` says which tests.

There are bounds because private names of both packages are used."""


def require_package(package: str, what: str) -> None:
    """Refuse what needs a package that is not installed.

    Raises:
        ValueError: says what to install.

    >>> require_package("nonesuch", "`OptimizerState.backend`")
    Traceback (most recent call last):
        ...
    ValueError: `OptimizerState.backend` needs the package nonesuch, which is not installed. Use: pip install nonesuch
    """
    if find_spec(package) is None:
        raise ValueError(f"{what} needs the package {package}, which is not installed. Use: pip install {package}")


class UntestedVersionWarning(UserWarning):
    """An installed version is newer than those that the tests have run on."""


def check_versions(tested: Mapping[str, Bounds] = TESTED) -> None:
    """Refuse installed versions that are too old; warn of those that are newer than any that was tested.

    Raises:
        ImportError: names the package, its version, the range and the remedy.

    >>> check_versions({"torch": ((9, 0), (9, 1))})
    Traceback (most recent call last):
        ...
    ImportError: lightning-memsave needs torch >= 9.0, found ... Install one, for example: pip install 'torch>=9.0'.
    """
    for package, (lowest, highest) in tested.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        low, high = (".".join(map(str, bound)) for bound in (lowest, highest))
        release = Version(found).release[:2]
        if release < lowest:
            raise ImportError(
                f"lightning-memsave needs {package} >= {low}, found {found}. "
                f"Install one, for example: pip install '{package}>={low}'."
            )
        if release > highest:
            warnings.warn(
                f"lightning-memsave is tested with {package} {low} to {high}, and this is {found}. Private names of it "
                "are used, which may have moved: a step may fail, or keep more activations.",
                UntestedVersionWarning,
                stacklevel=3,
            )
