"""The formats of moments that are our own: bytes, errors, checkpoints, and the same optimizer throughout."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_memsave import Ledger, LowPrecision, apply_low_precision
from lightning_memsave.loops.optimizer_changes import readable
from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    estimate_optimizer_state,
    host_offload,
)
from lightning_memsave.techniques.optimizer_state.moment_codecs import CODECS, Elsewhere, Factored, QuantizedMoment
from lightning_memsave.techniques.optimizer_state.quantized import is_quantized
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.techniques.optimizer_state.state_dict_layout import decoded, read

from .optimizer_state_subjects import (
    FORMATS,
    PLAIN,
    big_model,
    bytes_held,
    flat,
    run_steps,
    set_gradients,
    state_bytes,
    through_disk,
)

OPTIMIZERS = {
    "AdamW": PLAIN["AdamW"],
    "SGD": lambda p, **kw: torch.optim.SGD(p, **{"lr": 0.1, "momentum": 0.9, "nesterov": True, **kw}),
    "RMSprop": PLAIN["RMSprop"],
}
# Relative L2 error of the distance travelled over 20 steps, about twice what is measured.
BOUNDS = dict.fromkeys(("4bit", "factored", "4bit-factored", "5bit-factored"), 0.6)
BOUNDS |= {"8bit": 0.05, "fp8": 0.2, "lowrank": 1.0, "apollo": 1.2, "offload": 0.0}
OF_SECOND_MOMENTS = ("factored", "4bit-factored", "5bit-factored", "apollo")
CASES = [(f, o) for f in FORMATS for o in OPTIMIZERS if not (f in OF_SECOND_MOMENTS and o != "AdamW")]
every_case = pytest.mark.parametrize(("name", "optimizer_name"), CASES)
every_format = pytest.mark.parametrize("name", FORMATS)


def changed(name, optimizer_name="AdamW", model=None, **settings):
    model = big_model() if model is None else model
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), **settings)
    return model, optimizer, apply_optimizer_state(optimizer, FORMATS[name], model)


def places(optimizer):
    moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, tuple)]
    return {tensor.data_ptr() for moment in moments for tensor in moment}


def same(first, second):
    if isinstance(first, (tuple, list)):
        return all(same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, str):
        return first == second
    return torch.equal(torch.as_tensor(first), torch.as_tensor(second))


# ------------------------------------------------------------------------------- the steps
@every_case
def test_it_goes_where_the_plain_optimizer_goes(name, optimizer_name):
    model = big_model()
    second = copy.deepcopy(model)
    plain = OPTIMIZERS[optimizer_name](model.parameters())
    _, ours, applied = changed(name, optimizer_name, second)
    assert applied.loss_class == ("exact" if name == "offload" else "changed")
    start = flat(model)
    expected, found = run_steps(model, plain, range(20))[-1] - start, run_steps(second, ours, range(20))[-1] - start
    error = (found - expected).norm() / expected.norm()
    assert error <= BOUNDS[name]
    assert (error == 0) == (name == "offload")


@every_case
def test_bytes_equal_the_estimate(name, optimizer_name):
    model = big_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    estimate = estimate_optimizer_state(optimizer, FORMATS[name], model)
    apply_optimizer_state(optimizer, FORMATS[name], model)
    run_steps(model, optimizer, range(2))
    assert bytes_held(optimizer) == estimate
    with Ledger().watching(model, [optimizer]) as ledger:
        pass
    assert ledger.measurement.by_category["optimizer_state"] >= estimate


@pytest.mark.parametrize(
    ("name", "expected"), [("8bit", 2.03125), ("4bit", 1.03125), ("fp8", 2.03125), ("offload", 0.0)]
)
def test_bytes_per_parameter_of_the_docstring(name, expected):
    model = nn.Linear(1024, 1024, bias=False)
    assert estimate_optimizer_state(OPTIMIZERS["AdamW"](model.parameters()), FORMATS[name], model) / 2**20 == expected


def test_bytes_per_parameter_of_means_and_subspaces():
    model = nn.Linear(1024, 2048, bias=False)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for name, first in (("factored", 2**21), ("5bit-factored", 5 * 2**18), ("4bit-factored", 2**20)):
        means = estimate_optimizer_state(optimizer, FORMATS[name], model)
        assert means == first + 4 * 2**21 // 256 + 4 * (1024 + 2048)
    subspace = estimate_optimizer_state(optimizer, FORMATS["lowrank"], model)
    assert subspace == 4 * 16 * (2 * 2048 + 1024)
    assert estimate_optimizer_state(optimizer, FORMATS["apollo"], model) == 4 * 16 * 2 * 2048


@pytest.mark.parametrize("name", ["8bit", "4bit", "fp8", "factored", "4bit-factored", "5bit-factored"])
def test_the_transient_is_of_one_parameter(name):
    def transient(num_layers, width=128):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        _, optimizer, _ = changed(name, "AdamW", model)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            with Ledger().watching(model, [optimizer]) as ledger:
                optimizer.step()
        return ledger.measurement.peak_bytes - ledger.measurement.held_bytes

    assert transient(2) == transient(6)
    assert transient(2) <= 20 * 128**2  # bitsandbytes on CPU takes 20 bytes per element


# ------------------------------------------------------------------------------- each against its definition
def test_fp8_has_torchs_values():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    expected = values[values.isfinite()].unique() / torch.finfo(torch.float8_e4m3fn).max
    assert torch.equal(CODECS["fp8"][0].code_map, expected)


@pytest.mark.parametrize("state_format", ["8bit", "4bit", "fp8"])
def test_second_moments_are_never_zero_and_use_every_code(state_format):
    codec = CODECS[state_format][1]
    assert len(codec.code_map.unique()) == 2**codec.bits
    assert codec.code_map.min() > torch.finfo(torch.float32).tiny
    assert codec.code_map.max() == 1


@pytest.mark.parametrize("decades", [0, 2, 4])
@pytest.mark.parametrize(
    ("name", "most"), [("8bit", {0: 0.03, 2: 0.08, 4: 0.35}), ("fp8", {0: 0.07, 2: 0.08, 4: 0.12})]
)
def test_8_bits_follow_float64_however_far_the_gradients_of_a_block_spread(name, most, decades):
    sizes = 10 ** (decades * torch.rand(128, 128, generator=torch.Generator().manual_seed(0)) - decades)
    exact, weights = (nn.Parameter(torch.zeros(128, 128, dtype=d)) for d in (torch.float64, torch.float32))
    referee = OPTIMIZERS["AdamW"]([exact])
    _, ours, _ = changed(name, model=nn.ParameterList([weights]))
    draw = torch.Generator().manual_seed(1)
    for _ in range(200):
        gradient = torch.randn(128, 128, generator=draw) * sizes
        exact.grad, weights.grad = gradient.double(), gradient
        referee.step()
        ours.step()
    assert (weights - exact).norm() / exact.norm() < most[decades]


def test_means_are_adafactors():
    model = nn.Linear(6, 5, bias=False).double()
    weight, adafactor = (
        model.weight,
        torch.optim.Adafactor([nn.Parameter(model.weight.detach().clone())], beta2_decay=-0.1),
    )
    _, ours, _ = changed("factored", "AdamW", model)
    weight.grad = torch.randn_like(weight)
    adafactor.param_groups[0]["params"][0].grad = weight.grad.clone()
    adafactor.step()
    ours.step()
    (theirs,) = adafactor.state.values()
    means = ours.state[weight]["exp_avg_sq"]
    assert isinstance(means, Factored)
    for ours_mean, theirs_mean in ((means.rows, theirs["row_var"]), (means.columns, theirs["col_var"])):
        scaled = theirs_mean.flatten() * 0.001  # 1 - beta2 of AdamW; Adafactor's first step takes the square whole
        torch.testing.assert_close(ours_mean.double(), scaled.double(), rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------- elsewhere
def test_offloaded_state_is_not_in_memory():
    model, optimizer, _ = changed("offload")
    run_steps(model, optimizer, range(2))
    assert all(
        isinstance(optimizer.state[p][m], Elsewhere) for p in model.parameters() for m in ("exp_avg", "exp_avg_sq")
    )
    assert state_bytes(optimizer) == 4 * 4  # the counts of steps


@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_steps_next_is_on_its_way(is_reversed, monkeypatch):
    log = []
    monkeypatch.setattr(host_offload.Elsewhere, "fetch", lambda self: log.append(("fetch", id(self))))
    plain_get = host_offload.Elsewhere.get
    monkeypatch.setattr(host_offload.Elsewhere, "get", lambda self: (log.append(("get", id(self))), plain_get(self))[1])
    model, optimizer, _ = changed("offload")
    run_steps(model, optimizer, range(1))
    log.clear()
    set_gradients(model, 1)
    parameters = list(model.parameters())
    for p in reversed(parameters) if is_reversed else parameters:  # as backward does
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[0], "params": [p]}]
        optimizer.step()
        optimizer.param_groups = groups
    late = [i for i, (kind, which) in enumerate(log) if kind == "get" and ("fetch", which) not in log[:i]]
    assert len(late) == 2  # the moments of the first


# ------------------------------------------------------------------------------- checkpoints
WITHOUT_CODES = ("lowrank", "apollo", "offload")


@every_case
@pytest.mark.parametrize("checkpoint", ["plain", "compact"])
@pytest.mark.parametrize("lowered", [False, True])
def test_a_checkpoint_continues_bit_for_bit(name, optimizer_name, checkpoint, lowered):
    if checkpoint == "compact" and name in WITHOUT_CODES:
        with pytest.raises(ValueError, match="is used with formats of codes or means only"):
            replace(FORMATS[name], checkpoint=checkpoint)
        return

    def build(model):
        optimizer = OPTIMIZERS[optimizer_name](model.parameters(), lr=0.01)
        apply_optimizer_state(optimizer, replace(FORMATS[name], checkpoint=checkpoint), model)
        if lowered:
            apply_low_precision(model, optimizer, LowPrecision(format="bf16+8"))
        return optimizer

    model = big_model()
    optimizer = build(model)
    run_steps(model, optimizer, range(4))
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    second = big_model()
    second.load_state_dict(saved[0])
    resumed = build(second)
    resumed.load_state_dict(saved[1])
    assert same(resumed.state_dict()["state"], optimizer.state_dict()["state"])
    assert torch.equal(run_steps(second, resumed, range(4, 8)), run_steps(model, optimizer, range(4, 8)))
    assert same(resumed.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in WITHOUT_CODES])
def test_a_compact_checkpoint_takes_no_memory_of_its_own(name):
    model = big_model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, replace(FORMATS[name], checkpoint="compact"), model)
    run_steps(model, optimizer, range(2))
    with Ledger().watching(model, [optimizer]) as ledger:
        saved = optimizer.state_dict()
    assert ledger.measurement.peak_bytes == ledger.measurement.held_bytes
    assert saved["state"][0]["exp_avg"]["codes"] is optimizer.state[model[0].weight]["exp_avg"].codes


@pytest.mark.parametrize("checkpoint", ["plain", "compact"])
@pytest.mark.parametrize("name", ["8bit", "4bit", "fp8", "factored", "4bit-factored", "5bit-factored"])
def test_saving_and_resuming_stay_below_the_peak_of_training(name, checkpoint):
    config = replace(FORMATS[name], checkpoint=checkpoint)

    def build(num_layers):
        model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(num_layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        apply_optimizer_state(optimizer, config, model)
        return model, optimizer

    def peaks(num_layers):
        model, optimizer = build(num_layers)
        run_steps(model, optimizer, range(2))
        set_gradients(model, 2)
        measured = []
        with Ledger().watching(model, [optimizer]) as ledger:
            optimizer.step()
        measured.append(ledger.measurement.peak_bytes)
        optimizer.zero_grad()
        with Ledger().watching(model, [optimizer]) as ledger:
            saved = optimizer.state_dict()
        measured.append(ledger.measurement.peak_bytes)
        resumed_model, resumed = build(num_layers)
        with Ledger().watching(resumed_model, [resumed]) as ledger:  # what is loaded lies in the file or on the host
            resumed.load_state_dict(saved)
        return [*measured, ledger.measurement.peak_bytes]

    one = 4 * 96**2
    training, saving, resuming = peaks(12)
    if checkpoint == "compact":
        assert saving <= training + one
    else:  # it holds the float32 moments that it returns, and no more than one parameter's temporaries besides
        assert saving - peaks(6)[1] <= 6 * 3 * one + 6 * 2 * one
    assert resuming <= training + one


# ------------------------------------------------------------------------------- the same object
@every_case
def test_pickles_copies_and_undo(name, optimizer_name):
    model, optimizer, applied = changed(name, optimizer_name)
    run_steps(model, optimizer, range(3))
    for twin_model, twin in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        assert type(twin) is type(optimizer)
        assert is_quantized(twin)
        twin_steps = run_steps(twin_model, twin, range(3, 5))
        again_model, again = pickle.loads(pickle.dumps((model, optimizer)))
        assert torch.equal(twin_steps, run_steps(again_model, again, range(3, 5)))
    applied.undo()
    assert type(optimizer) is type(OPTIMIZERS[optimizer_name](big_model().parameters()))
    held = [v for state in optimizer.state.values() for v in state.values()]
    assert not any(isinstance(v, (QuantizedMoment, Factored, Elsewhere)) for v in held)
    run_steps(model, optimizer, range(3, 5))
    assert flat(model).isfinite().all()


@pytest.mark.parametrize(
    ("name", "build", "word"),
    [
        ("factored", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "first and second moments"),
        ("factored", lambda p: torch.optim.AdamW(p, amsgrad=True), "without `amsgrad`"),
        ("lowrank", lambda p: torch.optim.Adagrad(p, 0.1), "'lowrank' needs one of AdamW, Adam, "),
        ("8bit", lambda p: torch.optim.ASGD(p), "keeps something for each parameter in its shape"),
        ("8bit", lambda p: torch.optim.RMSprop(p, centered=True), "cannot keep RMSprop's `centered`"),
        ("paged", lambda p: torch.optim.AdamW(p), '="paged" needs parameters on CUDA'),
        ("paged", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "is paged for AdamW, Adam, Lion alone"),
    ],
)
def test_what_cannot_be_kept_is_refused(name, build, word):
    model = big_model()
    optimizer = build(list(model.parameters()))
    plain_class = type(optimizer)
    config = FORMATS.get(name, OptimizerState(placement="paged"))
    with pytest.raises(ValueError, match=word):
        apply_optimizer_state(optimizer, config, model)
    assert type(optimizer) is plain_class


def test_adagrad_of_bfloat16_weights_keeps_float32_state():
    model = big_model(torch.bfloat16)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    apply_low_precision(model, optimizer, LowPrecision())
    run_steps(model, optimizer, range(3))
    assert {state["sum"].dtype for state in optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("gradients", ["keep", "release", "into-state"])
@pytest.mark.parametrize("name", ["8bit", "factored"])
def test_codes_are_written_where_they_were_and_counted_as_state(name, gradients):
    model = big_model()
    config = replace(FORMATS[name], gradients=gradients)
    optimizer = PLAIN["AdamW"](model.parameters())
    estimate = estimate_optimizer_state(optimizer, config, model)
    apply_optimizer_state(optimizer, config, model)
    x = torch.ones(4, model[0].in_features)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = places(optimizer)
    with Ledger().watching(model, [optimizer], x) as ledger:
        step()
    assert before == places(optimizer) != set()
    counts = sum(state["step"].nbytes for state in optimizer.state.values())
    assert ledger.measurement.by_category["optimizer_state"] == estimate + counts


# ------------------------------------------------------------------------------- how moments lie in memory
@every_format
def test_fused_kernels_find_moments_in_the_order_of_their_parameter(name):
    """They go through the memory of both, and channels-last weights do not lie as they are numbered."""
    start, last = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last), []
    for fused in (False, True):
        model, optimizer, _ = changed(name, model=copy.deepcopy(start), fused=fused)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        run_steps(model, optimizer, range(6))
        plain = OPTIMIZERS["AdamW"](model.parameters(), fused=fused)
        if name not in ("lowrank", "apollo"):  # which load into their own kind
            plain.load_state_dict(optimizer.state_dict())
            assert plain.state[model.weight]["exp_avg"].stride() == model.weight.stride()
            run_steps(model, plain, range(2))
        last.append(flat(model))
    assert (last[1] - last[0]).norm() < 0.05 * (last[0] - flat(start)).norm()


@pytest.mark.parametrize("name", ["8bit", "4bit-factored", "5bit-factored"])
def test_compact_checkpoints_come_to_plain_optimizers_in_the_order_of_their_parameter(name):
    model = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, replace(FORMATS[name], checkpoint="compact"), model)
    run_steps(model, optimizer, range(2))
    plain = OPTIMIZERS["AdamW"](model.parameters(), fused=True)
    saved = optimizer.state_dict()
    (read,) = readable([plain], {"optimizer_states": [saved]})["optimizer_states"]
    plain.load_state_dict(read)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert plain.state[model.weight][moment].stride() == model.weight.stride()
        assert torch.equal(plain.state[model.weight][moment], decoded(saved["state"][0][moment]))


def test_moments_of_a_number_go_to_the_device_of_their_parameter():
    p = nn.Parameter(torch.empty((), device="meta"))
    saved = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(1.0, dtype=torch.float64)}
    found = {name: read("8bit", name, value, p=p, means={}, dtype=p.dtype) for name, value in saved.items()}
    assert (found["exp_avg"].device.type, found["exp_avg"].dtype) == ("meta", torch.float32)
    assert found["step"].device.type == "cpu"


# ------------------------------------------------------------------------------- gradients that overflow
@pytest.mark.parametrize("size", [1e4, 1e19, 1e25, 1e30, 3e38])
@pytest.mark.parametrize("when", [0, 3], ids=["first step", "later step"])
@pytest.mark.parametrize("shape", [(32, 512), (4096,)], ids=["matrix", "vector"])
@pytest.mark.parametrize(
    "state_format", ["8bit", "4bit", "fp8", "factored", "4bit-factored", "5bit-factored", "lowrank", "apollo"]
)
def test_one_huge_gradient_stops_one_weight_alone(state_format, shape, when, size):
    """Its square is infinite: plain AdamW leaves that weight where it is, and moves the others as before."""

    def moved(config, outlier):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(shape))
        start, optimizer = weight.detach().clone(), torch.optim.AdamW([weight], 1e-2)
        if config is not None:
            apply_optimizer_state(optimizer, config, nn.ParameterList([weight]))
        for step in range(6):
            weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            if step == when:
                weight.grad.view(-1)[5] = outlier
            optimizer.step()
        return (weight.detach() - start).abs()

    rank = {"rank": 8} if state_format in ("lowrank", "apollo") else {}
    config = OptimizerState(**BY_NAME[state_format], min_size=1, **rank)
    plain, ours, without = moved(None, size), moved(config, size), moved(config, 1.0)
    assert bool(plain.isfinite().all())
    assert bool(ours.isfinite().all())
    assert ours.mean() < 1.5 * without.mean()
    assert ours.max() < 5 * without.max()


@pytest.mark.parametrize("shape", [(1, 4096), (4096, 1), (2048, 3), (16, 16)])
def test_many_huge_gradients_leave_means_finite(shape):
    weight = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.AdamW([weight], 1e-2)
    apply_optimizer_state(optimizer, OptimizerState(second_moment="factored", min_size=1), nn.ParameterList([weight]))
    for step in range(6):
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        weight.grad[torch.rand(shape) < 0.02] = 1e30
        optimizer.step()
    assert bool(weight.isfinite().all())
    assert weight.abs().max() < 10
