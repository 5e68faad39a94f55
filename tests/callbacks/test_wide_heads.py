"""Models that end in a vocabulary: recipes, budgets, recovery and advice let their losses keep no logits."""

from __future__ import annotations

import contextlib

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import (
    ActivationCompression,
    MemSave,
    Microbatching,
    NoEffectWarning,
    plan_training,
    predict,
)
from lightning_memsave.loops import forward_scope, planned_checkpointing
from lightning_memsave.loops.probe_samples import FEWEST_SAMPLES
from lightning_memsave.prediction import after_fit, budgeted_run
from lightning_memsave.prediction.real_run import Trial
from lightning_memsave.saved_tensors import LogitsAskedError, SavedTensorStore
from lightning_memsave.saved_tensors.deferred_logits import DeferredLogits
from lightning_memsave.techniques.activation_compression import has_wide_head
from lightning_memsave.torch_internals.fake_tensors import is_fake

WIDTH, CLASSES, BATCH, TIME = 16, 2048, 16, 32
HEAD = "linear-cross-entropy"
LOGITS_BYTES = BATCH * TIME * CLASSES * 4


class Words(L.LightningModule):
    """Predicts the next of `CLASSES` words; `num_classes` as few as there are features is no vocabulary."""

    def __init__(self, num_classes=CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(num_classes, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(WIDTH, num_classes)

    def loss(self, batch):
        logits = self.head(self.blocks(self.embedding(batch)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class ByHand(Words):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def words(num_classes=CLASSES):
    return torch.randint(num_classes, (BATCH, TIME), generator=torch.Generator().manual_seed(1))


class Look(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.session = trainer.strategy.memsave


def fitted(module, *args, **slots):
    memsave, look = MemSave(*args, **slots), Look()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=[memsave, look], enable_checkpointing=False, **quiet)
    trainer.fit(module, DataLoader(words(module.head.out_features).repeat(2, 1), BATCH))
    return memsave.report, look.session


def codecs_of(session):
    config = session.recipe.get(ActivationCompression)
    return None if config is None else config.codecs


@pytest.mark.parametrize(
    ("recipe", "wide", "narrow"),
    [
        ("lossless", None, None),
        ("exact", (HEAD,), None),
        ("balanced", ("exact", HEAD, "int4-chain"), ("exact", "int4-chain")),
    ],
)
def test_recipes_keep_no_logits_of_a_vocabulary_and_are_as_before_without_one(recipe, wide, narrow):
    assert codecs_of(fitted(Words(), recipe)[1]) == wide
    assert codecs_of(fitted(Words(64), recipe)[1]) == narrow
    assert codecs_of(fitted(ByHand(), recipe)[1]) == narrow, "logits may be read after the step"


def test_what_was_set_is_left_as_it_is_set():
    assert codecs_of(fitted(ByHand(), "exact", activations=HEAD)[1]) == (HEAD,)
    assert codecs_of(fitted(Words(), "exact", activations="exact")[1]) == ("exact",)
    assert codecs_of(fitted(Words(), "exact", activations=False)[1]) is None


def test_the_exact_recipe_takes_no_logits_and_has_the_plain_weights():
    plain, ours = Words(), Words()
    measured, report = fitted(plain, "measure")[0], fitted(ours, "exact")[0]
    assert report.peak_bytes < measured.peak_bytes - 2 * LOGITS_BYTES
    assert report.loss_class == "exact"
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codecs", [HEAD, ["exact", HEAD]], ids=str)
def test_a_prediction_of_the_first_chunks_of_classes_has_the_bytes_of_them_all(codecs, monkeypatch):
    monkeypatch.setattr("lightning_memsave.saved_tensors.linear_cross_entropy.CHUNK_NUMEL", {"cpu": 2**15})  # 32 chunks
    predicted = predict(Words(), words(), MemSave("measure", activations=codecs))
    assert predicted.source == "fake"
    assert predicted.peak_bytes == fitted(Words(), "measure", activations=codecs)[0].peak_bytes


@pytest.mark.parametrize("is_small", [True, False], ids=["real steps", "shapes"])
@pytest.mark.parametrize("recipe", ["lossless", "balanced"])
def test_a_budget_that_logits_alone_exceed_is_met_exactly(recipe, is_small, monkeypatch):
    if not is_small:
        monkeypatch.setattr(budgeted_run, "SMALL_BYTES", 0)
    plan = plan_training(Words(), words(), MemSave(recipe, budget=LOGITS_BYTES, microbatch=False))
    assert plan.as_recipe().get(ActivationCompression).codecs in ((HEAD,), ("exact", HEAD))
    assert plan.loss_class == "exact"
    report = fitted(Words(), plan)[0]
    assert report.peak_bytes == plan.peak_bytes


def test_no_budget_takes_logits_away_that_are_none():
    plan = plan_training(Words(64), words(64), MemSave("balanced", budget="0.7x"))
    config = plan.as_recipe().get(ActivationCompression)
    assert config is None or HEAD not in config.codecs


def test_what_it_takes_to_ask_how_the_loss_depends_on_the_batch_is_planned_for(monkeypatch):
    """It evaluates five samples, where a microbatch may have one."""
    cut = Trial(Words(), words()).cut(Microbatching())
    assert not cut.why_not
    each = LOGITS_BYTES // BATCH
    assert 2.8 * each < cut.asking_bytes < 3.1 * each, "logits, a copy of all but the last, and log-probabilities"
    monkeypatch.setattr(budgeted_run, "SMALL_BYTES", 0)
    settings = {"activations": False, "checkpointing": False, "optimizer_state": False}
    with pytest.raises(ValueError, match=r"must be at least .* bytes") as refused:
        plan_training(Words(), words(), MemSave(budget=(FEWEST_SAMPLES - 1) * 3 * each, **settings))
    assert "microbatch" in str(refused.value)
    plan = plan_training(Words(), words(), MemSave(budget=(FEWEST_SAMPLES + 2) * 3 * each, **settings))
    assert plan.techniques
    assert plan.peak_bytes + plan.workspace_bytes <= plan.budget_bytes


@pytest.mark.parametrize(("make", "codecs"), [(Words, ("exact", HEAD)), (ByHand, ("exact",))])
def test_recovery_takes_logits_away_where_nobody_reads_them_later(make, codecs):
    class Takes(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                self.what = trainer.strategy.memsave.fallbacks.take_next(trainer)
                self.config = trainer.strategy.memsave.scopes.activations._config

    takes = Takes()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, callbacks=[MemSave(), takes], enable_checkpointing=False, **options
    )
    trainer.fit(make(), DataLoader(words(), BATCH))
    assert takes.config.codecs == codecs
    assert takes.what.endswith("a loss without logits") is (HEAD in codecs)


def test_the_box_advises_it(monkeypatch):
    monkeypatch.setattr(after_fit, "LEAST_SECONDS", 60.0)
    report = fitted(Words(), "lossless")[0]
    assert report.next_setting == 'activations=["exact", "linear-cross-entropy"]'
    assert report.next_peak_bytes == fitted(Words(), activations=["exact", HEAD])[0].peak_bytes


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(128, 1025), True),
        (nn.Linear(128, 1024), False),
        (nn.Linear(16, 1000), False),
        (nn.Sequential(nn.Embedding(50_000, 16), nn.Linear(16, 64)), False),
        (nn.LazyLinear(50_000), False),
    ],
    ids=str,
)
def test_a_vocabulary_has_more_than_a_thousand_classes_and_eight_for_each_feature(model, expected):
    assert has_wide_head(model) is expected


def test_a_head_that_is_compiled_with_all_the_rest_is_none():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, CLASSES))
    assert has_wide_head(model)
    model.compile(backend="eager")
    assert not has_wide_head(model)


class AsksLogits(Words):
    """GradNorm and its kin ask for the gradient of the logits."""

    def training_step(self, batch, batch_idx):
        logits = self.head(self.blocks(self.embedding(batch)))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        return loss + gradient.square().sum()


def test_a_step_that_asks_for_the_gradient_of_logits_gets_them():
    plain, ours = AsksLogits(), AsksLogits()
    fitted(plain, "measure")
    with pytest.warns(NoEffectWarning, match="Logits are computed and kept"):
        fitted(ours, "exact")
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def test_the_gradient_of_logits_is_refused_without_a_run_that_could_go_on():
    model = Words()
    with SavedTensorStore(chunk_loss=True).scope():
        logits = F.linear(torch.randn(8, WIDTH, requires_grad=True), model.head.weight)
        loss = F.cross_entropy(logits, torch.arange(8))
        with pytest.raises(LogitsAskedError, match="so their gradient is not found"):
            torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("change", [lambda w: w.mul_(0.5), lambda w: w.clamp_(-0.1, 0.1)], ids=["halved", "clamped"])
def test_a_weight_that_is_written_to_through_data_before_backward_is_an_error(change):
    class Clamps(Words):
        def on_before_backward(self, loss):
            change(self.head.weight.data)

    fitted(Clamps(64), "exact")
    with pytest.raises(RuntimeError, match=r"somebody has written to it since through `.data`"):
        fitted(Clamps(), "exact")


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_few_rows_of_many_classes_take_no_more_than_in_plain_torch(rows):
    class Few(Words):
        def loss(self, batch):
            return F.cross_entropy(self.head(self.blocks(self.embedding(batch[:, 0]))[:rows]), batch[:rows, 1])

    peaks = [fitted(Few(), "measure", activations=each)[0].peak_bytes for each in (False, HEAD)]
    assert peaks[1] <= 1.01 * peaks[0]


@pytest.mark.parametrize(
    "of", [lambda h: h.transpose(0, 1), lambda h: h[:, :-1], lambda h: h[:, 0], lambda h: h], ids=range(4)
)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_that_are_not_contiguous_have_no_logits_either(of, bias):
    torch.manual_seed(0)
    h = torch.randn(4, 6, WIDTH, requires_grad=True)
    head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def step(store):
        h.grad = None
        head.zero_grad()
        with store.scope() if store else contextlib.nullcontext():
            logits = head(of(h))
            is_deferred = type(logits) is DeferredLogits
            target = torch.arange(logits.shape[:-1].numel())
            loss = F.cross_entropy(logits.flatten(0, -2), target)
        loss.backward()
        return is_deferred, loss.detach(), h.grad, head.weight.grad

    plain, ours = step(None), step(SavedTensorStore(chunk_loss=True))
    assert ours[0]
    for a, b in zip(plain[1:], ours[1:], strict=True):
        torch.testing.assert_close(a, b)


def test_asking_how_a_loss_depends_on_the_batch_computes_no_logits(monkeypatch):
    monkeypatch.setattr("lightning_memsave.saved_tensors.linear_cross_entropy.CHUNK_NUMEL", {"cpu": 2**13})
    cut = Trial(Words(), words()).cut(Microbatching(), ActivationCompression(codecs=(HEAD,)))
    assert not cut.why_not
    assert cut.asking_bytes < Trial(Words(), words()).cut(Microbatching()).asking_bytes / 4
    report = fitted(Words(), "measure", microbatch=1, activations=HEAD)[0]
    plain = fitted(Words(), "measure", microbatch=1)[0]
    assert report.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("method", ["sqrt", "recursive"])
def test_planned_regions_leave_out_the_head_whose_logits_are_not_computed(method):
    alone = fitted(Words(), "measure", activations=HEAD)[0]
    both = fitted(Words(), "measure", activations=HEAD, checkpointing=method)[0]
    assert both.peak_bytes <= alone.peak_bytes
    regions = fitted(Words(), "measure", checkpointing=method)[0]
    assert both.peak_bytes < regions.peak_bytes - LOGITS_BYTES


def test_where_a_rehearsal_runs_out_of_memory_it_sees_no_logits_on_shapes_either(monkeypatch):
    plans, trace = [], planned_checkpointing.trace_step

    def limited(module, step, held):
        if not is_fake(held[0]):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return trace(module, step, held=held)

    monkeypatch.setattr(planned_checkpointing, "trace_step", limited)
    monkeypatch.setattr(planned_checkpointing.PlannedCheckpointing, "_apply", lambda self, _, plan: plans.append(plan))
    module = Words()
    fitted(module, "measure", activations=["exact", HEAD], checkpointing="sqrt")
    (plan, *_) = plans
    plain = fitted(Words(), "measure")[0].peak_bytes
    assert plan.baseline_peak_bytes < plain - LOGITS_BYTES


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_are_not_taken_for_a_weight_that_was_written_to(scale, dtype):
    torch.manual_seed(0)
    head, h = nn.Linear(64, CLASSES).to(dtype), torch.randn(32, 64, dtype=dtype)
    with torch.no_grad():
        head.weight.mul_(scale)
    for is_read in (False, True):
        x = h.clone().requires_grad_()
        with SavedTensorStore(chunk_loss=True).scope():
            logits = head(x)
            assert not is_read or logits.sum().isfinite()
            loss = F.cross_entropy(logits, torch.arange(32))
        loss.backward()
        assert x.grad.isfinite().all()


def test_weights_that_are_freed_before_backward_keep_recipes_and_recovery_from_it(monkeypatch):
    module = Words()
    assert forward_scope.may_drop_logits(module)
    monkeypatch.setattr(forward_scope, "frees_weights", lambda module: True)
    assert not forward_scope.may_drop_logits(module)
    assert codecs_of(fitted(module, "exact")[1]) is None
