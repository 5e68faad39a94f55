"""Planning leaves no trace: with a budget, modules as people write them train as with the plan's own settings."""

import dataclasses
import functools
from typing import ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import Checkpointing, MemSave, predict
from tests.strategies.quiet_runs import QUIET

WIDTH, SAMPLES, BATCH = 64, 256, 128


def tensors():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, 1, generator=generator)


def loader(**options):
    return DataLoader(TensorDataset(*tensors()), **{"batch_size": BATCH, **options})


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


@functools.lru_cache
def positions(width):
    return torch.linspace(0, 1, width)


class CachedByAFunction(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] + positions(WIDTH), batch[1]), batch_idx)


class CachedByTheClass(Module):
    table: ClassVar[dict] = {}
    latest = None

    def training_step(self, batch, batch_idx):
        if WIDTH not in self.table:
            self.table[WIDTH] = torch.linspace(0, 1, WIDTH)
        if CachedByTheClass.latest is None:
            CachedByTheClass.latest = torch.ones(())
        return super().training_step((batch[0] + self.table[WIDTH] * self.latest, batch[1]), batch_idx)


class AsksItsLogger(Module):
    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"seen": batch_idx})
        return super().training_step(batch, batch_idx)


class WarmsUp(Module):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        steps = int(0.5 * self.trainer.estimated_stepping_batches)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / steps))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs - 1)
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}, {"scheduler": cosine, "interval": "epoch"}]


@pytest.mark.parametrize("max_steps", [1, 100])
def test_a_run_whose_length_is_steps_is_planned_with_its_schedule(max_steps):
    """Without them a run of `max_steps` would have no end, and its schedule no length."""

    class OneCycle(Module):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            total = max(2, int(self.trainer.estimated_stepping_batches))
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total), "interval": "step"}
            ]

    memsave = MemSave(budget="0.95x")
    train(OneCycle, memsave, max_epochs=-1, max_steps=max_steps, limit_train_batches=3)
    assert memsave.plan is not None


class ChangesItsBatch(Module):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(1.5)
        return super().training_step(batch, batch_idx)


def train(module, memsave, data=None, **options):
    torch.manual_seed(1)
    positions.cache_clear()
    CachedByTheClass.table.clear()
    CachedByTheClass.latest = None
    module = module() if isinstance(module, type) else module
    trainer = L.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "callbacks": [memsave] if memsave else [],
            "logger": L.pytorch.loggers.logger.DummyLogger(),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **{name: value for name, value in options.items() if name != "ckpt_path"},
        }
    )
    data = {"train_dataloaders": loader()} if data is None else data
    trainer.fit(module, **data, ckpt_path=options.get("ckpt_path"))
    return trainer, torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("module", [CachedByAFunction, CachedByTheClass, AsksItsLogger, WarmsUp])
def test_a_planned_run_is_the_run_with_the_plans_settings(module):
    planned = MemSave(budget="0.9x")
    _, ours = train(module, planned)
    _, explicit = train(module, MemSave(planned.plan))
    torch.manual_seed(1)
    assert not torch.equal(ours, torch.cat([p.detach().flatten() for p in module().parameters()])), "it has trained"
    assert torch.equal(ours, explicit)


@pytest.mark.parametrize("module", [CachedByAFunction, CachedByTheClass])
def test_a_prediction_leaves_no_tensor_without_values(module):
    train(module, None)  # empties the caches first
    positions.cache_clear()
    CachedByTheClass.table.clear()
    predict(module(), tensors())
    _, before = train(module, None)
    positions.cache_clear()
    CachedByTheClass.table.clear()
    predict(module(), tensors())
    assert not CachedByTheClass.table
    assert CachedByTheClass.latest is None or type(CachedByTheClass.latest) is torch.Tensor
    assert positions.cache_info().currsize == 0
    assert torch.equal(train(module, None)[1], before)


@pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.MicrobatchWarning")
def test_a_step_that_changes_its_batch_meets_the_data_as_it_is():
    def ready():
        batches = [[part.clone() for part in tensors()] for _ in range(2)]
        return {"train_dataloaders": DataLoader(batches, batch_size=None)}

    planned = MemSave(budget="1x")
    _, ours = train(ChangesItsBatch, planned, ready())
    assert torch.equal(ours, train(ChangesItsBatch, MemSave(planned.plan), ready())[1])
    _, plain = train(ChangesItsBatch, None, ready())
    cut = MemSave(microbatch=86)
    torch.testing.assert_close(train(ChangesItsBatch, cut, ready())[1], plain, rtol=1e-4, atol=1e-6)
    assert any(applied.technique == "microbatching" for applied in cut.report.applied)


@pytest.mark.parametrize("checkpointing", [Checkpointing(budget="1MiB"), "sqrt"])
def test_a_rehearsal_with_values_leaves_the_data_as_it_is(checkpointing):
    class ReadsAndChanges(ChangesItsBatch):
        def training_step(self, batch, batch_idx):
            self.largest = max(0.0, batch[0].abs().max().item())
            return super().training_step(batch, batch_idx)

    def ready():
        return {"train_dataloaders": DataLoader([[part.clone() for part in tensors()]], batch_size=None)}

    seen = [
        train(ReadsAndChanges, memsave, ready())[0].lightning_module.largest
        for memsave in (None, MemSave(checkpointing=checkpointing))
    ]
    assert seen[0] == seen[1]


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("settings", [{"microbatch": 86}, {"checkpointing": "sqrt"}, {"budget": "0.9x"}])
def test_a_step_may_change_the_shapes_in_its_batch(settings):
    class Reshapes(Module):
        def training_step(self, batch, batch_idx):
            assert batch.y.dim() == 3
            batch.y.squeeze_(2)
            assert batch.x.max().item() < 10
            batch.x.mul_(2)
            return super().training_step((batch.x, batch.y), batch_idx)

    def ready():
        x, y = tensors()
        return {"train_dataloaders": DataLoader([Pair(x.clone(), y[..., None].clone())], batch_size=None)}

    _, ours = train(Reshapes, MemSave(**settings), {**ready()}, max_epochs=1)
    torch.testing.assert_close(ours, train(Reshapes, None, ready(), max_epochs=1)[1], rtol=1e-4, atol=1e-6)


class Data(L.LightningDataModule):
    scale = 0.5

    def train_dataloader(self):
        x, y = tensors()
        return DataLoader(TensorDataset((100 * x).clamp(0, 255).to(torch.uint8), y), BATCH)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].float() / 255, batch[1]


def test_a_data_module_is_asked_as_in_the_run():
    class Asks(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * self.trainer.datamodule.scale

    planned = MemSave(budget="0.9x")
    _, ours = train(Asks, planned, {"datamodule": Data()})
    assert torch.equal(ours, train(Asks, MemSave(planned.plan), {"datamodule": Data()})[1])


def test_callbacks_of_the_module_stay_out_of_it(tmp_path):
    class Saves(Module):
        def configure_callbacks(self):
            return [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")]

    train(Saves, MemSave(budget="0.9x"), enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]


def test_compiled_modules_are_still_compiled():
    """What is traced for the first time under a mode would stay eager for ever."""
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(1)
            return graph(*args)

        return run

    class Compiled(Module):
        def __init__(self):
            super().__init__()
            torch._dynamo.reset()
            self.net = torch.compile(self.net, backend=backend)

    planned = MemSave(budget="0.9x")
    train(Compiled, planned)
    num_planned = len(calls)
    calls.clear()
    train(Compiled, MemSave(planned.plan))
    assert num_planned >= len(calls) > 0
    module = Compiled()
    predict(module, tensors())
    calls.clear()
    train(module, None)
    assert len(calls) == 4


class Dropping(nn.Module):
    """A block whose samples are independent, with dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))


def test_steps_after_a_plan_are_compiled():
    """Code that a trial of the plan has met under a mode would stay eager, and draw other masks."""
    calls, of_steps = [], []

    def backend(graph, inputs):
        def run(*args):
            calls.append(1)
            return graph(*args)

        return run

    class Compiled(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch._dynamo.reset()
            self.net, self.head = torch.compile(Dropping(), backend=backend), nn.Linear(32, 5)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.head(self.net(batch[0])).flatten(0, 1), batch[1].flatten())

        def on_train_batch_end(self, *_):
            of_steps.append(len(calls))
            calls.clear()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    memsave = MemSave(budget="0.99x")
    trainer = L.Trainer(**QUIET | {"max_steps": 6}, callbacks=[memsave])
    data = [(torch.randn(16, 10, 32), torch.randint(5, (16, 10))) for _ in range(6)]
    trainer.fit(Compiled(), DataLoader(data, batch_size=None))
    assert memsave.plan is not None
    assert all(of_steps[-6:]), of_steps


def test_a_resumed_run_with_other_settings_is_planned_again(tmp_path):
    trainer, _ = train(Module, MemSave(budget="0.9x"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    other = MemSave(budget="0.9x", activations="exact")
    train(Module, other, ckpt_path=tmp_path / "one.ckpt", max_epochs=2)
    assert "activation_compression" in other.plan.as_recipe().stems()


def test_another_module_is_planned_for_again():
    memsave = MemSave(budget="0.9x")
    train(Module, memsave)
    first = memsave.plan
    train(Module, memsave)
    assert memsave.plan is first

    class Wide(Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, 1))

    train(Wide, memsave)
    assert memsave.plan.baseline_bytes > 2 * first.baseline_bytes


def test_parameters_without_a_shape_are_refused():
    class Lazy(Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 1))

    with pytest.raises(ValueError, match=r"`budget` needs parameters that have their shapes, got 'net.0"):
        train(Lazy, MemSave(budget="0.9x"))


def test_a_batch_that_can_be_called_is_a_batch():
    class Batch(dict):
        def __call__(self):
            raise AssertionError("called")

    assert predict(Keyed(), Batch(x=torch.ones(4, 32))).peak_bytes > 0


class Keyed(BoringModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["x"], batch_idx)
