"""Kernels on a GPU: gigabytes per second beside a copy in memory, and the update of AdamW beside other libraries'.

Bytes are those read and written. Times are medians of device events (`triton.testing.do_bench`); updates of many small
parameters are wall time, since the thread that launches them decides.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.measurement import environment, put_row
from lightning_memsave import OptimizerState, apply_optimizer_state
from lightning_memsave.numerics import kernels

NUM_ELEMENTS = 1 << 27
SEED = 7
ALL: dict[str, Any] = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}


def seconds_of(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(work, warmup=20, rep=80, return_mode="median") / 1e3


def num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value)) if isinstance(value, (tuple, list)) else 0


def kernel_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object], int]]:
    """(name, work, bytes read and written)."""
    values = torch.randn(NUM_ELEMENTS, device="cuda").to(dtype)
    out = torch.empty_like(values)
    whole = num_bytes(values)
    yield "copy", lambda: out.copy_(values), 2 * whole
    for bits in (8, 4, 2):
        codes = kernels.quantize(values, bits, SEED)
        assert codes is not None
        coded = num_bytes(codes)
        yield f"int{bits} encode", lambda bits=bits: kernels.quantize(values, bits, SEED), whole + coded  # type: ignore[misc]
        yield (
            f"int{bits} decode",
            lambda bits=bits, codes=codes: kernels.dequantize(*codes, bits, out),  # type: ignore[misc]
            whole + coded,
        )
    mask = kernels.pack_positive(values)
    yield "mask of positives", lambda: kernels.pack_positive(values), whole + num_bytes(mask)
    bools = kernels.unpack_mask(mask, NUM_ELEMENTS)
    yield "mask unpacked", lambda: kernels.unpack_mask(mask, NUM_ELEMENTS), num_bytes(bools) + num_bytes(mask)
    yield "mask packed", lambda: kernels.pack_mask(bools), num_bytes(bools) + num_bytes(mask)
    if dtype == torch.float32:
        for bits in (8, 4):
            code_map = torch.linspace(-1, 1, 2**bits, device="cuda")
            coded = kernels.quantize_to_map(values, code_map, bits, SEED)
            moved = whole + num_bytes(coded)
            yield (
                f"{bits}-bit map encode",
                lambda bits=bits, code_map=code_map: kernels.quantize_to_map(values, code_map, bits, SEED),  # type: ignore[misc]
                moved,
            )
            yield (
                f"{bits}-bit map decode",
                lambda bits=bits, code_map=code_map, coded=coded: kernels.dequantize_from_map(  # type: ignore[misc]
                    coded[0], code_map, coded[1], bits, NUM_ELEMENTS
                ),
                moved,
            )
        yield "stochastic rounding to bfloat16", lambda: kernels.round_to_bfloat16(values, SEED), whole + whole // 2


def kernel_rows() -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        copied = 0.0
        for name, work, moved in kernel_cases(dtype):
            try:
                seconds = seconds_of(work)
            except torch.OutOfMemoryError as error:
                print(name, dtype, error)
                continue
            speed = moved / seconds / 1e9
            copied = copied or speed
            yield {
                "case": name,
                "model": f"{NUM_ELEMENTS} elements of {str(dtype).removeprefix('torch.')}",
                "wall_seconds": seconds,
                "gigabytes_per_second": speed,
                "part_of_copy": speed / copied,
            }
            torch.cuda.empty_cache()


def optimizers(parameters: list[Tensor]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    yield "torch AdamW, fused", torch.optim.AdamW(parameters, fused=True)
    yield "torch AdamW, foreach", torch.optim.AdamW(parameters, foreach=True)
    ours: dict[str, dict[str, Any]] = {
        "8bit": {"backend": "own"},
        "8bit of bitsandbytes": {"backend": "bitsandbytes"},
        "4bit": {"first_moment": "4bit"},
        "5bit-factored": {"first_moment": "5bit", "second_moment": "factored"},
    }
    for name, options in ours.items():
        optimizer = torch.optim.AdamW(parameters)
        model = torch.nn.ParameterList(parameters)
        apply_optimizer_state(optimizer, OptimizerState(**options, **ALL), model)
        yield f"OptimizerState {name}", optimizer
    import bitsandbytes
    from torchao.optim import AdamW8bit

    yield "bitsandbytes AdamW8bit", bitsandbytes.optim.AdamW8bit(parameters)
    yield "torchao AdamW8bit", AdamW8bit(parameters)


SIZES = {"24 parameters of 2048 x 2048": (24, (2048, 2048)), "400 parameters of 64 x 64": (400, (64, 64))}


def optimizer_rows() -> Iterator[dict[str, Any]]:
    for model, (count, shape) in SIZES.items():
        baseline = 0.0
        parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for _ in range(count)]
        for name, optimizer in optimizers(parameters):
            for p in parameters:
                p.grad = torch.randn_like(p)
            seconds, before = [], 0
            for turn in range(12):
                if turn == 3:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                torch.cuda.synchronize()
                start = time.perf_counter()
                optimizer.step()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            taken = sorted(seconds[3:])[4]
            baseline = baseline or taken
            yield {
                "case": name,
                "model": model,
                "wall_seconds": taken,
                "microseconds_per_parameter": taken / count * 1e6,
                "wall_time_ratio": taken / baseline,
                "temporary_bytes": torch.cuda.max_memory_allocated() - before,
            }
            del optimizer
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizers", action="store_true", help="these alone")
    is_short = parser.parse_args().optimizers
    warnings.simplefilter("ignore")
    has_failed = False
    for rows in (optimizer_rows,) if is_short else (kernel_rows, optimizer_rows):
        try:
            for row in rows():
                put_row("cuda_kernels", {"benchmark": "cuda_kernels", **row, **environment()}, ("model", "case"))
                print(*(f"{v:.4g}" if isinstance(v, float) else v for v in row.values()), sep=" | ", flush=True)
        except Exception as error:  # the other rows are worth having
            print(f"{rows.__name__}: {type(error).__name__}: {error}", flush=True)
            has_failed = True
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
