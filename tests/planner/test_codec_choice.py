"""Codecs by module: the knapsack against an exact solver, and settings against what they are to mean."""

from __future__ import annotations

import itertools
import math
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_memsave import ActivationCompression
from lightning_memsave.planner.codec_choice import CODECS, CodeSite, CodeSites

KEPT = ("exact", "int8", "int4", "int2")


def random_sites(num_sites, seed):
    draw = np.random.default_rng(seed)
    sites = []
    for number in range(num_sites):
        plain, size = int(draw.integers(1000, 10**7)), draw.lognormal(0, 2)
        bits = dict(zip(KEPT, (32, 8.25, 4.25, 2.25), strict=True))
        kept = {codec: int(plain * bits[codec] / 32 * draw.uniform(0.8, 1.2)) for codec in KEPT}
        noise = {codec: 0.0 if codec == "exact" else 1e-4 * size * 4.0 ** -bits[codec] for codec in KEPT}
        sites.append(CodeSite(modules=(f"layer{number}",), kept_bytes=kept, noise=noise))
    return CodeSites(tuple(sites))


def solved(sites, minimised, bounded, bound):
    """The least of one figure with the other one bounded, by branch and bound; one codec for each site."""
    first, second = ([f(site)[c] for site in sites.sites for c in KEPT] for f in (minimised, bounded))
    one_each = np.kron(np.eye(len(sites.sites)), np.ones(len(KEPT)))
    scale = max(first) or 1.0, bound or 1.0
    found = milp(
        np.array(first) / scale[0],
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(np.array(second) / scale[1], -np.inf, 1.0)],
        integrality=np.ones(len(first)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-6},
    )
    return found.fun * scale[0]


@pytest.mark.parametrize("num_sites", [3, 12, 40])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_at_a_bound_are_those_of_an_exact_solver(num_sites, seed):
    sites = random_sites(num_sites, seed)
    most = sites.noise_of(("int2",) * num_sites)
    for part in (0.02, 0.2, 0.7):
        codecs = sites.fewest_bytes(part * most)
        assert sites.noise_of(codecs) <= part * most
        best = solved(sites, lambda s: s.kept_bytes, lambda s: s.noise, (part * most) ** 2)
        assert sites.bytes_of(codecs) <= 1.001 * best


@pytest.mark.parametrize("num_sites", [3, 12, 40])
@pytest.mark.parametrize("seed", range(4))
def test_noise_in_given_bytes_is_that_of_an_exact_solver(num_sites, seed):
    sites = random_sites(num_sites, seed)
    most, fewest = (sites.bytes_of((codec,) * num_sites) for codec in ("exact", "int2"))
    for part in (0.1, 0.3, 0.6):
        max_bytes = int(fewest + part * (most - fewest))
        codecs = sites.least_noise(max_bytes)
        assert sites.bytes_of(codecs) <= max_bytes
        room = num_sites * math.ceil((most - fewest) / 2**16)  # bytes are rounded up
        best = solved(sites, lambda s: s.noise, lambda s: s.kept_bytes, max_bytes - room)
        assert sites.noise_of(codecs) ** 2 <= 1.00001 * best


def test_no_more_noise_than_one_codec_for_all_in_the_same_bytes():
    sites = random_sites(20, 7)
    for codec in KEPT[1:]:
        uniform = (codec,) * 20
        room = 20 * math.ceil(sites.bytes_of(("exact",) * 20) / 2**16)
        mixed = sites.least_noise(sites.bytes_of(uniform) + room)
        assert sites.noise_of(mixed) <= sites.noise_of(uniform)


def test_what_cannot_be_met_is_met_as_far_as_it_goes():
    sites = random_sites(5, 0)
    assert sites.fewest_bytes(0.0) == ("exact",) * 5
    assert sites.bytes_of(sites.least_noise(0)) == sum(min(site.kept_bytes.values()) for site in sites.sites)


def test_without_sites_there_is_nothing_to_choose():
    nothing = CodeSites(())
    assert nothing.fewest_bytes(0.1) == nothing.least_noise(10) == ()
    config = nothing.as_config((), ActivationCompression(codecs=("int4",)), {"": "Net", "net": "Linear"})
    assert (config.codecs, config.modules) == (("exact",), {})


NAMES = ["", "a", "a.b", "a.b.c", "a.d", "e", "e.f"]


@given(st.lists(st.sampled_from(KEPT), min_size=len(NAMES), max_size=len(NAMES)), st.sets(st.sampled_from(NAMES)))
def test_each_module_has_the_codec_of_its_site(codecs, with_a_site):
    sites = CodeSites(
        tuple(
            CodeSite(modules=(name,), kept_bytes=dict.fromkeys(KEPT, 1), noise=dict.fromkeys(KEPT, 0.0))
            for name in NAMES
            if name in with_a_site
        )
    )
    chosen = tuple(codec for name, codec in zip(NAMES, codecs, strict=True) if name in with_a_site)
    config = sites.as_config(
        chosen, ActivationCompression(codecs=("int2",), max_gradient_noise=0.1), dict.fromkeys(NAMES, "Block")
    )
    base = next((codec for codec in config.codecs if codec != "exact"), "exact")

    def holds_in(name):  # the innermost module that is named, else what holds everywhere
        above = [".".join(name.split(".")[:n]) for n in range(name.count(".") + 1, 0, -1)] if name else []
        return next((config.modules[each] for each in above if each in config.modules), base)

    assert {name: holds_in(name) for name in with_a_site} == {
        name: codec for name, codec in zip(NAMES, codecs, strict=True) if name in with_a_site
    }
    assert config.max_gradient_noise is None


def test_other_codecs_and_settings_stay():
    config = ActivationCompression(codecs=("linear-cross-entropy", "int4"), seed=3, max_gradient_noise=0.1)
    site = CodeSite(modules=("a",), kept_bytes={"exact": 4, "int4": 1}, noise={"exact": 0.0, "int4": 0.01})
    found = CodeSites((site,)).as_config(("int4",), config, dict.fromkeys(("", "a", "b"), "Block"))
    assert found.codecs == ("exact", "linear-cross-entropy", "int4")
    assert found.seed == 3


def test_a_module_that_is_named_like_a_class_or_a_pattern_means_itself_alone():
    classes = {"": "Net", "Linear": "Block", "Linear.up": "Linear", "a[0]": "Linear", "a0": "Linear", "last": "Linear"}
    codecs = {"Linear": "int8", "Linear.up": "int4", "a[0]": "int8", "a0": "int4", "last": "int4"}
    kept = dict.fromkeys(KEPT, 1)
    sites = CodeSites(tuple(CodeSite(modules=(n,), kept_bytes=kept, noise={}) for n in codecs))
    config = sites.as_config(tuple(codecs.values()), ActivationCompression(), classes)

    def holds_in(name):  # as the technique matches them
        while name:
            for pattern, codec in config.modules.items():
                if fnmatchcase(name, pattern) or fnmatchcase(classes[name], pattern):
                    return codec
            name = name.rpartition(".")[0]
        return "int4"

    assert {name: holds_in(name) for name in codecs} == codecs


def test_codecs_are_in_the_order_of_their_faithfulness():
    from lightning_memsave.saved_tensors.codec_names import FIDELITIES

    order = [FIDELITIES[codec] for codec in CODECS]
    assert all(a > b for a, b in itertools.pairwise(order))
