"""Settings of lean optimizer state, and the names of their formats."""

import pytest
from torch import nn

from lightning_memsave.techniques.optimizer_state.state_config import FORMATS, OptimizerState, spelled


@pytest.mark.parametrize(
    "settings",
    [
        {"first_moment": "3bit"},
        {"second_moment": "4bit"},
        {"placement": "host", "projection": "galore"},
        {"min_size": -1},
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings):
    with pytest.raises(ValueError, match="`OptimizerState"):
        OptimizerState(**settings)


def test_shorthands():
    assert OptimizerState.from_shorthand("8bit") == OptimizerState.from_shorthand(True) == OptimizerState()
    with pytest.raises(ValueError, match=r"'8bit', '4bit', 'lean', 'offload', 'paged', got '2bit'"):
        OptimizerState.from_shorthand("2bit")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"first_moment": "fp8", "backend": "own"}, "is for 8-bit state only"),
        ({"backend": "cuda"}, "must be one of 'auto', 'bitsandbytes', 'own'"),
        ({"checkpoint": "zip"}, "must be one of 'plain', 'compact'"),
        ({"projection": "galore", "rank": 0}, "must be positive"),
        ({"placement": "paged", "gradients": "into-state"}, "moments of whole gradients"),
    ],
)
def test_settings_are_checked(settings, word):
    with pytest.raises(ValueError, match=word):
        OptimizerState(**settings)


@pytest.mark.parametrize("value", [None, (0,), nn.Linear(1, 1), (nn.Linear(1, 1),), "", int])
def test_what_is_no_selector_is_refused(value):
    with pytest.raises(ValueError, match=r"OptimizerState.keep_32bit. must be patterns"):
        OptimizerState(keep_32bit=value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_its_settings_ask_for(name):
    settings = dict(FORMATS[name])
    if name == "32bit":  # which changes nothing by itself
        settings["gradients"] = "release"
    assert OptimizerState(**settings).format == name


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "32bit"])
def test_what_a_user_is_told_to_write_is_that_format(name):
    slot, _, written = spelled(name).partition("=")
    value = eval(written, {"OptimizerState": OptimizerState})
    config = value if isinstance(value, OptimizerState) else OptimizerState.from_shorthand(value)
    assert slot == "optimizer_state"
    assert config.format == name


def test_settings_that_say_the_default_are_the_default_format():
    assert OptimizerState(first_moment="8bit", second_moment="8bit").format == "8bit"
    assert OptimizerState(placement="host", first_moment="32bit").format == "offload"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"first_moment": "32bit"}, "must change something.*optimizer_state=False"),
        ({"first_moment": "4bit", "second_moment": "8bit"}, "must keep second moments as first ones"),
        ({"first_moment": "fp8", "second_moment": "factored"}, "must keep second moments as first ones"),
        ({"placement": "host", "first_moment": "8bit"}, "must keep second moments as first ones"),
        ({"rank": 8}, "`OptimizerState.rank` is .* with a `projection`"),
        ({"placement": "host", "checkpoint": "compact"}, "`OptimizerState.checkpoint` is .* with formats of codes"),
        ({"backend": "bitsandbytes", "gradients": "into-state"}, "needs moments of whole gradients"),
        ({"projection": "apollo", "gradients": "into-state"}, "needs moments of whole gradients"),
        ({"gradients": "drop"}, "must be one of 'keep', 'release', 'into-state', got 'drop'"),
    ],
)
def test_settings_that_exclude_each_other(settings, text):
    with pytest.raises(ValueError, match=text):
        OptimizerState(**settings)


def test_settings_with_rows_of_their_own():
    assert OptimizerState().rows == ()
    assert OptimizerState(gradients="release", checkpoint="compact").rows == ("gradient release", "compact checkpoints")
    assert OptimizerState(backend="own", gradients="into-state").rows == ("into-state gradients",)
    assert (OptimizerState().has_rank, OptimizerState(projection="galore").has_rank) == (False, True)
