"""The choice of layers and channels for a budget: for each layer as the earliest, by gain per byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.units import format_bytes
from lightning_memsave.techniques.sparse_update.channel_gains import GainMeter
from lightning_memsave.techniques.sparse_update.sparse_update_config import Share, SparseUpdate

STATE_BYTES = 8
"""Bytes of Adam's state for each number."""


def plan_sparse_update(
    model: nn.Module,
    losses: Iterable[Callable[[], Tensor]],
    config: SparseUpdate,
    *,
    state_bytes: float = STATE_BYTES,
) -> SparseUpdate:
    """Return the settings with the layers and channels that give most within their budget.

    Args:
        model: in which everything is trained that may be; it is not changed, but its gradients are dropped.
        losses: the loss of one batch each: every function is called once.
        config: has a budget.
        state_bytes: what the optimizer keeps for each number: 8 with Adam, 4 with SGD and momentum, 0 without.

    Raises:
        ValueError: nothing can be trained within the budget.
    """
    meter = GainMeter()
    for loss in losses:
        meter.start(model)
        try:
            found = loss()
            meter.end_forward()
            found.backward()
        finally:
            meter.end()
    return planned(meter, config, state_bytes)


def planned(meter: GainMeter, config: SparseUpdate, state_bytes: float = STATE_BYTES) -> SparseUpdate:
    """Return the settings with the layers and channels that give most within their budget.

    Args:
        meter: has seen at least one step.
        config: has a budget.
        state_bytes: what the optimizer keeps for each number.

    Raises:
        ValueError: nothing can be trained within the budget, or gradients are not finite.
    """
    found = [*(layer.gains for layer in meter.layers.values()), *(bias.gain for bias in meter.biases.values())]
    if not all(bool(torch.as_tensor(each).isfinite().all()) for each in found):
        remedy = "Look for NaN in the first batches, or give `layers`."
        raise setting_error("sparse_update", "needs finite gradients to plan from", config.budget, remedy)
    candidates = _Candidates(meter, state_bytes, with_biases=config.biases is not False)
    largest_element = max((layer.element_bytes for layer in meter.layers.values()), default=4)
    whole_bytes = meter.whole_bytes + int(meter.num_trained * (largest_element + state_bytes))
    budget_bytes = config.budget_bytes(whole_bytes)
    best: tuple[float, int, Tensor] | None = None
    least = None
    for first in sorted({layer.position for layer in meter.layers.values() if layer.position}):
        fixed_bytes, gain = candidates.before_channels(first)
        least = fixed_bytes if least is None else min(least, fixed_bytes)
        if fixed_bytes > budget_bytes:
            continue
        taken = candidates.within(first, budget_bytes - fixed_bytes)
        gain += float(candidates.gains[taken].sum())
        if taken.numel() and (best is None or gain > best[0]):
            best = gain, first, taken
    if best is None:
        what = "a layer that can be trained in part" if least is None else f"{format_bytes(int(least))} and a channel"
        rule = f"must have room for {what} (training all of it takes {format_bytes(whole_bytes)})"
        raise setting_error("sparse_update", rule, config.budget, "Give more, or smaller batches (`microbatch=8`).")
    _, first, taken = best
    biases: bool | tuple[str, ...] = config.biases
    if biases is True:
        biases = tuple(name for name, bias in meter.biases.items() if bias.position >= first)
    return replace(config, budget=SparseUpdate().budget, layers=candidates.shares(taken), biases=biases)


class _Candidates:
    """The channels of all layers that were called, by falling gain per byte."""

    def __init__(self, meter: GainMeter, state_bytes: float, with_biases: bool) -> None:
        self._meter, self._state_bytes, self._with_biases = meter, state_bytes, with_biases
        self._names = [name for name, layer in meter.layers.items() if layer.position]
        layers = [meter.layers[name] for name in self._names]
        sizes = torch.tensor([len(layer.gains) for layer in layers], dtype=torch.long, device="cpu")
        # The values that are trained, their gradient, and their state.
        costs = [
            layer.kept_bytes / len(layer.gains) + layer.num_weights * (2 * layer.element_bytes + state_bytes)
            for layer in layers
        ]
        owners = torch.arange(len(layers), device="cpu").repeat_interleave(sizes)
        numbers = torch.cat([torch.arange(len(layer.gains), device="cpu") for layer in layers]) if layers else owners
        gains = torch.cat([layer.gains for layer in layers]) if layers else owners.double()
        per_channel = torch.tensor(costs, dtype=torch.float64, device="cpu")[owners]
        order = (gains / per_channel).sort(descending=True, stable=True).indices
        self.gains, self._costs = gains[order], per_channel[order]
        self._owners, self._numbers = owners[order], numbers[order]
        self._positions = torch.tensor([layer.position for layer in layers], device="cpu")[self._owners]

    def before_channels(self, first: int) -> tuple[float, float]:
        """Return the bytes of all but channels, where the layer at position `first` is the earliest, and their gain."""
        kept = sum(num_bytes for position, num_bytes in self._meter.kept.values() if position >= first)
        biases = [b for b in self._meter.biases.values() if b.position >= first] if self._with_biases else []
        held = sum(bias.num_weights * (bias.element_bytes + self._state_bytes) for bias in biases)
        return kept + held, sum(bias.gain for bias in biases)

    def within(self, first: int, room: float) -> Tensor:
        """Return the channels that are taken in their order, each if there is room; from position `first` on."""
        left = ((self._positions >= first) & (self.gains > 0)).nonzero().view(-1)
        taken: list[Tensor] = []
        while left.numel():
            sums = self._costs[left].cumsum(0)
            num_taken = int((sums <= room).sum())
            if num_taken:
                taken.append(left[:num_taken])
                room -= float(sums[num_taken - 1])
            left = left[num_taken:]
            left = left[self._costs[left] <= room]
        return torch.cat(taken) if taken else left

    def shares(self, taken: Tensor) -> dict[str, Share]:
        """Return the channels of each layer; 1.0 for all of them."""
        found: dict[str, Share] = {}
        for owner, name in enumerate(self._names):
            numbers = self._numbers[taken[self._owners[taken] == owner]].sort().values
            if numbers.numel():
                is_all = len(numbers) == len(self._meter.layers[name].gains)
                found[name] = 1.0 if is_all else tuple(numbers.tolist())
        return found
