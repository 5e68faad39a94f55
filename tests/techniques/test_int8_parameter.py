"""Parameters that are int8 codes: what is computed with them, what is kept, and which they are."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from lightning_memsave import (
    Ledger,
    LowPrecision,
    OptimizerState,
    apply_low_precision,
    apply_optimizer_state,
)
from lightning_memsave.numerics.row_codes import decode_rows, encode_rows
from lightning_memsave.saved_tensors import SavedTensorStore
from lightning_memsave.techniques.low_precision.int8_parameter import CODES, Int8, become_int8, parameters_for_int8, raw
from lightning_memsave.torch_internals.optimizer_class import PART_NUMEL
from tests.techniques.low_precision_subjects import through_disk

LAYERS = {
    "Linear": (lambda: nn.Linear(24, 40), lambda: torch.randn(3, 24)),
    "Conv2d": (lambda: nn.Conv2d(8, 12, 3, groups=2), lambda: torch.randn(2, 8, 6, 6)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(8, 6, 3, stride=2), lambda: torch.randn(2, 8, 5)),
    "Embedding": (lambda: nn.Embedding(30, 16, padding_idx=2), lambda: torch.randint(0, 30, (4, 5))),
    "Conv1D": (lambda: Conv1D(20, 12), lambda: torch.randn(3, 12)),
}
CONFIG = LowPrecision(format="int8-sr")


def lowered(model, lr=1e-3, kind=torch.optim.AdamW, **settings):
    optimizer = kind(model.parameters(), lr)
    return optimizer, apply_low_precision(model, optimizer, LowPrecision(format="int8-sr", **settings))


def gradients(module, x):
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.float().square().sum().backward()
    return y, {name: p.grad for name, p in module.named_parameters()}


# ------------------------------------------------------------------------------- what they compute
@pytest.mark.parametrize("scope", ["alone", "store"])
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_a_bfloat16_layer_with_the_same_weight(name, scope):
    torch.manual_seed(0)
    make, data = LAYERS[name]
    module, x = make(), data()
    plain = copy.deepcopy(module)
    become_int8(module.weight)
    with torch.no_grad():
        plain.weight.copy_(module.weight.float())
    plain.weight.data = plain.weight.data.bfloat16()
    stored = SavedTensorStore(recompute=True, min_numel=1).scope() if scope == "store" else contextlib.nullcontext()
    with stored:
        found = gradients(module, x)
    expected = gradients(plain, x)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][key], expected[1][key]) for key in expected[1])
    assert found[1]["weight"].dtype == torch.bfloat16


def test_the_weight_is_the_nearest_one_and_takes_a_byte():
    module = nn.Linear(64, 32)
    p, exact = module.weight, module.weight.detach().clone()
    become_int8(p)
    assert module.weight is p
    assert isinstance(p, nn.Parameter)
    assert torch.equal(p.whole(), decode_rows(*encode_rows(exact, None), torch.float32))
    assert torch.equal(p.float(), p.whole())
    assert p.untyped_storage().nbytes() == 64 * 32 + 2 * 32


def test_no_weight_is_kept_for_backward():
    def kept(lower):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        if lower:
            lowered(model)
        else:
            model.bfloat16()
        x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
        with Ledger().watching(model, batch=x) as ledger:
            before = ledger.live_bytes
            loss = model(x).sum()
            held = ledger.live_bytes - before
        loss.backward()
        return held

    assert kept(True) == kept(False) == 2 * 2 * 64 * 2 + 2  # two activations and the loss


def test_a_step_before_backward_is_noticed():
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer, _ = lowered(model)
    x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    loss = model(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed"):
        loss.backward()


# ------------------------------------------------------------------------------- steps
def test_steps_are_those_of_the_optimizer_in_float32_up_to_one_step_of_a_row():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 4))
    optimizer, _ = lowered(model)
    plain = copy.deepcopy(model)
    reference = nn.Parameter(plain[0].weight.whole())
    stepping = torch.optim.AdamW([reference], 1e-3)
    for step in range(4):
        gradient = torch.randn(40, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
        reference.data, before = model[0].weight.whole(), model[0].weight.whole()  # this step alone
        model[0].weight.grad, reference.grad = gradient, gradient.float()
        optimizer.step()
        stepping.step()
        scales = encode_rows(reference.detach(), None)[1].float()[:, None]
        assert ((model[0].weight.whole() - reference).abs() < scales).all()
        assert not torch.equal(model[0].weight.whole(), before)


def test_large_weights_step_in_parts_of_whole_rows_with_the_same_state(monkeypatch):
    def trained(size):
        monkeypatch.setitem(PART_NUMEL, "cpu", size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 100, bias=False))
        optimizer, _ = lowered(model)
        for step in range(3):
            model[0].weight.grad = torch.randn(100, 48, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
        return model[0].weight.whole(), optimizer.state[model[0].weight]["exp_avg"]

    whole, parts = trained(2**20), trained(48 * 7 + 5)
    assert torch.equal(whole[1], parts[1])
    step = float(encode_rows(whole[0], None)[1].max())
    assert 0 < (whole[0] - parts[0]).abs().max() <= 4 * step  # other noise


def test_a_step_takes_memory_for_one_part(monkeypatch):
    monkeypatch.setitem(PART_NUMEL, "cpu", 2**14)

    def transient(rows):
        model = nn.Sequential(nn.Linear(64, rows, bias=False))
        optimizer, _ = lowered(model, kind=torch.optim.SGD)
        model[0].weight.grad = torch.ones(rows, 64, dtype=torch.bfloat16)
        with Ledger().watching(model, [optimizer]) as ledger:
            optimizer.step()
        return ledger.measurement.peak_bytes - ledger.measurement.held_bytes

    assert transient(1024) == transient(4096)


@pytest.mark.parametrize("gradients_of", ["keep", "release"])
def test_with_8bit_state_it_trains(gradients_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    apply_optimizer_state(optimizer, OptimizerState(min_size=0, gradients=gradients_of), model)
    apply_low_precision(model, optimizer, CONFIG)
    x = torch.randn(256, 16)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), x[:, :2].sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.15 * losses[0]


# ------------------------------------------------------------------------------- on disk, in copies, and moved
def test_a_resumed_run_is_the_same_run_also_after_a_row_has_grown():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer, _ = lowered(model, 0.1)

    def run(model, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            optimizer.step()

    scales = model[0].weight.scales.clone()
    run(model, optimizer, range(30))
    assert not torch.equal(model[0].weight.scales, scales)
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    assert saved[0]["0.weight"].dtype == torch.bfloat16
    second = nn.Sequential(nn.Linear(8, 8))
    resumed, _ = lowered(second, 0.1)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert torch.equal(second[0].weight.whole(), model[0].weight.whole())
    run(model, optimizer, range(30, 60))
    run(second, resumed, range(30, 60))
    assert torch.equal(second[0].weight.whole(), model[0].weight.whole())


def test_a_state_dict_of_another_shape_is_refused_as_torch_does():
    model = nn.Sequential(nn.Linear(8, 8))
    lowered(model)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({"0.weight": torch.zeros(4, 4), "0.bias": torch.zeros(8)})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        model.load_state_dict({"0.bias": torch.zeros(8)})


def test_copies_and_pickles_train_on_their_own():
    model = nn.Sequential(nn.Linear(8, 8))
    lowered(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    before = model[0].weight.whole()
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert isinstance(other[0].weight, Int8)
        assert torch.equal(other[0].weight.whole(), before)
        other(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
        assert other[0].weight.grad.dtype == torch.bfloat16
        other[0].weight.write(torch.zeros(8, 8), None)
    assert torch.equal(model[0].weight.whole(), before)


@pytest.mark.parametrize("move", [lambda m: m.double(), lambda m: m.half(), lambda m: m.to(torch.float32)])
def test_codes_are_not_cast_with_the_module(move):
    model = nn.Sequential(nn.Linear(8, 8))
    lowered(model)
    before = model[0].weight.whole()
    move(model)
    with raw():
        assert model[0].weight.dtype == CODES
    assert torch.equal(model[0].weight.whole(), before)
    assert model[0].weight.dtype == torch.bfloat16


def test_undo_gives_the_same_parameter_with_what_it_computed_with():
    model = nn.Sequential(nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last))
    p, keys = model[0].weight, list(model.state_dict())
    _, applied = lowered(model)
    whole = model[0].weight.whole()
    applied.undo()
    assert type(p) is nn.Parameter
    assert model[0].weight is p
    assert torch.equal(p, whole)
    assert p.is_contiguous(memory_format=torch.channels_last)
    assert list(model.state_dict()) == keys
    assert not list(model.buffers())
    model(torch.randn(1, 4, 5, 5)).sum().backward()
    assert p.grad.dtype == torch.float32


# ------------------------------------------------------------------------------- which layers
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


def test_which_layers_keep_codes():
    tied = nn.Linear(4, 4)
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 4),
            "tied": tied,
            "with_it": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "own": Own(),
            "max_norm": nn.Embedding(4, 4, max_norm=1.0),
            "sparse": nn.Embedding(4, 4, sparse=True),
            "embedding": nn.Embedding(4, 4),
            "parametrized": weight_norm(nn.Linear(4, 4)),
            "meta": nn.Linear(4, 4, device="meta"),
            "attention": nn.MultiheadAttention(4, 2),
            "lstm": nn.LSTM(4, 4),
        }
    )
    model["with_it"].weight = tied.weight
    chosen = parameters_for_int8(model)
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p in chosen}
    assert names == {f"{name}.weight" for name in ("linear", "embedding", "attention.out_proj", "tied", "with_it")}
    model["own"].weight = tied.weight
    assert tied.weight not in parameters_for_int8(model), "tied to a module that is not known"


def test_without_such_a_layer_it_is_refused():
    with pytest.raises(ValueError, match="needs a Linear, convolution or Embedding with a plain weight"):
        lowered(nn.ParameterList([torch.randn(4, 4)]))
    with pytest.raises(ValueError, match="needs a Linear, convolution or Embedding with a plain weight"):
        lowered(nn.Sequential(nn.Linear(4, 4), Own()), keep_32bit=("0",))


def test_gradients_that_go_into_the_state_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(min_size=0, gradients="into-state"), model)
    with pytest.raises(ValueError, match="needs gradients outside of the optimizer's state where weights are codes"):
        apply_low_precision(model, optimizer, CONFIG)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.dtype == torch.float32


def test_attention_of_torch_trains_with_it():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    optimizer, _ = lowered(model)
    x = torch.randn(4, 6, 16)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)


def test_state_that_is_made_with_an_optimizer_has_numbers():
    """Adagrad's is made like its parameter, before the first step, which has it in float32."""
    model = nn.Sequential(nn.Linear(8, 8))
    become_int8(model[0].weight)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)
    assert optimizer.state[model[0].weight]["sum"].dtype == torch.bfloat16
    assert (optimizer.state[model[0].weight]["sum"] > 0.09).all()
