"""Uses of a step that are rare and right in plain torch: the same gradients with store and regions."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memsave import Checkpointing, Sparsity, apply_checkpointing, apply_sparsity
from tests.saved_tensors.nets import data, exact, int4
from tests.saved_tensors.region_nets import Kinds, Loop, assert_same, assert_same_steps, names, samples, with_regions


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------- the store
def both_modes(model, x):
    """A call in evaluation, whose graph waits while a call in training edits the statistics."""
    in_evaluation = model.eval()(x)
    in_training = model.train()(x + 1)
    return in_evaluation.square().mean() + in_training.square().mean()


def test_batchnorm_in_evaluation_is_recomputed_by_the_statistics_that_it_had():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    ours, x = copy.deepcopy(plain), torch.randn(4, 2, 8, 8)
    expected = gradients(plain, both_modes(plain, x))
    with exact().scope():
        loss = both_modes(ours, x)
    found = gradients(ours, loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_what_a_second_derivative_unpacks_stands_for_no_activation():
    """A ReLU's result that only its mask was kept of comes back as ones and zeros, and is kept once more."""
    torch.manual_seed(0)
    first, second, x = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), torch.randn(2, 2, 8, 8)

    def step(scope):
        model = nn.Sequential(copy.deepcopy(first), copy.deepcopy(second))
        given = x.clone().requires_grad_()

        def forward():  # lets go of what is kept as a mask
            h = torch.relu(model[0](given))
            other = torch.relu(model[0](given).flip(0)).mean()  # what waits for its next reader is whole
            (gradient,) = torch.autograd.grad(h.mean((2, 3)).sum(), given, create_graph=True)
            return model[1](h + 1.0).square().sum() + gradient.square().sum() + other

        with scope:
            loss = forward()
        return gradients(model, loss)

    assert_same(step(exact().scope()), step(contextlib.nullcontext()))


IN_PLACE = {
    "relu_": lambda x: x.relu_(),
    "F.relu": lambda x: F.relu(x, inplace=True),
    "nn.ReLU": nn.ReLU(inplace=True),
}


@pytest.mark.parametrize("relu", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("store", [exact, int4], ids=["exact", "int4"])
def test_a_relu_in_place_of_a_slice_is_closed_where_it_was(store, relu):
    torch.manual_seed(0)
    x, head = torch.randn(64, 32, requires_grad=True), nn.Linear(32, 8)

    def forward():  # lets go of what is kept in codes
        h = x * 1
        relu(h[:, :16])
        return head(h)

    with store().scope():
        out = forward()
    out.sum().backward()
    expected = head.weight.sum(0).detach().expand(64, 32).clone()
    expected[:, :16] *= x[:, :16] > 0
    torch.testing.assert_close(x.grad, expected)


class InFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.to(torch.float8_e4m3fn))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].float()


@pytest.mark.parametrize("store", [exact, int4], ids=["exact", "int4"])
@pytest.mark.parametrize("make", [lambda: torch.randn(64, 32), lambda: torch.randint(0, 2, (64, 32)) * 2.0])
def test_a_function_may_keep_float8(store, make):
    x = make().requires_grad_()
    with store().scope():
        out = InFloat8.apply(x)
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().to(torch.float8_e4m3fn).float())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_left_alone():
    layer, x = nn.Linear(8, 8), [torch.randn(n, 8) for n in (3, 5)]
    results = []
    for scope in (contextlib.nullcontext(), exact().scope()):
        with scope:
            nested = torch.nested.nested_tensor(x, layout=torch.strided, requires_grad=True)
            out = layer(nested).relu()
        layer.zero_grad()
        torch.nested.to_padded_tensor(out, 0.0).sum().backward()
        results.append(layer.weight.grad)
    assert torch.equal(*results)


def test_values_of_sparse_layers_may_be_computed():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32)), data(4, 32)
    apply_sparsity(model, Sparsity(sparsity=0.5, min_size=1))
    results = []
    for scope in (contextlib.nullcontext(), exact().scope()):
        with scope:
            doubled = {name: 2 * p for name, p in model.named_parameters()}
            out = torch.func.functional_call(model, doubled, x)
        results.append(gradients(model, out.square().sum())["0.values"])
    assert torch.equal(*results)


# ------------------------------------------------------------------------------- regions
@pytest.mark.parametrize("kind", [nn.Dropout, nn.RReLU, Kinds.BatchNorm, lambda: nn.BatchNorm1d(8, affine=False)])
@pytest.mark.parametrize("modes", [(True, False), (False, True)])
def test_regions_are_in_the_mode_of_their_call(kind, modes):
    """Backward comes when the model is in another one: of a later call, or of a validation in between."""
    torch.manual_seed(0)
    plain = Loop(lambda: nn.Sequential(nn.Linear(8, 8), kind()), n=2)
    ours, x, results = with_regions(plain, [names(2)]), samples(), []
    for model in (plain, ours):
        for _ in range(2):
            torch.manual_seed(1)
            model.zero_grad()
            losses = []
            for mode in modes:
                losses.append(model.train(mode)(x).square().mean())
                if model is plain:  # whose BatchNorm would read statistics that the other call has changed
                    losses.pop().backward()
            if model is ours:
                sum(losses).backward()
        assert all(m.training == modes[-1] for m in model.modules())
        gradients_and_buffers = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
        results.append(gradients_and_buffers)
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-5, atol=1e-8, msg=name)


def test_noise_that_a_kernel_fills_after_it_was_kept_is_there_in_the_repetition():
    """RReLU's, which autograd keeps before the kernel runs that draws it: what follows may not be left out."""
    plain = Loop(lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU()))
    for groups in ([names(4)], [names(2), names(4, 2)], [[name] for name in names(4)]):
        assert_same_steps(plain, with_regions(plain, groups), samples())


@pytest.mark.parametrize("is_frozen_first", [True, False])
def test_regions_whose_weights_are_frozen_or_not_in_between(is_frozen_first):
    torch.manual_seed(0)
    plain = Loop(n=2)
    ours, x, results = with_regions(plain, [names(2)]), samples(), []
    for model in (plain, ours):
        model.zero_grad()
        model.blocks.requires_grad_(not is_frozen_first)
        loss = model(x).square().mean()
        model.blocks.requires_grad_(is_frozen_first)
        (gradient,) = torch.autograd.grad(loss, [x])
        assert all(p.requires_grad == is_frozen_first for p in model.blocks.parameters())
        results.append(gradient)
    assert torch.equal(*results)


class WithBias(nn.Module):
    """Makes what it adds in its first call, which may be a sanity check in inference mode."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8), None

    def forward(self, x, scale=None):
        if self.bias is None:
            self.bias = torch.arange(8.0)
        x = self.linear(x) + self.bias
        return x if scale is None else x + scale


@pytest.mark.parametrize("scope", [contextlib.nullcontext, lambda: exact().scope()], ids=["plain", "store"])
def test_regions_with_tensors_that_were_made_in_inference_mode(scope):
    torch.manual_seed(0)
    plain = nn.Sequential(WithBias(), nn.Linear(8, 8))
    ours, x = copy.deepcopy(plain), samples()
    apply_checkpointing(ours, Checkpointing(modules="0"))
    results = []
    with torch.inference_mode():
        scale = torch.ones(8)
        plain(x), ours(x)
    for model in (plain, ours):
        with scope() if model is ours else contextlib.nullcontext():
            loss = model[1](model[0](x, scale)).square().mean() + model(x).mean()
        results.append(gradients(model, loss))
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_regions_repeat_with_the_libraries_that_were_allowed():
    """oneDNN's LSTM keeps other tensors than torch's own, for 16 bits where the CPU has instructions for them."""
    torch.manual_seed(0)
    seen = []

    class Plain(nn.Module):
        def forward(self, x):
            seen.append((torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled))
            return x.tanh()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = Plain(), nn.Linear(6, 2)

        def forward(self, x):
            with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
                return self.out(self.inner(x))

    net = Net()
    apply_checkpointing(net, Checkpointing(regions=(("inner",),)))
    net(torch.randn(4, 6, requires_grad=True)).sum().backward()
    assert seen == [(False, False), (False, False)]
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled


def test_regions_repeat_the_kind_of_attention_that_was_asked_for():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x):  # [B, T, 16]
            q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    plain, x, results = nn.Sequential(Attends(), nn.Linear(16, 4)), torch.randn(2, 8, 16), []
    ours = copy.deepcopy(plain)
    apply_checkpointing(ours, Checkpointing(modules="0"))
    for model in (plain, ours):
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(x).square().mean()
        results.append(gradients(model, loss))
    assert_same(*results)
    assert torch.backends.cuda.flash_sdp_enabled()
