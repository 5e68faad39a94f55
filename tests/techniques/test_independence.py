"""The test of independence on modules of which the answer is known, and what it leaves as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import Tiling, apply_tiling
from lightning_memsave.techniques.tiling.independence import test_of as independence_of

from .independence_zoo import ZOO, held_out

D = 16


def judged(case):
    torch.manual_seed(0)
    module = case.make()
    x = torch.randint(1, 60, case.shape) if len(case.shape) == 2 else torch.randn(case.shape, requires_grad=True)
    return independence_of(module.forward, module, (x,), {}, case.dim)


@pytest.mark.parametrize("case", [*ZOO, *held_out()], ids=lambda case: case.name)
def test_a_module_is_found_independent_only_where_it_is(case):
    found = judged(case)
    if case.why_not:
        assert case.why_not in found.why_not
    else:
        assert found.why_not == ""


# ---------------------------------------------------------------------------------------------------- kinds of mixing
class Gated(nn.Module):
    """A Linear, and something of other entries that depends on `rule`."""

    def __init__(self, rule) -> None:
        super().__init__()
        self.linear, self.rule = nn.Linear(D, D), rule

    def forward(self, x, **given):
        return self.rule(self.linear(x), x, **given)


RULES = {
    "a mask that is open later": (
        lambda y, x, mask: y + torch.where(mask[..., None], x.mean(1, keepdim=True), 0.0),
        [{"mask": torch.zeros(4, 64, dtype=torch.bool)}],
    ),
    "a flag that is open later": (
        lambda y, x, flag: y + torch.where(flag, x.mean(1, keepdim=True), 0.0),
        [{"flag": torch.zeros(1, dtype=torch.bool)}],
    ),
    "numbers that differ later": (
        lambda y, x, ids: y + ids.amax(1)[:, None, None],
        [{"ids": torch.zeros(4, 64, dtype=torch.long)}],
    ),
    "a threshold": (lambda y, x: y + (x[..., :1] > 9).any(1, keepdim=True), [{}]),
    "a count of what was seen": (lambda y, x: y * ((x[..., :1].sigmoid() > 0.5).long().cumsum(1) <= 20), [{}]),
    "a distance": (lambda y, x: y + (F.pad(x, (0, 0, 30, 0))[:, : x.shape[1]] if x.shape[1] > 30 else 0), [{}]),
    "a length": (lambda y, x: y * (2.0 if x.shape[1] > 40 else 1.0), [{}]),
}


@pytest.mark.parametrize("rule", RULES)
def test_mixing_that_depends_on_values_or_on_the_extent_is_refused(rule):
    torch.manual_seed(0)
    function, [given] = RULES[rule]
    model = nn.Sequential(Gated(function))
    apply_tiling(model, Tiling(modules="Gated", dim=1, size=4))
    with pytest.raises(ValueError, match="independently, and of this one"):
        model[0](torch.randn(4, 64, D), **given)


def test_arguments_of_other_names_are_tested_for_themselves():
    def rule(y, x, a=None, b=None):
        return y + (0 if a is None else a) + (0 if b is None else b.mean(1, keepdim=True))

    model, x = Gated(rule), torch.randn(4, 64, D)
    expected = model(x, b=x)
    apply_tiling(nn.Sequential(model), Tiling(modules="Gated", dim=1, size=4))
    model(x, a=x)
    assert torch.equal(model(x, b=x), expected)  # whole: an earlier call was cut


def test_a_buffer_that_is_edited_between_calls_is_a_reason_to_test_again():
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.register_buffer("is_open", torch.zeros((), dtype=torch.bool))

        def forward(self, x):
            return self.linear(x) + torch.where(self.is_open, x.mean(1, keepdim=True), 0.0)

    model, x = Switch(), torch.randn(4, 64, D)
    apply_tiling(nn.Sequential(model), Tiling(modules="Switch", dim=1, size=4))
    model(x)
    model.is_open.fill_(True)
    assert torch.equal(model(x), model.linear(x) + x.mean(1, keepdim=True))


def test_a_longer_call_is_compared_once_more():
    model = Gated(lambda y, x: y * (2.0 if x.shape[1] > 40 else 1.0))
    applied = apply_tiling(nn.Sequential(model), Tiling(modules="Gated", dim=1, size=4))
    model(torch.randn(4, 30, D))
    assert applied.summary.startswith("1 module in tiles")
    longer = torch.randn(4, 64, D)
    torch.testing.assert_close(model(longer), 2 * model.linear(longer))
