"""Regions against no regions: loss, gradients, parameters and buffers are the same bits."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightning_memsave import Checkpointing, Ledger, apply_checkpointing
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.techniques.checkpointing.region_selection import repeated_blocks
from lightning_memsave.torch_internals.model_copies import copied
from tests.contracts.spec import Spec

from .checkpointing_subjects import BLOCKS, Block, scripted, stack

SPEC = Spec(config=Checkpointing(), loss_class="exact", bit_equal=True, shrinks="activations")


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        norm = torch.nn.utils.parametrizations.spectral_norm
        self.blocks = nn.ModuleList([nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class OldWeightNorm(nn.Module):
    """Computes its weight in a hook, and has it as a plain attribute with a graph."""

    def __init__(self):
        super().__init__()
        norm = torch.nn.utils.weight_norm
        self.blocks = nn.ModuleList([nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh()) for _ in range(3)])

    forward = Spectral.forward


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(p=0.2), Block(p=0.2)])

    def forward(self, x):
        for _ in range(3):
            x = self.blocks[1](self.blocks[0](x))
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.rnn(x[:, None].expand(-1, 3, -1))[0])


class Keywords(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(8, 8))

        def forward(self, *, x, flag, nothing=None):
            assert flag == "yes"
            assert nothing is None
            return types.SimpleNamespace(y=self.linear(x), n=3), [x * 2]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Inner(), self.Inner()])

    def forward(self, x):
        for layer in self.layers:
            out, (double,) = layer(x=x, flag="yes")
            x = out.y + double
        return x


class Branches(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                scale = x.abs().mean()
            return (self.a(x) if x.sum() > 0 else self.b(self.a(x).relu())) * scale

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(self.Inner(), self.Inner())

    def forward(self, x):
        return self.layers(x)


CASES = {
    "BatchNorm": (stack, BLOCKS),
    "BatchNorm momentum=None": (lambda: stack(momentum=None), BLOCKS),
    "dropout": (lambda: stack(p=0.3), BLOCKS),
    "in-place ReLU": (lambda: stack(inplace=True), BLOCKS),
    "whole group": (lambda: stack(p=0.3), Checkpointing(modules="1")),
    "spectral norm": (Spectral, BLOCKS),
    "old weight norm": (OldWeightNorm, BLOCKS),
    "shared, called thrice": (Shared, BLOCKS),
    "LSTM with dropout, tuple output": (Recurrent, Checkpointing(modules=nn.LSTM)),
    "keyword-only, non-tensor outputs": (Keywords, BLOCKS),
    "data-dependent branch, no_grad inside": (Branches, BLOCKS),
    "first layer, input without gradient": (stack, Checkpointing(modules=lambda name, module: name == "0")),
}


def train_step(model, x, autocast=False):
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return loss.detach(), grads, {n: b.clone() for n, b in model.named_buffers()}


def assert_same_bits(first, second):
    assert torch.equal(first[0], second[0])
    for a, b in zip(first[1:], second[1:], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert (a[name] is None) == (b[name] is None), name
            assert a[name] is None or torch.equal(a[name], b[name]), name


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_bit_equal_for_two_steps_in_training_and_one_in_eval(case, autocast):
    make, config = CASES[case]
    if autocast and "LSTM" in case:
        pytest.skip("oneDNN has no bfloat16 LSTM on every CPU")
    plain, ours, x = make(), None, torch.randn(6, 8)
    ours = copied(plain)
    keys = list(plain.state_dict())
    applied = apply_checkpointing(ours, config)
    for training in (True, True, False):
        assert_same_bits(train_step(plain.train(training), x, autocast), train_step(ours.train(training), x, autocast))
    assert list(ours.state_dict()) == keys
    applied.undo()
    applied.undo()
    assert all("forward" not in vars(m) and "_checkpoint_region" not in vars(m) for m in ours.modules())
    assert_same_bits(train_step(plain, x, autocast), train_step(ours, x, autocast))


TINY = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
HUGGING_FACE = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**TINY)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_layer=2, n_embd=16, n_head=2, n_positions=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers_blocks_are_found_and_bit_equal(name):
    plain = HUGGING_FACE[name]().train()
    ours = copy.deepcopy(plain)
    assert len(repeated_blocks(ours)) == 2
    apply_checkpointing(ours, BLOCKS)
    ids = torch.randint(0, 50, (3, 8))
    labels = torch.tensor([0, 1, 0]) if name == "bert" else ids
    results = []
    for model in (plain, ours):
        torch.manual_seed(1)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())))
    assert_same_bits(*results)


def test_torchs_own_checkpoint_is_the_counterexample():
    plain = stack()
    naive = copy.deepcopy(plain)
    for block in naive[1]:
        block.forward = lambda x, original=block.forward: torch.utils.checkpoint.checkpoint(
            original, x, use_reentrant=False
        )
    x = torch.randn(6, 8)
    _, _, buffers = train_step(plain, x)
    _, _, naive_buffers = train_step(naive, x)
    assert [int(b) for n, b in buffers.items() if "tracked" in n] == [1, 1, 1]
    assert [int(b) for n, b in naive_buffers.items() if "tracked" in n] == [2, 2, 2]


def test_what_stays_is_the_input_of_each_region_to_the_byte():
    """WideResNet-28-2, 10 images: 12 block inputs instead of everything."""
    model, x = WideResNet(), torch.randn(10, 3, 32, 32)
    model(x)  # learns which buffers change

    def held_by_the_graph():
        with Ledger().watching(model, batch=x) as ledger:
            before = ledger.live_bytes
            out = model(x)
            return ledger.live_bytes - before - out.nbytes

    plain = held_by_the_graph()
    apply_checkpointing(model, BLOCKS)
    model(x)
    ours = held_by_the_graph()
    channel = 10 * 4 * 32 * 32  # bytes of one float32 channel at full size, for 10 images
    block_inputs = channel * (16 + 4 * 32 + 4 * 64 // 4 + 3 * 128 // 16)
    # Behind the blocks: BatchNorm's input and statistics, ReLU's output (shape [10, 128, 8, 8]), the pooled features.
    head = 2 * channel * 128 // 16 + 2 * 128 * 4 + 10 * 128 * 4
    statistics = sum(b.nbytes for name, b in model.named_buffers() if ".bn" in name and "groups" in name)
    assert ours == block_inputs + head + statistics
    assert plain > 3.5 * ours


def test_a_deepcopy_computes_with_its_own_weights_and_a_pickle_forgets_the_regions():
    model, x = stack().eval(), torch.randn(2, 8)
    apply_checkpointing(model, BLOCKS)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin(x).abs().max() == 0
    assert model(x).abs().max() > 0
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_a_forward_that_was_patched_before_is_kept_and_comes_back():
    model = stack()
    calls = []
    original = model[1][0].forward
    patched = lambda x: calls.append(1) or original(x)  # noqa: E731
    model[1][0].forward = patched
    applied = apply_checkpointing(model, BLOCKS)
    model(torch.randn(3, 8)).sum().backward()
    assert calls == [1, 1]  # forward and recomputation
    applied.undo()
    assert model[1][0].forward is patched


def test_in_place_edit_of_a_regions_input_raises():
    class Edits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x):
            return self.linear(x.mul_(2))

    model = nn.Sequential(nn.Linear(8, 8), Edits())
    apply_checkpointing(model, Checkpointing(modules="Edits"))
    with pytest.raises(ValueError, match="edits its input in place"):
        model(torch.randn(3, 8))


# ------------------------------------------------------------------- TorchScript


def traced(block):
    return torch.jit.trace(block, torch.ones(2, 8), check_trace=False)


@pytest.mark.parametrize("kind", [scripted, traced])
def test_blocks_that_torchscript_runs_are_left_out_by_name(kind):
    plain = stack()
    plain[1][1].linear, plain[1][2].linear = kind(plain[1][1].linear), kind(plain[1][2].linear)
    ours = copied(plain)
    applied = apply_checkpointing(ours, BLOCKS)
    assert applied.summary == "1 region: 1 x Block; left out, as they hold TorchScript modules: 1.1, 1.2"
    x = torch.randn(6, 8)
    for _ in range(4):  # TorchScript compiles in the second call
        assert_same_bits(train_step(plain, x), train_step(ours, x))


def activation_of(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class CallsScripted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.linear(x))


def test_a_function_that_torchscript_has_compiled():
    x, function = torch.randn(6, 8), torch.jit.script(activation_of)
    for _ in range(3):
        function(x.clone().requires_grad_()).sum().backward()
    plain = nn.Sequential(*(CallsScripted(function) for _ in range(3)))
    ours = copied(plain)
    apply_checkpointing(ours, Checkpointing(modules="CallsScripted"))
    assert_same_bits(train_step(plain, x), train_step(ours, x))


def test_wrong_settings_name_what_there_is():
    with pytest.raises(ValueError, match=r"`checkpointing` must be one of 'blocks'.*got 'no-such-thing'"):
        Checkpointing.from_shorthand("no-such-thing")
    with pytest.raises(
        ValueError, match=r"must match at least one module, got 'Nothing'.*Sequential \(1\), Block \(3\)"
    ):
        apply_checkpointing(stack(), Checkpointing(modules="Nothing"))
    with pytest.raises(ValueError, match="no module with children"):
        apply_checkpointing(nn.Linear(2, 2), BLOCKS)
    model = stack()
    apply_checkpointing(model, BLOCKS)
    with pytest.raises(ValueError, match="applied once"):
        apply_checkpointing(model, BLOCKS)


def test_double_backward_through_a_region():
    model, x = stack(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    model = model.double().eval()
    plain = copy.deepcopy(model)
    apply_checkpointing(model, BLOCKS)

    def second(m):
        (first,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(model), second(plain), rtol=1e-12, atol=0)


def test_several_selectors_name_modules():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Tanh())
    applied = apply_checkpointing(model, Checkpointing(modules=["1", nn.Tanh]))
    assert applied.summary == "2 regions: 1 x Sequential, 1 x Tanh"
    assert Checkpointing(modules=["1"]) == Checkpointing(modules="1")
    with pytest.raises(ValueError, match=r"`Checkpointing.modules` must be patterns, classes of modules"):
        Checkpointing(modules=[nn.Linear, 3])
    with pytest.raises(ValueError, match=r"`Checkpointing.modules` must name modules"):
        Checkpointing(modules=[])
    with pytest.raises(ValueError, match=r"must match at least one module, got 'nothing'"):
        apply_checkpointing(nn.Sequential(nn.Linear(8, 8)), Checkpointing(modules=["Linear", "nothing"]))
