"""The codes of activation compression: speed of each implementation on one thread, bytes, and error.

Speeds are GB of float32 per second of CPU time, read when coding and written when decoding.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.measurement import environment, write_rows
from lightning_memsave.numerics import bits, kbit
from lightning_memsave.numerics.kernels import native

NUM_ELEMENTS = 1 << 22
SEED = 7


class Codec(NamedTuple):
    """One implementation of one code."""

    setting: str
    implementation: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    expected: Callable[[Tensor], Tensor] = lambda values: values


def gigabytes_per_second(work: Callable[[], object], num_bytes: int, repeats: int = 11) -> float:
    seconds = []
    for _ in range(repeats + 2):  # two warm-ups: the first one may compile
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return num_bytes / statistics.median(seconds[2:]) / 1e9


def compiled_reference() -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """The reference, compiled as one chunk: a loop over chunks breaks the graph of one and copies in the other's."""
    spec = importlib.util.find_spec(kbit.__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._CHUNK = NUM_ELEMENTS
    torch.compiler.reset()
    return torch.compile(module.quantize), torch.compile(module.dequantize)


def codecs(out: Tensor) -> Iterator[Codec]:
    yield Codec("float32", "memcpy", torch.empty_like(out).copy_, out.copy_)
    for width, signed in ((8, False), (4, False), (4, True), (2, False)):
        for name, (quantize, dequantize) in {
            "torch": (kbit.quantize, kbit.dequantize),
            "torch.compile": compiled_reference(),
            "c": (native.quantize, native.dequantize),
        }.items():
            yield Codec(
                f"{width} bit{', signed' if signed else ''}",
                name,
                lambda flat, f=quantize, w=width, s=signed: f(flat, w, SEED, s),
                lambda coded, f=dequantize, w=width, s=signed: f(*coded, w, out, s),
            )
    size, positive = out.numel(), lambda flat: (flat > 0).float()
    yield Codec(
        "mask of positive",
        "torch",
        lambda flat: bits.pack(flat > 0, 1),
        lambda packed: bits.unpack(packed, 1, size).view(torch.bool),
        positive,
    )
    yield Codec(
        "mask of positive", "c", native.pack_positive, lambda packed: native.unpack_mask(packed, size), positive
    )
    for name, module in (("torch", bits), ("c", native)):
        yield Codec("two values", name, module.pack_two, lambda packed, m=module: m.unpack_two(*packed, size))


def measure(codec: Codec, normal: Tensor) -> dict[str, Any]:
    values = (normal > 0) / 0.9 if codec.setting == "two values" else normal
    coded = codec.encode(values)
    parts = coded if isinstance(coded, tuple) else (coded,)
    expected = codec.expected(values)
    error = float((codec.decode(coded).float() - expected).norm() / expected.norm())
    return {
        "benchmark": "codecs",
        "model": f"{values.numel()} float32, N(0, 1)",
        "setting": codec.setting,
        "implementation": codec.implementation,
        "bytes_per_element": sum(part.nbytes for part in parts) / values.numel(),
        "encode_gb_per_s": gigabytes_per_second(lambda: codec.encode(values), values.nbytes),
        "decode_gb_per_s": gigabytes_per_second(lambda: codec.decode(coded), values.nbytes),
        "quality": "relative error of the decoded values",
        "quality_value": error,
        **environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    normal = torch.randn(NUM_ELEMENTS)
    write_rows("codecs", [measure(codec, normal) for codec in codecs(torch.empty(NUM_ELEMENTS))])
