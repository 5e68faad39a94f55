"""Patterns that change during training: what goes, what grows, and the optimizer's state that moves with it.

After an update each surviving weight has its value, gradient and moments at its new place in the vectors; each grown
one starts at zero with zero moments. `set` and `rigl` keep the number of values of each layer, in place; `dsr` and
`gradual` resize the parameters, which stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.techniques.sparsity.layers import SparseLayer, sparse_layers
from lightning_memsave.techniques.sparsity.patterns import best_of_all, cosine, count_live, cubic, drawn
from lightning_memsave.techniques.sparsity.sparsity_config import Sparsity


class MaskUpdates:
    """Moves the live weights of one optimizer's sparse layers, on schedule: `step()` after each `optimizer.step()`.

    Args:
        model: with sparse layers (`apply_sparsity`).
        optimizer: whose layers are moved, with their state.
        config: as applied.
        num_steps: how many steps the run has; needed where `schedule.until` is a fraction.
        average: over all ranks, of a tensor; for `"rigl"` in distributed training.

    Raises:
        ValueError: the number of steps is not known; SNIP is to compare layers of float16 with others; at the first
            update, the optimizer's state is low-bit.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Sparsity,
        num_steps: float | None = None,
        average: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        own = {p for group in optimizer.param_groups for p in group["params"]}
        self._layers = {name: layer for name, layer in sparse_layers(model).items() if layer.values in own}
        self._optimizer, self._config, self._average = optimizer, config, average
        self._until = _last_step(config, num_steps)
        self._threshold: float | None = None
        self.num_steps = 0
        """Steps so far."""
        self._check_snip()
        self._watch()

    @torch.no_grad()
    def step(self) -> int:
        """Count a step, and update the patterns when that is due.

        Returns:
            How many weights went, to grow elsewhere or for good.
        """
        if self._config.initial == "snip" and self._is_due(self.num_steps + 1) and self._has_overflowed():
            return 0  # a scaler has left this step out, and halves its scale: the next one tells
        self.num_steps += 1
        num_moved = self._update() if self._is_due(self.num_steps) else 0
        self._watch()
        return num_moved

    def _check_snip(self) -> None:
        dtypes = {layer.values.dtype for layer in self._layers.values()}
        is_scaled = torch.float16 in dtypes and len(dtypes) > 1
        if self._config.initial == "snip" and self._config.distribution == "global" and is_scaled:
            raise setting_error(
                "Sparsity.initial",
                "cannot compare layers of float16, whose gradients have the factor of the loss, with others",
                "snip",
                'Use `distribution="uniform"` or "erk", or no `keep_32bit` for these layers.',
            )

    def join_at(self, num_steps: int) -> None:
        """Start in the middle of a run; at the latest where the last update of gradual pruning is still to come."""
        if self._config.initial != "snip":
            self.num_steps = min(num_steps, self._until - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the patterns."""
        return {"num_steps": self.num_steps, "threshold": self._threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.num_steps, self._threshold = state["num_steps"], state["threshold"]
        self._watch()

    # --------------------------------------------------------------------------- schedule
    def _is_due(self, step: int) -> bool:
        if self._config.initial == "snip":
            return step == 1
        every = self._config.schedule.every
        # Gradual pruning ends with an update, so that it arrives at its density.
        is_last = self._config.method == "gradual" and step == self._until
        return self._config.is_updated and step <= self._until and (step % every == 0 or is_last)

    def _watch(self) -> None:
        """Have layers add up their dense gradient where the coming step ends with an update that reads it."""
        is_wanted = self._config.method == "rigl" and self._is_due(self.num_steps + 1)
        for layer in self._layers.values():
            layer.watches_gradient, layer.dense_gradient = is_wanted, None

    def _has_overflowed(self) -> bool:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        return not all(bool(p.grad.isfinite().all()) for p in parameters)

    def _update(self) -> int:
        layers = {name: layer for name, layer in self._layers.items() if layer.values.requires_grad}
        if not layers:
            return 0
        if self._config.method == "dsr":
            return self._redistribute(layers)
        if self._config.method in ("set", "rigl"):
            return sum(self._regrow(name, layer) for name, layer in layers.items())
        return self._prune(layers)

    # --------------------------------------------------------------------------- methods
    def _regrow(self, name: str, layer: SparseLayer) -> int:
        """Let the smallest go and as many grow, in one layer."""
        fraction = self._config.schedule.fraction
        if self._config.method == "rigl":
            fraction = cosine(fraction, self.num_steps / self._until)
            gradient, layer.dense_gradient = layer.dense_gradient, None
            if gradient is None:  # it took no part in this step; on other ranks it may have
                gradient = layer.values.new_zeros(layer.dense_shape)
            scores = self._average(gradient).reshape(-1).abs().nan_to_num_()
            if not scores.any():
                return 0
        else:
            scores = self._drawn(name, layer)
        num_live, size = layer.values.numel(), layer.dense_shape.numel()
        num_moved = min(int(num_live * fraction), size - num_live)
        keep = torch.ones(num_live, dtype=torch.bool, device=scores.device)
        keep[layer.values.abs().topk(num_moved, largest=False, sorted=False).indices] = False
        self._move(layer, keep, _grown(layer, scores, num_moved))
        return num_moved

    def _redistribute(self, layers: Mapping[str, SparseLayer]) -> int:
        """Let go whatever is below one threshold; what grows is shared by how much each layer kept."""
        num_live = sum(layer.values.numel() for layer in layers.values())
        wanted = self._config.schedule.fraction * num_live
        if not self._threshold:  # the first time, or all that was there were zeros
            sizes = torch.cat([layer.values.abs() for layer in layers.values()])
            self._threshold = sizes.kthvalue(int(wanted) + 1).values.item()
        keeps = {name: layer.values.abs() >= self._threshold for name, layer in layers.items()}
        for name, keep in keeps.items():
            if not keep.any():
                keep[layers[name].values.abs().argmax()] = True
        kept = {name: int(keep.sum()) for name, keep in keeps.items()}
        num_pruned = num_live - sum(kept.values())
        if num_pruned > 1.1 * wanted:
            self._threshold /= 2
        elif num_pruned < 0.9 * wanted:
            self._threshold *= 2
        room = {name: layers[name].dense_shape.numel() - kept[name] for name in layers}
        for name, num_grown in _shares(num_pruned, kept, room).items():
            layer = layers[name]
            # What has just gone may not come back in the same update, unless there is no other place.
            scores = self._drawn(name, layer)
            scores[layer.layout.positions()[~keeps[name]]] -= 1
            self._move(layer, keeps[name], _grown(layer, scores, num_grown, keeps[name]))
        return num_pruned

    def _prune(self, layers: Mapping[str, SparseLayer]) -> int:
        """Keep the best, of each layer or of all; SNIP's scores, or gradual pruning's magnitudes."""
        config = self._config
        density = config.density
        scores = {name: layer.values.detach().abs() for name, layer in layers.items()}
        if config.initial == "snip":
            if all(layer.values.grad is None for layer in layers.values()):
                raise setting_error(
                    "Sparsity.initial",
                    "needs the gradients of the first step after it",
                    "snip",
                    'Keep gradients until the step is over, or use `initial="magnitude"`.',
                )
            for name, layer in layers.items():
                gradient = layer.values.grad
                scores[name] = scores[name] * (0 if gradient is None else gradient.abs())
        else:
            density = cubic(density, self.num_steps / self._until)
        shapes = {name: layer.dense_shape for name, layer in layers.items()}
        if config.distribution == "global":
            total = round(density * sum(shape.numel() for shape in shapes.values()))
            kept = best_of_all(scores, min(total, sum(score.numel() for score in scores.values())))
        else:
            counts = count_live(shapes, density, config.distribution)
            kept = {n: s.topk(min(counts[n], s.numel()), sorted=False).indices for n, s in scores.items()}
        num_gone = 0
        for name, layer in layers.items():
            keep = torch.zeros_like(scores[name], dtype=torch.bool).index_fill_(0, kept[name], True)
            num_gone += keep.numel() - kept[name].numel()
            self._move(layer, keep, kept[name].new_empty(0))
        return num_gone

    def _drawn(self, name: str, layer: SparseLayer) -> Tensor:
        return drawn(layer.dense_shape.numel(), layer.values.device, self._config.seed, self.num_steps, name)

    # --------------------------------------------------------------------------- moving
    def _move(self, layer: SparseLayer, keep: Tensor, grown: Tensor) -> None:
        """Keep what `keep` ([k]) says, and give `grown` positions zeros, in values, gradient and moments alike."""
        survivors = layer.layout.positions()[keep]
        positions = torch.cat([survivors, grown]).sort().values
        places = torch.searchsorted(positions, survivors)

        def moved(vector: Tensor) -> Tensor:
            return vector.new_zeros(positions.numel()).index_copy_(0, places, vector[keep])

        values, state = layer.values, self._optimizer.state.get(layer.values, {})
        refuse_codes(self._config, any(map(_is_code, state.values())))
        for name, moment in state.items():
            if isinstance(moment, Tensor) and moment.shape == values.shape:
                state[name] = moved(moment)
        for name, buffer in dict(layer.named_buffers(recurse=False)).items():  # low precision's corrections
            if name == "_values_correction" and buffer.shape == values.shape:
                setattr(layer, name, moved(buffer))
        gradient = None if values.grad is None else moved(values.grad)
        if gradient is not None and gradient.shape == values.shape:
            values.grad.copy_(gradient)  # type: ignore[union-attr]  # in place: DDP's buckets may hold it
            gradient = values.grad
        values.grad = None
        layer.move_to(positions, moved(values.detach()))
        values.grad = gradient


def refuse_codes(config: Sparsity, is_low_bit: bool) -> None:
    """Raise `ValueError` where weights would move away from the blocks that their state is coded in."""
    if is_low_bit:
        raise setting_error(
            "Sparsity.method",
            "cannot move weights whose optimizer state is low-bit, as it is coded in blocks",
            config.method,
            'Use `method="static"`, or `optimizer_state=False`.',
        )


def refuse_lost_gradients(config: Sparsity, are_lost: bool) -> None:
    """Raise `ValueError` where each backward frees gradients, of which growth would see the last one alone."""
    if are_lost and config.method == "rigl":
        raise setting_error(
            "Sparsity.method",
            'cannot add gradients up where each backward frees them (`gradients="into-state"`)',
            config.method,
            'Use `OptimizerState(gradients="keep")`, or `method="set"`.',
        )


def _is_code(moment: Any) -> bool:
    if isinstance(moment, Tensor):
        return moment.dtype == torch.uint8
    return not (moment is None or isinstance(moment, (int, float)))


def _grown(layer: SparseLayer, scores: Tensor, num_grown: int, keep: Tensor | None = None) -> Tensor:
    """Return the positions of the highest scores outside of what lives (of which `keep` stays, if given)."""
    live = layer.layout.positions()
    scores[live if keep is None else live[keep]] = -torch.inf
    return scores.topk(num_grown, sorted=False).indices


def _shares(num_grown: int, kept: Mapping[str, int], room: Mapping[str, int]) -> dict[str, int]:
    """Return `num_grown` shared in proportion to `kept`, none above its `room`."""
    total = sum(kept.values())
    shares = {name: min(room[name], num_grown * count // total) for name, count in kept.items()}
    rest = num_grown - sum(shares.values())
    for name in sorted(kept, key=lambda name: -kept[name]):  # what rounding and full layers left
        extra = min(rest, room[name] - shares[name])
        shares[name] += extra
        rest -= extra
    return shares


def _last_step(config: Sparsity, num_steps: float | None) -> int:
    until = config.schedule.until
    if isinstance(until, int) or config.method == "static":
        return int(until) if isinstance(until, int) else 1
    if num_steps is None or num_steps < 0 or num_steps == float("inf"):  # Lightning says -1 where it cannot tell
        raise setting_error(
            "UpdateSchedule.until",
            "must be a number of steps where the length of the run is not known",
            until,
            "For example `UpdateSchedule(until=10_000)`.",
        )
    return max(1, int(until * num_steps))
