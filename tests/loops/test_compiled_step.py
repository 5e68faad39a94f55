"""Compiled modules and compressed activations in real trainers, with Inductor; what is compiled is small."""

from __future__ import annotations

import shutil

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import ActivationCompression, Checkpointing, MemSave, NoEffectWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's own, while it compiles
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]
INT4 = ActivationCompression(codecs=("int4",), min_numel=64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Module(L.LightningModule):
    def __init__(self, compiled=lambda net: net) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = compiled(Net())

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def in_place(net):
    net.compile()
    return net


WAYS = {
    "net = torch.compile(net)": lambda: Module(torch.compile),
    "net.compile()": lambda: Module(in_place),
    "torch.compile(module)": lambda: torch.compile(Module()),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(make, memsave=None, *, epochs=1, ckpt=None, **options):
    """Train, the last batch of an epoch being smaller; returns the weights and the trainer."""
    module = make()
    data = DataLoader(torch.randn(40, 32, generator=torch.Generator().manual_seed(0)), 16)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[] if memsave is None else [memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data, ckpt_path=ckpt)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), trainer


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_compiled_code_keeps_codes_and_a_later_fit_is_plain(make):
    plain, _ = train(make)
    memsave = MemSave(activations=INT4)
    ours, _ = train(make, memsave)
    (applied,) = (each for each in memsave.report.applied if each.technique == "activation_compression")
    assert " int4" in applied.summary.partition("kept in")[2]
    assert applied.loss_class == "approximate"
    assert 0 < (ours - plain).norm() < 0.1 * plain.norm()
    assert torch.equal(train(make)[0], plain)


def test_exact_leaves_compiled_code_as_it_is():
    make = WAYS["net = torch.compile(net)"]
    plain, _ = train(make)
    memsave = MemSave(activations=ActivationCompression(min_numel=64))
    assert torch.equal(train(make, memsave)[0], plain)


def test_a_resumed_run_draws_the_noise_that_it_would_have_drawn(tmp_path):
    make = WAYS["net = torch.compile(net)"]
    whole, _ = train(make, MemSave(activations=INT4), epochs=2)
    _, trainer = train(make, MemSave(activations=INT4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed, _ = train(make, MemSave(activations=INT4), epochs=2, ckpt=tmp_path / "last.ckpt")
    assert torch.equal(resumed, whole)


def test_the_other_techniques_work_with_it():
    make = WAYS["net = torch.compile(net)"]
    memsave = MemSave(activations=INT4, microbatch=4, optimizer_state="8bit", precision="bf16-sr")
    plain, ours = train(make)[0], train(make, memsave, precision="bf16-mixed")[0]
    assert (ours - plain).norm() < 0.2 * plain.norm()
    assert {"microbatching", "activation_compression"} <= {each.technique for each in memsave.report.applied}


COMPILES_CONTAINERS = Version(torch.__version__) >= Version("2.15.0.dev0")


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(
            lambda net: in_place(nn.Sequential(net.up, net.down)),
            id="a container",
            marks=pytest.mark.skipif(COMPILES_CONTAINERS, reason="torch 2.15 compiles its containers"),
        ),
        pytest.param(lambda net: torch.compile(net, backend="aot_eager"), id="another backend"),
    ],
)
def test_compiled_code_without_codes_is_told_of(compiled):
    with pytest.warns(NoEffectWarning, match="What is compiled .net. keeps its activations as they are"):
        train(lambda: Module(compiled), MemSave(activations=INT4))


@pytest.mark.parametrize("activations", ["exact", "int4"])
def test_functions_that_are_compiled_are_told_of(activations):
    class Compiled(Module):
        def __init__(self):
            super().__init__()
            self.net.forward = torch.compile(self.net.forward, backend="eager")

    with pytest.warns(NoEffectWarning, match=r"Functions that are compiled .net\.forward. run eagerly"):
        train(Compiled, MemSave(activations=activations))


def test_gradients_outside_of_training_step_are_told_of():
    """Compiled code keeps what it was compiled to keep, also where nobody asked for codes."""
    module = Module(torch.compile)

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.net(torch.randn(16, 32)).sum().backward()

    data = DataLoader(torch.randn(32, 32), 16)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[MemSave(activations=INT4), Look()],
        enable_model_summary=False,
        **options,
    )
    with pytest.warns(NoEffectWarning, match="outside of the scope"):
        trainer.fit(module, data)


class Blocks(L.LightningModule):
    """Three blocks, of which one is compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Net() for _ in range(3))
        self.blocks[1] = torch.compile(self.blocks[1])

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_a_compiled_block_in_a_region_is_repeated_as_it_was(codec):
    activations = ActivationCompression(codecs=(codec,), min_numel=64)
    plain, _ = train(Blocks)
    torch.compiler.reset()
    ours, _ = train(Blocks, MemSave(activations=activations, checkpointing="recursive", summary=False))
    apart = float((ours - plain).norm() / plain.norm())
    assert apart == 0 if codec == "exact" else 0 < apart < 0.1


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")  # torch 2.12
@pytest.mark.parametrize("settings", [{"checkpointing": Checkpointing(modules=["Net"])}, {"tiling": "samples"}])
def test_what_may_have_no_graph_breaks_meets_no_regions_or_tiles_and_a_note_says_so(settings):
    def compiled(net):
        return torch.compile(nn.Sequential(net, nn.Tanh()), backend="eager", fullgraph=True)

    with pytest.raises(RuntimeError) as caught:
        train(lambda: Module(compiled), MemSave(**settings))
    assert any("Compile without `fullgraph=True`" in note for note in caught.value.__notes__)
