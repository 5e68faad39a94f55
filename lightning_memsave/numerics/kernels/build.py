"""The library of the C kernels: compiled with the machine's compiler, kept for later processes, checked when loaded.

A library is code that runs as the user. It is loaded only from a folder that belongs to the user and to which nobody
else can write; without one, every process compiles its own. The hash of the file is part of its name, so that a file
that was cut off, by a full disk for example, is compiled again: to load it would end the process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
_log = logging.getLogger(__name__)


class UnsafeFolderError(OSError):
    """A folder, or a library in it, is not this user's alone."""


def load(source: Path) -> ctypes.CDLL | None:
    """Return the library of a C file, from the cache where it is there.

    `None` where it cannot be compiled or loaded.
    """
    compiler = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    if compiler is None:
        return None
    try:
        try:
            return _load_cached(source, compiler)
        except OSError as error:
            _log.warning(
                "memsave: this process compiles its kernels for itself, as the cache cannot be used: %s", error
            )
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return ctypes.CDLL(str(_compile(source, compiler, Path(folder))))  # stays loaded when the file is gone
    except (OSError, subprocess.CalledProcessError) as error:
        _log.warning("memsave: the C kernels cannot be compiled, plain torch does their work: %s", error)
    return None


def _load_cached(source: Path, compiler: str) -> ctypes.CDLL:
    folder, key = _cache_folder(), _key(source, compiler)
    for library in folder.glob(f"native-{key}-*.so"):
        if _is_whole(library):
            return ctypes.CDLL(str(library))
        _log.warning("memsave: %s is damaged, and is compiled again", library)
        library.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:  # renamed when complete: others may compile as well
        compiled = _compile(source, compiler, Path(part))
        loaded = ctypes.CDLL(str(compiled))
        compiled.chmod(0o700)  # the compiler makes it as the user's mask says
        compiled.replace(folder / f"native-{key}-{_hash(compiled.read_bytes())}.so")
    return loaded


def _compile(source: Path, compiler: str, folder: Path) -> Path:
    library = folder / "native.so"
    subprocess.run([compiler, *_FLAGS, str(source), "-o", str(library), "-lm"], check=True, capture_output=True)
    return library


def _cache_folder() -> Path:
    """Return the cache folder of this user alone.

    Raises:
        OSError: it cannot be made.
        UnsafeFolderError: it belongs to another user.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    if not base.is_absolute():
        raise FileNotFoundError("neither XDG_CACHE_HOME nor HOME is an absolute path")
    folder = base / "lightning_memsave"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder.stat()):
        raise UnsafeFolderError(f"{folder} belongs to another user")
    folder.chmod(0o700)  # from here on; what others have put there before belongs to them, and is not loaded
    return folder


def _is_own(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


def _is_whole(library: Path) -> bool:
    """Return whether a library is what was compiled.

    Raises:
        UnsafeFolderError: another user may write to it.
    """
    found = library.lstat()
    has_modes = hasattr(os, "geteuid")
    is_open = has_modes and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISREG(found.st_mode) or not _is_own(found) or is_open:
        raise UnsafeFolderError(f"another user may write to {library}")
    return library.stem.rpartition("-")[2] == _hash(library.read_bytes())


def _key(source: Path, compiler: str) -> str:
    """Return what the machine code depends on."""
    binary = Path(compiler).resolve()
    found = binary.stat()  # another version is another file, and `--version` would start a process
    parts = (source.read_text(), *_FLAGS, binary, found.st_size, found.st_mtime_ns, _machine())
    return _hash("\n".join(map(str, parts)).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _machine() -> str:
    """Return what `-march=native` and the C library make of it: a home folder may be shared by different machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    libc: str | None = None
    with contextlib.suppress(AttributeError, OSError, ValueError):  # of other systems, and other C libraries
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    return f"{platform.machine()} {platform.processor()} {flags[:1]} {libc}"
