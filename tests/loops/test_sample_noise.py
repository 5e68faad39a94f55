"""Noise in a question about a loss: each sample has its own, whatever part it is in."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lightning_memsave import MemSave, MicrobatchWarning
from lightning_memsave.loops.sample_noise import SampleNoise
from tests.loops.whole_batches import Module, batches, both, unpack


@pytest.mark.parametrize(
    ("draw", "is_sure"),
    [
        (lambda n: torch.randn(n, 3), True),
        (lambda n: F.dropout(torch.ones(n, 3)), True),
        (lambda n: torch.native_dropout(torch.ones(n, 3), 0.5, True), True),  # as CUDA does
        (lambda n: torch.rand(()), True),
        (lambda n: F.dropout(torch.ones(2 * n, 3)), False),
        (lambda n: torch.randperm(n), False),
        (lambda n: torch.randn(7, 3), False),
    ],
)
def test_noise_says_whether_it_is_a_samples_own(draw, is_sure):
    with SampleNoise(0, 5, 5) as whole:
        draw(5)
    with SampleNoise(2, 3, 5) as part:
        draw(3)
    assert (whole.is_sure and part.is_sure) == is_sure


@pytest.mark.parametrize("p", [0.2, 1.0])
def test_dropout_in_one_operation_is_each_samples_own(p):
    """CUDA's; the CPU draws the mask first."""
    x = torch.randn(5, 300, dtype=torch.float64)
    with SampleNoise(0, 5, 5):
        whole, kept = torch.native_dropout(x, p, True)
    with SampleNoise(2, 3, 5):
        part, kept_in_part = torch.native_dropout(x[2:], p, True)
    assert torch.equal(part, whole[2:])
    assert torch.equal(kept_in_part, kept[2:])
    torch.testing.assert_close(whole, x * kept / (1 - p) if p < 1 else torch.zeros_like(x))
    with SampleNoise(0, 5, 5) as noise:
        assert torch.equal(torch.native_dropout(x, p, False)[0], x)
    assert noise.num_drawn == 0
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.05


@pytest.mark.filterwarnings("ignore::lightning_memsave.NotLosslessWarning")
@pytest.mark.parametrize("draws", ["like", "size", "in place", "numbers"])
def test_a_loss_that_draws_noise_is_known_for_a_mean(draws):
    """As in diffusion and variational autoencoders; what is drawn differs from that of the whole batch."""

    class Noisy(Module):
        def training_step(self, batch, batch_idx):
            x, _ = unpack(batch)
            noise = {
                "like": lambda: torch.randn_like(x),
                "size": lambda: torch.rand(len(x), 1) * torch.randint(1, 9, (len(x), 1)),
                "in place": lambda: torch.empty(x.shape).normal_(),
                "numbers": lambda: random.random() + np.random.rand(),  # noqa: NPY002  # as mixup does,
            }[draws]()
            return (self.net(x) - self.net(x + noise)).square().mean()

    memsave = MemSave(microbatch=3)
    state = random.getstate()
    both(Noisy(), batches(), memsave)
    assert "(loss: mean over samples)" in memsave.report.applied[1].summary
    assert memsave.report.microbatch_size == 3
    random.setstate(state)


def test_samples_that_meet_through_their_noise_are_still_detected():
    class Diverse(Module):
        def training_step(self, batch, batch_idx):
            x = unpack(batch)[0]
            return self.net(torch.randn_like(x)).std(0).mean()

    with pytest.warns(MicrobatchWarning, match="neither the mean nor the sum"):
        both(Diverse(), batches(), MemSave(microbatch=3))


def test_activations_with_noise_are_no_noise():
    class Random(Module):
        def training_step(self, batch, batch_idx):
            return F.rrelu(self.net(unpack(batch)[0]), training=False).square().mean()

    memsave = MemSave(microbatch=3)
    both(Random(), batches(), memsave)
    assert "(loss: mean over samples)" in memsave.report.applied[1].summary
