"""What relates samples is found wherever in a batch, or in a run, it is."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import MemSave, Microbatching
from lightning_memsave.loops.probe_samples import Subject
from tests.loops.loss_runs import Base, applied, compare, fit


def rare(num=4):
    """Batches with one sample of the second class, each at another place."""
    batches = []
    for number in range(num):
        y = torch.zeros(16, dtype=torch.long)
        y[[2, 6, 9][number % 3]] = 1
        batches.append((torch.randn(16, 6), y))
    return batches


def alike(num=4):
    """Batches with four samples of each class, one after the other."""
    return [(torch.randn(32, 6), torch.arange(8).repeat_interleave(4)) for _ in range(num)]


class ClassWeights(Base):
    def loss(self, z, y):
        return F.cross_entropy(z[:, :2], y, weight=torch.tensor([1.0, 20.0]))


class SupCon(Base):
    def loss(self, z, y):
        n, same = F.normalize(z, dim=1), y[:, None] == y
        eye = torch.eye(len(z), dtype=torch.bool)
        similar = (n @ n.T / 0.1).masked_fill(eye, -1e9)
        positive, has = same & ~eye, (same & ~eye).any(1)
        log_p = similar - similar.logsumexp(1, keepdim=True)
        loss = z.square().sum(1).mean()
        return loss - (log_p * positive).sum(1)[has].mean() / 3 if has.any() else loss


class MeanOfThePresent(Base):
    def loss(self, z, y):
        return F.mse_loss(z[:, 0][y == 0], torch.ones(int((y == 0).sum())))


@pytest.mark.parametrize(("make", "batches"), [(ClassWeights, rare), (SupCon, alike), (MeanOfThePresent, rare)])
def test_a_rare_class_and_samples_of_one_class_are_found_among_all(make, batches):
    torch.manual_seed(0)
    report, apart, messages = compare(make(), batches())
    assert apart == 0
    assert "Batches are not cut" in messages[0]
    assert applied(report) is None


class TwoTasks(Base):
    """Every fourth batch has a loss that relates samples."""

    def training_step(self, batch, batch_idx):
        z = self.head(self.first(batch[0]).tanh())
        if batch_idx % 4 != 2:
            return F.cross_entropy(z, batch[1])
        n = F.normalize(z, dim=1)
        return F.cross_entropy(n @ n.roll(1, 1).T / 0.1, torch.arange(len(z)))


def test_a_loss_of_another_kind_is_asked_about_when_it_comes_again():
    torch.manual_seed(0)
    batches = [(torch.randn(12, 6), torch.randint(4, (12,))) for _ in range(16)]
    report, _, messages = compare(TwoTasks(), batches)
    assert report.loss_class == "changed", "a batch had been cut by then"
    assert any("neither the mean" in message for message in messages)


def test_all_samples_are_looked_at_as_many_at_a_time_as_a_microbatch_has():
    batch = torch.arange(23)
    groups = list(Subject.all_of(batch, 23, Microbatching(size=8)))
    assert [list(group.whole) for group in groups] == [list(range(8)), list(range(8, 16)), list(range(16, 23))]
    for group in groups:
        assert torch.equal(torch.cat([part for part, _ in group.parts]), group.whole)
        assert [len(part) for part, _ in group.parts] == [size for _, size in group.parts]
    many = list(Subject.all_of(torch.arange(1001), 1001, Microbatching(size=1)))
    assert len(many) == 32
    assert (int(many[0].whole[0]), int(many[-1].whole[-1])) == (0, 999)


def test_nothing_reads_a_weight_that_is_computed_with_an_effect():
    class Spectral(Base):
        def __init__(self):
            super().__init__()
            self.first = nn.utils.parametrizations.spectral_norm(self.first)

    torch.manual_seed(0)
    data = [(torch.randn(12, 6), torch.randint(4, (12,))) for _ in range(4)]
    module = Spectral()
    plain = fit(copy.deepcopy(module), data)
    for memsave in (MemSave(), MemSave("exact"), MemSave("measure"), MemSave(microbatch=20)):
        ours = fit(copy.deepcopy(module), data, memsave)
        for (name, found), expected in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(found, expected, msg=name, rtol=1e-5, atol=1e-6)
