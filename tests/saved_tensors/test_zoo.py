"""Codes on the architectures of `transformers`, against plain autograd."""

from __future__ import annotations

import statistics

import pytest
import torch
import transformers

from lightning_memsave import ActivationCompression, Checkpointing, apply_checkpointing, plan_checkpointing
from lightning_memsave.techniques.activation_compression import open_store
from lightning_memsave.techniques.checkpointing.region_selection import select_regions
from tests import zoo

BOUNDS = {"int8": 0.05, "int4": 0.6}
MEDIANS = {"int8": 0.007, "int4": 0.114}
"""Relative errors of the whole gradient: of each architecture, and of the median one."""
SOME = {
    "vision": ("beit", "bit", "dinov2_with_registers", "mobilevit", "vit", "vit_msn"),
    "causal": ("gemma4_unified_text", "llama", "opt"),
    "masked": ("bert", "squeezebert"),
    "seq2seq": ("bart",),
}


def errors(kind, name):
    """Of each codec; `None` where the architecture is not built."""
    built = zoo.build(kind, name)
    if built is None:
        return None
    model, loss_of = built
    plain = zoo.gradients(model, loss_of)
    found = {}
    for codec in BOUNDS:
        store, applied = open_store(model, ActivationCompression(codecs=(codec,)))
        found[codec] = float((zoo.gradients(model, loss_of, store.scope) - plain).norm() / plain.norm())
        assert store.tally.held_bytes < store.tally.plain_bytes
        applied.undo()
    return found


def skip_unless_built(found):
    """Other versions of transformers than the one of `NUM_BUILT` may need more than a shrunk configuration."""
    if found is None:
        assert not transformers.__version__.startswith("5.23.")
        pytest.skip(f"transformers {transformers.__version__} does not build it at toy size")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in SOME.items() for name in names if name in zoo.CONFIG_MAPPING]
)
def test_codes_of_an_architecture_are_within_their_bounds(kind, name):
    torch.set_num_threads(1)
    found = errors(kind, name)
    skip_unless_built(found)
    assert all(0 < found[codec] < bound for codec, bound in BOUNDS.items()), found


@pytest.mark.slow
def test_codes_of_all_architectures_are_within_their_bounds():
    torch.set_num_threads(1)
    found = {(kind, name): errors(kind, name) for kind in zoo.HEADS for name in zoo.names(kind)}
    built = {key: value for key, value in found.items() if value is not None}
    for kind, number in zoo.NUM_BUILT.items():
        assert sum(key[0] == kind for key in built) >= number
    for codec, bound in BOUNDS.items():
        assert {key: value[codec] for key, value in built.items() if not value[codec] < bound} == {}
        assert statistics.median(value[codec] for value in built.values()) <= MEDIANS[codec]


CACHED = ("bloom", "gpt2", "mpt", "gemma2", "recurrent_gemma")
PLANS = ("blocks", "exact", "sqrt", "recursive")


def differences(kind, name, caches=True):
    """What does not equal plain autograd to the bit, of an architecture with its caches of keys and values on."""
    built = zoo.build(kind, name)
    if built is None:
        return None
    model, loss_of = built
    if caches and not _use_caches(model, loss_of):
        model, loss_of = zoo.build(kind, name)
    plain, found = zoo.gradients(model, loss_of), {}
    for plan in PLANS:
        if plan == "exact":
            store, applied = open_store(model, ActivationCompression(codecs=("exact",)))
            ours = zoo.gradients(model, loss_of, store.scope)
        else:
            config = Checkpointing(method=plan)
            if config.needs_a_plan:
                config = plan_checkpointing(model, lambda: loss_of().backward(), config)
            elif not repeated_blocks(model):
                continue
            applied = apply_checkpointing(model, config)
            zoo.gradients(model, loss_of)
            ours = zoo.gradients(model, loss_of)  # as later steps: what the first one fills is there
        applied.undo()
        if not torch.equal(ours, plain):
            found[plan] = float((ours - plain).norm() / plain.norm())
    return found


def _use_caches(model, loss_of):
    """Whether the model trains with them, which some of transformers' hybrids do not."""
    for module in model.modules():
        for config in (getattr(module, "config", None), getattr(getattr(module, "config", None), "text_config", None)):
            if hasattr(config, "use_cache"):
                config.use_cache = True
    try:
        loss_of().backward()
    except Exception:
        return False
    return True


def repeated_blocks(model):
    try:
        return select_regions(model, None, None)
    except ValueError:
        return []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind, names in SOME.items() for name in names[:2] if name in zoo.CONFIG_MAPPING),
        *(("causal", name) for name in CACHED),
    ],
)
def test_lossless_measures_give_the_bits_of_plain_autograd(kind, name):
    torch.set_num_threads(1)
    found = differences(kind, name)
    skip_unless_built(found)
    assert found == {}


@pytest.mark.slow
def test_lossless_measures_give_the_bits_of_plain_autograd_on_all_architectures():
    torch.set_num_threads(1)
    found = {(kind, name): differences(kind, name) for kind in zoo.HEADS for name in zoo.names(kind)}
    assert {key: value for key, value in found.items() if value} == {}
    assert sum(value is not None for value in found.values()) >= sum(zoo.NUM_BUILT.values())
