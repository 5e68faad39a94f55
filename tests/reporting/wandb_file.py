"""Reads back what wandb wrote: its transaction log `run-<id>.wandb`.

The file is LevelDB's log format behind a header of 7 bytes (`:W&B`, 0xBEE1, version 0): blocks of 32 KiB hold
fragments, each a crc32 (of its type and payload), a length and a type (1 whole, 2 first, 3 middle, 4 last); the joined
payload is one protobuf `Record`. Call `wandb.finish()` and then `wandb.teardown()` before reading: finishing alone may
leave the file incomplete. wandb 0.31 ships no reader.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<4sHB")
FRAGMENT = struct.Struct("<IHB")
BLOCK_BYTES = 32 * 1024
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class WandbFile:
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    """Definitions by exact name, as protobuf messages."""
    globs: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    tags: list[str] = field(default_factory=list)
    path: Path = Path()


def wandb_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/*run-*/run-*.wandb"))


def read_wandb(path: Path) -> WandbFile:
    from wandb.proto.wandb_internal_pb2 import Record

    out = WandbFile(path=path)
    for payload in payloads(path.read_bytes()):
        record = Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            out.name = record.run.display_name
            out.tags = list(record.run.tags)
            out.config |= _values(record.run.config.update)
        elif kind == "config":
            out.config |= _values(record.config.update)
        elif kind == "history":
            out.history.append(_values(record.history.item))
        elif kind == "summary":
            out.summary |= _values(record.summary.update)
            for item in record.summary.remove:
                out.summary.pop(item.key, None)
        elif kind == "metric" and record.metric.name:
            out.metrics[record.metric.name] = record.metric
        elif kind == "metric":
            out.globs[record.metric.glob_name] = record.metric
        elif kind == "exit":
            out.finished = True
    return out


def payloads(content: bytes) -> Iterator[bytes]:
    """Each record's bytes; ends quietly at a tail that was cut off, raises `ValueError` for anything damaged."""
    if len(content) < HEADER.size or HEADER.unpack_from(content) != (b":W&B", 0xBEE1, 0):
        raise ValueError(f"not a .wandb file: {content[: HEADER.size]!r}")
    position, parts = HEADER.size, []
    while position + FRAGMENT.size <= len(content):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < FRAGMENT.size:
            position += left_in_block
            continue
        checksum, length, kind = FRAGMENT.unpack_from(content, position)
        if kind == length == 0:  # padding
            position += left_in_block
            continue
        start = position + FRAGMENT.size
        payload = content[start : start + length]
        if len(payload) < length:
            return
        if zlib.crc32(bytes([kind]) + payload) != checksum:
            raise ValueError(f"damaged fragment at byte {position}")
        position = start + length
        if kind in (WHOLE, FIRST):
            parts = []
        parts.append(payload)
        if kind in (WHOLE, LAST):
            yield b"".join(parts)


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
