"""Optimizers that hold others, as one with Muon for matrices and AdamW for the rest, and which of them move parameters.

Lightning's automatic optimization knows one optimizer, so several come behind one. What is done to an optimizer (codes
for its state, steps in float32) is done to those inside, where the outer one proves to do no more than to call their
steps: a copy of it steps small parameters, and so do copies of those that it holds, without it.
Both must be equal to the bit after each of 64 steps. Lookahead, which moves parameters itself every few steps, and a
wrapper that scales gradients before it calls a step differ, and so they are one optimizer, and refused by name.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memsave.torch_internals.coupling import held_by
from lightning_memsave.torch_internals.fake_tensors import is_fake, with_values

_NUM_STEPS = 64
_NUM_TRIED = 2
"""Parameters of each group that have gradients in the trial."""


def with_held(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return optimizers and all that they hold, each once: whose state is that of optimizers."""
    found: dict[int, torch.optim.Optimizer] = {}
    todo = list(optimizers)
    while todo:
        optimizer = todo.pop(0)
        if id(optimizer) not in found:  # else one that is inside may know the one around it
            found[id(optimizer)] = optimizer
            todo += held_by(optimizer)
    return list(found.values())


def stepping(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose steps move parameters: in place of one that only calls others, those.

    >>> class Both(torch.optim.Optimizer):
    ...     def __init__(self, *optimizers):
    ...         self.optimizers = optimizers
    ...         super().__init__([p for each in optimizers for g in each.param_groups for p in g["params"]], {})
    ...
    ...     def step(self, closure=None):
    ...         loss = None if closure is None else closure()
    ...         for each in self.optimizers:
    ...             each.step()
    ...         return loss
    >>> layer = nn.Linear(4, 4)
    >>> both = Both(torch.optim.SGD([layer.weight], 0.1), torch.optim.AdamW([layer.bias]))
    >>> [type(each).__name__ for each in stepping([both])]
    ['SGD', 'AdamW']
    """
    return [each for optimizer in optimizers for each in _stepping_of(optimizer)]


def _stepping_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    held = held_by(optimizer)
    if not held:
        return [optimizer]
    if optimizer not in _ONLY_CALLS:
        _ONLY_CALLS[optimizer] = False  # for one inside that holds it
        _ONLY_CALLS[optimizer] = _only_calls(optimizer, stepping(held))
    return stepping(held) if _ONLY_CALLS[optimizer] else [optimizer]


_ONLY_CALLS: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
"""What was found before anything was changed."""


def _only_calls(optimizer: torch.optim.Optimizer, inside: list[torch.optim.Optimizer]) -> bool:
    """Return whether a step of `optimizer` is one of each of `inside` and no more, tried on small parameters."""
    parameters = list(_parameters_of(inside))
    if len(set(parameters)) != len(parameters) or set(parameters) != set(_parameters_of([optimizer])):
        return False
    if any(isinstance(leaf, nn.Module) for leaf in tree_leaves(list(vars(optimizer).values()))):
        return False  # it may do something with it, also in a trial
    try:  # in a thread, where no mode makes tensors fake
        return with_values(functools.partial(_steps_alike, optimizer, inside))
    except Exception:  # whatever a class does that needs more than a step
        return False


@torch.random.fork_rng(devices=[])
def _steps_alike(optimizer: torch.optim.Optimizer, inside: list[torch.optim.Optimizer]) -> bool:
    (outer, together), (_, apart) = (_twins(optimizer, inside) for _ in range(2))
    tried = [_tried(twins) for twins in (together, apart)]
    before = [p.detach().clone() for p in tried[0]]
    generator, counter = torch.Generator().manual_seed(1), itertools.count()
    for _ in range(_NUM_STEPS):
        gradients = [torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu") for p in before]
        for parameters in tried:
            for number, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                p.grad = (gradient * 30 ** (number % 2)).to(p.device)  # what looks at all gradients is told
        type(outer).step(outer, functools.partial(next, counter))
        for twin in apart:
            type(twin).step(twin)
        if not all(map(torch.equal, *tried)):
            return False
    is_closure_called_once = next(counter) == _NUM_STEPS
    keeps_state = bool(vars(outer).get("state"))  # which would be written beside, or instead of, that of those inside
    return is_closure_called_once and not keeps_state and not any(map(torch.equal, tried[0], before))


def _tried(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    groups = [group["params"] for each in optimizers for group in each.param_groups]
    return [p for group in groups for p in [p for p in group if p.requires_grad and p.numel()][:_NUM_TRIED]]


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _twins(
    optimizer: torch.optim.Optimizer, inside: list[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, list[Any]]:
    """Return a copy of an optimizer for small parameters in the places of its own, and those inside of the copy."""
    generator, memo = torch.Generator().manual_seed(0), dict[int, Any]()
    for p in _parameters_of(inside):
        values = torch.randn([min(n, 4) for n in p.shape], generator=generator, dtype=torch.float64, device="cpu")
        memo[id(p)] = nn.Parameter(values.to("cpu" if is_fake(p) else p.device), requires_grad=p.requires_grad)
    twin = _twin(optimizer, memo)
    return twin, [memo[id(each)] for each in inside]


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))  # torch's own way of copying leaves attributes out
    for each in held_by(optimizer):
        if id(each) not in memo:
            _twin(each, memo)
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # of the instance: a scheduler's
    own |= {name: OrderedDict() for name, value in own.items() if "hooks" in name and isinstance(value, OrderedDict)}
    if "state" in own:
        own["state"] = defaultdict(dict)
    vars(twin).update(copy.deepcopy(own, memo))
    for group in twin.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = group["lr"] or 0.1  # a warmup begins with none
    return twin
