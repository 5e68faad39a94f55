"""Settings of lean optimizer state, the names of their formats, and which state stays float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_memsave.techniques.optimizer_state import apply_optimizer_state, estimate_optimizer_state
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS, OptimizerState, spelled

from .optimizer_state_subjects import ALL_32BIT, CONFIG, PLAIN, every_kin, run_steps, state_bytes, state_dtypes


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
    without = "release without norm_clipping"
    assert OptimizerState(gradients="release", checkpoint="compact").rows == (
        *("gradient release", without, "compact checkpoints"),
    )
    assert OptimizerState(gradients="release", norm_clipping="two-pass").rows == ("gradient release", "norm_clipping")
    assert OptimizerState(backend="own", gradients="into-state").rows == ("into-state gradients",)
    assert (OptimizerState().has_rank, OptimizerState(projection="galore").has_rank) == (False, True)


# ---------------------------------------------------------------------- parameters that keep float32 state
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.bag = nn.EmbeddingBag(100, 64)
        self.linear = nn.Linear(64, 64)  # exactly 4096 elements
        self.small = nn.Linear(64, 63)
        self.norm = nn.LayerNorm(5000)
        self.group_norm = nn.GroupNorm(2, 5000)
        self.odd = nn.Linear(71, 67)  # the last block is not full


@every_kin
def test_state_bytes_equal_the_estimate(name):
    model = Mixed()
    optimizer = PLAIN[name](model.parameters())
    estimate = estimate_optimizer_state(optimizer, CONFIG, model)
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(2))
    assert state_bytes(optimizer) == estimate
    in_8bit = [n for n, p in model.named_parameters() if state_dtypes(optimizer, p) == {torch.uint8}]
    assert in_8bit == ["linear.weight", "odd.weight"]


@pytest.mark.parametrize(
    ("config", "in_8bit"),
    [
        (
            OptimizerState(backend="bitsandbytes", min_size=0),
            {"linear.weight", "linear.bias", "small.weight", "small.bias", "odd.weight"},
        ),
        (
            OptimizerState(backend="bitsandbytes", keep_embeddings_32bit=False),
            {"embedding.weight", "bag.weight", "linear.weight"},
        ),
        (
            OptimizerState(backend="bitsandbytes", keep_norms_32bit=False),
            {"linear.weight", "norm.weight", "group_norm.bias"},
        ),
        (OptimizerState(backend="bitsandbytes", min_size=4097), {"odd.weight"}),
        (ALL_32BIT, set()),
    ],
)
def test_settings_decide_what_is_kept(config, in_8bit):
    model = Mixed()
    optimizer = PLAIN["AdamW"](model.parameters())
    estimate = estimate_optimizer_state(optimizer, config, model)
    apply_optimizer_state(optimizer, config, model)
    run_steps(model, optimizer, range(1))
    found = {n for n, p in model.named_parameters() if state_dtypes(optimizer, p) == {torch.uint8}}
    assert found >= in_8bit
    assert bool(found) == bool(in_8bit)
    if config.min_size != 0 and config.keep_norms_32bit:
        assert not any("norm" in n for n in found)
    if config.keep_embeddings_32bit:
        assert not found & {"embedding.weight", "bag.weight"}
    assert state_bytes(optimizer) == estimate


def test_bytes_per_parameter_of_the_docstring():
    for name, expected in (("AdamW", 2.031), ("SGD", 1.016), ("Lion", 1.016), ("RMSprop", 1.016), ("LAMB", 2.031)):
        model = nn.Linear(1024, 1024, bias=False)
        total = estimate_optimizer_state(PLAIN[name](model.parameters()), CONFIG, model)
        assert total / 1024**2 == pytest.approx(expected, abs=0.003)


@pytest.mark.parametrize(
    "selector", ["odd", "Lin*", nn.Linear, lambda name, module: name in ("odd", "linear", "small")]
)
def test_modules_that_are_named_stay_32bit(selector):
    model, config = Mixed(), OptimizerState(min_size=0, keep_32bit=selector, backend="bitsandbytes")
    optimizer = PLAIN["AdamW"](model.parameters())
    estimate = estimate_optimizer_state(optimizer, config, model)
    apply_optimizer_state(optimizer, config, model)
    run_steps(model, optimizer, range(2))
    kept = {n for n, p in model.named_parameters() if state_dtypes(optimizer, p) == {torch.float32}}
    assert kept >= {"odd.weight", "odd.bias"}
    assert ("linear.weight" in kept) == (selector != "odd")
    assert state_bytes(optimizer) == estimate


def test_a_selector_that_matches_nothing_is_refused_before_anything_changes():
    model = Mixed()
    optimizer = PLAIN["AdamW"](model.parameters())
    with pytest.raises(ValueError, match=r"OptimizerState.keep_32bit. must match a module, got 'heads'"):
        apply_optimizer_state(optimizer, OptimizerState(keep_32bit=("odd", "heads")), model)
    assert type(optimizer) is torch.optim.AdamW


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
HEADS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=2)), "lm_head"),
    "bert": (
        lambda: BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=2, tie_word_embeddings=False)),
        "cls.predictions.decoder",
    ),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("keep", [True, False])
def test_heads_that_transformers_names_are_kept_with_embeddings(name, keep):
    make, head = HEADS[name]
    model = make()

    def state_bytes_with(**settings):
        config = OptimizerState(backend="own", keep_embeddings_32bit=keep, **settings)
        return estimate_optimizer_state(PLAIN["AdamW"](model.parameters()), config, model)

    assert (state_bytes_with(keep_32bit=head) == state_bytes_with()) == keep


@pytest.mark.parametrize("format", ["8bit", "4bit", "offload"])
def test_what_comes_into_the_optimizer_later_is_kept_by_the_same_rules(format):
    model = Mixed()
    optimizer = torch.optim.AdamW(model.linear.parameters())
    apply_optimizer_state(optimizer, OptimizerState(**FORMATS[format]), model)
    optimizer.add_param_group({"params": [*model.norm.parameters(), *model.small.parameters(), model.odd.weight]})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    as_it_is = {
        name for name, p in model.named_parameters() if type(optimizer.state.get(p, {}).get("exp_avg")) is torch.Tensor
    }
    norm = set() if format == "offload" else {"norm.weight", "norm.bias"}
    assert as_it_is == {"linear.bias", "small.weight", "small.bias"} | norm


@pytest.mark.parametrize(
    "format", ["8bit", "4bit", "fp8", "factored", "4bit-factored", "5bit-factored", "lowrank", "apollo", "offload"]
)
def test_complex_parameters_step_as_without(format):
    """Codes are of real numbers."""

    def stepped(format):
        torch.manual_seed(0)
        model = nn.ParameterList([torch.randn(64, 128, dtype=torch.complex64)])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if format is not None:
            apply_optimizer_state(optimizer, OptimizerState(**FORMATS[format], min_size=0), model)
        for _ in range(4):
            model[0].grad = torch.randn_like(model[0])
            optimizer.step()
        return model[0]

    assert torch.equal(stepped(format), stepped(None))


def test_complex_gradients_do_not_end_in_state():
    model = nn.ParameterList([torch.randn(64, 128, dtype=torch.complex64)])
    config = OptimizerState(first_moment="32bit", gradients="into-state")
    with pytest.raises(ValueError, match="complex"):
        apply_optimizer_state(torch.optim.AdamW(model.parameters()), config, model)
    with pytest.raises(ValueError, match="complex"):
        apply_optimizer_state(torch.optim.AdamW(model.parameters()), OptimizerState(backend="bitsandbytes"), model)


@pytest.mark.parametrize("backend", ["own", "bitsandbytes"])
def test_what_is_small_and_comes_later_is_kept_whoever_has_the_codes(backend):
    model = nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(backend=backend), model)
    late = nn.Parameter(torch.zeros(64))
    optimizer.add_param_group({"params": [late]})
    model.weight.grad, late.grad = torch.ones_like(model.weight), torch.ones_like(late)
    optimizer.step()
    dtypes = {t.dtype for t in optimizer.state[late].values() if isinstance(t, torch.Tensor) and t.numel() == 64}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("kind", ["small", "complex"])
def test_what_comes_later_is_kept_by_the_same_rule(kind):
    model = nn.Linear(128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(), model)
    late = nn.Parameter(torch.zeros(64) if kind == "small" else torch.zeros(64, 128, dtype=torch.complex64))
    optimizer.add_param_group({"params": [late]})
    model.weight.grad, late.grad = torch.ones_like(model.weight), torch.ones_like(late)
    optimizer.step()
    assert isinstance(optimizer.state[late]["exp_avg"], torch.Tensor)
    assert optimizer.state[late]["exp_avg"].dtype == late.dtype
    assert not isinstance(optimizer.state[model.weight]["exp_avg"], torch.Tensor)
