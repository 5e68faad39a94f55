"""One step of one parameter, and torch's private names of optimizers."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone
from lightning_memsave.torch_internals.optimizer_class import OneParameter, bare_step, step_one


class Counting(torch.optim.SGD):
    """Counts its steps in the group, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


def parameters():
    found = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in found:
        p.grad = torch.ones(3)
    return found


def test_torch_still_wraps_step_as_expected():
    torch.optim.AdamW(parameters())
    assert torch.optim.AdamW.step.hooked
    assert bare_step(torch.optim.AdamW) is torch.optim.AdamW.step.__wrapped__


def test_only_that_parameter_steps_and_hooks_do_not_run():
    first, second = parameters()
    optimizer = torch.optim.SGD([first, second], 0.1)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook of the whole step ran"))
    groups, seen = optimizer.param_groups, []

    def step(o):
        seen.append(type(o.param_groups))
        bare_step(type(o))(o)

    step_one(step, optimizer, groups[0], second)
    assert seen == [OneParameter]
    assert optimizer.param_groups is groups
    assert torch.equal(first, torch.ones(3))
    torch.testing.assert_close(second.detach(), torch.full((3,), 0.9))


def test_state_in_a_group_is_refused_by_name():
    (first, _) = parameters()
    optimizer = Counting([first], 0.1)
    with pytest.raises(ValueError, match="Counting, which changes `k` of its parameter group"):
        step_one(bare_step(Counting), optimizer, optimizer.param_groups[0], first)


def test_optimizers_of_all_parameters_are_refused():
    with pytest.raises(ValueError, match=r"`precision` needs an optimizer .* got 'LBFGS'"):
        check_steps_parameters_alone(torch.optim.LBFGS(parameters()), "precision")
