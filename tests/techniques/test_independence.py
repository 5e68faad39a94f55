"""The test of independence on modules of which the answer is known, and what it leaves as it was."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.techniques.tiling.independence import test_of as independence_of

from .independence_zoo import ZOO, held_out


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
