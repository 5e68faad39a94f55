"""Parameters that are int8 codes, in the hands of users and libraries: read, edited, frozen, looked up, predicted."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import (
    Ledger,
    LowPrecision,
    MemSave,
    OptimizerState,
    Tiling,
    apply_low_precision,
    apply_tiling,
    predict,
)
from lightning_memsave.numerics.row_codes import encode_rows
from lightning_memsave.techniques.low_precision.int8_parameter import Int8, become_int8, parameters_for_int8


def twins():
    """A layer with codes, and a plain one with the same weight in bfloat16."""
    torch.manual_seed(0)
    coded = nn.Linear(12, 8)
    become_int8(coded.weight)
    plain = copy.deepcopy(coded)
    plain.weight = nn.Parameter(coded.weight.whole().bfloat16())
    return coded, plain


VALUES = {
    "float": lambda w: w.float(),
    "to": lambda w: w.to(torch.float64),
    "detach": lambda w: w.detach() * 2,
    "data": lambda w: w.data[2:4],
    "norm": lambda w: w.norm(),
    "sum of squares": lambda w: (w**2).sum(),
    "product": lambda w: w @ w.T,
    "cat": lambda w: torch.cat([w, w.flatten()[None].view(8, 12)]),
    "mse": lambda w: F.mse_loss(w, torch.zeros_like(w)),
    "list": lambda w: torch.tensor(w.tolist()),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "clone": lambda w: w.clone(),
    "compare": lambda w: w == w.detach(),
    "like": lambda w: torch.zeros_like(w),
    "embedding bag": lambda w: F.embedding_bag(torch.tensor([[1, 2], [3, 3]]), w, mode="sum"),
    "max_norm": lambda w: F.embedding(torch.tensor([1, 2]), w.detach().clone(), max_norm=0.1),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_function_gets_the_weights(name):
    coded, plain = twins()
    found, expected = VALUES[name](coded.weight), VALUES[name](plain.weight)
    assert torch.equal(found, expected)
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    if expected.requires_grad:
        for layer, value in ((coded, found), (plain, expected)):
            layer.weight.grad = None
            value.float().square().sum().backward()
        assert torch.equal(coded.weight.grad, plain.weight.grad)


EDITS = {
    "copy_": lambda w: w.copy_(torch.full((8, 12), 0.25)),
    "data.copy_": lambda w: w.data.copy_(torch.full((8, 12), 0.25)),
    "detach().mul_": lambda w: w.detach().mul_(2),
    "clamp_": lambda w: w.clamp_(-0.125, 0.125),
    "+=": lambda w: w.__iadd__(1),
    "item": lambda w: w.__setitem__((slice(None), 3), 0.5),
    "data =": lambda w: setattr(w, "data", torch.full((8, 12), -2.0)),
    "data +=": lambda w: setattr(w, "data", w.data.__iadd__(1)),
    "zeros_": lambda w: nn.init.zeros_(w),
    "constant_": lambda w: nn.init.constant_(w, 0.5),
    "out": lambda w: torch.add(w, 1, out=w.data),
    "vector": lambda w: nn.utils.vector_to_parameters(torch.full((96,), 0.5), [w]),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_kept_to_the_nearest_code(name):
    coded, plain = twins()
    before = coded.weight.whole()
    for layer in (coded, plain):
        with torch.no_grad():
            EDITS[name](layer.weight)
    assert isinstance(coded.weight, Int8)
    assert not torch.equal(coded.weight.whole(), before)
    step = encode_rows(plain.weight.float(), None)[1].float()[:, None]
    assert ((coded.weight.whole() - plain.weight.float()).abs() <= 0.51 * step).all()  # and bfloat16's own rounding


def test_edits_that_torch_refuses_are_refused():
    coded, _ = twins()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        coded.weight.mul_(2)
    with pytest.raises(RuntimeError, match="would edit several tensors at once"), torch.no_grad():
        torch._foreach_mul_([coded.weight, coded.bias], 2)
    assert torch.equal(coded.weight.whole(), twins()[0].weight.whole())


def test_an_edit_of_a_view_that_would_be_lost_is_refused():
    coded, _ = twins()
    for view in (lambda w: w[0], lambda w: w.data.t(), lambda w: w.detach().view(-1)[3:5]):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"), torch.no_grad():
            view(coded.weight).fill_(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not coded(torch.ones(1, 12)).is_inference()
        assert not coded.weight.clone().is_inference()


@pytest.mark.parametrize("name", ["embedding", "embedding_bag"])
@pytest.mark.parametrize("grad", [True, False])
def test_max_norm_renormalises_the_table_itself(name, grad):
    coded, _ = twins()
    wanted, index = coded.weight.whole(), torch.tensor([[1, 2], [3, 3]])  # in float32
    with torch.set_grad_enabled(grad):
        ours = getattr(F, name)(index, coded.weight, max_norm=0.5)
    getattr(F, name)(index, wanted, max_norm=0.5)
    step = encode_rows(wanted, None)[1].float()[:, None]
    assert ((coded.weight.whole() - wanted).abs() <= 0.5 * step).all()
    assert wanted[1:4].norm(dim=1).max() < 0.501 < wanted.norm(dim=1).max()  # other rows are as they were
    assert torch.equal(ours, getattr(F, name)(index, coded.weight.whole().bfloat16()))


def test_it_is_the_leaf_that_it_was():
    coded, _ = twins()
    w, calls = coded.weight, []
    assert (w.is_leaf, w.requires_grad, w.shape, w.dtype, w.numel()) == (True, True, (8, 12), torch.bfloat16, 96)
    assert coded.get_parameter("weight") is w
    w.register_hook(lambda gradient: calls.append(1) or gradient * 2)
    w.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    (w * 1.0).sum().backward()
    assert calls[0] == 1
    assert calls[1] is w
    assert torch.equal(w.grad, torch.full((8, 12), 2.0, dtype=torch.bfloat16))
    (gradient,) = torch.autograd.grad((w * 3.0).sum(), w)
    assert (gradient == 6).all()  # with the hook
    optimizer = torch.optim.SGD([w], 0.1)
    assert w in optimizer.state or len(optimizer.state) == 0
    coded.requires_grad_(False)
    assert not w.requires_grad


def test_second_derivatives_go_through_codes():
    coded, plain = twins()
    x = torch.randn(4, 12, dtype=torch.bfloat16, requires_grad=True)

    def penalty(layer):
        (gradient,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        layer.weight.grad = None
        gradient.square().sum().backward()
        return layer.weight.grad

    coded.bias, plain.bias = None, None
    assert torch.equal(penalty(coded), penalty(plain))


@pytest.mark.parametrize("is_frozen", [True, False])
def test_frozen_weights_are_not_kept_either(is_frozen):
    """The base of a LoRA model: the weight is read for the gradient of the input alone."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    apply_low_precision(model, torch.optim.SGD(model.parameters(), 0.1), LowPrecision(format="int8-sr"))
    model.requires_grad_(not is_frozen)
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    with Ledger().watching(model, batch=x) as ledger:
        before = ledger.live_bytes
        loss = model(x).sum()
        held = ledger.live_bytes - before
    assert held == (0 if is_frozen else 2 * 2 * 64 * 2) + 2
    loss.backward()


def test_a_table_decodes_the_rows_that_are_read():
    table = nn.Embedding(5000, 64)
    become_int8(table.weight)
    table.requires_grad_(False)
    index = torch.tensor([3, 4999, 3])
    with Ledger().watching(table, batch=index) as ledger:
        rows = table(index)
    assert torch.equal(rows, table.weight.decoded()[index])
    assert ledger.measurement.peak_bytes - ledger.measurement.held_bytes < 20 * rows.numel()


def test_compiled_modules_keep_sixteen_bits():
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4)))
    assert parameters_for_int8(model) == {model[0].weight}


class Product(torch.autograd.Function):
    """A fused layer of a library's own, which is called with the parameter itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class OwnFunction(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 16, bias=False)

    def training_step(self, batch, batch_idx):
        return Product.apply(batch.bfloat16(), self.layer.weight).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_function_of_a_library_gets_the_parameter_and_computes_with_weights():
    coded, plain = twins()
    x = torch.randn(4, 12, dtype=torch.bfloat16, requires_grad=True)
    found = [Product.apply(x, layer.weight) for layer in (coded, plain)]
    assert torch.equal(*found)
    for y in found:
        y.float().square().sum().backward()
    assert torch.equal(coded.weight.grad, plain.weight.grad)
    check_prediction(OwnFunction, torch.randn(16, 32), {"precision": "int8-sr"})


def check_prediction(make, data, settings):
    memsave = MemSave("measure", summary=False, **settings)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make(), DataLoader(data, 4))
    prediction = predict(make(), data[:4], MemSave("measure", **settings))
    assert prediction.source == "fake"
    assert prediction.peak_bytes == memsave.report.peak_bytes


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_prediction_is_what_is_measured(name):
    """With a head whose logits are deferred, which is asked for its weight as well."""
    shape = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    state = OptimizerState(first_moment="4bit", gradients="release", min_size=0)
    settings = {"activations": ["exact", "linear-cross-entropy"], "checkpointing": "blocks", "optimizer_state": state}
    settings = {"precision": "int8-sr", **(settings if name == "everything" else {})}

    class Language(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **shape))

        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    check_prediction(Language, torch.randint(0, 200, (12, 16)), settings)


class PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_weight_that_a_function_passes_on_is_refused_where_its_gradient_would_be_lost():
    coded, plain = twins()
    with pytest.raises(RuntimeError, match="a function has passed on a weight as its own result"):
        F.linear(torch.ones(1, 12), PassedOn.apply(coded.weight))
    gradients = []
    for layer in (coded, plain):
        leaf = layer.weight.detach().requires_grad_()
        (leaf.float() * 3).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_tiles_compute_with_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    apply_low_precision(model, torch.optim.SGD(model.parameters(), 0.1), LowPrecision(format="int8-sr"))
    found = []
    for tiled in (False, True):
        model.zero_grad()
        applied = apply_tiling(model, Tiling(dim=0, size=2)) if tiled else None
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(16, 12, generator=generator).bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            model(x).square().mean().backward()
        if applied is not None:
            applied.undo()
        found.append([p.grad.float() for p in model.parameters()])
    for whole, tiles in zip(*found, strict=True):
        assert (whole - tiles).norm() < 0.02 * whole.norm()  # sums in bfloat16
