"""What a `training_step` does besides its loss: microbatches do it once for each part, and the report says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memsave.loops.step_settings import StepSettings
from lightning_memsave.saved_tensors.module_state import Attributes
from lightning_memsave.saved_tensors.parameter_edits import ParameterEdits
from lightning_memsave.saved_tensors.randomness import Randomness, generators_in
from lightning_memsave.torch_internals.sharded_parameters import with_shards

_Norm = nn.modules.batchnorm._NormBase


class StepEffects:
    """What a LightningModule holds before a part of a batch is run.

    Args:
        module: it.
        device: whose random numbers it may draw.
        reads_values: whether edits of parameters and buffers through `.data` count as changes.
    """

    def __init__(self, module: L.LightningModule, device: torch.device, *, reads_values: bool) -> None:
        owners = [(name, m) for name, m in module.named_modules() if not isinstance(m, Metric)]
        self._attributes = Attributes(owners)
        self._settings = StepSettings(module, ())  # those of layers are among the attributes
        self._tensors = list(_tensors(owners))
        named = with_shards(module, ((name, t) for name, *_, t in self._tensors))
        self._edits = ParameterEdits(named, None if reads_values else ())
        self._gradients = [(p, p.grad, None if p.grad is None else p.grad._version) for p in module.parameters()]
        self._randomness = Randomness({device}, generators_in(*(m for _, m in owners)))

    @property
    def has_drawn(self) -> bool:
        """Whether random numbers were drawn."""
        return not self._randomness.now().equals(self._randomness)

    @property
    def has_made_gradients(self) -> bool:
        """Whether the step has called backward itself."""
        return any(
            p.grad is not before or (before is not None and before._version != version)
            for p, before, version in self._gradients
        )

    def changes(self) -> list[str]:
        """Return what the step has changed, by name."""
        attributes = (f"`{name}`" for name in self._attributes.differences() if name not in _OF_LIGHTNING)
        edited = self._edits.edited()
        settings = self._settings.differences()
        changed = (name for name, held, key, t in self._tensors if name in edited or _is_replaced(held, key, t))
        return [*attributes, *settings, *(f"`{name}`" for name in changed)]


_OF_LIGHTNING = frozenset(("_current_fx_name",))


def _is_replaced(held: dict[str, Any], key: str, before: Tensor) -> bool:
    """Return whether a parameter or buffer is another object than before; not where FSDP2 has gathered its shards."""
    now = next((tensor for name, tensor in held.items() if name == key), None)  # TorchScript's has no `get`
    return now is not before and type(now) is type(before)


def _tensors(owners: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield name, dictionary and key of parameters and buffers, and themselves.

    Not BatchNorm's buffers, which are updated once per batch or named elsewhere.
    """
    seen: set[Tensor] = set()
    for prefix, owner in owners:
        buffers = {} if isinstance(owner, _Norm) else owner._buffers
        for held in (owner._parameters, buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor not in seen and not nn.parameter.is_lazy(tensor):
                    seen.add(tensor)
                    yield f"{prefix}.{key}".removeprefix("."), held, key, tensor


def unwatched(part: int) -> AbstractContextManager[None]:
    """Return the context that is put around `training_step` for a batch that is not cut: none."""
    return nullcontext()


@contextmanager
def gradients_set_aside(module: nn.Module) -> Iterator[None]:
    """Start without gradients; afterwards there are those of before, and what was made inside is gone."""
    gradients = [(p, p.grad) for p in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def hooks_on_gradients(module: nn.Module) -> list[str]:
    """Return the parameters and modules whose gradients go through hooks, which would get those of each microbatch."""
    named = with_shards(module, module.named_parameters())
    hooked = list(dict.fromkeys(f"`{name}`" for name, p in named if p._backward_hooks or _has_late_hook(p)))
    inside = ((name, each) for name, each in module.named_modules() if each._backward_hooks or each._backward_pre_hooks)
    return hooked + [f"`{name}` ({type(each).__name__})" for name, each in inside]


def _has_late_hook(p: Tensor) -> bool:
    """Return whether somebody else has a hook on a gradient that has been added up."""
    hooks: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    functions = (getattr(hook, "func", hook) for hook in hooks.values())  # of a `partial`
    return any(not getattr(each, "__module__", "").startswith("lightning_memsave.") for each in functions)
