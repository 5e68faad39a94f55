import math

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave.demo.model import ImageClassifier, WideBlock, WideResNet

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


def randomise_norms(module):
    """Fresh BatchNorms have weight 1 and bias 0, which hides a norm that is left out."""
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.weight.data, norm.bias.data, norm.running_mean):
            tensor.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)


def block_by_hand(x, state, prefix, stride, training):
    def norm_relu(x, name):
        weight, bias = state[f"{prefix}{name}.weight"], state[f"{prefix}{name}.bias"]
        if training:
            mean, var = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), unbiased=False)
        else:
            mean, var = state[f"{prefix}{name}.running_mean"], state[f"{prefix}{name}.running_var"]
        mean, var, weight, bias = (t[None, :, None, None] for t in (mean, var, weight, bias))
        return ((x - mean) / (var + 1e-5).sqrt() * weight + bias).clamp_min(0)

    y = F.conv2d(norm_relu(x, "bn1"), state[f"{prefix}conv1.weight"], stride=stride, padding=1)
    y = F.conv2d(norm_relu(y, "bn2"), state[f"{prefix}conv2.weight"], stride=1, padding=1)
    shortcut = state.get(f"{prefix}shortcut.weight")
    return y + (x if shortcut is None else F.conv2d(x, shortcut, stride=stride))


def test_wide_resnet_28_2_has_the_published_size():
    model = WideResNet()
    assert sum(p.numel() for p in model.parameters()) == 1_467_610
    three_by_three = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(three_by_three) == 25  # the stem and two in each of 3 x 4 blocks
    assert sum(isinstance(m, WideBlock) for m in model.modules()) == 12


@pytest.mark.parametrize("num_classes", [10, 7])
def test_output_has_one_score_per_class(num_classes):
    assert WideResNet(num_classes=num_classes)(torch.randn(2, 3, 32, 32)).shape == (2, num_classes)


def test_groups_halve_the_image_twice():
    model, x, shapes = WideResNet().eval(), torch.randn(1, 3, 32, 32), []
    with torch.no_grad():
        x = model.stem(x)
        for group in model.groups:
            x = group(x)
            shapes.append(tuple(x.shape[1:]))
    assert shapes == [(32, 32, 32), (64, 16, 16), (128, 8, 8)]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("in_channels", "out_channels", "stride"), [(4, 4, 1), (4, 6, 1), (4, 6, 2)])
def test_block_is_what_its_formula_says(in_channels, out_channels, stride, training):
    block = WideBlock(in_channels, out_channels, stride).double().train(training)
    randomise_norms(block)
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    x = torch.randn(3, in_channels, 8, 8, dtype=torch.float64)
    expected = block_by_hand(x, state, "", stride, training)
    torch.testing.assert_close(block(x), expected, rtol=1e-10, atol=1e-10)
    assert expected.shape == (3, out_channels, 8 // stride, 8 // stride)


def test_network_is_stem_blocks_and_head():
    model = WideResNet(depth=16, width=2).double().eval()
    randomise_norms(model)
    state = model.state_dict()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = F.conv2d(x, state["stem.weight"], padding=1)
    for group, stride in ((0, 1), (1, 2), (2, 2)):
        for block in range(2):
            y = block_by_hand(y, state, f"groups.{group}.{block}.", 1 if block else stride, training=False)
    norm = [state[f"bn.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")]
    y = ((y - norm[0]) / (norm[1] + 1e-5).sqrt() * norm[2] + norm[3]).clamp_min(0).mean(dim=(2, 3))
    expected = y @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


class Scores(nn.Module):
    """The input, flattened, is the scores; one parameter so that there is something to train."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.flatten(1) * self.scale


def data_of(num_samples, num_right):
    labels = torch.arange(num_samples) % 10
    shown = labels.clone()
    shown[num_right:] = (labels[num_right:] + 1) % 10
    return TensorDataset(F.one_hot(shown, 10).float()[:, :, None, None], labels)


def trainer_of(*callbacks, **options):
    return L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def test_accuracy_counts_samples_and_not_batches():
    data = data_of(25, 16)  # batches of 10, 10 and 5 with 10, 6 and 0 right
    (scores,) = trainer_of().test(ImageClassifier(Scores()), DataLoader(data, 10), verbose=False)
    assert scores["test/accuracy"] == pytest.approx(16 / 25, rel=1e-6)


def test_loss_is_the_mean_negative_log_probability():
    data = data_of(8, 5)
    images, labels = data.tensors
    module = ImageClassifier(Scores())
    trainer = trainer_of(max_epochs=1)
    trainer.fit(module, DataLoader(data, 8))
    odds = images.flatten(1).double().exp()
    expected = -(odds[torch.arange(8), labels] / odds.sum(dim=1)).log().mean()
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_learning_rate_falls_to_zero_along_a_cosine():
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, *args):
            (group,) = trainer.optimizers[0].param_groups
            seen.append((group["lr"], group["momentum"], group["weight_decay"]))

        def on_train_end(self, trainer, *args):
            seen.append((trainer.optimizers[0].param_groups[0]["lr"],))

    trainer_of(Watch(), max_epochs=2).fit(ImageClassifier(Scores(), lr=0.4), DataLoader(data_of(30, 30), 10))
    expected = [0.2 * (1 + math.cos(math.pi * step / 6)) for step in range(7)]
    assert [entry[0] for entry in seen] == pytest.approx(expected, abs=1e-9)
    assert {entry[1:] for entry in seen[:-1]} == {(0.9, 5e-4)}
