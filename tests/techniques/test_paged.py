"""Pages of optimizer state stay pages, whoever moves them."""

import bitsandbytes
import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import (
    pages_kept,
)
from lightning_memsave.techniques.optimizer_state.bitsandbytes_backend import become_8bit
from lightning_memsave.techniques.optimizer_state.conversion import load_plain_state
from lightning_memsave.techniques.optimizer_state.optimizer_mapping import find_mapping, memory_of
from lightning_memsave.techniques.optimizer_state.paged import note_pages


def paged_optimizer(monkeypatch):
    """An optimizer whose state is marked as pages are, and its parameter: pages themselves need CUDA."""

    def paged(self, p, dtype=torch.float32):
        made = torch.zeros(p.shape, dtype=dtype)
        made.is_paged = True
        return made

    monkeypatch.setattr(bitsandbytes.optim.PagedAdamW32bit, "get_state_buffer", paged)
    p = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([p])
    become_8bit(optimizer, find_mapping(optimizer), set(), is_paged=True)
    load_plain_state(
        optimizer, {p: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(64), "exp_avg_sq": torch.ones(64)}}
    )
    return optimizer, p


def test_paged_state_is_paged_after_it_was_moved_to_its_device(monkeypatch):
    """Lightning does so after each checkpoint that it loads, and at the start of a fit."""
    optimizer, p = paged_optimizer(monkeypatch)
    plain = {p: {"step": torch.tensor(3.0), "exp_avg": torch.full((64,), 2.0), "exp_avg_sq": torch.ones(64)}}
    with pages_kept([optimizer]):
        load_plain_state(optimizer, plain)  # of a checkpoint
        pages = [optimizer.state[p][name] for name in ("state1", "state2")]
        optimizer.state[p]["state1"] = pages[0].clone().fill_(5)
    assert optimizer.state[p]["state1"] is pages[0]
    assert optimizer.state[p]["state2"] is pages[1]
    assert torch.equal(pages[0], torch.full((64,), 5.0))


def test_what_was_paged_is_put_back_even_when_moving_fails(monkeypatch):
    optimizer, p = paged_optimizer(monkeypatch)

    def move_and_fail():
        optimizer.state[p]["state1"] = torch.full((64,), 7.0)
        raise KeyError

    page = optimizer.state[p]["state1"]
    with pytest.raises(KeyError), pages_kept([optimizer]):
        move_and_fail()
    assert optimizer.state[p]["state1"] is page
    assert page.tolist() == [7.0] * 64


def test_only_pages_are_noted(monkeypatch):
    optimizer, p = paged_optimizer(monkeypatch)
    note_pages(optimizer)
    assert {name: id(page) for name, page in memory_of(optimizer).pages[p].items()} == {
        name: id(optimizer.state[p][name]) for name in ("state1", "state2")
    }
    model = nn.Linear(64, 64)
    plain = torch.optim.AdamW(model.parameters())
    become_8bit(plain, find_mapping(plain), set())
    model(torch.ones(1, 64)).sum().backward()
    plain.step()
    note_pages(plain)
    assert all(pages == {} for pages in memory_of(plain).pages.values())


def test_plain_optimizers_are_moved_as_ever():
    p = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones(64)
    optimizer.step()
    moved = torch.zeros(64)
    with pages_kept([optimizer]):
        optimizer.state[p]["exp_avg"] = moved
    assert optimizer.state[p]["exp_avg"] is moved
