"""Config files of LightningCLI as a prediction reads them: what is made of them, and what is left alone."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, Microbatching
from lightning_memsave.api.cli_config import read_config

HERE = __name__


class Layers(L.LightningModule):
    def __init__(self, depth: int = 2):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(depth)))


class Numbers(L.LightningDataModule):
    made = 0

    def __init__(self, num_samples: int = 4):
        super().__init__()
        type(self).made += 1
        self.num_samples, self.called = num_samples, []

    def prepare_data(self):
        self.called.append("prepare_data")

    def setup(self, stage):
        self.called.append(stage)

    def train_dataloader(self):
        return DataLoader(torch.arange(12.0), self.num_samples)


class TwoLoaders(Numbers):
    def train_dataloader(self):
        return {"a": DataLoader(torch.arange(4.0), 2), "b": [DataLoader(torch.arange(6.0), 3)]}


class NeverMade(L.Callback):
    def __init__(self):
        raise AssertionError("a prediction has no use for it")


class OurMemSave(MemSave):
    """As users derive one, with other defaults."""

    def __init__(self, size: int = 2):
        super().__init__(microbatch=size)


@pytest.fixture(autouse=True)
def quiet_parser(monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def read(tmp_path):
    def read(text, *args, **options):
        path = tmp_path / "config.yaml"
        path.write_text(text.replace("HERE", HERE))
        return read_config(path, *args, **options)

    return read


WHOLE = """
seed_everything: 3
trainer:
  accelerator: gpu
  logger: {class_path: nowhere.Logger}
  precision: bf16-mixed
  max_epochs: 7
  gradient_clip_val: null
  callbacks:
    - class_path: HERE.NeverMade
    - class_path: nowhere.Callback
    - class_path: lightning_memsave.MemSave
      init_args: {recipe: measure, microbatch: 5}
model: {class_path: HERE.Layers, init_args: {depth: 4}}
data: {class_path: HERE.Numbers, init_args: {num_samples: 5}}
ckpt_path: nowhere.ckpt
"""


def test_what_a_file_names_is_made_and_what_steps_do_not_depend_on_is_not(read):
    found = read(WHOLE)
    assert type(found.module) is Layers
    assert len(found.module.layers) == 4
    assert found.batch.tolist() == [0, 1, 2, 3, 4]
    assert found.data_module.called == ["prepare_data", "fit"]
    assert found.trainer == {"precision": "bf16-mixed", "max_epochs": 7}
    assert found.memsave.recipe.get(Microbatching).size == 5


def test_weights_are_those_of_the_seed(read):
    found = read(WHOLE)
    L.seed_everything(3, verbose=False)
    expected = Layers(4)
    assert all(torch.equal(a, b) for a, b in zip(found.module.parameters(), expected.parameters(), strict=True))


def test_the_settings_of_a_subcommand_are_read_as_the_others(read):
    indented = "fit:\n" + "".join(f"  {line}\n" for line in WHOLE.strip().splitlines())
    found = read(indented)
    assert len(found.module.layers) == 4
    assert found.trainer == {"precision": "bf16-mixed", "max_epochs": 7}


def test_without_need_of_a_batch_no_data_is_made(read):
    before = Numbers.made
    found = read(WHOLE, with_data=False)
    assert (found.batch, found.data_module, Numbers.made) == (None, None, before)
    assert len(found.module.layers) == 4


def test_each_loader_of_a_nest_gives_a_batch(read):
    found = read("{model: {class_path: HERE.Layers}, data: {class_path: HERE.TwoLoaders}}")
    assert found.batch["a"].tolist() == [0, 1]
    assert found.batch["b"][0].tolist() == [0, 1, 2]


def test_a_class_beside_the_file_takes_its_arguments(read):
    found = read("model: {depth: 3}", Layers)
    assert len(found.module.layers) == 3
    assert (found.batch, found.memsave, found.trainer) == (None, None, {})
    with pytest.raises(ValueError, match="`MODULE:CLASS` must be a class beside a config file"):
        read("model: {depth: 3}", Layers(2))


@pytest.mark.parametrize("name", ["HERE.OurMemSave", "OurMemSave"])
def test_classes_derived_from_memsave_count_by_path_and_by_name(read, name):
    found = read(f"{{trainer: {{callbacks: {{class_path: {name}}}}}, model: {{class_path: HERE.Layers}}}}")
    assert type(found.memsave) is OurMemSave
    assert found.memsave.recipe.get(Microbatching).size == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("devices: 2", {"devices": 2}),
        ("devices: '3'", {"devices": 3}),
        ("devices: '0,2,'", {"devices": 2}),
        ("devices: [1, 4, 5]", {"devices": 3}),
        ("devices: auto", {}),
        ("devices: -1", {}),
        ("devices: '-1'", {}),
        ("devices: [-1]", {}),
        ("num_nodes: '2'", {"num_nodes": 2}),
        ("strategy: ddp, devices: 2, num_nodes: 4", {"strategy": "ddp", "devices": 2, "num_nodes": 4}),
    ],
)
def test_devices_are_counted_and_what_is_left_to_the_machine_is_left_out(read, settings, expected):
    assert read(f"{{trainer: {{{settings}}}, model: {{class_path: HERE.Layers}}}}").trainer == expected


@pytest.mark.parametrize("path", ["lightning.pytorch.strategies.DDPStrategy", "DDPStrategy"])
def test_a_strategy_by_class_is_made(read, path):
    made = f"{{class_path: {path}, init_args: {{static_graph: true}}}}"
    found = read(f"{{trainer: {{strategy: {made}}}, model: {{class_path: HERE.Layers}}}}").trainer["strategy"]
    assert type(found) is DDPStrategy
    assert found._ddp_kwargs == {"static_graph": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n- 2\n", "`--config` must hold settings by name"),
        ("", "`--config` must hold settings by name"),
        ("model: {depth: [", "`--config` must be a readable YAML file"),
        ("{trainer: [1], model: {class_path: HERE.Layers}}", "`--config` must hold settings of the trainer by name"),
        ("{trainer: {strategy: {class_path: nowhere.Strategy}}, model: {class_path: HERE.Layers}}", "can be made"),
        ("{trainer: {strategy: {class_path: DDPStrategy, init_args: 3}}, model: {class_path: HERE.Layers}}", "can be"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_settings_name(read, text, said):
    with pytest.raises(ValueError, match=said):
        read(text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be a readable YAML file.*none\.yaml"):
        read_config(tmp_path / "none.yaml")


def test_a_class_that_lightning_cli_does_not_know_ends_the_program(read, capsys):
    with pytest.raises(SystemExit):
        read("model: {class_path: HERE.Layers, init_args: {depht: 3}}")
    assert "depht" in capsys.readouterr().err
