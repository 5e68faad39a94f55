"""The same under the name `pytorch_lightning`."""

from __future__ import annotations

import textwrap

import pytest

from tests.strategies.quiet_runs import QUIET, run


@pytest.mark.parametrize("order", ["memsave first", "pytorch_lightning first"])
def test_the_other_namespace(order):
    """In a process of its own, because importing `pytorch_lightning` cannot be undone."""
    imports = ["import lightning_memsave", "import pytorch_lightning as pl"]
    by_name = "import lightning_memsave.strategies.pytorch_lightning" if order == "memsave first" else ""
    program = "\n".join(
        [
            *(imports if order == "memsave first" else reversed(imports)),
            "import logging, warnings; warnings.simplefilter('ignore')",
            "from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset",
            "from torch.utils.data import DataLoader",
            f"quiet = {QUIET!r}",
            by_name,
            "trainer = pl.Trainer(strategy='memsave', **quiet)",
            "trainer.fit(BoringModel())",
            "assert [a.technique for a in trainer.strategy.memsave.applied] == ['early_zero_grad']",
            "memsave = lightning_memsave.MemSave(microbatch=1)",
            "data = DataLoader(RandomDataset(32, 64), batch_size=4)",
            "pl.Trainer(callbacks=[memsave], **quiet).fit(BoringModel(), data)",
            "assert memsave.report.peak_bytes > 0 and memsave.report.microbatch_size == 1",
            "from pickle import dumps, loads",
            "from lightning_memsave.strategies.pytorch_lightning import MemSaveStrategy",
            "assert loads(dumps(MemSaveStrategy)) is MemSaveStrategy is type(trainer.strategy)",
        ]
    )
    run(program)


def test_names_and_classes_of_the_other_namespace_are_its_own():
    program = """
        import pytorch_lightning as pl
        from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
        from pytorch_lightning.strategies import StrategyRegistry
        import lightning_memsave
        from lightning_memsave.strategies import pytorch_lightning as ours

        bases = {
            "memsave": (ours.MemSaveStrategy, SingleDeviceStrategy),
            "memsave_ddp": (ours.MemSaveDDPStrategy, DDPStrategy),
            "memsave_fsdp": (ours.MemSaveFSDPStrategy, ModelParallelStrategy),
        }
        for name, (cls, base) in bases.items():
            assert StrategyRegistry[name]["strategy"] is cls
            assert issubclass(cls, base) and cls.__module__ == ours.__name__
            assert not issubclass(cls, getattr(lightning_memsave, cls.__name__))
        quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        several = pl.Trainer(strategy="memsave", devices=2, **quiet)
        assert type(several.strategy) is ours.MemSaveDDPStrategy
    """
    run(textwrap.dedent(program))
