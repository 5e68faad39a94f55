"""Regions under codecs and with offloaded inputs."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    apply_activation_compression,
    apply_checkpointing,
)
from lightning_memsave.saved_tensors.offload import File
from tests.saved_tensors.region_nets import BETWEEN, GROUPS, Block, Loop, assert_same_steps, kept_bytes, with_regions


class Wide(Loop):
    def __init__(self) -> None:
        super().__init__(lambda: Block(0.1, 64), n=4)
        self.head = nn.Linear(64, 3)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("codecs", [("exact",), ("exact", "offload")])
def test_exact_store_has_the_same_bits(groups, codecs):
    plain, x = Wide(), torch.randn(128, 64, requires_grad=True)
    ours = with_regions(plain, GROUPS[groups])
    apply_activation_compression(ours, ActivationCompression(codecs=codecs, min_numel=16))
    assert_same_steps(plain, ours, x)


class Gelus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("groups", ["one", "two", "three deep"])
def test_a_lossy_store_is_unbiased_and_lowers_the_peak_of_the_repetition(groups):
    plain, x = Gelus(), torch.randn(256, 64)
    region, lossy = with_regions(plain, GROUPS[groups]), with_regions(plain, GROUPS[groups])
    apply_activation_compression(lossy, ActivationCompression(codecs=("int4",), min_numel=16))
    expected = gradients(plain, x)
    found = torch.stack([gradients(lossy, x) for _ in range(30)])
    assert (found[0] != found[1]).any()
    one, mean = (found[0] - expected).norm(), (found.mean(0) - expected).norm()
    assert 0 < mean < 2.0 * one / 30**0.5
    if groups != "three deep":  # there one block at a time is whole, and it is the largest
        assert kept_bytes(lossy, x)[1] < 0.8 * kept_bytes(region, x)[1]


@pytest.mark.parametrize("groups", ["one", "two", "three deep"])
def test_codecs_of_modules_hold_inside_repeated_regions(groups):
    plain, x = Gelus(), torch.randn(256, 64)
    expected = gradients(plain, x)
    for pattern, noisy in (
        ("*", ()),
        ("blocks.*", ()),
        ("nothing", range(4)),
        ("blocks.[01]*", (2, 3)),
        ("blocks.[23]", (0, 1)),
    ):
        ours = with_regions(plain, GROUPS[groups])
        modules = {} if pattern == "nothing" else {pattern: "exact"}
        apply_activation_compression(ours, ActivationCompression(codecs=("int4",), modules=modules, min_numel=16))
        found = gradients(ours, x)
        ours_by_block = found.view(4, -1)
        is_noisy = [bool((a != b).any()) for a, b in zip(ours_by_block, expected.view(4, -1), strict=True)]
        # noise of later blocks flows into earlier ones
        assert is_noisy == [bool(noisy) and i <= max(noisy) for i in range(4)], pattern


@pytest.mark.parametrize("groups", GROUPS)
def test_offloaded_inputs_have_the_same_bits_and_take_no_memory(groups, monkeypatch):
    plain, x = Loop(lambda: Block(0.1, 64), between=BETWEEN["nothing"]), torch.randn(512, 64, requires_grad=True)
    plain.head = nn.Linear(64, 3)
    ours, stays = with_regions(plain, GROUPS[groups], offload=True), with_regions(plain, GROUPS[groups])
    assert_same_steps(copy.deepcopy(plain), ours, x)
    written, write = [], File.write
    monkeypatch.setattr(File, "write", lambda self, tensor: written.append(tensor.nbytes) or write(self, tensor))
    kept, without = kept_bytes(ours, x)[0], kept_bytes(stays, x)[0]
    expected = sum(group[0] != "blocks.0" for group in GROUPS[groups][:2]) if groups in ("two", "a pair inside") else 0
    assert without - kept == expected * x.nbytes
    assert written == [x.nbytes] * (2 * expected), "in each of two steps; inner regions write nothing"


def test_the_file_of_offloaded_inputs_is_closed_with_the_model(monkeypatch):
    files, init = [], File.__init__

    def noting(self, folder):
        init(self, folder)
        files.append((weakref.ref(self), self._file))

    monkeypatch.setattr(File, "__init__", noting)
    model = nn.Sequential(*(Block(0.1, 64) for _ in range(5)))
    applied = apply_checkpointing(model, Checkpointing(regions=[["1", "2"], ["3", "4"]], offload=True))
    x = torch.randn(512, 64)
    gc.disable()
    try:
        for _ in range(2):
            model(x).sum().backward()
        assert len(files) == 1
        assert len(next(iter(files[0][0]()._free.values()))) == 2, "both places were given back"
        applied.undo()
        del applied
    finally:
        gc.enable()
    gc.collect()
    assert files[0][1].closed
