"""Optimizers that hold others, as users write them."""

from __future__ import annotations

import torch
from torch import nn


def parameters_of(optimizers):
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


class Both(torch.optim.Optimizer):
    """Groups of its own, with the parameters of those that it holds."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__(parameters_of(optimizers), {})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss

    def state_dict(self):
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict):
        for each, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            each.load_state_dict(state)


class Joined(torch.optim.Optimizer):
    """No groups or state of its own, as is often seen; torch's constructor is not called."""

    def __init__(self, *optimizers):
        self.by_name = {str(number): each for number, each in enumerate(optimizers)}
        self.defaults = {}

    @property
    def optimizers(self):
        return list(self.by_name.values())

    @property
    def param_groups(self):
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self):
        return {p: state for each in self.optimizers for p, state in each.state.items()}

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss

    def zero_grad(self, set_to_none=True):
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self):
        return {name: each.state_dict() for name, each in self.by_name.items()}

    def load_state_dict(self, state_dict):
        for name, each in self.by_name.items():
            each.load_state_dict(state_dict[name])


class Clipping(Both):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        nn.utils.clip_grad_norm_(parameters_of(self.optimizers), 1.0)
        super().step()
        return loss


class Lookahead(Both):
    """Every few steps the parameters go half of the way back."""

    def __init__(self, *optimizers, period=5):
        super().__init__(*optimizers)
        self.period, self.num_steps, self.slow = period, 0, None

    @torch.no_grad()
    def step(self, closure=None):
        self.slow = self.slow or [p.detach().clone() for p in parameters_of(self.optimizers)]
        loss = super().step(closure)
        self.num_steps += 1
        if self.num_steps % self.period == 0:
            for p, slow in zip(parameters_of(self.optimizers), self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)
        return loss


class InTurns(Both):
    """One optimizer steps, then the other."""

    num_steps = 0

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.num_steps += 1
        self.optimizers[self.num_steps % len(self.optimizers)].step()
        return loss


class ClosureForEach(Both):
    def step(self, closure=None):
        return max(each.step(closure) for each in self.optimizers)


class KeepsState(Both):
    """Writes the state of those that it holds as its own."""

    def step(self, closure=None):
        loss = super().step(closure)
        for each in self.optimizers:
            self.state.update(each.state)
        return loss
