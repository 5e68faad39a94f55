"""What runs with sparse, low-rank and partly trained layers have in common: optimizers that are older than the run."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, OptimizerState, SparseUpdate

KINDS = {
    "sparsity": {"sparsity": 0.5},
    "low_rank": {"low_rank": 4},
    "sparse_update": {"sparse_update": SparseUpdate(layers={"Linear": 0.5})},
    "sparsity, low-bit": {"sparsity": 0.5, "precision": "bf16-sr", "optimizer_state": OptimizerState(min_size=0)},
}


class Net(L.LightningModule):
    """Makes its optimizer when it is made, or when it is asked."""

    def __init__(self, is_early):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.made = self._adamw() if is_early else None

    def _adamw(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.made or self._adamw()


def fit(module, path=None, **settings):
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(32, 64, generator=torch.Generator().manual_seed(2))), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[MemSave(**settings)] if settings else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    if path is not None:
        trainer.save_checkpoint(path)
    return copy.deepcopy(module.net.state_dict())


def equal(first, second):
    return all(torch.equal(first[key], second[key]) for key in first.keys() | second.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_exists_before_the_fit_trains_as_one_that_is_made_in_it(kind):
    assert equal(fit(Net(is_early=True), **KINDS[kind]), fit(Net(is_early=False), **KINDS[kind]))


@pytest.mark.filterwarnings("ignore:AdamW.* is a low-bit optimizer already")
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_goes_on_trains_every_weight_of_later_fits(kind):
    module = Net(is_early=True)
    before = copy.deepcopy(module.net.state_dict())
    for settings in (KINDS[kind], {}, KINDS[kind]):  # `{}` is plain Lightning
        after = fit(module, **settings)
        assert not any(torch.equal(before[key], after[key]) for key in before if key.endswith("weight"))
        before = after


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_layers_that_are_dense_again_begins_anew(kind):
    module = Net(is_early=True)
    fit(module, **KINDS[kind])
    other = Net(is_early=True)
    other.load_state_dict(module.state_dict())
    weights = [p for p in module.parameters() if p.ndim == 2]
    assert not any(p in module.made.state for p in weights)
    if "precision" in KINDS[kind]:
        return  # its biases' state is low-bit
    biases = [(p, q) for p, q in zip(module.parameters(), other.parameters(), strict=True) if p.ndim == 1]
    other.made.state.update({q: copy.deepcopy(module.made.state[p]) for p, q in biases})
    assert equal(fit(module), fit(other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_after_the_fit_has_the_state_that_it_left(kind, tmp_path):
    class Save(L.Callback):
        def on_train_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "in.ckpt")

    module = Net(is_early=False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[MemSave(**KINDS[kind]), Save()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=8))
    for _ in range(2):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        found = [torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("in", "after")]
        state, later = (each["optimizer_states"][0]["state"] for each in found)
        assert state.keys() == later.keys()
        for number in state:
            torch.testing.assert_close(later[number], state[number], rtol=0, atol=0)


class Eager(torch.optim.Optimizer):
    """Has its state from the start, and cannot make it later."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"sum": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                self.state[p]["sum"].add_(p.grad.square())
                p.sub_(group["lr"] * p.grad / (self.state[p]["sum"].sqrt() + 1e-8))
        return loss


class MadeEagerly(Net):
    def _adamw(self):
        return Eager(self.parameters())


@pytest.mark.parametrize("kind", ["sparsity", "low_rank", "sparse_update"])
@pytest.mark.parametrize("is_early", [False, True])
def test_optimizers_that_make_their_state_at_once(kind, is_early):
    class Keeps(MadeEagerly):
        def configure_optimizers(self):
            self.made = self.made or self._adamw()
            return self.made

    module = Keeps(is_early)
    before = copy.deepcopy(module.net.state_dict())
    for settings in (KINDS[kind], {}, KINDS[kind]):
        after = fit(module, **settings)
        assert not any(torch.equal(before[key], after[key]) for key in before if key.endswith("weight"))
        before = after


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_checkpoint_of_an_earlier_trainer_leaves_the_optimizer_as_it_is(kind, tmp_path):
    module = Net(is_early=True)
    loader = DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=8)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options["enable_model_summary"] = False
    first = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[MemSave(**KINDS[kind])], **options)
    first.fit(module, loader)
    fit(module)
    kept = module.made.state.items()
    before = {id(p): {name: str(value) for name, value in state.items()} for p, state in kept}
    first.save_checkpoint(tmp_path / "late.ckpt")
    assert before.keys() == {id(p) for p in module.made.state}
    for p, state in kept:
        assert {name: str(value) for name, value in state.items()} == before[id(p)]
