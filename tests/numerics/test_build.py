"""The library of C kernels: from the cache where that is safe, else of the process alone, else torch instead."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess

import pytest
import torch

from lightning_memsave.numerics import kernels
from lightning_memsave.numerics.kernels import build, native

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def use_all(signed=False):
    """Every function of `kernels` on values that are the same each time."""
    values = torch.linspace(-1, 1, 1000)
    codes, ranges = kernels.quantize(values, 4, 7, signed)
    packed = kernels.pack_mask(values > 0.5)
    return (
        *(codes, ranges, kernels.dequantize(codes, ranges, 4, torch.empty_like(values), signed)),
        *(packed, kernels.unpack_mask(packed, len(values)), kernels.pack_positive(values)),
    )


@pytest.fixture
def rebuilt(tmp_path, monkeypatch):
    """As in a new process and for a new user; compiled without optimization, which takes a fraction of the time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build._FLAGS))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def compiler_that(tmp_path, monkeypatch, does):
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(shutil, "which", lambda name: str(script))


def assert_falls_back(expected):
    assert kernels.implementation(CPU) == "torch"
    assert native.library() is None
    assert all(map(torch.equal, use_all(), expected))


def test_without_a_compiler_torch_gives_the_same(rebuilt, monkeypatch):
    expected = use_all()
    native.library.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert_falls_back(expected)


@pytest.mark.parametrize(
    "does",
    ["exit 1", 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "kill -9 $$", "true"],
    ids=["fails", "writes nonsense", "is killed", "writes nothing"],
)
def test_with_a_broken_compiler_torch_gives_the_same(does, rebuilt, monkeypatch):
    expected = use_all()
    native.library.cache_clear()
    compiler_that(rebuilt, monkeypatch, does)
    assert_falls_back(expected)


def test_with_a_compiler_that_cannot_be_run_torch_gives_the_same(rebuilt, monkeypatch):
    expected = use_all()
    native.library.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: str(rebuilt / "gone"))
    assert_falls_back(expected)


@pytest.fixture
def cached(rebuilt):
    """A library that an earlier process has put into the cache."""
    assert kernels.implementation(CPU) == "c"
    (library,) = (rebuilt / "lightning_memsave").iterdir()  # nothing half-built is left beside it
    native.library.cache_clear()
    return library


def kernels_of_another_process(caplog):
    """What is used, and what was said of it."""
    with caplog.at_level(logging.WARNING):
        used = kernels.implementation(CPU)
        native.library.cache_clear()
    return used, [record.getMessage() for record in caplog.records]


@needs_compiler
@pytest.mark.parametrize("by", ["XDG_CACHE_HOME", "HOME"])
def test_the_library_is_compiled_once_into_the_users_cache(by, rebuilt, monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(by, str(rebuilt))
    assert kernels.implementation(CPU) == "c"
    folder = rebuilt / (".cache" if by == "HOME" else "") / "lightning_memsave"
    (library,) = folder.iterdir()
    assert library.match("native-*.so")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    native.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled twice"))
    assert kernels_of_another_process(caplog) == ("c", [])


@needs_compiler
def test_the_users_mask_does_not_open_the_library(rebuilt, caplog):
    before = os.umask(0o002)
    try:
        assert kernels_of_another_process(caplog) == ("c", [])
        assert kernels_of_another_process(caplog) == ("c", [])
    finally:
        os.umask(before)


@needs_compiler
@pytest.mark.parametrize("part", ["_machine", "_FLAGS"])
def test_other_machines_and_flags_get_a_library_of_their_own(part, cached, monkeypatch):
    monkeypatch.setattr(build, part, {"_machine": lambda: "another", "_FLAGS": (*build._FLAGS, "-g")}[part])
    assert kernels.implementation(CPU) == "c"
    assert len(list(cached.parent.iterdir())) == 2


@needs_compiler
def test_another_version_of_the_compiler_gets_a_library_of_its_own(cached, rebuilt, monkeypatch):
    script, compiler = rebuilt / "cc", shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    for version in ("1", "22"):
        script.write_text(f'#!/bin/sh\n# {version}\nexec {compiler} "$@"\n')
        script.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "which", lambda name: str(script))
            assert kernels.implementation(CPU) == "c"
        native.library.cache_clear()
    assert len(list(cached.parent.iterdir())) == 3


@needs_compiler
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 20_000])
def test_a_library_that_was_cut_off_is_compiled_again(num_bytes, cached, caplog):
    whole = cached.read_bytes()
    cached.unlink()  # it is loaded: to cut the file itself would end this process
    cached.write_bytes(whole[:num_bytes])
    assert kernels_of_another_process(caplog) == ("c", [f"memsave: {cached} is damaged, and is compiled again"])
    assert list(cached.parent.iterdir()) == [cached]
    assert cached.read_bytes() == whole


@needs_compiler
@pytest.mark.parametrize("planted", ["another user's", "writable", "a link"])
def test_a_library_that_others_can_write_is_not_loaded(planted, cached, monkeypatch, caplog):
    if planted == "another user's":
        found = os.stat(cached)
        monkeypatch.setattr(build, "_is_own", lambda status: status.st_ino != found.st_ino)
    elif planted == "writable":
        cached.chmod(0o666)
    else:
        cached.symlink_to(cached.rename(cached.parent / "elsewhere"))
    used, (line,) = kernels_of_another_process(caplog)
    assert used == "c"  # of this process alone
    assert line.endswith(f"another user may write to {cached}")


@needs_compiler
def test_the_folder_of_another_user_is_not_used(cached, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: cached.stat().st_uid + 1)
    used, (line,) = kernels_of_another_process(caplog)
    assert used == "c"
    assert line.endswith(f"{cached.parent} belongs to another user")


@needs_compiler
def test_a_folder_that_others_could_write_is_closed(cached, caplog):
    cached.parent.chmod(0o777)
    assert kernels_of_another_process(caplog) == ("c", [])
    assert stat.S_IMODE(cached.parent.stat().st_mode) == 0o700


@needs_compiler
@pytest.mark.parametrize("why", ["a file is in its place", "no home", "relative"])
def test_without_a_cache_the_library_is_the_process_own(why, rebuilt, monkeypatch, caplog):
    monkeypatch.chdir(rebuilt)
    (rebuilt / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(rebuilt / "file") if why == "a file is in its place" else "relative")
    if why == "no home":  # nor an entry in the table of users
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    if why == "relative":
        monkeypatch.setenv("HOME", "here")
    used, (line,) = kernels_of_another_process(caplog)
    assert used == "c"
    assert "compiles its kernels for itself" in line
    assert [path.name for path in rebuilt.iterdir()] == ["file"]  # no folder `~`
