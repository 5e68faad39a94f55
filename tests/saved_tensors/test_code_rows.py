"""Where codes end: rows of tensors in any layout, against the elements that they should hold."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_memsave.numerics.kbit import coded_bytes
from lightning_memsave.saved_tensors.code_rows import Rows, rows_in_memory, rows_over
from lightning_memsave.saved_tensors.encodings import Fidelity, IntCodes


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ((8, 100, 768), 768),
        ((8, 100, 192), 192),
        ((8, 100, 64), 64),
        ((8, 100, 63), 6300),  # tokens of 63 share blocks
        ((8, 128, 32), 32 * 128),
        ((4, 16, 32, 32), 1024),  # a plane
        ((4, 16, 8, 8), 64),
        ((4, 16, 7, 7), 16 * 49),  # a sample
        ((4, 16, 2, 2), 64),
        ((5,), 5),
        ((4, 3), 12),
    ],
)
def test_rows_in_memory_are_the_smallest_runs_of_64(shape, length):
    tensor = torch.empty(shape)
    assert rows_in_memory(shape, tensor.stride(), tensor.numel()) == Rows(length)


def test_rows_in_memory_follow_the_order_in_memory():
    images = torch.empty(4, 96, 5, 5).to(memory_format=torch.channels_last)
    assert rows_in_memory(images.shape, images.stride(), images.numel()).length == 96
    window = torch.empty(4, 10, 192)[:, 2:4]
    assert rows_in_memory(window.shape, window.stride(), 4 * 10 * 192).length == 192
    expanded = torch.empty(1, 1, 192).expand(4, 10, 192)
    assert rows_in_memory(expanded.shape, expanded.stride(), 192).length == 192


def dims(tensor, chosen):
    return [(tensor.shape[d], tensor.stride(d)) for d in chosen]


LAYOUTS = {
    "contiguous, last": (lambda x: x.view(6, 5, 48), [2]),
    "contiguous, first and last": (lambda x: x.view(6, 5, 48), [0, 2]),
    "channels first, channels": (lambda x: x.view(6, 48, 5).transpose(1, 2), [2]),
    "images, planes": (lambda x: x.view(6, 5, 6, 8), [2, 3]),
    "images, a channel": (lambda x: x.view(6, 5, 6, 8), [0, 2, 3]),
    "small planes, a channel": (lambda x: x.view(6, 60, 2, 2), [0, 2, 3]),
    "channels last, a channel": (lambda x: x.view(6, 5, 6, 8).permute(0, 3, 1, 2), [0, 2, 3]),
    "features, a batch": (lambda x: x.view(30, 48), [0]),
    "all": (lambda x: x.view(30, 48).T, [0, 1]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_row_holds_elements_of_one_place(name):
    """And so the range of a block says nothing of other places."""
    make, inner = LAYOUTS[name]
    flat = torch.arange(1440.0)
    tensor = make(flat)
    outer = [d for d in range(tensor.dim()) if d not in inner]
    rows = rows_over(tensor, dims(tensor, outer), dims(tensor, inner))
    assert rows is not None
    place_of = torch.empty(1440)
    places = torch.arange(math.prod(tensor.shape[d] for d in outer), dtype=torch.float32)
    shape = [tensor.shape[d] if d in outer else 1 for d in range(tensor.dim())]
    make(place_of).copy_(places.view(shape).expand(tensor.shape))
    parts = [part.reshape(-1) for part in rows.parts(place_of)]
    assert sum(part.numel() for part in parts) == 1440
    for part in parts:
        in_rows = part.view(-1, rows.length)
        assert bool((in_rows == in_rows[:, :1]).all())


def test_a_window_has_rows_where_they_end_in_memory():
    qkv = torch.empty(2, 7, 3, 4, 16)
    query = qkv[:, :, 0]
    assert rows_over(query, dims(query, [0, 1, 2]), dims(query, [3])) == Rows(16)
    tokens = torch.empty(2, 7, 48)[:, 1:]
    assert rows_over(tokens, dims(tokens, [0, 1]), dims(tokens, [2])) == Rows(48)
    features = torch.empty(2, 7, 48)[..., 3:35]
    assert rows_over(features, dims(features, [0, 1]), dims(features, [2])) is None
    overlapping = torch.empty(100).unfold(0, 32, 1)
    assert rows_over(overlapping, dims(overlapping, [0]), dims(overlapping, [1])) is None


@pytest.mark.parametrize("fidelity", [Fidelity.INT8, Fidelity.INT4, Fidelity.INT2])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chunk", [100, 2**20])
def test_codes_in_rows_decode_to_their_places(name, fidelity, chunk, monkeypatch):
    """Rows of very different sizes: each is off by a step of its own."""
    monkeypatch.setattr("lightning_memsave.saved_tensors.code_rows._CHUNK", chunk)
    make, inner = LAYOUTS[name]
    flat = torch.randn(1440)
    tensor = make(flat)
    outer = [d for d in range(tensor.dim()) if d not in inner]
    sizes = 10.0 ** torch.randint(-6, 7, [tensor.shape[d] if d in outer else 1 for d in range(tensor.dim())])
    tensor.mul_(sizes)
    rows = rows_over(tensor, dims(tensor, outer), dims(tensor, inner))
    coded = IntCodes.of(flat, fidelity, 3, False, rows)
    found = make(coded.flat())
    spread = tensor.amax(inner, keepdim=True) - tensor.amin(inner, keepdim=True)
    step = 1.03 * spread / (2 ** {Fidelity.INT8: 8, Fidelity.INT4: 4, Fidelity.INT2: 2}[fidelity] - 1)
    assert bool(((found - tensor).abs() <= step).all())
    bits = {Fidelity.INT8: 8, Fidelity.INT4: 4, Fidelity.INT2: 2}[fidelity]
    assert sum(t.nbytes for t in coded.payload()) == coded_bytes(1440, bits, row=rows.length)


def test_parts_of_one_code_draw_other_noise(monkeypatch):
    monkeypatch.setattr("lightning_memsave.saved_tensors.code_rows._CHUNK", 256)
    values = torch.rand(1).expand(1024).clone() + torch.linspace(0, 1, 256).repeat(4)
    by_rows = IntCodes.of(values, Fidelity.INT4, 3, False, Rows(256, ((4, 256), (256, 1))))
    errors = (by_rows.flat() - values).view(4, 256)
    assert len({tuple(row.tolist()) for row in errors}) == 4
