"""Runs whose optimizer holds others: Muon for matrices and AdamW for the rest, behind one."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, OptimizerState, apply_optimizer_state, predict
from lightning_memsave.techniques.optimizer_state import is_low_bit
from tests.torch_internals.held_optimizers_subjects import Both, Clipping, Joined, Lookahead

from .quiet_runs import QUIET

NUM_BATCHES = 4
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def inside(network, lr=0.02):
    matrices, rest = ([p for p in network.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return torch.optim.Muon(matrices, lr), torch.optim.AdamW(rest, lr)


def batches(start=0):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 128, generator=generator) for _ in range(2 * NUM_BATCHES)][start:][:NUM_BATCHES]


class Module(L.LightningModule):
    def __init__(self, kind=Both):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.losses = kind, []
        self.network = nn.Sequential(nn.Linear(128, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 128))

    def training_step(self, batch, batch_idx):
        return (self.network(batch) - batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.dtypes = {p.dtype for p in self.parameters()}

    def configure_optimizers(self):
        return self.kind(*inside(self.network))


def fit(module, *settings, start=0, ckpt_path=None, **keywords):
    callbacks = [MemSave(*settings, summary=False, **keywords)] if settings or keywords else []
    trainer = L.Trainer(**{**QUIET, "max_steps": -1, "max_epochs": 1 if start == 0 else 2}, callbacks=callbacks)
    trainer.fit(module, DataLoader(batches(start), batch_size=None), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def in_plain_torch(change=lambda optimizer, network: None):
    """The weights, and the optimizers, of a loop over the same batches."""
    network = Module().network
    optimizers = inside(network)
    for each in optimizers:
        change(each, network)
    for batch in batches():
        for each in optimizers:
            each.zero_grad()
        (network(batch) - batch).square().mean().backward()
        for each in optimizers:
            each.step()
    return network, optimizers


def are_equal(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


RELEASE = {"optimizer_state": OptimizerState(first_moment="32bit", gradients="release")}
INTO_STATE = {"optimizer_state": OptimizerState(gradients="into-state"), "microbatch": 4}
EXACT = ({}, {"optimizer_state": "offload"}, {"activations": "exact"}, {"recipe": "exact"})


@pytest.mark.parametrize("kind", [Both, Joined])
@pytest.mark.parametrize("settings", EXACT, ids=str)
def test_what_is_exact_is_the_plain_loop(kind, settings):
    module = Module(kind)
    trainer = fit(module, **settings) if settings else fit(module, "lossless")
    assert trainer.callbacks[0].report.loss_class == "exact"
    assert are_equal(module.network, in_plain_torch()[0])


@pytest.mark.parametrize("kind", [Both, Joined])
@pytest.mark.parametrize("state_format", ["8bit", "4bit"])
def test_state_is_in_codes_inside(kind, state_format):
    config = OptimizerState.from_shorthand(state_format)
    module = Module(kind)
    fit(module, optimizer_state=config)
    network, optimizers = in_plain_torch(lambda each, network: apply_optimizer_state(each, config, network))
    assert are_equal(module.network, network)
    assert all(map(is_low_bit, optimizers))


@pytest.mark.parametrize("precision", ["bf16-sr", "bf16+8", "bf16-kahan"])
def test_weights_in_16_bits_learn_as_float32(precision):
    """One step of the outer optimizer for each parameter would be a step of all, several times."""
    plain, lowered = Module(), Module()
    fit(plain)
    fit(lowered, precision=precision)
    assert lowered.dtypes == {torch.bfloat16, torch.float32}  # LayerNorm keeps 32 bits
    for one, other in zip(lowered.losses, plain.losses, strict=True):
        assert one == pytest.approx(other, rel=5e-3)


@pytest.mark.parametrize("kind", [Clipping, Lookahead])
@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16-sr"}, {"optimizer_state": "8bit"}, {"optimizer_state": EXACT[1]["optimizer_state"]}],
)
def test_one_that_does_more_is_refused(kind, settings):
    with pytest.raises(ValueError, match=f"only calls the steps of those that it holds.*{kind.__name__}"):
        fit(Module(kind), **settings)


@pytest.mark.parametrize("settings", [RELEASE, INTO_STATE], ids=["release", "into-state"])
def test_gradients_do_not_end_in_backward_where_an_outer_step_may_decide(settings):
    with pytest.raises(ValueError, match=r"hold no others.*outer `step` decides.*Both"):
        fit(Module(), **settings)


class Skipping(Both):
    """Holds its optimizers where nobody finds them."""

    def __init__(self, *optimizers):
        super().__init__(*optimizers)
        self.inside, self.optimizers = SimpleNamespace(optimizers=optimizers), ()

    def step(self, closure=None):
        loss = closure()
        for each in self.inside.optimizers:
            each.step()
        return loss


@pytest.mark.parametrize("settings", [{"precision": "bf16-sr"}, {"optimizer_state": "8bit"}, RELEASE], ids=str)
def test_one_whose_parameters_do_not_move_by_itself_is_refused(settings):
    with pytest.raises(ValueError, match=r"(steps each parameter by itself|something for each parameter).*Skipping"):
        fit(Module(Skipping), **settings)


class WithModule(Both):
    """A trial of it would change the average."""

    def __init__(self, *optimizers):
        super().__init__(*optimizers)
        self.average, self.num_steps = nn.Linear(2, 2), []

    def step(self, closure=None):
        self.num_steps.append(1)
        return super().step(closure)


def test_one_that_holds_a_module_is_not_tried():
    module = Module(WithModule)
    trainer = fit(module, "balanced")
    assert len(trainer.optimizers[0].num_steps) == NUM_BATCHES
    assert module.dtypes == {torch.float32}


REFUSED = [{"sparsity": 0.9}, {"low_rank": 4}, {"precision": "int8-sr"}, {"precision": "bf16-sr"}]


@pytest.mark.parametrize("settings", REFUSED, ids=str)
@pytest.mark.parametrize("fails", ["the optimizer", "on_train_start"])
def test_a_fit_that_is_refused_leaves_the_weights_as_they_were(settings, fails):
    class Failing(Module):
        def configure_optimizers(self):
            if fails == "the optimizer":
                return Lookahead(*(torch.optim.SGD(layer.parameters(), 0.1) for layer in self.network[:2]))
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_train_start(self):
            raise ValueError("the user's own")

    module = Failing()
    before = copy.deepcopy(module.network)
    with pytest.raises(ValueError, match=r"by itself|inside of another|the user's own"):
        fit(module, **settings)
    assert are_equal(module.network, before)
    assert [p.dtype for p in module.parameters()] == [torch.float32] * 6


def test_a_precision_that_steps_aside_has_not_rounded_the_weights():
    module, plain = Module(Clipping), Module(Clipping)
    fit(plain)
    trainer = fit(module, "balanced", activations=False)
    assert module.losses == plain.losses
    assert trainer.callbacks[0].report.loss_class == "exact"


def test_recipes_step_aside_for_one_that_does_more():
    module, plain = Module(Lookahead), Module(Lookahead)
    fit(plain)
    fit(module, "balanced")
    assert module.dtypes == {torch.float32}
    assert module.losses == pytest.approx(plain.losses, rel=1e-2)


@pytest.mark.parametrize("kind", [Both, Clipping])
@pytest.mark.parametrize("by", ["matrices", "layers"])
def test_extreme_leaves_layers_dense_for_them(kind, by):
    """No matrix is left where Muon looks for one, or the optimizer is refused."""

    class Extreme(Module):
        def configure_optimizers(self):
            if by == "matrices":
                return kind(*inside(self.network, lr=1e-4))
            return kind(*(torch.optim.AdamW(self.network[n].parameters(), 1e-4) for n in (0, 1, 3)))

    module, before = Extreme(kind), Module().network[0].weight.detach()
    trainer = fit(module, "extreme", microbatch=False)
    report = trainer.callbacks[0].report
    assert "sparsity" not in {applied.technique for applied in report.applied}
    assert module.dtypes == ({torch.bfloat16, torch.float32} if kind is Both else {torch.float32})
    after = module.network[0].weight.detach()
    assert float((after == 0).float().mean()) < 0.01, "it was sparse for a moment"
    assert float((after - before).abs().max()) < 0.1 * float(before.abs().max()), "small steps from where it was"


def test_a_factor_of_the_loss_is_refused():
    with pytest.raises(ValueError, match=r"fp16-scaled.*hold no others.*Both"):
        fit(Module(), precision="fp16-scaled")


@pytest.mark.parametrize("technique", [{"sparsity": 0.5}, {"low_rank": 8}], ids=str)
def test_layers_that_change_are_refused(technique):
    class Elementwise(Module):
        def configure_optimizers(self):
            return Both(*(torch.optim.SGD(layer.parameters(), 0.1) for layer in self.network[:2]))

    with pytest.raises(ValueError, match=r"inside of another one.*Both"):
        fit(Elementwise(), **technique)


class Shared(Both):
    """Has the groups of those that it holds, as dictionaries."""

    def __init__(self, *optimizers):
        super().__init__(*optimizers)
        self.param_groups = [group for each in optimizers for group in each.param_groups]


@pytest.mark.parametrize("kind", [Both, Shared])
@pytest.mark.parametrize("settings", [{"optimizer_state": "8bit"}, {"precision": "bf16+8"}, {"recipe": "balanced"}])
def test_a_resumed_run_is_the_run_that_went_on(settings, kind, tmp_path):
    first, whole = Module(kind), Module(kind)
    fit(first, **settings).save_checkpoint(tmp_path / "one.ckpt")
    resumed = Module(kind)
    fit(resumed, start=NUM_BATCHES, ckpt_path=tmp_path / "one.ckpt", **settings)
    trainer = L.Trainer(**{**QUIET, "max_steps": -1, "max_epochs": 1}, callbacks=[MemSave(**settings, summary=False)])
    trainer.fit(whole, DataLoader([*batches(), *batches(NUM_BATCHES)], batch_size=None))
    assert resumed.losses == whole.losses[NUM_BATCHES:]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16+8"}, {"optimizer_state": "4bit"}], ids=str)
def test_compact_checkpoints_are_read_by_every_format(settings, tmp_path):
    compact = OptimizerState(checkpoint="compact", min_size=64)
    fit(Module(), optimizer_state=compact).save_checkpoint(tmp_path / "compact.ckpt")
    resumed = Module()
    fit(resumed, "lossless", start=NUM_BATCHES, ckpt_path=tmp_path / "compact.ckpt", **settings)
    same = Module()
    fit(same, optimizer_state=compact, start=NUM_BATCHES, ckpt_path=tmp_path / "compact.ckpt")
    assert resumed.losses == pytest.approx(same.losses, rel=0.02)


def test_compact_checkpoints_are_read_by_sparse_layers_with_low_bit_state(tmp_path):
    class One(Module):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    compact = OptimizerState(checkpoint="compact", min_size=64)
    fit(One(), optimizer_state=compact).save_checkpoint(tmp_path / "compact.ckpt")
    resumed = One()
    config = OptimizerState(min_size=64)
    fit(resumed, start=NUM_BATCHES, ckpt_path=tmp_path / "compact.ckpt", sparsity=0.5, optimizer_state=config)
    assert len(resumed.losses) == NUM_BATCHES


@pytest.mark.parametrize("settings", [(), ("balanced",)])
def test_state_is_booked_as_that_and_predicted(settings):
    module = Module()
    expected = predict(copy.deepcopy(module), batches()[0], MemSave(*settings) if settings else ())
    report = fit(module, *(settings or ("lossless",))).callbacks[0].report
    assert report.peak_bytes == expected.peak_bytes
    state = sum(p.nbytes for p in module.network.parameters() if p.dim() == 2)  # Muon's; AdamW's is small
    assert report.by_category["data"] == batches()[0].nbytes
    assert report.by_category["optimizer_state"] > (state if not settings else state / 5)
