"""Build the simulated device for one installation of torch: a CUDA runtime, a driver, and kernels."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_ASKED_FOR = re.compile(r" U ((?:__)?(?:cuda|cublas|cupti|curand|cufft|cusparse|cusolver)\w*)")
_CREATORS = {"cublasCreate_v2": "malloc(64)", "cublasLtCreate": "malloc(64)"}


def build(packages: Path, folder: Path) -> dict[str, str]:
    """Build what is not there yet.

    Args:
        packages: the `site-packages` of a torch for CUDA 13, whose headers come with it and with triton.
        folder: gets the libraries.

    Returns:
        Environment variables with which a program finds the device.
    """
    torch = packages / "torch"
    headers = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
    for path in (torch / "lib/libtorch_cuda.so", headers[0] / "cuda_runtime_api.h", headers[1] / "cuda.h"):
        if not path.exists():
            sys.exit(f"The simulated device needs a torch for CUDA 13: {path} is not there.")
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            sys.exit(f"The simulated device is built with `{tool}`, which is not there.")
    sources = b"".join((HERE / name).read_bytes() for name in ("runtime.cpp", "kernels.cpp", "build.py"))
    folder = folder.resolve() / hashlib.sha256(sources).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    headers += [torch / "include", torch / "include/torch/csrc/api/include"]
    includes = [f"-I{path}" for path in headers]
    runtime, driver, kernels = folder / "libruntime.so", folder / "libcuda.so.1", folder / "libkernels.so"
    if not runtime.exists():
        rest = folder / "rest.cpp"
        rest.write_text(_rest(torch / "lib"))
        _compile(runtime, [str(HERE / "runtime.cpp"), str(rest), *includes])
    if not driver.exists():
        names = sorted(set(re.findall(r"CUDAAPI (cu\w+)\(", (headers[1] / "cuda.h").read_text())))
        source = folder / "driver.cpp"
        source.write_text("\n".join(f'extern "C" int {name}(...) {{ return 0; }}' for name in names))
        _compile(driver, [str(source), "-Wl,-soname,libcuda.so.1"])
    if not kernels.exists():
        libraries = ["-ltorch_cpu", "-lc10", "-ltorch_cuda", "-lc10_cuda", f"-Wl,-rpath,{torch / 'lib'}"]
        _compile(kernels, [str(HERE / "kernels.cpp"), *includes, f"-L{torch / 'lib'}", *libraries])
    found = {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(folder), "MEMSAVE_SIMULATED_CUDA": str(kernels)}
    return found | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _compile(library: Path, arguments: list[str]) -> None:
    part = library.with_name(f"{library.name}.part{os.getpid()}")
    subprocess.run(["g++", "-O1", "-w", "-std=c++20", "-fPIC", "-shared", "-o", str(part), *arguments], check=True)
    part.replace(library)


def _rest(libraries: Path) -> str:
    """The source of every function that torch's libraries ask for, and `runtime.cpp` lacks: each succeeds."""
    asked: set[str] = set()
    for name in ("libtorch_cpu", "libtorch_cuda", "libtorch_cuda_linalg", "libtorch_python", "libc10_cuda"):
        command = ["nm", "-D", str(libraries / f"{name}.so")]
        asked.update(_ASKED_FOR.findall(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    known = set(re.findall(r"(\w+)\(", (HERE / "runtime.cpp").read_text()))
    lines = ["#include <cstdlib>", 'extern "C" {']
    lines += [f"int {name}(void** handle) {{ *handle = {made}; return 0; }}" for name, made in _CREATORS.items()]
    lines += [f"int {name}(...) {{ return 0; }}" for name in sorted(asked - known - _CREATORS.keys())]
    return "\n".join([*lines, "}", ""])
