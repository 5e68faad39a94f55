"""Trials show what the run will take: also where it does not cut its batches, and where it has more of a batch."""

import contextlib
import gc

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_memsave import (
    Checkpointing,
    MemSave,
    Microbatching,
    Plan,
    Recipe,
    Tiling,
    microbatches,
    plan_training,
    predict,
)
from lightning_memsave.core.errors import MicrobatchWarning
from lightning_memsave.planner.memory_budget import machine_bytes
from lightning_memsave.planner.search_space import MANY_BLOCKS, NOT_TILED, Tiled
from lightning_memsave.prediction.budgeted_run import _situation
from lightning_memsave.prediction.real_run import Cut, Trial

SAMPLES, WIDTH = 64, 32


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2)]


class Contrastive(L.LightningModule):
    """In-batch negatives: each sample is told from all others of its batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))

    def training_step(self, batch, batch_idx):
        one, other = (F.normalize(self.net(view), dim=1) for view in batch)
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Plain(Contrastive):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1][:, :16])


class NeedsTwo(Plain):
    """Without its batch's dimension, a loss of one sample has another shape than its target."""

    def training_step(self, batch, batch_idx):
        return F.binary_cross_entropy_with_logits(self.net(batch[0])[:, :1].squeeze(), batch[1][:, 0].sigmoid())


class ByHand(Plain):
    automatic_optimization = False

    def parts(self, batch):
        return [(batch, 1.0)]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part, weight in self.parts(batch):
            self.manual_backward(weight * super().training_step(part, batch_idx))
        optimizer.step()


class ByHandInParts(ByHand):
    def parts(self, batch):
        return microbatches(batch)


SEEN = []


class Noting(Plain):
    """Keeps what it sees in a global of its file."""

    def training_step(self, batch, batch_idx):
        SEEN.append(batch)
        if batch_idx:
            assert float(batch[0].sum()) < 1e9  # no step for its shapes alone
        return super().training_step(batch, batch_idx)


@torch.compile(backend="eager")
def compiled(x):
    return x.tanh()


class Compiled(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step([compiled(part) for part in batch], batch_idx)


def test_what_is_compiled_in_a_trial_can_be_run_afterwards():
    """Dynamo keeps its functions as globals of the file."""
    module = Compiled()
    Trial(module, batch())(())
    module.training_step(batch(), 0).backward()
    assert module.net[0].weight.grad is not None


@pytest.mark.parametrize("measure", [lambda: Trial(Noting(), batch())(()), lambda: predict(Noting(), batch())])
def test_what_a_step_keeps_outside_of_its_module_is_not_kept_of_a_trial(measure):
    measure()
    assert not SEEN


class Large(Plain):
    def __init__(self):
        super().__init__()
        self.large = nn.Linear(1024, 512)


def test_nothing_of_a_large_copy_waits_for_a_collection():
    gc.disable()
    try:
        module = Large()
        Trial(module, batch())(())
        assert [each for each in gc.get_objects() if type(each) is Large] == [module]
    finally:
        gc.enable()


def train(memsave, module):
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch() for _ in range(4)], batch_size=None))


@pytest.mark.parametrize("module", [Contrastive, ByHand])
def test_what_the_run_does_not_cut_a_trial_takes_whole(module):
    trial = Trial(module(), batch())
    assert trial((Microbatching(size=4),)).by_category == trial(()).by_category


@pytest.mark.parametrize(
    ("module", "settings", "expected"),
    [
        (Contrastive, {}, "neither the mean nor the sum of the losses of its parts"),
        (Contrastive, {"reduction": "mean"}, ""),
        (Contrastive, {"split_fn": lambda batch, size: [batch]}, ""),
        (Plain, {}, ""),
        (NeedsTwo, {}, ""),
        (ByHand, {}, "with manual optimization only `lightning_memsave.microbatches(batch)`"),
        (ByHandInParts, {}, ""),
    ],
)
def test_a_few_samples_tell_whether_batches_are_cut(module, settings, expected):
    why = Trial(module(), batch()).cut(Microbatching(**settings)).why_not
    assert why == "" if expected == "" else expected in why


def test_memory_that_runs_out_says_nothing_of_cutting():
    class RunsOut(ByHand):
        def training_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("out of memory")

    assert Trial(RunsOut(), batch()).cut(Microbatching()) == Cut()


def test_what_one_process_finds_of_cutting_holds_for_all():
    """Each has its own batch; all have to take part in the exchange, whatever they found."""
    exchanged = []

    class Strategy:
        root_device = torch.device("cpu")

        def broadcast(self, found):
            exchanged.append(found)
            return Cut("of rank 0", 3), 7, Tiled(("net",), 7)

        def reduce(self, found, reduce_op):
            assert reduce_op == "min"
            return found - 1

    class Processes:
        world_size, strategy = 2, Strategy()

    trainer, recipe = Processes(), Recipe("mine", (Microbatching(split_fn=lambda batch, size: [batch]),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_memsave.prediction.budgeted_run.ways_of_training", lambda trainer: [])
        situation = _situation(Plain(), batch(), recipe, trainer)
    assert exchanged == [(Cut(), SAMPLES, NOT_TILED)]
    assert situation.why_whole == "Batches are not cut into microbatches: of rank 0"
    assert (situation.num_samples, situation.asking_bytes) == (None, (3, 0))
    assert situation.tiled == Tiled(("net",), 7)
    assert situation.device_bytes == machine_bytes() - 1  # what the smallest of them has


class Blocks(Plain):
    """Some residual blocks."""

    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(num_blocks))


@pytest.mark.parametrize(("make", "expected"), [(lambda: Blocks(5), 5), (Plain, MANY_BLOCKS)], ids=["blocks", "none"])
def test_a_planner_knows_how_many_blocks_a_module_repeats(make, expected):
    assert _situation(make(), batch(), Recipe("mine"), None).num_blocks == expected


def test_a_step_that_fails_on_few_samples_says_nothing_of_cutting():
    class NeedsMany(Plain):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) < 10:
                raise ValueError("too few")
            return super().training_step(batch, batch_idx)

    assert Trial(NeedsMany(), batch()).cut(Microbatching()) == Cut()


@pytest.mark.parametrize("small_bytes", [0, 2**30])  # predicted for shapes and confirmed; real steps
@pytest.mark.parametrize("module", [Contrastive, ByHand])
@pytest.mark.parametrize("microbatch", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_budget_holds_where_batches_are_not_cut(module, microbatch, small_bytes, monkeypatch):
    monkeypatch.setattr("lightning_memsave.prediction.budgeted_run.SMALL_BYTES", small_bytes)
    if module is ByHand:  # regions cannot be planned there
        memsave = MemSave(budget="0.3x", activations=False, checkpointing=False, microbatch=microbatch)
        with pytest.raises(
            ValueError, match=r"`budget` must be at least .*Batches are not cut into microbatches: with"
        ):
            plan_training(module(), batch(), memsave)
        return
    memsave = MemSave(budget="0.85x", microbatch=microbatch)
    with pytest.warns(MicrobatchWarning) if microbatch else contextlib.nullcontext():
        train(memsave, module())
    assert memsave.report.peak_bytes + memsave.plan.workspace_bytes <= memsave.plan.budget_bytes
    assert "note: Batches are not cut into microbatches" in str(memsave.plan)
    sizes = [t.size for t in memsave.plan.techniques if isinstance(t, Microbatching)]
    assert microbatch is not None or sizes in ([], ["auto"])


class Deep(Contrastive):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(self.dropout)) for _ in range(8)]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 16))

    dropout = 0.0


class Drops(Deep):
    """Its loss is a mean, but microbatches would draw other masks."""

    dropout = 0.5

    def training_step(self, batch, batch_idx):
        return Plain.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("small_bytes", [0, 2**30], ids=["shapes", "real steps"])
@pytest.mark.parametrize("make", [Deep, Drops])
def test_a_budget_takes_tiles_where_microbatches_change_the_result(make, small_bytes, monkeypatch):
    monkeypatch.setattr("lightning_memsave.prediction.budgeted_run.SMALL_BYTES", small_bytes)
    settings = {"activations": False, "checkpointing": False, "optimizer_state": False}
    plain, ours = make(), make()
    ours.load_state_dict(plain.state_dict())
    torch.manual_seed(2)
    train(MemSave("measure"), plain)
    memsave = MemSave(budget="0.6x", **settings)
    torch.manual_seed(2)
    train(memsave, ours)
    (tiles,) = [config for config in memsave.plan.techniques if isinstance(config, Tiling)]
    assert (tiles.modules, tiles.dim) == (("net",), 0)
    assert memsave.plan.loss_class == memsave.report.loss_class == "exact"
    assert memsave.report.peak_bytes + memsave.plan.workspace_bytes <= memsave.plan.budget_bytes
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert Plan.from_json(memsave.plan.to_json()).techniques == memsave.plan.techniques


class Mixes(Contrastive):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(128))


@pytest.mark.parametrize(("make", "expected"), [(Contrastive, ("net",)), (ByHand, ("net",)), (Mixes, ())])
def test_a_few_samples_tell_which_modules_may_run_in_tiles(make, expected):
    assert Trial(make(), batch()).tiled().modules == expected


QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False}


class Long(L.LightningModule):
    """An MLP over few and long samples, whose positions are related before it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))

    def training_step(self, batch, batch_idx):
        h = batch + batch.cumsum(1) / batch.shape[1]
        return (h + self.mlp(h)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("small_bytes", [0, 2**30], ids=["shapes", "real steps"])
def test_a_budget_that_one_sample_is_too_long_for_takes_tiles_of_positions(small_bytes, monkeypatch):
    monkeypatch.setattr("lightning_memsave.prediction.budgeted_run.SMALL_BYTES", small_bytes)

    def fit(*callbacks):
        module = Long()
        trainer = L.Trainer(max_steps=3, callbacks=[*callbacks], **QUIET)
        trainer.fit(module, DataLoader(torch.randn(3, 1024, 16, generator=torch.Generator().manual_seed(0)), 1))
        return module

    least = MemSave(budget="0.01x")
    with pytest.raises(ValueError, match="`budget` must be at least") as refused:
        fit(least)
    assert "dim=1" in str(refused.value)
    num_bytes = int(str(refused.value).split(" bytes)")[0].split("(")[-1])
    without = MemSave(budget=num_bytes, tiling=False)
    with pytest.raises(ValueError, match="`budget` must be at least"):
        fit(without)
    memsave = MemSave(budget=num_bytes)
    ours, plain = fit(memsave), fit()
    (tiles,) = [config for config in memsave.plan.techniques if isinstance(config, Tiling)]
    assert (tiles.modules, tiles.dim) == (("mlp",), 1)
    assert memsave.report.loss_class == "exact"
    assert memsave.report.peak_bytes + memsave.plan.workspace_bytes <= num_bytes
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_positions_are_asked_for_only_where_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(Trial, "tiled_positions", lambda self: pytest.fail("a step for nothing"))
    memsave = MemSave(budget="0.7x")
    L.Trainer(max_steps=1, callbacks=[memsave], **QUIET).fit(Long(), DataLoader(torch.randn(2, 1024, 16), 2))
    assert memsave.plan is not None


def test_where_batches_are_cut_exactly_no_tiles_are_looked_for(monkeypatch):
    monkeypatch.setattr(Trial, "tiled", lambda self: pytest.fail("a step for nothing"))
    assert _situation(Plain(), batch(), Recipe("mine"), None).tiled == NOT_TILED
    switched_off = Recipe("mine", (), (Tiling,))
    assert _situation(Contrastive(), batch(), switched_off, None).tiled == NOT_TILED


def test_the_smallest_peak_that_a_refusal_names_is_enough_and_is_that_of_the_best_regions():
    module = Contrastive()
    only_regions = {"activations": False, "microbatch": False, "optimizer_state": False}
    with pytest.raises(ValueError, match="`budget` must be at least") as refusal:
        plan_training(module, batch(), MemSave(budget="0.01x", **only_regions))
    least = int(str(refusal.value).split("(")[1].split(" bytes")[0])
    named = Trial(module, batch())
    others = (named((Checkpointing(method=method),)) for method in ("sqrt", "recursive"))
    assert least < min(other.peak_bytes + other.workspace_bytes for other in others)
    memsave = MemSave(budget=least, **only_regions)
    train(memsave, Contrastive())
    assert memsave.report.peak_bytes + memsave.plan.workspace_bytes <= least


def test_a_trial_chooses_the_regions_of_the_run():
    techniques = (Microbatching(size=4), Checkpointing(budget=272_000))
    memsave = MemSave(Recipe("cut", techniques))
    train(memsave, Plain())
    found = Trial(Plain(), batch())(techniques)
    assert 0 <= found.peak_bytes - memsave.report.peak_bytes <= 64 * (SAMPLES // 4 - 2)  # what is noted of each


class Ends(Plain):
    """Ends the epoch at the start of a batch, or in the middle of its step."""

    def __init__(self, at, in_step):
        super().__init__()
        self.at, self.in_step = at, in_step

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == self.at and not self.in_step else None

    def training_step(self, batch, batch_idx):
        if batch_idx == self.at and self.in_step:
            raise StopIteration
        return super().training_step(batch, batch_idx)


def compiles():
    """Return whether the compiler compiles what it is given."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(3))
    return bool(graphs)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_a_step_that_ends_its_epoch_leaves_nothing_on(at, in_step):
    module = Ends(at, in_step)
    if at < 2:
        with pytest.raises(ValueError, match="No step can be predicted"):
            plan_training(module, batch(), MemSave(budget="1x"))
    else:
        plan_training(module, batch(), MemSave(budget="1x"))
    assert _get_current_dispatch_mode_stack() == []
    assert not torch.autograd.profiler._is_profiler_enabled
    assert compiles(), "or nothing would be compiled in this process any more"
