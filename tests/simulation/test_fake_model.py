"""Fake tensors: the same peaks without memory, and a model that has noticed nothing."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lightning_memsave.measuring.step_trace import trace_step
from lightning_memsave.simulation.fake_model import fake_tensors, optimizer_state_bytes
from tests.steps import STEPS, gpt2, lstm, mlp, squares


def fake_trace(step):
    step.model.zero_grad()
    with fake_tensors(step.model) as fake:
        batch = fake(step.batch)
        return trace_step(step.model, lambda: step.loss(step.model, batch).backward(), held=batch.values())


@pytest.mark.parametrize("name", [name for name in STEPS if name != "LSTM"])
def test_the_peak_is_that_of_real_tensors(name):
    step = STEPS[name]()
    fake = fake_trace(step)
    real = trace_step(step.model, step.run, held=step.batch.values())
    assert fake.peak_bytes == real.peak_bytes == step.measured().peak_bytes
    assert fake.start_bytes == real.start_bytes
    assert [call.name for call in fake.calls] == [call.name for call in real.calls]
    assert [s.num_bytes for s in fake.storages if s.is_kept] == [s.num_bytes for s in real.storages if s.is_kept]


def test_an_lstm_is_known_to_change_nothing_of_itself():
    """Else it could be in no region: its layers look whether their weights are still the same objects."""
    step = lstm()
    fake = fake_trace(step)
    real = trace_step(step.model, step.run, held=step.batch.values())
    assert fake.start_bytes == real.start_bytes
    assert fake.peak_bytes <= real.peak_bytes
    assert [call.side_effect for call in fake.calls] == [call.side_effect for call in real.calls]
    assert not any(call.side_effect for call in fake.calls)


def test_no_memory_is_taken_and_the_same_tensor_has_the_same_fake():
    model, x = nn.Linear(8, 8), torch.zeros(4, 8)
    with fake_tensors(model) as fake:
        first, again = fake([x, x])
        assert first is again
        assert isinstance(first, FakeTensor)
        assert model(torch.empty(2**40, 8)).shape == (2**40, 8)  # 32 TiB
        assert fake({"n": 3, "x": (x,)}) == {"n": 3, "x": (first,)}


# ---------------------------------------------------------------------- the model afterwards
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.inner(self.embedding(x)))))


def snapshot(model):
    owners = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = {name: tensor for name, tensor in owners}
    return (
        {name: (id(tensor), id(tensor.grad), tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()},
        {name: tensor.detach().clone() for name, tensor in tensors.items()},
        {name: None if t.grad is None else t.grad.clone() for name, t in tensors.items()},
        torch.get_rng_state(),
    )


def assert_same(before, after):
    assert before[0] == after[0]
    for first, second in zip(before[1:3], after[1:3], strict=True):
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert (tensor is None) == (second[name] is None), name
            assert tensor is None or torch.equal(tensor, second[name]), name
    assert torch.equal(before[3], after[3])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_the_model_comes_back_bit_for_bit(has_gradients, fails):
    model, x = Tied(), torch.randint(10, (6,))
    if has_gradients:
        model(x).sum().backward()
    before = snapshot(model)

    def step():
        with fake_tensors(model) as fake:
            assert model.head.weight is model.embedding.weight
            assert all(isinstance(p, FakeTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
            assert len(list(model.parameters())) == 5
            loss = model(fake(x)).sum()
            loss.backward()
            if fails:
                loss.item()

    if fails:
        with pytest.raises(Exception, match=r"read at .*test_fake_model.py:\d+ step"):
            step()
    else:
        step()
    assert model.head.weight is model.embedding.weight
    assert_same(before, snapshot(model))
    assert not any(isinstance(tensor, FakeTensor) for tensor in tree_leaves(dict(vars(model))))


def test_a_model_that_cannot_be_exchanged_comes_back_too(monkeypatch):
    model = Tied()
    before = snapshot(model)
    real = torch.empty_strided
    calls = []

    def fails_at_the_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_strided", fails_at_the_third)
    with pytest.raises(RuntimeError, match="no"), fake_tensors(model):
        pass
    assert_same(before, snapshot(model))


def test_frozen_parameters_and_strides_are_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    with fake_tensors(model):
        assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_flat_weights_of_a_recurrent_layer_are_fake_inside_and_come_back():
    step = lstm()
    flat, weights = step.model.rnn._flat_weights, list(step.model.rnn._flat_weights)
    with fake_tensors(step.model) as fake:
        assert all(isinstance(weight, FakeTensor) for weight in step.model.rnn._flat_weights)
        assert step.model.rnn._flat_weights[0] is step.model.rnn.weight_ih_l0
        squares(step.model, fake(step.batch)).backward()
    assert step.model.rnn._flat_weights is flat
    assert all(a is b for a, b in zip(flat, weights, strict=True))
    assert step.model.rnn._flat_weights[0] is step.model.rnn.weight_ih_l0
    step.run()
    assert all(p.grad is not None and not isinstance(p.grad, FakeTensor) for p in step.model.parameters())


def test_training_goes_on_as_if_nothing_had_been():
    step = gpt2()
    plain = copy.deepcopy(step.model)
    fake_trace(step)
    for model in (plain, step.model):
        torch.manual_seed(1)
        step.loss(model, step.batch).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), step.model.parameters(), strict=True))


# ---------------------------------------------------------------------- optimizers
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "amsgrad": True}], 0.1),
}


def state_bytes(optimizer):
    leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves}.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_predicted_to_the_byte_and_the_optimizer_is_untouched(name):
    step = mlp()
    optimizer = OPTIMIZERS[name](list(step.model.parameters()))
    values = [p.detach().clone() for p in step.model.parameters()]
    there, num_states = state_bytes(optimizer), len(optimizer.state)  # Adagrad makes its sums at once
    predicted = optimizer_state_bytes(optimizer)
    assert (state_bytes(optimizer), len(optimizer.state)) == (there, num_states)
    assert all(p.grad is None for p in step.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(values, step.model.parameters(), strict=True))
    step.run()
    optimizer.step()
    assert predicted == state_bytes(optimizer) == optimizer_state_bytes(optimizer)
    assert (predicted == 0) == (name == "SGD")


def test_frozen_parameters_have_no_state():
    step = mlp()
    step.model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(step.model.parameters())
    predicted = optimizer_state_bytes(optimizer)
    step.run()
    optimizer.step()
    assert predicted == state_bytes(optimizer)


def test_an_optimizer_that_reads_values_first_is_worth_nothing_and_harms_nothing():
    class Reads(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0].sum().item() > 0:
                super().step(closure)

    parameter = nn.Parameter(torch.ones(3))
    assert optimizer_state_bytes(Reads([parameter], 0.1, momentum=0.9)) == 0
    assert torch.equal(parameter, torch.ones(3))


def test_step_hooks_of_the_real_optimizer_do_not_run():
    parameter, called = nn.Parameter(torch.ones(3)), []
    optimizer = torch.optim.Adam([parameter])
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    assert optimizer_state_bytes(optimizer) == 3 * 4 * 2 + 4
    assert called == []


def test_a_recurrent_layer_whose_weights_were_replaced():
    layer = nn.LSTM(4, 4)
    layer._flat_weight_refs[0] = weakref.ref(nn.Parameter(torch.zeros(1)))  # dies at once
    with fake_tensors(layer) as fake:
        assert layer(fake(torch.zeros(2, 3, 4)))[0].shape == (2, 3, 4)
    assert layer(torch.zeros(2, 3, 4))[0].isfinite().all()


def test_what_shapes_alone_cannot_compute_is_not_logged_as_an_error(caplog):
    """A handler would keep the frames that raised, and all tensors in them."""

    def refuses(x):
        raise RuntimeError("no shapes")

    library = torch.library.Library("memsave_test", "DEF")
    library.define("without_shapes(Tensor x) -> Tensor")
    library.impl("without_shapes", refuses, "Meta")
    with pytest.raises(RuntimeError), torch._subclasses.fake_tensor.FakeTensorMode():
        torch.ops.memsave_test.without_shapes(torch.empty(4))
    assert "failed" in caplog.text
    caplog.clear()
    with pytest.raises(RuntimeError), fake_tensors(nn.Linear(1, 1)):
        torch.ops.memsave_test.without_shapes(torch.empty(4))
    assert not caplog.text
