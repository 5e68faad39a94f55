"""The Triton kernels as machine code of GPUs that are not there: `make test-cubin`.

Triton compiles for any target with its own `ptxas`. What is held here is what decides the speed of a kernel that reads
and writes each element once: registers without spills, global accesses of 128 bits, and instructions per element.

An H100 issues 132 SMs x 4 schedulers x 32 lanes x 1.7 GHz = 29e12 lane instructions a second, and reads and writes
3.35e12 bytes. Coding float32 to 8 bits moves 5 bytes per element: memory alone takes as long as 43 instructions per
element; from bfloat16, 3 bytes and 26. Decoding moves as many bytes. On an H100 it takes fewer instructions than memory
allows, or about as many. Coding takes 1.4 times as many from float32 and 2.3 times as many from bfloat16; a fifth of
them make the noise.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_memsave.numerics.kbit import BITS, Blocks

triton = pytest.importorskip("triton", reason="needs triton: make test-cubin")
COUNTED = "3.9.0"
"""The version of Triton whose code is counted. Coding 8 bits takes up to 166 registers by 3.6.0, 110 by this."""
if triton.__version__ != COUNTED:
    pytest.skip(f"counts are of triton {COUNTED}: make test-cubin", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lightning_memsave.numerics.kernels import triton_coded_step, triton_elementwise, triton_kbit  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {"A100": 80, "H100": 90, "B200": 100}
MOST_INSTRUCTIONS = {
    ("quantize", False): 66,
    ("quantize", True): 85,
    ("dequantize", False): 32,
    ("dequantize", True): 34,
}
"""Per element, by kernel and whether codes are signed: what is reached on every target, with a little room."""
POINTERS = {"torch.float32": "*fp32", "torch.bfloat16": "*bf16"}
pytestmark = pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="needs triton's nvdisasm")


def arguments(kernel: str, bits: int, signed: bool, dtype: torch.dtype) -> tuple[dict[str, str], dict[str, object]]:
    """Return the types of what a launch of whole blocks gives, and what is known when it is compiled."""
    blocks = Blocks.of_rows(2**22)
    size, num_bytes, padded_bytes = triton_kbit._sizes(blocks, bits)
    known: dict[str, object] = {"size": size, "num_bytes": num_bytes, "padded_bytes": padded_bytes}
    known |= {"bits": bits, "signed": signed, "per_program": triton_kbit._PER_PROGRAM}
    sizes = {"num_blocks": "i32", "row": "i32", "per_row": "i32"}
    if kernel == "dequantize":
        types = {"codes": "*u8", "ranges": "*i32", "out": POINTERS[str(dtype)], **sizes}
        return types, known | {"limit": torch.finfo(dtype).max}
    is_bfloat16 = dtype == torch.bfloat16
    values = "*i16" if is_bfloat16 else POINTERS[str(dtype)]
    types = {"x": values, "codes": "*u8", "ranges": "*i32", **sizes, "seed": "i32"}
    return types, known | {"stochastic": True, "is_bfloat16": is_bfloat16, "are_full": True}


def machine_code(kernel: str, bits: int, signed: bool, dtype: torch.dtype, target: int, folder: Path):
    """Return the operations, by name, and the resources of a compiled kernel."""
    types, known = arguments(kernel, bits, signed, dtype)
    return compiled(getattr(triton_kbit, f"_{kernel}"), types, known, triton_kbit._OPTIONS, target, folder)


def compiled(function, types, known, options, target: int, folder: Path):
    names = function.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    is_aligned = {
        n for n, kind in types.items() if kind.startswith("*") or n in ("num_blocks", "row", "per_row", "size")
    }
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in is_aligned}
    source = ASTSource(function, signature, {(names.index(n),): value for n, value in known.items()}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=dict(options))
    (file := folder / "kernel.cubin").write_bytes(built.asm["cubin"])
    text, resources = (
        subprocess.run([TOOLS / tool, option, file], check=True, capture_output=True, text=True).stdout
        for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
    )
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE)
    return collections.Counter(found), dict(re.findall(r"([A-Z]+):(\d+)", resources))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("signed", [False, True], ids=["zeros", "signs"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kernel", ["quantize", "dequantize"])
def test_kernels_spill_nothing_and_keep_to_their_instructions(kernel, bits, signed, dtype, target, tmp_path):
    operations, resources = machine_code(kernel, bits, signed, dtype, TARGETS[target], tmp_path)
    assert resources["STACK"] == resources["LOCAL"] == "0"
    assert int(resources["REG"]) <= 136, "fewer than 15 of an SM's 64 warps can be there"
    lanes = Blocks.of_rows(2**22).size * triton_kbit._PER_PROGRAM / 32
    per_element = (operations.total() - operations["NOP"]) / lanes
    print(f"{kernel} {bits} bits, {dtype}, {target}: {per_element:.1f} per element, {resources['REG']} registers")
    assert 15 < per_element <= MOST_INSTRUCTIONS[kernel, signed]
    values = "LDG" if kernel == "quantize" else "STG"
    widths = {name for name in operations if name.startswith(values)}
    assert widths == {f"{values}.E.128"}, "values go through 128 bits at a time"
    assert operations[f"{values}.E.128"] == lanes * dtype.itemsize / 16


VALUES, CODED = {"x": "*fp32", "size": "i32"}, {"codes": "*u8", "code_map": "*fp32", "absmax": "*fp32", "size": "i32"}
ROUNDED, NOISE = {**VALUES, "out": "*i16", "seed": "i32"}, dict.fromkeys(("seed", "shift"), "i32")
ENCODED, DECODED = {**VALUES, **CODED, **NOISE, "num_blocks": "i32", "num_entries": "i32"}, {**CODED, "out": "*fp32"}
PACKED = {"patterns": "*i32", "packed": "*u8", "size": "i32"}, {"infinity": 0x7F800000, "all_but_sign": 2**31 - 1}
LOOKED_UP = {"values": "*fp32", "table": "*fp32", "size": "i32", "num_entries": "i32", "scale": "fp32", "shift": "fp32"}
MOMENT = {"": "*u8", "_absmax": "*fp32", "_map": "*fp32"}
MOMENTS = {f"{name}{part}": kind for name in ("first", "second") for part, kind in MOMENT.items()}
NUMBERS = ("shrink", "decay", "keep", "take", "keep_second", "take_second", "root_correction", "eps", "step")
BLOCKS, BYTES = {"blocks": 4}, {"num_bytes": 512}
ELEMENTWISE = {
    "round to bfloat16": ("_round", ROUNDED, {"to_bfloat16": True, **BLOCKS}, 1024),
    "round to float16": ("_round", ROUNDED, {"to_bfloat16": False, **BLOCKS}, 1024),
    **{f"map of {n} bits": ("_quantize_to_map", ENCODED, {"bits": n, **BLOCKS}, 1024) for n in (4, 5, 8)},
    **{f"from a map of {n} bits": ("_dequantize_from_map", DECODED, {"bits": n, **BLOCKS}, 1024) for n in (4, 5, 8)},
    "mask of positives": ("_pack", PACKED[0], {**PACKED[1], **BYTES}, 4096),
    "mask": ("_unpack", {"packed": "*u8", "mask": "*u8", "size": "i32"}, BYTES, 4096),
    "table": ("_look_up", LOOKED_UP, {"per_program": 1024}, 1024),
}
"""Function, types, what is known, and elements of a program."""
MOST_ELSEWHERE = {"map": 135, "from": 45}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_kernels_spill_nothing(name, target, tmp_path):
    function, types, known, num_elements = ELEMENTWISE[name]
    options = triton_elementwise.OPTIONS
    operations, resources = compiled(
        getattr(triton_elementwise, function), types, known, options, TARGETS[target], tmp_path
    )
    assert resources["STACK"] == resources["LOCAL"] == "0"
    assert int(resources["REG"]) <= 96
    per_element = (operations.total() - operations["NOP"]) * 32 * options["num_warps"] / num_elements
    print(f"{name}, {target}: {per_element:.1f} per element, {resources['REG']} registers")
    assert per_element <= MOST_ELSEWHERE.get(name.split()[0], 40)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("is_adam", [True, False])
def test_a_step_on_codes_spills_nothing(is_adam, kind, target, tmp_path):
    weights = "*i16" if kind else "*fp32"
    types = {"weights": weights, "correction": "*i8" if kind == 2 else weights, "gradient": "*fp32", **MOMENTS}
    types |= dict.fromkeys(("size", "num_blocks", "first_entries", "second_entries"), "i32")
    types |= dict.fromkeys(("first_seed", "second_seed", "seed", "shift"), "i32") | dict.fromkeys(NUMBERS, "fp32")
    known = {"first_bits": 8, "second_bits": 8, "kind": kind, "is_adam": is_adam, "has_decay": True}
    known |= {"has_nesterov": False, "blocks": 4}
    _, resources = compiled(
        *(triton_coded_step._step, types, known, triton_elementwise.OPTIONS, TARGETS[target], tmp_path)
    )
    assert resources["STACK"] == resources["LOCAL"] == "0"
    assert int(resources["REG"]) <= 160
