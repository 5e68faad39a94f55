from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.loops.out_of_memory import fragmentation, is_out_of_memory, nothing_left
from lightning_memsave.measuring.ledger import Measurement
from tests.measuring.test_allocator import FakeDevice

DEVICE = torch.device("cuda")


def held(monkeypatch, allocated, reserved):
    fake = FakeDevice()
    fake.now, fake.reserved = allocated, reserved
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)


def test_memory_in_pieces_is_told_with_the_setting_that_joins_them(monkeypatch):
    held(monkeypatch, 6 * 2**30, 8 * 2**30)
    text = fragmentation(DEVICE)
    assert "Allocated are 6.0 GiB of 8.0 GiB reserved" in text
    assert "2.0 GiB lie between tensors" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text


def test_memory_in_use_is_told_without(monkeypatch):
    held(monkeypatch, 79 * 2**27, 80 * 2**27)
    assert fragmentation(DEVICE) == " Allocated are 9.9 GiB of 10.0 GiB reserved."
    assert fragmentation(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ...",
        "std::bad_alloc",
        "could not create a primitive",
        "could not execute a primitive",
        "can't start new thread",
        "unable to mmap 4096 bytes from file </dev/shm/x>: Cannot allocate memory (12)",
    ],
)
def test_what_is_raised_under_a_limit_of_addresses_is_memory_that_ran_out(text):
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


def test_an_error_of_the_users_without_a_text_is_another_error():
    assert not is_out_of_memory(RuntimeError(5))
    assert not is_out_of_memory(RuntimeError())
    assert not is_out_of_memory(RuntimeError({"CUDA": "out"}))


ADVICE = {
    "optimizer_state": 'optimizer_state="8bit"',
    "activations": 'activations="exact"',
    "weights": 'precision="bf16-sr"',
    "gradients": 'gradients="release"',
}


@pytest.mark.parametrize(("largest", "remedy"), ADVICE.items(), ids=ADVICE)
def test_what_takes_most_is_named_first_with_its_remedy(largest, remedy):
    by_category = {**dict.fromkeys(CATEGORIES, 1000), largest: 5000, "data": 0}
    text = nothing_left(nn.Linear(2, 2), Measurement(peak_bytes=9000, by_category=by_category), True, (), "no more")
    assert "at one sample per microbatch" in text
    assert f"held: {largest} 4.9 KiB" in text
    first, _, _ = text.partition("in this order: ")[2].partition("), ")
    assert remedy in first
    assert "DataLoader" not in text
    assert not any(text.count(each) > 1 for each in ADVICE.values())
    assert "no more" in text


def test_what_is_on_already_is_not_recommended():
    measured = Measurement(peak_bytes=9000, by_category={"weights": 9000})
    on = {"low_precision", "sparsity"}
    assert "`low_rank=0.2`" in nothing_left(nn.Linear(2, 2), measured, False, on, "no more")
    assert "Nothing else would help. " in nothing_left(nn.Linear(2, 2), measured, False, on, "no more", on)
    text = nothing_left(nn.Linear(2, 2), measured, False, {*on, "low_rank"}, "no more")
    assert "bf16-sr" not in text
    assert 'in this order: `strategy="memsave_fsdp"` (a shard on each device,' in text
    assert "cannot be cut" in text


def test_an_error_that_was_raised_from_one_of_memory_is_one_too():
    error = ValueError("shapes do not fit")
    assert not is_out_of_memory(error)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(error)
