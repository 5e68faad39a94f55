"""The versions this package is made for, looked at once at import."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

Bounds = tuple[tuple[int, int], tuple[int, int]]
TESTED: Mapping[str, Bounds] = {
    "torch": ((2, 10), (2, 15)),
    "lightning": ((2, 5), (2, 6)),
}
"""Lowest and highest (major, minor) that tests have run on, which private names of both need; which tests, says
`docs/compatibility.md`."""


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
