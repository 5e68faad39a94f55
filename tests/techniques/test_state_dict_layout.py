"""8-bit optimizer state on disk, and copies of such optimizers."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    from_plain,
    is_8bit,
    to_plain,
)
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME

from .optimizer_state_subjects import (
    ALL_32BIT,
    BOUNDS_8BIT,
    CONFIG,
    PLAIN,
    big_model,
    every_kin,
    flat,
    run_steps,
    state_bytes,
    through_disk,
    trained_8bit,
)


# ---------------------------------------------------------------------- checkpoints
def assert_state_equal(first, second):
    assert first.keys() == second.keys()
    for key in first:
        assert first[key].keys() == second[key].keys()
        for name, value in first[key].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[key][name])), (key, name)


@every_kin
def test_to_plain_has_torchs_layout(name):
    _, optimizer, _ = trained_8bit(name)
    plain_model = big_model()
    plain = PLAIN[name](plain_model.parameters())
    run_steps(plain_model, plain, range(4))
    saved, expected = to_plain(optimizer), plain.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert saved["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert torch.as_tensor(saved["state"][number][key]).shape == torch.as_tensor(value).shape
            assert key == "step" or saved["state"][number][key].dtype == value.dtype
    assert saved["param_groups"] == expected["param_groups"]


@every_kin
def test_to_plain_loads_into_the_plain_optimizer(name):
    model, optimizer, _ = trained_8bit(name)
    second = copy.deepcopy(model)
    plain = PLAIN[name](second.parameters())
    plain.load_state_dict(through_disk(to_plain(optimizer)))
    start = flat(model)
    expected, found = run_steps(second, plain, range(4, 9)) - start, run_steps(model, optimizer, range(4, 9)) - start
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]


@every_kin
def test_a_plain_state_dict_loads_into_the_8bit_optimizer(name):
    model = big_model()
    plain = PLAIN[name](model.parameters())
    run_steps(model, plain, range(4))
    second = copy.deepcopy(model)
    ours = PLAIN[name](second.parameters(), lr=123.0)
    apply_optimizer_state(ours, CONFIG, second)
    from_plain(ours, through_disk(plain.state_dict()))
    assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    start = flat(model)
    expected, found = run_steps(model, plain, range(4, 9)) - start, run_steps(second, ours, range(4, 9)) - start
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]


@every_kin
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_continues_bit_for_bit(name, dtype):
    model, optimizer, _ = trained_8bit(name, big_model(dtype))
    saved = through_disk(to_plain(optimizer))
    second = copy.deepcopy(model)
    resumed = PLAIN[name](second.parameters(), lr=123.0)
    apply_optimizer_state(resumed, CONFIG, second)
    from_plain(resumed, saved)
    assert_state_equal(to_plain(resumed)["state"], saved["state"])
    expected, found = run_steps(model, optimizer, range(4, 9)), run_steps(second, resumed, range(4, 9))
    assert torch.equal(found, expected)
    assert_state_equal(to_plain(resumed)["state"], to_plain(optimizer)["state"])


def test_a_checkpoint_of_other_settings_loads_and_rounds():
    model, optimizer, _ = trained_8bit("AdamW")
    second = copy.deepcopy(model)
    resumed = PLAIN["AdamW"](second.parameters())
    apply_optimizer_state(resumed, ALL_32BIT, second)
    from_plain(resumed, to_plain(optimizer))
    assert_state_equal(to_plain(resumed)["state"], to_plain(optimizer)["state"])


def test_to_plain_before_the_first_step():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    saved = through_disk(to_plain(optimizer))
    assert saved["state"] == {}
    from_plain(optimizer, saved)
    run_steps(model, optimizer, range(2))
    torch.optim.AdamW(big_model().parameters()).load_state_dict(saved)


def test_a_saved_state_is_not_changed_by_later_steps_of_another_run():
    model, optimizer, _ = trained_8bit("AdamW")
    saved = through_disk(to_plain(optimizer))
    kept = copy.deepcopy(saved["state"])
    from_plain(optimizer, saved)
    run_steps(model, optimizer, range(3))
    assert_state_equal(saved["state"], kept)


WRONG = [("AdamW", "SGD"), ("SGD", "AdamW"), ("RMSprop", "Adam"), ("Adagrad", "RMSprop"), ("Lion", "AdamW")]


@pytest.mark.parametrize(("written_by", "read_by"), [*WRONG, ("AdamW", "Lion"), ("LAMB", "Lion")])
@pytest.mark.parametrize("low_bit", [True, False])
def test_a_checkpoint_of_another_optimizer_is_refused(written_by, read_by, low_bit):
    if low_bit:
        saved = to_plain(trained_8bit(written_by)[1])
    else:
        plain_model = big_model()
        plain = PLAIN[written_by](plain_model.parameters())
        run_steps(plain_model, plain, range(2))
        saved = plain.state_dict()
    _, optimizer, _ = trained_8bit(read_by)
    before = copy.deepcopy(to_plain(optimizer))
    with pytest.raises(ValueError, match="optimizer_states"):
        from_plain(optimizer, saved)
    after = to_plain(optimizer)
    assert_state_equal(after["state"], before["state"])
    assert after["param_groups"] == before["param_groups"]


def test_a_checkpoint_of_other_groups_is_refused():
    saved = to_plain(trained_8bit("AdamW")[1])
    larger = nn.Sequential(*big_model(), nn.Linear(32, 32))
    optimizer = PLAIN["AdamW"](larger.parameters())
    apply_optimizer_state(optimizer, CONFIG, larger)
    with pytest.raises(ValueError, match=r"sizes \[6\], got \[4\]"):
        from_plain(optimizer, saved)
    model = big_model()
    split = PLAIN["AdamW"]([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    apply_optimizer_state(split, CONFIG, model)
    with pytest.raises(ValueError, match=r"sizes \[2, 2\], got \[4\]"):
        from_plain(split, saved)


def test_a_checkpoint_of_a_newer_version_is_refused():
    _, optimizer, _ = trained_8bit("AdamW")
    saved = to_plain(optimizer)
    saved["memsave_8bit"]["version"] += 1
    with pytest.raises(ValueError, match="Update lightning-memsave"):
        from_plain(optimizer, saved)


# ---------------------------------------------------------------------- copies
@every_kin
@pytest.mark.parametrize("with_scheduler", [False, True])
def test_a_deep_copy_is_an_8bit_optimizer_of_its_own(name, with_scheduler):
    model = big_model()
    optimizer = PLAIN[name](model.parameters())
    if with_scheduler:
        lr_scheduler.CosineAnnealingLR(optimizer, 100)
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(3))
    second_model, second = copy.deepcopy((model, optimizer))
    assert is_8bit(second)
    assert second.param_groups[0]["params"][0] is second_model[0].weight
    assert state_bytes(second) == state_bytes(optimizer)
    before = flat(model)
    found = run_steps(second_model, second, range(3, 6))
    assert torch.equal(flat(model), before)
    assert torch.equal(found, run_steps(model, optimizer, range(3, 6)))
    assert_state_equal(to_plain(second)["state"], to_plain(optimizer)["state"])


@every_kin
@pytest.mark.parametrize("with_scheduler", [False, True])
def test_a_pickled_8bit_optimizer_goes_on(name, with_scheduler):
    model = big_model()
    optimizer = PLAIN[name](model.parameters())
    if with_scheduler:
        lr_scheduler.CosineAnnealingLR(optimizer, 100)
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(3))
    second_model, second = pickle.loads(pickle.dumps((model, optimizer)))
    assert type(second) is type(optimizer)
    assert is_8bit(second)
    found = run_steps(second_model, second, range(3, 6))
    assert torch.equal(found, run_steps(model, optimizer, range(3, 6)))


def test_state_dict_is_torchs_layout():
    _, optimizer, _ = trained_8bit("AdamW")
    assert_state_equal(optimizer.state_dict()["state"], to_plain(optimizer)["state"])
    model = big_model()
    resumed = PLAIN["AdamW"](model.parameters())
    apply_optimizer_state(resumed, CONFIG, model)
    resumed.load_state_dict(through_disk(optimizer.state_dict()))
    assert_state_equal(resumed.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("format", ["8bit", "4bit"])
def test_momentum_in_some_groups_alone(format):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def make(model):
        groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[1].parameters()}]
        optimizer = torch.optim.RMSprop(groups)
        apply_optimizer_state(optimizer, OptimizerState(**BY_NAME[format]), model)
        return optimizer

    optimizer, twin = make(model), copy.deepcopy(model)
    run_steps(model, optimizer, range(2))
    other = make(twin)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(through_disk(optimizer.state_dict()))
    run_steps(model, optimizer, range(2, 4))
    run_steps(twin, other, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    for state in (saved := optimizer.state_dict())["state"].values():
        state.pop("momentum_buffer", None)
    with pytest.raises(ValueError, match="momentum_buffer"):
        make(twin).load_state_dict(saved)
