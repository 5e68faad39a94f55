from __future__ import annotations

import contextlib
import copy

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import Checkpointing, MemoryMonitor, MemSave, Microbatching, OptimizerState, Recipe
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad
from tests.harness import ListLogger

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Regressor(L.LightningModule):
    def __init__(self, width: int = 80) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.net = nn.Sequential(nn.Linear(4, width), *blocks, nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[:, :4]) - batch[:, 4:]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Validated(Regressor):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[:, :4]).square().mean())


def loader(n: int = 64) -> DataLoader:
    return DataLoader(torch.randn(n, 5, generator=torch.Generator().manual_seed(0)), batch_size=16)


EVERYTHING = {"microbatch": 4, "checkpointing": "blocks", "optimizer_state": "8bit"}


def fit(memsave, module=None, resume=None, **options):
    torch.manual_seed(0)
    module = module or Regressor()
    options = {"max_epochs": 2, "enable_checkpointing": False, **options}
    callbacks = [*([memsave] if memsave else []), *options.pop("monitors", [])]
    trainer = L.Trainer(callbacks=callbacks, **QUIET, **options)
    trainer.fit(module, loader(), ckpt_path=resume)
    return trainer, module


def test_report_adds_up_and_says_what_was_done():
    memsave = MemSave(**EVERYTHING)
    fit(memsave)
    report = memsave.report
    assert sum(report.by_category.values()) == report.peak_bytes
    assert [a.technique for a in report.applied] == [
        "early_zero_grad",
        "microbatching",
        "checkpointing",
        "optimizer_state",
    ]
    assert report.microbatch_size == 4
    assert report.loss_class == "changed"
    assert report.loss_class_reasons == ("AdamW's moments are rounded to 8 bits",)
    assert report.num_steps_measured == 2
    assert report.factor is None


def test_factor_against_a_measured_baseline():
    baseline, memsave = MemSave("measure"), MemSave(**EVERYTHING)
    fit(baseline)
    memsave.compare_to(baseline.report)
    fit(memsave)
    assert memsave.report.baseline_source == "measured"
    assert memsave.report.factor == baseline.report.peak_bytes / memsave.report.peak_bytes > 1


def test_slots_shorthands_configs_and_false():
    configs = {
        "microbatch": Microbatching(size=4),
        "checkpointing": Checkpointing(),
        "optimizer_state": OptimizerState(),
    }
    assert MemSave(**configs).recipe == MemSave(**EVERYTHING).recipe
    both = MemSave(checkpointing=True, optimizer_state=True).recipe
    assert both.stems() == ("early_zero_grad", "microbatching", "checkpointing", "optimizer_state")
    recipe = Recipe("mine", (EarlyZeroGrad(), Microbatching(size=2)))
    assert MemSave(recipe).recipe == recipe
    assert MemSave(recipe, microbatch=False).recipe.stems() == ("early_zero_grad",)
    assert MemSave(recipe, microbatch=False).recipe.switched_off == (Microbatching,)
    assert MemSave(microbatch="auto").recipe == MemSave(microbatch=True).recipe
    assert MemSave(recipe, microbatch=3).recipe.get(Microbatching).size == 3
    assert MemSave("measure").recipe.stems() == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "magic"}, r"`recipe` must be one of 'measure', 'lossless'.*got 'magic'"),
        ({"recipe": [Microbatching()]}, r"`recipe` must be one of 'measure', 'lossless'.*got \[Microbatching"),
        ({"microbatch": 0}, r"`microbatch` must be a positive integer or .auto., got 0"),
        ({"microbatch": "all"}, r"`microbatch` must be a positive integer"),
        ({"microbatch": 2.5}, r"`microbatch` must be a positive integer"),
        ({"checkpointing": "no-such-thing"}, r"`checkpointing` must be one of 'blocks', 'sqrt', 'recursive', got"),
        ({"checkpointing": "budget"}, r"To fit a limit|to fit a limit"),
        (
            {"optimizer_state": "1bit"},
            r"`optimizer_state` must be one of '8bit', '4bit', 'lean', .*'paged', got '1bit'",
        ),
        ({"recipe": Recipe("a", ()), "microbatch": -3}, "got -3"),
    ],
)
def test_wrong_settings_fail_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        MemSave(**arguments)


def test_a_recipe_names_each_technique_once():
    with pytest.raises(ValueError, match="each technique once"):
        Recipe("twice", (Microbatching(size=1), Microbatching(size=2)))


def test_a_selector_without_match_fails_before_training_and_leaves_the_module_whole():
    module = Regressor()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"Checkpointing.modules.*Sequential"):
        fit(MemSave(checkpointing=Checkpointing(modules="Nope")), module)
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())


def test_an_optimizer_without_moments_fails_before_training():
    class ASGD(Regressor):
        def configure_optimizers(self):
            return torch.optim.ASGD(self.parameters())

    with pytest.raises(ValueError, match=r"keeps something for each parameter in its shape.*got 'ASGD'"):
        fit(MemSave(optimizer_state="8bit"), ASGD())


def test_checkpoints_load_both_ways_and_resume_is_bit_equal(tmp_path):
    def run(memsave, ckpt=None, epochs=2):
        torch.manual_seed(0)
        module = Regressor()
        trainer = L.Trainer(
            callbacks=[memsave] if memsave else [], max_epochs=epochs, enable_checkpointing=False, **QUIET
        )
        trainer.fit(module, loader(), ckpt_path=ckpt)
        return trainer, module

    path, plain_path = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    trainer, module = run(MemSave(**EVERYTHING))
    trainer.save_checkpoint(path)
    plain_trainer, plain = run(None)
    plain_trainer.save_checkpoint(plain_path)

    ours, theirs = torch.load(path, weights_only=True), torch.load(plain_path, weights_only=True)
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    states, plain_states = ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"]
    described = [{n: (t.shape, t.dtype) for n, t in s.items()} for s in states.values()]
    assert described == [{n: (t.shape, t.dtype) for n, t in s.items()} for s in plain_states.values()]
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]

    _, straight = run(MemSave(**EVERYTHING), epochs=4)
    _, resumed = run(MemSave(**EVERYTHING), path, epochs=4)
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    for memsave, ckpt in ((None, path), (MemSave(**EVERYTHING), plain_path)):
        _, crossed = run(memsave, ckpt, epochs=4)
        assert all(torch.isfinite(p).all() for p in crossed.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(crossed.parameters(), module.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in plain.parameters())


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_run_without_optimizer_resumes(tmp_path):
    class Without(Regressor):
        def configure_optimizers(self):
            return None

    path = tmp_path / "last.ckpt"
    trainer, _ = fit(MemSave(), Without())
    trainer.save_checkpoint(path)
    trainer, _ = fit(MemSave(), Without(), resume=path, max_epochs=3)
    assert trainer.current_epoch == 3


def test_as_a_default_16_bit_weights_step_aside_for_an_optimizer_that_cannot_step_them():
    class Searches(Regressor):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=2)

    memsave = MemSave("extreme", sparsity=False)
    _, module = fit(memsave, Searches())
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert not {"low_precision", "optimizer_state"} & {a.technique for a in memsave.report.applied}
    with pytest.raises(ValueError, match="`precision` needs an optimizer that steps each parameter by itself"):
        fit(MemSave(precision="bf16-sr"), Searches())


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_fit_twice_validate_and_a_second_trainer():
    memsave = MemSave(**EVERYTHING)
    trainer, module = fit(memsave, Validated())
    first = memsave.report
    trainer.validate(module, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    assert len(memsave.report.applied) == 4
    fit(memsave)
    assert memsave.report.peak_bytes == first.peak_bytes
    assert [a.technique for a in memsave.report.applied] == [a.technique for a in first.applied]
    assert all("_checkpoint_region" not in vars(m) for m in module.modules())


def test_monitor_alone_changes_nothing_and_a_second_one_reads_the_first():
    monitor, second = MemoryMonitor(), MemoryMonitor()
    torch.manual_seed(0)
    module = Regressor()
    trainer = L.Trainer(callbacks=[monitor, second], max_epochs=2, enable_checkpointing=False, **QUIET)
    trainer.fit(module, loader())
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
    _, plain = fit(None)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert monitor.report == second.report
    assert monitor.report.num_steps_measured == 2
    assert trainer.callback_metrics["memsave/peak_bytes"].item() == monitor.report.peak_bytes


def test_what_a_second_monitor_is_told_reaches_the_figures_of_the_first():
    baseline, memsave = MemoryMonitor(), MemSave(**EVERYTHING)
    fit(baseline)
    trainer, _ = fit(memsave, monitors=[MemoryMonitor().compare_to(baseline.report)])
    assert memsave.report.factor == baseline.report.peak_bytes / memsave.report.peak_bytes > 1
    assert trainer.callback_metrics["memsave/factor"].item() == memsave.report.factor


def test_logged_settings_are_without_defaults_that_stepped_aside(monkeypatch):
    class ASGD(Regressor):
        def configure_optimizers(self):
            return torch.optim.ASGD(self.parameters())

    logged = []
    monkeypatch.setattr("lightning_memsave.callbacks.monitor.log_config", lambda _, config: logged.append(config))
    for module in (Regressor(), ASGD()):
        fit(MemSave("balanced"), module)
    both = {"recipe", "early_zero_grad", "low_precision", "microbatching", "activation_compression", "every"}
    assert [set(config) for config in logged] == [both | {"optimizer_state"}, both]


def test_an_exception_in_the_middle_of_a_measured_step_leaves_nothing_behind():
    class Fails(Regressor):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("user's own")
            return super().training_step(batch, batch_idx)

    memsave = MemSave(**EVERYTHING)
    with pytest.raises(RuntimeError, match="user's own"):
        fit(memsave, Fails())
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _get_current_dispatch_mode_stack() == []
    fit(memsave)
    assert memsave.report.peak_bytes > 0


def test_the_second_step_of_a_long_run_and_every_nth_are_measured():
    monitor = MemoryMonitor(every=5)
    trainer = L.Trainer(callbacks=[monitor], max_steps=12, max_epochs=-1, enable_checkpointing=False, **QUIET)
    trainer.fit(Regressor(), loader())
    assert monitor.report.num_steps_measured == 4  # 2, 3, 5, 10
    with pytest.raises(ValueError, match="`every`"):
        MemoryMonitor(every=0)


class FoursDataModule(BoringDataModule):
    def train_dataloader(self):
        return DataLoader(self.random_train, batch_size=4)


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.filterwarnings("ignore:.*`val_dataloader`")
def test_lightning_cli_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    config = {
        "seed_everything": 1,
        "trainer": {
            **QUIET,
            "enable_checkpointing": False,
            "max_steps": 3,
            "strategy": {"class_path": "lightning_memsave.MemSaveStrategy"},
            "callbacks": [
                {
                    "class_path": "lightning_memsave.MemSave",
                    "init_args": {
                        "recipe": "lossless",
                        "microbatch": {"class_path": "lightning_memsave.Microbatching", "init_args": {"size": 2}},
                        "checkpointing": False,
                        "optimizer_state": None,
                    },
                },
                {"class_path": "lightning_memsave.MemoryMonitor", "init_args": {"every": 3}},
            ],
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    cli = LightningCLI(BoringModel, FoursDataModule, save_config_callback=None, args=["fit", "--config", str(path)])
    memsave = cli.trainer.callbacks[0]
    assert isinstance(memsave, MemSave)
    assert memsave.report.microbatch_size == 2

    arguments = ["fit", "--trainer.callbacks+=lightning_memsave.MemSave", "--trainer.callbacks.microbatch=2"]
    arguments += ["--trainer.strategy=memsave", "--trainer.max_steps=3", "--trainer.logger=false"]
    arguments += ["--trainer.accelerator=cpu", "--trainer.enable_checkpointing=false"]
    arguments += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    cli = LightningCLI(BoringModel, FoursDataModule, save_config_callback=None, args=arguments)
    assert cli.trainer.callbacks[0].report.microbatch_size == 2


def test_workspace_is_measured_when_asked_for_and_the_first_monitor_decides():
    monitor, memsave = MemoryMonitor(every=4, workspace=True), MemSave(**EVERYTHING)
    trainer = L.Trainer(callbacks=[monitor, memsave], max_epochs=2, enable_checkpointing=False, **QUIET)
    trainer.fit(Regressor(), loader())
    report = memsave.report
    assert report.workspace_bytes == monitor.report.workspace_bytes
    # bitsandbytes' CPU code takes up to 20 bytes per element of the largest parameter inside its operation.
    assert 0 < report.workspace_bytes < 80 * 80 * 20 + 100_000
    assert report.microbatch_size == 4
    assert len(report.applied) == 4
    assert MemSave().report.workspace_bytes is None


def modes():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


def test_a_skipped_rest_of_an_epoch_leaves_no_ledger_behind():
    class Skips(Validated):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 and self.trainer.current_epoch == 0 else None

        def on_validation_start(self):
            assert modes() == []

    memsave = MemSave()
    trainer = L.Trainer(callbacks=[memsave], max_epochs=3, enable_checkpointing=False, **QUIET)
    trainer.fit(Skips(), loader(), loader())
    assert modes() == []
    assert memsave.report.num_steps_measured == 2


def test_accumulation_shows_the_same_optimizer_state():
    states = []
    for accumulate in (1, 4):
        memsave = MemSave("measure")
        fit(memsave, accumulate_grad_batches=accumulate, max_epochs=4)
        states.append(memsave.report.by_category["optimizer_state"])
    assert states[0] == states[1] > 0


class BackwardByHand(Regressor):
    """Plain Lightning zeroes what this backward leaves behind, because it zeroes after `training_step`."""

    def training_step(self, batch, batch_idx):
        (self.net(batch[:, :4]).square().mean() * 0.1).backward()
        return super().training_step(batch, batch_idx)


class ReadsInHook(Regressor):
    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.zeros(()))

    def on_before_zero_grad(self, optimizer):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norm += sum(g.norm() for g in grads) + self.net(torch.ones(1, 4)).detach().sum()


@pytest.mark.parametrize("module", [BackwardByHand, ReadsInHook])
@pytest.mark.parametrize("settings", [{}, {"microbatch": 16}], ids=["default", "one part"])
def test_early_zero_grad_steps_aside_where_it_would_change_a_run(module, settings):
    torch.manual_seed(0)
    plain, ours = module(), module()
    ours.load_state_dict(plain.state_dict())
    memsave = MemSave(**settings)
    fit(None, plain)
    fit(memsave, ours)
    for (name, a), b in zip(plain.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert ("early_zero_grad" in [a.technique for a in memsave.report.applied]) == (module is BackwardByHand)


def test_reports_and_callbacks_can_be_copied_and_pickled():
    import dataclasses
    import pickle

    memsave = MemSave(**EVERYTHING)
    fit(memsave)
    for twin in (pickle.loads(pickle.dumps(memsave.report)), copy.deepcopy(memsave.report)):
        assert twin == memsave.report
    assert dataclasses.asdict(memsave.report)["peak_bytes"] == memsave.report.peak_bytes
    del memsave.log, memsave.log_dict  # Lightning's, bound to the module
    assert pickle.loads(pickle.dumps(memsave)).report == memsave.report


def test_without_the_callback_the_next_fit_is_plain_again():
    trainer, module = fit(MemSave(**EVERYTHING))
    assert type(trainer.optimizers[0]).__qualname__ == "AdamWCoded"  # its checkpoint can still be written
    trainer.callbacks.clear()
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader())
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert type(trainer.strategy) is L.pytorch.strategies.SingleDeviceStrategy


class Fails(Regressor):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.current_epoch == 0:
            raise RuntimeError("no such thing")


def test_without_the_callback_the_next_fit_is_plain_after_a_failed_one():
    """Lightning tears down no callbacks then."""
    trainer = L.Trainer(callbacks=[MemSave(**EVERYTHING)], max_epochs=1, enable_checkpointing=False, **QUIET)
    with pytest.raises(RuntimeError, match="no such thing"):
        trainer.fit(Fails(), loader())
    trainer.callbacks.clear()
    trainer.fit(Regressor(), loader())
    assert type(trainer.strategy) is L.pytorch.strategies.SingleDeviceStrategy


@pytest.mark.parametrize("slots", [{"precision": "bf16-sr"}, {"sparsity": 0.9}], ids=str)
@pytest.mark.parametrize("kind", [Regressor, Fails])
def test_a_model_is_given_back_where_there_is_room(kind, slots, monkeypatch):
    """Whole weights may not fit on the device that small ones were trained on."""
    moved = []

    def cpu(module):
        moved.append(sum(p.nbytes for p in module.parameters()))
        return nn.Module.cpu(module)

    monkeypatch.setattr(kind, "cpu", cpu)
    module = kind()
    num_bytes = sum(p.nbytes for p in module.parameters())
    with pytest.raises(RuntimeError, match="no such thing") if kind is Fails else contextlib.nullcontext():
        fit(MemSave(**slots), module)
    assert moved[0] < 0.6 * num_bytes
    assert sum(p.nbytes for p in module.parameters()) == num_bytes


@pytest.mark.parametrize(
    "slots",
    [
        {"optimizer_state": "8bit"},
        {"precision": "bf16-sr"},
        {"optimizer_state": "4bit", "precision": "bf16+8"},
        {"optimizer_state": OptimizerState(backend="bitsandbytes")},
    ],
    ids=str,
)
def test_learning_rates_are_logged_under_the_same_names(slots):
    def keys(memsave):
        monitor = LearningRateMonitor()
        options = {**QUIET, "logger": ListLogger()}
        L.Trainer(callbacks=[memsave, monitor], max_epochs=1, enable_checkpointing=False, **options).fit(
            Regressor(), loader()
        )
        return set(monitor.lrs)

    assert keys(MemSave(**slots)) == keys(MemSave("measure")) == {"lr-AdamW"}


def test_a_barebones_trainer_is_told_nothing_of_logs():
    options = {name: QUIET[name] for name in ("accelerator",)}
    memsave = MemSave()
    L.Trainer(callbacks=[memsave], max_epochs=1, barebones=True, **options).fit(Unlogged(), loader())
    assert memsave.report.step_seconds > 0


class Unlogged(Regressor):
    def training_step(self, batch, batch_idx):
        return (self.net(batch[:, :4]) - batch[:, 4:]).square().mean()


def test_two_memsaves_are_refused_and_one_leads_whatever_the_order():
    two = [MemSave(microbatch=2), MemSave(checkpointing="blocks")]
    options = {"max_epochs": 1, "enable_checkpointing": False, **QUIET}
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `MemSave`"):
        L.Trainer(callbacks=two, **options)
    trainer = L.Trainer(callbacks=two[:1], **options)
    trainer.callbacks.append(two[1])
    with pytest.raises(ValueError, match="one MemSave"):
        trainer.fit(Regressor(), loader())
    baseline, memsave, monitor = MemSave("measure"), MemSave(**EVERYTHING), MemoryMonitor(every=3)
    fit(baseline)
    memsave.compare_to(baseline.report)
    trainer = L.Trainer(callbacks=[monitor, memsave], max_epochs=2, enable_checkpointing=False, **QUIET)
    trainer.fit(Regressor(), loader())
    assert memsave.report.num_steps_measured == 3  # 2, 3, 6
    assert trainer.callback_metrics["memsave/factor"].item() == memsave.report.factor
    assert trainer.callback_metrics["memsave/microbatch_size"].item() == 4
    assert monitor.report == memsave.report


def test_checkpoints_have_the_keys_of_plain_ones(tmp_path):
    saved = []
    for memsave in (None, MemSave(**EVERYTHING)):
        trainer, _ = fit(memsave)
        during = tmp_path / "during.ckpt"

        class Save(L.Callback):
            def on_train_epoch_end(self, trainer, pl_module, path=during):
                trainer.save_checkpoint(path)

        trainer = L.Trainer(
            callbacks=[*([memsave] if memsave else []), Save()], max_epochs=1, enable_checkpointing=False, **QUIET
        )
        trainer.fit(Regressor(), loader())
        saved.append(torch.load(during, weights_only=True))
    plain, ours = saved
    assert ours.keys() == plain.keys()
    assert ours["loops"]["fit_loop"].keys() == plain["loops"]["fit_loop"].keys()


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.filterwarnings("ignore")
def test_blocks_that_are_compiled_can_be_regions(how):
    torch.manual_seed(0)
    plain, ours = Regressor(), Regressor()
    ours.load_state_dict(plain.state_dict())
    for number in (1, 2, 3):
        if how == "in place":
            ours.net[number].compile(backend="aot_eager")
        else:
            ours.net[number] = torch.compile(ours.net[number], backend="aot_eager")
    fit(None, plain)
    fit(MemSave(checkpointing=Checkpointing(modules="net.[123]")), ours)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class DroppingOut(nn.Module):  # of torch's own containers, nothing is compiled
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(80, 80), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("recipe", ["measure", "lossless"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_dropout_draws_the_numbers_that_it_draws_alone(recipe):
    """A backend that decomposes dropout draws other numbers than eager code, in steps that are measured as well."""
    weights = []
    for memsave in (None, MemSave(recipe)):
        torch.compiler.reset()
        L.seed_everything(0, verbose=False)
        model = Regressor()
        model.net[2] = DroppingOut()
        model.net[2].compile(backend="aot_eager_decomp_partition")
        fit(memsave, model)
        weights.append([p.detach() for p in model.parameters()])
    assert memsave.report.num_steps_measured > 0
    assert all(map(torch.equal, *weights))


def test_the_representation_says_what_was_set():
    assert repr(MemSave()) == "MemSave('lossless')"
    assert repr(MemSave(budget="8GiB")) == "MemSave('lossless', budget='8GiB')"
    shown = repr(MemSave("balanced", microbatch=4, checkpointing="blocks"))
    assert shown == "MemSave('balanced', microbatch=4, checkpointing='blocks')"
