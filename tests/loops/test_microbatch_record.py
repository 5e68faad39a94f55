"""The record of microbatching: its loss class, the reasons, and what `strict` refuses."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import MemSave, Microbatching, MicrobatchWarning, NotLosslessWarning
from lightning_memsave.loops.microbatch_record import MicrobatchRecord
from tests.harness import Net, assert_same_run, fit
from tests.loops.whole_batches import EXACT, Module, batches


@pytest.mark.parametrize(("layer", "named"), [(nn.BatchNorm1d(5), "BatchNorm1d"), (nn.Dropout(0.5), "Dropout")])
def test_batchnorm_and_dropout_are_named_and_strict_refuses(layer, named):
    module = Module().double()
    module.net = nn.Sequential(layer, Net()).double()
    memsave = MemSave(microbatch=3)
    with pytest.warns(NotLosslessWarning, match=rf"net\.0 \({named}"):
        fit(module, batches(), memsave, precision="64-true")
    assert memsave.report.loss_class == "changed"
    assert named in memsave.report.loss_class_reasons[0]
    with pytest.raises(ValueError, match=rf"strict.*{named}"):
        fit(module, batches(), MemSave(microbatch=Microbatching(size=3, strict=True)), precision="64-true")


@pytest.mark.parametrize("recipe", ["lossless", "exact"])
def test_recipes_that_promise_the_same_result_warn_where_microbatches_change_it(recipe):
    module = Module().double()
    module.net = nn.Sequential(nn.Dropout(0.5), Net()).double()
    with pytest.warns(NotLosslessWarning, match="Dropout"):
        fit(module, batches(), MemSave(recipe, microbatch=3, checkpointing=False), precision="64-true")


class Draws(Module):
    """By itself, as models that call `F.dropout`."""

    def training_step(self, batch, batch_idx):
        return super().training_step((F.dropout(batch[0], 0.1), batch[1]), batch_idx)


def test_what_the_step_draws_is_seen_when_it_is_cut():
    memsave = MemSave(microbatch=3)
    with pytest.warns(NotLosslessWarning, match="training_step .it draws random numbers"):
        fit(Draws().double(), batches(), memsave, precision="64-true")
    assert memsave.report.loss_class == "changed"
    with pytest.raises(ValueError, match=r"strict.*draws random numbers"):
        fit(Draws().double(), batches(), MemSave(microbatch=Microbatching(size=3, strict=True)), precision="64-true")
    memsave = MemSave(microbatch=1000)
    fit(Draws().double(), batches(), memsave, precision="64-true")
    assert memsave.report.loss_class == "exact"  # nothing was cut


def test_strict_is_not_forgotten_where_recovery_tries_again():
    record = MicrobatchRecord(Microbatching(size=3, strict=True), warns=True)
    record.begin(nn.Identity(), "batches run")
    module, device = Module(), torch.device("cpu")
    for _ in range(3):
        with pytest.raises(ValueError, match="strict"), record.watch(module, device)(0):
            torch.rand(1)
    with record.watch(module, device)(0):
        pass
    assert record.applied(3, None).loss_class == "exact"


def test_a_frozen_batchnorm_is_exact():
    module = Module().double()
    module.net = nn.Sequential(nn.BatchNorm1d(5), Net()).double()
    memsave = MemSave(microbatch=3)

    class Freeze(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            pl_module.net[0].eval()

    plain = fit(module, batches(), precision="64-true", callbacks=[Freeze()])
    ours = fit(module, batches(), memsave, precision="64-true", callbacks=[Freeze()])
    assert_same_run(plain, ours, EXACT)
    assert memsave.report.loss_class == "exact"


def cut(record, module, num_parts=2, what=lambda module, part: None):
    """Run a batch in parts, each of which does `what`."""
    record.begin(module, "batches run")
    around = record.watch(module, torch.device("cpu"))
    for part in range(num_parts):
        with around(part):
            what(module, part)
    record.note_losses([torch.zeros(())] * num_parts)


def test_nothing_is_reported_before_a_batch_is_cut():
    record = MicrobatchRecord(Microbatching(size=3), warns=True)
    assert record.applied(3, "mean over samples") is None
    with pytest.warns(MicrobatchWarning, match="because of this"):
        record.ran_whole("because of this")
    for _ in range(2):  # a warning is an error here
        record.ran_whole("because of this")
    assert record.applied(3, None) is None
    cut(record, nn.Linear(2, 2))
    found = record.applied(3, "mean over samples")
    assert found.summary == "batches run in parts of at most 3 samples (loss: mean over samples); 3 batches ran whole"
    assert (found.loss_class, found.reasons) == ("exact", ())
    assert record.applied(None, None).summary == "batches run in parts; 3 batches ran whole"


@pytest.mark.parametrize("warns", [True, False])
def test_each_reason_is_kept_once_and_warned_of_where_that_is_worth_it(warns):
    record = MicrobatchRecord(Microbatching(size=3), warns=warns)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            record.begin(nn.Sequential(*(nn.Dropout() for _ in range(7))), "batches run")
            record.changes("something else")
    first, second = record.applied(3, None).reasons
    assert first.startswith("microbatches change the result of 0 (Dropout: other masks), 1 (Dropout")
    assert first.endswith("4 (Dropout: other masks) and 2 more")
    assert second == "something else"
    assert record.applied(3, None).loss_class == "changed"
    assert [each.category for each in caught] == [NotLosslessWarning] * (2 * warns)


def test_strict_makes_a_reason_an_error_before_anything_is_cut():
    record = MicrobatchRecord(Microbatching(size=3, strict=True), warns=True)
    for _ in range(2):  # asked again
        with pytest.raises(ValueError, match=r"`Microbatching.strict` forbids .*0 \(Dropout"):
            record.begin(nn.Sequential(nn.Dropout()), "batches run")
    assert record.applied(3, None) is None
    record.begin(nn.Sequential(nn.Dropout()).eval(), "batches run")
    assert record.applied(3, None).loss_class == "exact"


def test_steps_are_looked_at_in_batches_one_two_four_and_eight():
    def named_in(batch):
        """Whether a change that one batch alone makes is seen."""
        record, module = MicrobatchRecord(Microbatching(size=3), warns=False), L.LightningModule()
        module.seen = 0
        for number in range(1, 10):
            cut(record, module, 3, lambda m, part, is_it=number == batch: setattr(m, "seen", m.seen + is_it * part))
        return record.applied(3, None).loss_class == "changed"

    assert [batch for batch in range(1, 10) if named_in(batch)] == [1, 2, 4, 8]


def test_losses_of_some_parts_alone_are_a_reason():
    record, loss = MicrobatchRecord(Microbatching(size=3), warns=False), torch.zeros(())
    record.begin(nn.Identity(), "batches run")
    record.note_losses([None, None])  # the batch is skipped, as a whole one would be
    record.note_losses([loss, loss])
    assert record.applied(3, None).reasons == ()
    record.note_losses([loss, None])
    assert record.applied(3, None).reasons == (
        "training_step returned None for some microbatches, of which others have a loss",
    )


def test_that_evaluation_is_cut_is_told_by_a_record_once():
    record = MicrobatchRecord(None, warns=True)
    with pytest.warns(MicrobatchWarning, match="Memory ran out in evaluation"):
        record.warn_of_evaluation()
    record.warn_of_evaluation()  # a warning is an error here
