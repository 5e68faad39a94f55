"""BatchNorm in tiles: each has its own statistics; running statistics are updated once, by those of the whole call."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_memsave import Checkpointing, Tiling, apply_checkpointing, apply_tiling
from lightning_memsave.saved_tensors.tiles import lengths_of
from lightning_memsave.techniques import tiling
from lightning_memsave.techniques.batchnorm import pooled_batchnorm
from lightning_memsave.techniques.tiling import independence


def net(**options):
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.BatchNorm2d(3, **options), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )
    return nn.Sequential(encoder, nn.BatchNorm1d(5)).double()


def images(num_samples=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 2 + torch.randn(num_samples, 3, 6, 6, generator=generator, dtype=torch.float64)


def ghost(size, **settings):
    return Tiling(modules="0", dim=0, size=size, batchnorm="ghost", **settings)


def gradients(model):
    return [p.grad for p in model.parameters()]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@settings(max_examples=30, deadline=None)
@given(
    num_samples=st.integers(4, 13),
    size=st.integers(2, 6),
    momentum=st.sampled_from([0.1, 0.7, None]),
    with_regions=st.booleans(),
)
def test_tiles_are_normalised_by_themselves_and_running_statistics_are_those_of_the_call(
    num_samples, size, momentum, with_regions
):
    model, x = net(momentum=momentum), images(num_samples)
    by_hand, whole = copy.deepcopy(model), copy.deepcopy(model)
    applied = apply_tiling(model, ghost(size))
    if with_regions:
        apply_checkpointing(model, Checkpointing(modules="Sequential"))
    lengths = lengths_of(num_samples, max(size, -(-num_samples // (num_samples // 2))))
    assert min(lengths) >= 2
    for step in range(2):
        output = model(x + step)
        output.square().sum().backward()
        expected = by_hand[1](torch.cat([by_hand[0](part) for part in (x + step).split(lengths)]))
        expected.square().sum().backward()
        whole(x + step)
        torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-13)
        assert_equal(gradients(model), gradients(by_hand))
    assert_equal(model[0][0].buffers(), whole[0][0].buffers())
    assert int(model[0][2].num_batches_tracked) == 2
    assert model[0][0].momentum == momentum
    assert model[0][0].training
    assert (applied.loss_class == "changed") == (len(lengths) > 1)


def test_the_statistics_of_later_layers_are_of_all_tiles():
    model, x = net(), images()
    inputs = []
    with torch.no_grad():
        for part in x.split(3):
            inputs.append(copy.deepcopy(model)[0][:2](part))
    apply_tiling(model, ghost(3))
    model(x)
    whole = torch.cat(inputs)
    torch.testing.assert_close(model[0][2].running_mean, 0.1 * whole.mean((0, 2, 3)))
    torch.testing.assert_close(model[0][2].running_var, 0.9 + 0.1 * whole.transpose(0, 1).flatten(1).var(1))


def test_a_module_that_is_called_twice_is_updated_twice_and_in_microbatches_once_for_each():
    model = net()
    plain = copy.deepcopy(model)
    apply_tiling(model, ghost(3))
    views = images(), images(seed=2)
    with pooled_batchnorm(model) as batch:
        for rows in (slice(0, 6), slice(6, 12)):
            with batch.microbatch():
                sum(model[0](view[rows]).sum() for view in views).backward()
    for view in views:
        plain[0](view)
    assert_equal(model[0][0].buffers(), plain[0][0].buffers())
    for view in views:
        model[0](view).sum().backward()
        plain[0](view)
    assert_equal(model[0][0].buffers(), plain[0][0].buffers())


def test_a_call_that_fails_leaves_statistics_as_they_were():
    model = net()

    class Fails(nn.Module):
        def forward(self, x):
            if len(x) == 3 and torch.is_grad_enabled() and self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return x

    failing = Fails()
    failing.fails = False
    model[0].append(failing)
    apply_tiling(model, ghost(3))
    model(images())
    before = copy.deepcopy(list(model.buffers()))
    failing.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        model(images())
    assert_equal(model.buffers(), before)
    assert model[0][0].momentum == 0.1


def test_without_being_asked_for_such_modules_stay_whole_and_frozen_statistics_do_not_count():
    with pytest.raises(ValueError, match=r"it changes its buffer `0\.num_batches_tracked`"):
        apply_tiling(model := net(), Tiling(modules="0", dim=0, size=3)) and model(images())
    model = net()
    model.eval()
    plain = copy.deepcopy(model)
    applied = apply_tiling(model, ghost(3))
    torch.testing.assert_close(model(images()), plain(images()))
    assert (applied.loss_class, applied.summary) == ("exact", "1 module in tiles: 1 x Sequential, at most 3 samples")


def test_batchnorm_that_is_made_active_later_is_noticed():
    model = net()
    for each in model.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.eval()
    applied = apply_tiling(model, Tiling(dim=0, size=3))
    model(images())
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 3 samples"
    model[0][2].train()
    plain = copy.deepcopy(model)
    torch.testing.assert_close(model(images()), plain(images()), rtol=1e-12, atol=0)
    assert applied.loss_class == "exact"


def test_a_module_that_stays_whole_is_tested_once_though_its_statistics_move(monkeypatch):
    tested = []

    def counted(*args):
        tested.append(args[1])
        return independence.test_of(*args)

    monkeypatch.setattr(tiling, "test_of", counted)
    model = net()
    apply_tiling(model, Tiling(dim=0, size=3))
    for _ in range(4):
        model(images())
    assert tested == [model[0]]


def test_layers_without_batchnorm_have_tiles_of_one_sample():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), net())
    applied = apply_tiling(model, Tiling(modules="0", dim=0, size=3, batchnorm="ghost"))
    model[0](torch.randn(7, 3))
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 3 samples"


def test_the_test_of_a_second_call_leaves_the_graph_of_the_first_as_it_is():
    model = net()
    plain = copy.deepcopy(model)
    apply_tiling(model, Tiling(dim=0, size=3))
    for each in (model, plain):
        (each(images()) * each(images(seed=2))).sum().backward()
    assert_equal(gradients(model), gradients(plain))


def test_a_wrong_mode_is_refused():
    with pytest.raises(ValueError, match=r"`Tiling.size` must be 2 or more"):
        Tiling(size=1, batchnorm="ghost")
    with pytest.raises(ValueError, match=r'`Tiling.batchnorm` must be "ghost" or `None`'):
        Tiling(batchnorm="running")
