"""What the rows of WideResNet-28-2 rest on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.models import wrn
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.measuring.meter import Meter

pytestmark = pytest.mark.filterwarnings("ignore:Microbatches change the result", "ignore::UserWarning")


@pytest.mark.parametrize("arguments", [{}, {"sparsity": 0.9, "activations": "int4-chain"}])
def test_two_microbatches_have_the_peak_of_many_less_what_the_batch_is_larger(arguments):
    def peak_bytes(num_images):
        images = wrn.load(num_images, seed=1).tensors
        module = wrn.Classifier(WideResNet(depth=10, width=1))
        data = DataLoader([images] * 2, batch_size=None)
        memsave, _ = wrn.fit(module, data, {"microbatch": 2, **arguments}, max_steps=2)
        return memsave.report.peak_bytes

    per_image, per_microbatch = 3 * 32 * 32 + 8, 3 * 4  # three scalars that logging keeps
    assert peak_bytes(12) - peak_bytes(4) == 8 * per_image + 4 * per_microbatch


def test_a_row_has_every_figure():
    images, labels = wrn.load(8, seed=1).tensors
    two = images[:4].clone(), labels[:4].clone()
    found = wrn.measure(lambda: wrn.Classifier(WideResNet(depth=10, width=1)), (images, labels), two, {"microbatch": 2})
    categories = ("weights", "gradients", "optimizer_state", "activations", "temporary", "data")
    assert sum(found[f"{category}_bytes"] for category in categories) == found["peak_bytes"]
    assert 0 <= found["data_bytes"] - 8 * (3 * 32 * 32 + 8) < 100  # and states of metrics
    assert found["allocated_bytes"] > found["peak_bytes"]
    assert found["cpu_time_ratio"] == found["cpu_seconds"] / found["baseline_cpu_seconds"] > 0
    assert found["loss_class"] == "changed"


def test_steps_that_are_timed_are_watched_by_nobody(monkeypatch):
    watched = []
    begin = Meter.begin

    def begin_and_note(meter, *args, **kwargs):
        begin(meter, *args, **kwargs)
        if meter._workspace:
            watched.append(any((meter._ledger, meter._profile)))

    monkeypatch.setattr(Meter, "begin", begin_and_note)
    images = wrn.load(8, seed=1).tensors
    wrn.measure(lambda: wrn.Classifier(WideResNet(depth=10, width=1)), images, images, {})
    assert watched == [False, True, True, True, False, False, False]  # the last two are timed


def test_images_of_8_bits_become_numbers_around_zero():
    images, _ = wrn.as_float((torch.tensor([0, 255], dtype=torch.uint8), torch.zeros(2)))
    assert images.tolist() == [-1.0, 1.0]
