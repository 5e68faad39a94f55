"""Files that others have written: regular ones of a bounded size, plain data, text that a terminal shows as it is."""

from __future__ import annotations

import stat
import unicodedata
from pathlib import Path
from typing import Any

import yaml

_MOST_BYTES = 2**30
_MOST_SETTINGS = 2**18, 20_000  # bytes of YAML, and values once its references are followed


class DamagedFileError(ValueError):
    """A file is not what its name says, or not what it was when it was written."""


def read_bytes(path: Path, most: int = _MOST_BYTES, inside: Path | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        path: of the file.
        most: bytes.
        inside: the folder in which it must lie, after links.

    Raises:
        DamagedFileError: it is no regular file, has more bytes, or lies elsewhere.
        OSError: it cannot be read.
    """
    if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
        raise DamagedFileError(f"{path} is not inside of {inside}")
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedFileError("no regular file")
    if found.st_size > most:
        raise DamagedFileError(f"{found.st_size} bytes, more than {most}")
    return path.read_bytes()


def printable(value: Any) -> Any:
    r"""Return text, or all text of plain data, without characters that steer a terminal or hide others.

    >>> printable({"a": ["\x1b]0;title\x07", "left\u202eright", "two\nlines"]})
    {'a': ['�]0;title�', 'left�right', 'two lines']}
    """
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(printable, value))
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(map(_shown, value))


def _shown(character: str) -> str:
    if character in "\n\t":
        return " "
    return "�" if unicodedata.category(character)[0] == "C" or character in "\u2028\u2029" else character


def read_settings(path: Path) -> dict[str, Any]:
    """Return what Lightning's `hparams.yaml` holds, as plain data; empty where there is no such file.

    Raises:
        DamagedFileError: it is large, or its references are.
        yaml.YAMLError: it is no YAML.
    """
    if not path.exists():
        return {}
    most_bytes, most_values = _MOST_SETTINGS
    loader = _Loader(read_bytes(path, most_bytes))
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if _num_values(node, {}) > most_values:
            raise DamagedFileError(f"{path.name} has more than {most_values} values")
        found = loader.construct_document(node)
    finally:
        loader.dispose()
    return found if isinstance(found, dict) else {}


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Count the values, once more for each reference to them; infinite where something holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        inner = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        has_inner = isinstance(node, yaml.CollectionNode)
        known[id(node)] = 1 + sum(_num_values(each, known) for each in inner) if has_inner else 1
    return known[id(node)]


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Plain data only. Lightning writes Python's types with tags, for example of tuples: their text is kept."""


_Loader.add_multi_constructor("", lambda loader, tag, node: _plain(loader, node))


def _plain(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return str(node.value)
