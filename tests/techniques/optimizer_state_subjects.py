"""Optimizers, models and steps for the tests of 8-bit optimizer state; Lion and LAMB are written plainly here."""

import copy
import io

import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state
from lightning_memsave.techniques.optimizer_state.host_offload import Elsewhere

CONFIG = OptimizerState(backend="bitsandbytes")
ALL_32BIT = OptimizerState(min_size=10**9, backend="bitsandbytes")
ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
FORMATS = {
    "8bit": OptimizerState(backend="own", **ALL),
    "4bit": OptimizerState(first_moment="4bit", **ALL),
    "fp8": OptimizerState(first_moment="fp8", **ALL),
    "factored": OptimizerState(second_moment="factored", **ALL),
    "4bit-factored": OptimizerState(first_moment="4bit", second_moment="factored", **ALL),
    "5bit-factored": OptimizerState(first_moment="5bit", second_moment="factored", **ALL),
    "lowrank": OptimizerState(projection="galore", rank=16, **ALL),
    "apollo": OptimizerState(projection="apollo", rank=16, **ALL),
    "offload": OptimizerState(placement="host", **ALL),
}


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (beta1 * moment + (1 - beta1) * p.grad).sign()
                p -= group["lr"] * (direction + group["weight_decay"] * p)
                moment.copy_(beta2 * moment + (1 - beta2) * p.grad)


class LAMB(torch.optim.Optimizer):
    """You et al., 2020, algorithm 2, with the step counted per parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].copy_(beta1 * state["exp_avg"] + (1 - beta1) * p.grad)
                state["exp_avg_sq"].copy_(beta2 * state["exp_avg_sq"] + (1 - beta2) * p.grad**2)
                first = state["exp_avg"] / (1 - beta1 ** float(state["step"]))
                second = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
                update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * p
                ratio = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
                p -= group["lr"] * ratio * update


class Lamb(LAMB):
    pass


PLAIN = {
    "AdamW": lambda params, **kw: torch.optim.AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "Adam": lambda params, **kw: torch.optim.Adam(params, **{"lr": 1e-2, **kw}),
    "SGD": lambda params, **kw: torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **kw}),
    "Lion": lambda params, **kw: Lion(params, **{"lr": 1e-3, "weight_decay": 0.1, **kw}),
    "RMSprop": lambda params, **kw: torch.optim.RMSprop(params, **{"lr": 1e-3, "weight_decay": 0.01, **kw}),
    "Adagrad": lambda params, **kw: torch.optim.Adagrad(params, **{"lr": 1e-2, "weight_decay": 0.01, **kw}),
    "LAMB": lambda params, **kw: LAMB(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
}
every_kin = pytest.mark.parametrize("name", PLAIN)


def big_model(dtype=torch.float32):
    """One parameter with 8-bit state, one just too small for it."""
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 32)).to(dtype)


def set_gradients(model, step):
    # Given, not computed, so that two optimizers see the same ones whatever they do to the parameters.
    random = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(model.parameters()):
        if p.requires_grad:
            noise = torch.randn(p.shape, generator=random)
            gradient = 0.1 * (noise + 0.5 * torch.sin(torch.arange(p.numel()).view(p.shape) + i))
            p.grad = torch.empty_like(p).copy_(gradient)  # in memory as autograd's are: as the parameter is


def run_steps(model, optimizer, steps):
    """The parameters after each of `steps`, [steps, elements]."""
    rows = []
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        rows.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
    return torch.stack(rows)


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def twins(name, model=None, config=CONFIG, **settings):
    """(model, plain optimizer), (equal model, 8-bit optimizer)."""
    first = big_model() if model is None else model
    second = copy.deepcopy(first)
    plain, ours = PLAIN[name](first.parameters(), **settings), PLAIN[name](second.parameters(), **settings)
    apply_optimizer_state(ours, config, second)
    return (first, plain), (second, ours)


def trained_8bit(name, model=None, steps=4):
    model = big_model() if model is None else model
    optimizer = PLAIN[name](model.parameters())
    applied = apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(steps))
    return model, optimizer, applied


def state_bytes(optimizer):
    storages = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    return sum(storages.values())


def bytes_held(optimizer):
    counts = ("step", "mu_product")
    moments = (v for state in optimizer.state.values() for k, v in state.items() if k not in counts)
    on_device = (v for v in moments if not isinstance(v, (Elsewhere, int)))
    tensors = (t for v in on_device for t in (v if isinstance(v, tuple) else (v,)))
    return sum(t.nbytes for t in tensors)


def state_dtypes(optimizer, p):
    return {v.dtype for k, v in optimizer.state[p].items() if k in ("state1", "state2")}


def through_disk(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# Relative L2 error of the distance travelled over 10 steps, about three times what is measured.
BOUNDS_8BIT = {"AdamW": 0.03, "Adam": 0.03, "SGD": 0.03, "Lion": 0.1, "RMSprop": 0.015, "Adagrad": 0.015, "LAMB": 0.03}
