"""The models of torchvision, which nobody here wrote: lossless measures to the bit, int4 within its bound.

Needs torchvision, which has a release for one version of torch each; skipped without.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from lightning_memsave import ActivationCompression, Checkpointing, apply_checkpointing, plan_checkpointing
from lightning_memsave.techniques.activation_compression import open_store
from tests import zoo

torchvision = pytest.importorskip("torchvision", exc_type=ImportError)
models = torchvision.models

BOUND = 0.6  # as of `test_zoo.BOUNDS`


def classify(make, size):
    model, images = make(weights=None, num_classes=5), torch.randn(4, 3, size, size)
    return model, lambda: F.cross_entropy(model(images), torch.tensor([0, 1, 2, 3]))


def segment():
    model = models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5, aux_loss=True
    )
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(5, (2, 64, 64))

    def loss():
        out = model(images)
        return F.cross_entropy(out["out"], labels) + 0.5 * F.cross_entropy(out["aux"], labels)

    return model, loss


def detect():
    """Batches are lists, of images of several sizes and of dictionaries; which boxes are sampled is random."""
    model = models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5, min_size=96, max_size=128
    )
    images = [torch.rand(3, 96, 120), torch.rand(3, 110, 100)]
    boxes = torch.tensor([[10.0, 10.0, 60.0, 50.0], [30.0, 20.0, 90.0, 80.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 3])}, {"boxes": boxes[:1] + 5, "labels": torch.tensor([2])}]
    return model, lambda: sum(model(images, targets).values())


MODELS = {
    "resnet50": functools.partial(classify, models.resnet50, 64),
    "convnext_tiny": functools.partial(classify, models.convnext_tiny, 64),
    "swin_t": functools.partial(classify, models.swin_t, 64),
    "mobilenet_v3_small": functools.partial(classify, models.mobilenet_v3_small, 64),
    "deeplabv3": segment,
    "faster_rcnn": detect,
}


@pytest.fixture(params=MODELS)
def built(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of = MODELS[request.param]()
    zoo.gradients(model.train(), loss_of)  # what a first step fills is there
    return model, loss_of


def test_recomputing_gives_the_bits_of_plain_autograd(built):
    model, loss_of = built
    plain = zoo.gradients(model, loss_of)
    store, applied = open_store(model, ActivationCompression(codecs=("exact",)))
    assert torch.equal(zoo.gradients(model, loss_of, store.scope), plain)
    assert store.tally.held_bytes < store.tally.plain_bytes
    applied.undo()


@pytest.mark.parametrize("plan", ["blocks", "sqrt", "recursive"])
def test_regions_give_the_bits_and_the_statistics_of_plain_autograd(built, plan):
    model, loss_of = built
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plain = zoo.gradients(model, loss_of)
    wanted = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(statistics, strict=False)
    config = Checkpointing(method=plan)
    if config.needs_a_plan:
        config = plan_checkpointing(model, lambda: loss_of().backward(), config)
        model.load_state_dict(statistics, strict=False)
    try:
        applied = apply_checkpointing(model, config)
    except ValueError as error:
        pytest.skip(str(error))
    assert torch.equal(zoo.gradients(model, loss_of), plain)
    assert all(torch.equal(buffer, wanted[name]) for name, buffer in model.named_buffers())
    applied.undo()


def test_codes_of_4_bits_are_within_their_bound(built):
    model, loss_of = built
    plain = zoo.gradients(model, loss_of)
    store, applied = open_store(model, ActivationCompression(codecs=("int4",)))
    error = float((zoo.gradients(model, loss_of, store.scope) - plain).norm() / plain.norm())
    assert 0 < error < BOUND
    assert store.tally.held_bytes < store.tally.plain_bytes / 2
    applied.undo()
