"""Codes on the architectures of `transformers`, against plain autograd."""

from __future__ import annotations

import statistics

import pytest
import torch

from lightning_memsave import ActivationCompression
from lightning_memsave.techniques.activation_compression import open_vault
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
        vault, applied = open_vault(model, ActivationCompression(codecs=(codec,)))
        found[codec] = float((zoo.gradients(model, loss_of, vault.scope) - plain).norm() / plain.norm())
        assert vault.tally.held_bytes < vault.tally.plain_bytes
        applied.undo()
    return found


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in SOME.items() for name in names])
def test_codes_of_an_architecture_are_within_their_bounds(kind, name):
    torch.set_num_threads(1)
    found = errors(kind, name)
    assert found is not None
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
