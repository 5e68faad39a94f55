"""Read a run that wandb has written: its log `run-<id>.wandb`, offline or online, finished or killed.

wandb 0.31 ships no reader. The file is LevelDB's log format behind a header of 7 bytes: blocks of 32 KiB that hold
fragments, each with a checksum, a length and a kind; fragments join to records, which are protobuf messages. That
format and the messages' module are wandb's own business: they are read here and nowhere else, and a test reads what the
installed wandb writes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_memsave.core.versions import require_package
from lightning_memsave.reporting.foreign_files import DamagedFileError, read_bytes

_HEADER, _MAGIC = struct.Struct("<4sHB"), (b":W&B", 0xBEE1, 0)
_FRAGMENT = struct.Struct("<IHB")
_BLOCK_BYTES = 2**15
_ENDS_RECORD = (1, 4)  # whole, last
_BEGINS_RECORD = (1, 2)  # whole, first


@dataclass
class WandbLog:
    """What a run has logged, in order."""

    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def read_log(path: Path) -> WandbLog:
    """Read a `.wandb` file up to its last whole record: a killed run's tail may be cut off.

    Raises:
        DamagedFileError: `path` is not such a file.
        ValueError: wandb is not installed.
    """
    require_package("wandb", f"Reading {path.name}")
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # slow; generated, untyped

    log = WandbLog()
    for content in _records(read_bytes(path)):
        record = Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            log.name = record.run.display_name or record.run.run_id
            log.config.update(_values(record.run.config.update))
        elif kind == "config":
            log.config.update(_values(record.config.update))
        elif kind == "history":
            log.history.append(_values(record.history.item))
        elif kind == "summary":
            log.summary.update(_values(record.summary.update))
            for item in record.summary.remove:
                log.summary.pop(item.key, None)
    log.config = {name: value for name, value in log.config.items() if name.partition(".")[0] != "_wandb"}
    return log


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(content: bytes) -> Iterator[bytes]:
    if len(content) < _HEADER.size or _HEADER.unpack_from(content) != _MAGIC:
        raise DamagedFileError("no header of a W&B record")
    position, parts = _HEADER.size, list[bytes]()
    while position + _FRAGMENT.size <= len(content):
        left_in_block = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left_in_block < _FRAGMENT.size:
            position += left_in_block
            continue
        checksum, num_bytes, kind = _FRAGMENT.unpack_from(content, position)
        if kind == num_bytes == 0:  # nothing more in this block
            position += left_in_block
            continue
        position += _FRAGMENT.size
        payload = content[position : position + num_bytes]
        if len(payload) < num_bytes:
            return
        if zlib.crc32(payload, zlib.crc32(bytes([kind]))) != checksum:
            raise DamagedFileError(f"damaged before byte {position + num_bytes}")
        position += num_bytes
        if kind in _BEGINS_RECORD:
            parts.clear()
        parts.append(payload)
        if kind in _ENDS_RECORD:
            yield b"".join(parts)
