"""Operations whose outputs are as large as values say: on fake tensors as large as real ones."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from lightning_memsave import MemSave, predict
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.simulation.fake_model import fake_tensors
from lightning_memsave.simulation.known_sizes import ReadsValueError
from lightning_memsave.simulation.known_sizes import pad_packed_sequence as pad_as_torch
from lightning_memsave.torch_internals.fake_tensors import is_fake


def batch():
    ids = torch.arange(48).view(4, 12) % 30
    labels = ids.masked_fill(torch.arange(12) >= torch.tensor([[3], [12], [1], [7]]), -100)
    return ids, labels, (labels != -100).sum(1)


SELECTIONS = {
    "mask": lambda x, ids, labels, lengths: x[labels != -100],
    "mask of two dimensions beside an index": lambda x, ids, labels, lengths: x[labels != -100, torch.tensor(0)],
    "mask of the first dimension": lambda x, ids, labels, lengths: x[lengths > 2],
    "bytes": lambda x, ids, labels, lengths: x[(labels[:, 0] > 2).to(torch.uint8)],
    "masked_select": lambda x, ids, labels, lengths: x.masked_select((labels > 3)[..., None]),
    "positions": lambda x, ids, labels, lengths: x[(labels > 3).nonzero(as_tuple=True)],
    "repeated": lambda x, ids, labels, lengths: x.repeat_interleave(lengths, 0),
    "counted": lambda x, ids, labels, lengths: x[: len(ids.unique())],
    "packed": lambda x, ids, labels, lengths: pack_padded_sequence(
        x, lengths.cpu(), batch_first=True, enforce_sorted=False
    ),
    "packed, steps first": lambda x, ids, labels, lengths: pack_padded_sequence(
        x.transpose(0, 1), lengths.sort(descending=True).values
    ),
    "in a loop": lambda x, ids, labels, lengths: [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)],
}


def shapes(tree):
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_are_as_large_as_real_ones(name):
    select, real = SELECTIONS[name], batch()
    with fake_tensors(nn.Identity()) as fake:
        made = select(torch.randn(4, 12, 5), *fake(real))
    assert shapes(made) == shapes(select(torch.randn(4, 12, 5), *real))


def test_what_is_picked_out_by_values_that_are_not_known_has_no_size():
    for select in (lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.masked_select(x > 0), torch.unique):
        says = r"a size depends on values at .*test_known_sizes\.py:\d+ "
        with fake_tensors(nn.Identity()), pytest.raises(ReadsValueError, match=says):
            select(torch.randn(5))


def test_how_long_packed_sequences_are_is_real():
    with fake_tensors(nn.Identity()) as fake:
        packed = pack_padded_sequence(torch.randn(4, 12, 5), fake(batch())[2], batch_first=True, enforce_sorted=False)
        assert is_fake(packed.data)
        assert not is_fake(packed.batch_sizes.detach())
    real = pack_padded_sequence(torch.randn(4, 12, 5), batch()[2], batch_first=True, enforce_sorted=False)
    assert packed.batch_sizes.tolist() == real.batch_sizes.tolist()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("total_length", [0, 15])
def test_padding_is_torchs_own(batch_first, total_length):
    x = torch.randn(4, 12, 5, requires_grad=True)
    packed = pack_padded_sequence(x, batch()[2], batch_first=True, enforce_sorted=False)
    arguments = packed.data, packed.batch_sizes, batch_first, -1.5, total_length
    expected, ours = torch._VF._pad_packed_sequence(*arguments), pad_as_torch(*arguments)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    weights = torch.randn_like(expected[0])
    gradients = [torch.autograd.grad((out * weights).sum(), x, retain_graph=True)[0] for out, _ in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Recurrent(L.LightningModule):
    def __init__(self, kind, **settings):
        super().__init__()
        self.table = nn.Embedding(31, 16)
        self.layers = getattr(nn, kind)(16, 24, 2, batch_first=True, **settings)
        self.head = nn.Linear(48 if settings else 24, 31)

    def training_step(self, batch, batch_idx):
        ids, labels, lengths = batch
        packed = pack_padded_sequence(self.table(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True, total_length=12)
        mask = labels != -100
        return F.cross_entropy(self.head(out)[mask], labels[mask])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "bidirectional LSTM"])
@pytest.mark.parametrize("recipe", ["measure", "exact"])
def test_a_step_over_packed_sequences_is_predicted_without_running_it_to_the_byte(kind, recipe):
    settings = {"bidirectional": True} if " " in kind else {}
    module = Recurrent(kind.split()[-1], **settings)
    found = predict(module, batch(), MemSave(recipe))
    assert (found.source, found.flags) == ("fake", ())
    if recipe == "measure":
        real = Predictor(module, batch())
        real._why = "asked for"
        assert real(Recipe("plain", ())).peak_bytes == found.peak_bytes
