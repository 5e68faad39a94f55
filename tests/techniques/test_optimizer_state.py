import copy
import gc
import weakref
from contextlib import nullcontext

import bitsandbytes
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler

from lightning_memsave.core.errors import NoEffectWarning
from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    estimate_optimizer_state,
    from_plain,
    is_8bit,
    pages_kept,
    to_plain,
    uses_bitsandbytes,
)
from lightning_memsave.techniques.optimizer_state.bitsandbytes_backend import become_8bit
from lightning_memsave.techniques.optimizer_state.conversion import load_plain_state
from lightning_memsave.techniques.optimizer_state.optimizer_mapping import OPTIMIZER_MAPPINGS, find_mapping
from lightning_memsave.techniques.optimizer_state.state_dict_layout import move_counts
from lightning_memsave.torch_internals.optimizer_class import SCALES_ITSELF
from tests.contracts.spec import Spec

from .optimizer_state_subjects import (
    ALL_32BIT,
    BOUNDS_8BIT,
    CONFIG,
    LAMB,
    PLAIN,
    Lamb,
    big_model,
    every_kin,
    flat,
    run_steps,
    state_bytes,
    state_dtypes,
    through_disk,
    trained_8bit,
    twins,
)

SPEC = Spec(config=OptimizerState(min_size=256), loss_class="changed", bit_equal=False, shrinks="optimizer_state")


def test_the_tests_know_every_kin():
    assert set(PLAIN) == set(OPTIMIZER_MAPPINGS)


# ---------------------------------------------------------------------- the same steps


@every_kin
def test_8bit_state_tracks_the_plain_optimizer(name):
    (first, plain), (second, ours) = twins(name)
    start = flat(first)
    expected, found = run_steps(first, plain, range(10)) - start, run_steps(second, ours, range(10)) - start
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < BOUNDS_8BIT[name]


@every_kin
def test_32bit_state_equals_the_plain_optimizer(name):
    model = nn.Sequential(nn.Linear(63, 64), nn.Linear(64, 5))  # 4032 elements: just below the threshold
    (first, plain), (second, ours) = twins(name, model)
    start = flat(first)
    expected, found = run_steps(first, plain, range(10)) - start, run_steps(second, ours, range(10)) - start
    assert all(state_dtypes(ours, p) == {torch.float32} for p in second.parameters())
    assert (found - expected).norm() / expected.norm() < 1e-5


@every_kin
def test_trains_a_model(name):
    model = big_model()
    optimizer = PLAIN[name](model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    x = torch.randn(64, 96)
    target = torch.tanh(x @ torch.randn(96, 32) / 10)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_keeps_the_trust_ratio(weight_decay):
    model = big_model().double()
    reference_model = copy.deepcopy(model)
    model.float()
    with torch.no_grad():
        for p in (*model.parameters(), *reference_model.parameters()):
            p.mul_(7)  # far from 1, so that a missing ratio is a large error
    reference = LAMB(reference_model.parameters(), lr=1e-2, weight_decay=weight_decay)
    ours = LAMB(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    apply_optimizer_state(ours, ALL_32BIT, model)
    start = flat(reference_model)
    expected, found = run_steps(reference_model, reference, range(10)), run_steps(model, ours, range(10))
    assert (found - expected).norm() / (expected - start).norm() < 1e-4


def test_lamb_takes_a_zero_parameter_and_a_zero_gradient():
    model = nn.Linear(80, 64)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = LAMB(model.parameters(), lr=0.1)
    apply_optimizer_state(optimizer, CONFIG, model)
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.zeros_like(model.bias)
    bias = model.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full_like(model.weight, -0.1))  # ratio 1
    assert torch.equal(model.bias.detach(), bias)


def test_lamb_is_found_under_its_other_name():
    model = big_model()
    optimizer = Lamb(model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    assert isinstance(optimizer, bitsandbytes.optim.LAMB8bit)


@every_kin
def test_bfloat16_parameters(name):
    model = big_model(torch.bfloat16)
    optimizer = PLAIN[name](model.parameters())
    reference_model = copy.deepcopy(model).float()
    reference = PLAIN[name](reference_model.parameters())
    estimate = estimate_optimizer_state(optimizer, CONFIG, model)
    apply_optimizer_state(optimizer, CONFIG, model)
    start = flat(model)
    found = run_steps(model, optimizer, range(10))
    expected = run_steps(reference_model, reference, range(10))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert state_bytes(optimizer) == estimate
    assert bool(found.isfinite().all())
    # bf16 keeps 8 bits of the weight, and steps are small next to the weights.
    assert (found - expected)[-1].norm() < 0.5 * (expected[-1] - start).norm()


@every_kin
def test_channels_last_parameters(name):
    model = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)  # 4608 elements
    (first, plain), (second, ours) = twins(name, model)
    start = flat(first)
    expected, found = run_steps(first, plain, range(5)) - start, run_steps(second, ours, range(5)) - start
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]
    buffers = [v for v in ours.state[second.weight].values() if isinstance(v, torch.Tensor)]
    assert all(buffer.is_contiguous() for buffer in buffers)  # CUDA's kernels walk the memory
    for moment, value in plain.state[first.weight].items():
        if moment != "step":  # each element's own, in a checkpoint as well
            error = ours.state_dict()["state"][0][moment].reshape(-1) - value.reshape(-1)
            assert error.norm() < 0.1 * value.norm()


@pytest.mark.parametrize(
    "settings",
    [
        {"first_moment": "3bit"},
        {"second_moment": "4bit"},
        {"placement": "host", "projection": "galore"},
        {"min_size": -1},
    ],
)
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match="`OptimizerState"):
        OptimizerState(**settings)


def test_shorthands():
    assert OptimizerState.from_shorthand("8bit") == OptimizerState.from_shorthand(True) == OptimizerState()
    with pytest.raises(ValueError, match=r"'8bit', '4bit', 'lean', 'offload', 'paged', got '2bit'"):
        OptimizerState.from_shorthand("2bit")


@every_kin
def test_frozen_parameters(name):
    model = big_model()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = PLAIN[name](model.parameters())
    estimate = estimate_optimizer_state(optimizer, CONFIG, model)
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(2))
    assert torch.equal(model[0].weight, frozen)
    assert state_bytes(optimizer) == estimate
    from_plain(optimizer, through_disk(to_plain(optimizer)))
    run_steps(model, optimizer, range(2))
    assert torch.equal(model[0].weight, frozen)


@every_kin
def test_tied_parameters(name):
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    model[1].weight = model[0].weight
    (first, plain), (second, ours) = twins(name, model)
    estimate = estimate_optimizer_state(plain, CONFIG, first)
    assert second[0].weight is second[1].weight
    start = flat(first)
    expected, found = run_steps(first, plain, range(5)) - start, run_steps(second, ours, range(5)) - start
    assert len(ours.state) == 3
    assert state_bytes(ours) == estimate
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]


@every_kin
def test_param_groups_keep_their_own_settings(name):
    model = big_model()
    second = copy.deepcopy(model)

    def build(m):
        decays = {} if name == "Adam" else {"weight_decay": 0.3}
        return PLAIN[name](
            [{"params": m[0].parameters(), "lr": 0.02, **decays}, {"params": m[2].parameters(), "lr": 1e-4}]
        )

    plain, ours = build(model), build(second)
    apply_optimizer_state(ours, ALL_32BIT, second)
    keys = [set(g) for g in plain.param_groups]
    starts = [flat(m) for m in model if isinstance(m, nn.Linear)]
    run_steps(model, plain, range(5))
    run_steps(second, ours, range(5))
    for expected, found, start in zip((model[0], model[2]), (second[0], second[2]), starts, strict=True):
        assert (flat(found) - flat(expected)).norm() / (flat(expected) - start).norm() < 1e-4
    assert [set(g) for g in ours.param_groups] == keys


# ---------------------------------------------------------------------- the optimizer stays the same object
@every_kin
def test_apply_keeps_the_object_and_undo_restores_it(name):
    model = big_model()
    optimizer = PLAIN[name](model.parameters())
    plain_class, keys = type(optimizer), [set(g) for g in optimizer.param_groups]
    attributes, groups, state = set(vars(optimizer)), optimizer.param_groups, optimizer.state
    applied = apply_optimizer_state(optimizer, CONFIG, model)
    assert is_8bit(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, getattr(bitsandbytes.optim, f"{name}8bit"))
    assert optimizer.param_groups is groups
    assert [set(g) for g in optimizer.param_groups] == keys
    assert applied.technique == "optimizer_state"
    assert applied.loss_class == "changed"
    assert name in applied.summary
    assert "1 of 4" in applied.summary
    run_steps(model, optimizer, range(3))
    assert [set(g) for g in optimizer.param_groups] == keys

    applied.undo()
    assert not is_8bit(optimizer)
    assert type(optimizer) is plain_class
    assert set(vars(optimizer)) == attributes
    assert optimizer.state is state
    assert set(optimizer.state[model[0].weight]) >= set(OPTIMIZER_MAPPINGS[name].moments)
    before = flat(model)
    applied.undo()
    assert type(optimizer) is plain_class
    run_steps(model, optimizer, range(3, 5))
    assert not torch.equal(flat(model), before)


@every_kin
def test_undo_continues_from_the_converted_state(name):
    model = nn.Linear(40, 40)  # 32-bit state, so that nothing is lost
    first, second = model, copy.deepcopy(model)
    plain, ours = PLAIN[name](first.parameters()), PLAIN[name](second.parameters())
    applied = apply_optimizer_state(ours, CONFIG, second)
    run_steps(first, plain, range(4))
    run_steps(second, ours, range(4))
    applied.undo()
    start = flat(first)
    expected, found = run_steps(first, plain, range(4, 8)) - start, run_steps(second, ours, range(4, 8)) - start
    assert (found - expected).norm() / expected.norm() < 1e-4


@every_kin
def test_undo_with_bfloat16_parameters_steps_on(name):
    model = big_model(torch.bfloat16)
    _, optimizer, applied = trained_8bit(name, model)
    applied.undo()
    run_steps(model, optimizer, range(2))
    assert bool(flat(model).isfinite().all())


@every_kin
def test_apply_undo_apply(name):
    model, optimizer, applied = trained_8bit(name)
    applied.undo()
    again = apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(4, 6))
    assert is_8bit(optimizer)
    again.undo()
    run_steps(model, optimizer, range(6, 8))
    assert not is_8bit(optimizer)


@every_kin
def test_apply_in_the_middle_converts_the_state(name):
    model = big_model()
    second = copy.deepcopy(model)
    plain, ours = PLAIN[name](model.parameters()), PLAIN[name](second.parameters())
    run_steps(model, plain, range(5))
    run_steps(second, ours, range(5))
    apply_optimizer_state(ours, CONFIG, second)
    moments = to_plain(ours)["state"]
    for number, p in enumerate(model.parameters()):
        for key in OPTIMIZER_MAPPINGS[name].moments:
            exact = plain.state[p][key]
            assert (moments[number][key] - exact).norm() < 0.05 * exact.norm()
    if OPTIMIZER_MAPPINGS[name].has_step:
        assert {float(s["step"]) for s in moments.values()} == {5.0}
    start = flat(model)
    expected, found = run_steps(model, plain, range(5, 10)) - start, run_steps(second, ours, range(5, 10)) - start
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]


def test_apply_twice_warns_and_does_nothing():
    model, optimizer, _ = trained_8bit("AdamW")
    state = {p: dict(s) for p, s in optimizer.state.items()}
    with pytest.warns(NoEffectWarning, match="low-bit"):
        applied = apply_optimizer_state(optimizer, CONFIG, model)
    assert applied.loss_class == "changed"  # what it was before stays low-bit
    applied.undo()
    assert is_8bit(optimizer)
    assert all(optimizer.state[p][k] is v for p, s in state.items() for k, v in s.items())


def test_bitsandbytes_own_optimizers_are_left_alone():
    model = big_model()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    with pytest.warns(NoEffectWarning, match="AdamW8bit is a low-bit"):
        apply_optimizer_state(optimizer, CONFIG, model)
    assert type(optimizer) is bitsandbytes.optim.AdamW8bit


def test_step_hooks_run_once():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    applied = apply_optimizer_state(optimizer, CONFIG, model)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    run_steps(model, optimizer, range(1))
    assert calls == ["pre", "post"]
    applied.undo()
    run_steps(model, optimizer, range(1))
    assert calls == ["pre", "post", "pre", "post"]


def test_other_optimizers_of_the_class_stay_plain():
    model, other_model = big_model(), big_model()
    other = PLAIN["AdamW"](other_model.parameters())
    optimizer = PLAIN["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(other_model, other, range(2))
    assert type(other) is torch.optim.AdamW
    assert set(other.state[other_model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("with_scheduler", [False, True])
def test_an_8bit_optimizer_dies_without_the_garbage_collector(with_scheduler):
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10) if with_scheduler else None
    applied = apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(1))
    state = weakref.ref(optimizer.state[model[0].weight]["state1"])
    gc.collect()
    gc.disable()
    try:
        del optimizer, scheduler, applied
        assert state() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight decay"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "momentum"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), "momentum"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "lr_decay"),
    ],
)
def test_settings_without_a_kin_are_refused(build, word):
    model = big_model()
    optimizer = build(list(model.parameters()))
    plain_class, attributes = type(optimizer), set(vars(optimizer))
    with pytest.raises(ValueError, match=word):
        apply_optimizer_state(optimizer, CONFIG, model)
    with pytest.raises(ValueError, match=word):
        estimate_optimizer_state(optimizer, CONFIG, model)
    assert type(optimizer) is plain_class
    assert set(vars(optimizer)) == attributes


@pytest.mark.parametrize("build", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, momentum=0.9)])
def test_parameters_without_a_kernel_are_refused(build):
    """bitsandbytes has none for float64, and for bfloat16 beside a 32-bit momentum none on CUDA."""
    model = big_model(torch.float64)
    with pytest.raises(ValueError, match=r'float64 .* on cpu.*backend="own"'):
        apply_optimizer_state(build(list(model.parameters())), CONFIG, model)
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(8, device="cuda", dtype=torch.bfloat16))
        optimizer = build([p])
    has_kernel = isinstance(optimizer, torch.optim.AdamW)
    with nullcontext() if has_kernel else pytest.raises(ValueError, match="bfloat16 under SGD on cuda"):
        find_mapping(optimizer)
    assert uses_bitsandbytes(optimizer, OptimizerState()) is has_kernel


@pytest.mark.parametrize(
    "config", [CONFIG, OptimizerState(projection="galore", rank=8), OptimizerState(first_moment="4bit")]
)
def test_a_gradient_scaler_unscales_what_the_fused_step_would_not_see(config):
    """torch tells it by an attribute not to; codes of our own go through the fused step, which divides."""
    model = big_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert vars(optimizer)[SCALES_ITSELF]
    applied = apply_optimizer_state(optimizer, config, model)
    assert vars(optimizer).get(SCALES_ITSELF, False) is (config.format == "4bit")
    applied.undo()
    assert vars(optimizer)[SCALES_ITSELF]


def test_counts_are_where_fused_steps_read_them():
    p, q = (nn.Parameter(torch.empty(2, device="meta")) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [p]}, {"params": [q]}])
    optimizer.param_groups[0]["fused"] = True
    optimizer.state.update({each: {"step": torch.tensor(3.0)} for each in (p, q)})
    move_counts(optimizer)
    assert [optimizer.state[each]["step"].device.type for each in (p, q)] == ["meta", "cpu"]


def test_paged_state_is_paged_after_it_was_moved_to_its_device(monkeypatch):
    """As Lightning does after each checkpoint that it loads, and at the start of a fit."""

    def paged(self, p, dtype=torch.float32):
        made = torch.zeros(p.shape, dtype=dtype)
        made.is_paged = True
        return made

    monkeypatch.setattr(bitsandbytes.optim.PagedAdamW32bit, "get_state_buffer", paged)
    p = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([p])
    plain = {p: {"step": torch.tensor(3.0), "exp_avg": torch.full((64,), 2.0), "exp_avg_sq": torch.ones(64)}}
    become_8bit(optimizer, find_mapping(optimizer), set(), is_paged=True)
    with pages_kept([optimizer]):
        load_plain_state(optimizer, plain)  # of a checkpoint
        pages = [optimizer.state[p][name] for name in ("state1", "state2")]
        optimizer.state[p]["state1"] = pages[0].clone().fill_(5)
    assert optimizer.state[p]["state1"] is pages[0]
    assert optimizer.state[p]["state2"] is pages[1]
    assert torch.equal(pages[0], torch.full((64,), 5.0))


def test_lamb_takes_adams_kernels():
    """CUDA has none of 8 bits under LAMB's name."""
    model = big_model()
    optimizer = LAMB(model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    assert optimizer.optimizer_name == "adam"


def test_one_bad_group_of_two_is_refused():
    model = big_model()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[2].parameters()}], lr=0.1
    )
    with pytest.raises(ValueError, match="needs SGD with momentum"):
        apply_optimizer_state(optimizer, CONFIG, model)


def test_an_unknown_optimizer_is_refused_and_the_error_lists_the_known():
    model = big_model()
    with pytest.raises(ValueError, match="Rprop") as error:
        apply_optimizer_state(torch.optim.Rprop(model.parameters()), CONFIG, model)
    assert all(name in str(error.value) for name in OPTIMIZER_MAPPINGS)


def test_adam_with_decoupled_weight_decay_is_taken():
    model = nn.Linear(30, 30)
    second = copy.deepcopy(model)
    plain, ours = (
        torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True)
        for m in (model, second)
    )
    apply_optimizer_state(ours, CONFIG, second)
    start = flat(model)
    expected, found = run_steps(model, plain, range(5)) - start, run_steps(second, ours, range(5)) - start
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(100, 64, sparse=True))
    with pytest.raises(ValueError, match=r"optimizer_state.*sparse gradients.*0\.sparse=True"):
        apply_optimizer_state(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), CONFIG, model)


def test_only_the_optimizers_own_parameters_are_checked_for_sparse_gradients():
    model = nn.ModuleDict({"sparse": nn.Embedding(100, 64, sparse=True), "linear": nn.Linear(64, 64)})
    applied = apply_optimizer_state(torch.optim.AdamW(model["linear"].parameters()), CONFIG, model)
    assert "1 of 2" in applied.summary
