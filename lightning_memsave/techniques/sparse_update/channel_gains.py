"""Measure what each part of a network would give, and cost, if it were trained: in a forward and a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.techniques.sparse_update.partial_layers import num_owners_of, operator_of, why_whole
from lightning_memsave.torch_internals.autograd_graph import storage_key


@dataclass
class LayerGain:
    """Gain and cost of the input channels of a layer."""

    gains: Tensor
    """The squares of the gradients of each channel's weights, summed over the batches, [C], float64, on the CPU."""
    num_weights: int
    """Weights of each channel."""
    element_bytes: int
    position: int = 0
    """Number of its first call, among those of all modules."""
    kept_bytes: int = 0
    """Bytes of its input that are kept for the gradient of its weight, in all its calls."""


@dataclass
class BiasGain:
    """Gain and cost of a bias."""

    num_weights: int
    element_bytes: int
    gain: float = 0.0
    position: int = 0


class GainMeter:
    """Measures steps of a model, each between `start` and `end`: gains add up, costs are those of the latest step.

    Gradients are let go as soon as they are known.
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerGain] = {}
        """Layers that can be trained in part, by name."""
        self.biases: dict[str, BiasGain] = {}
        """Biases, by the name of their module."""
        self.kept: dict[int, tuple[int, int]] = {}
        """What is kept for others than the weights of these layers: the last position that keeps it, and its bytes."""
        self.num_trained = 0
        """Numbers that are trained where everything is."""
        self._all: dict[int, int] = {}
        self._weights: set[int] = set()
        self._batch: set[int] = set()
        self._position = 0
        self._running: list[tuple[str, int]] = []  # layers, and the sizes of their inputs
        self._hooks, self._forward = ExitStack(), ExitStack()

    @property
    def whole_bytes(self) -> int:
        """Bytes that are kept where everything is trained."""
        return sum(self._all.values())

    def start(self, model: nn.Module, batch: Any = None) -> None:
        """Watch the step that begins now.

        Args:
            model: whose weights are measured; gradients that it has are dropped.
            batch: its bytes are there anyway.
        """
        self.end()
        self._weights = {storage_key(t) for t in (*model.parameters(), *model.buffers())}
        self._batch = {storage_key(t) for t in tensors_in(batch)}
        self.kept, self._all, self._position, self._running = {}, {}, 0, []
        self.num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        num_owners = num_owners_of(model)
        for name, module in model.named_modules():
            if why_whole(module, num_owners) is None:
                self._watch_layer(name, module)
            before = functools.partial(self._before, name)
            self._forward.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            bias = dict(module.named_parameters(recurse=False)).get("bias")
            if bias is not None and bias.requires_grad:
                self.biases.setdefault(name, BiasGain(bias.numel(), bias.element_size()))
                self._watch(bias, functools.partial(self._note_bias, name))
        for p in model.parameters():
            p.grad = None
            if p.requires_grad:
                self._watch(p, _drop_gradient)  # after what notes it
        self._forward.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept))

    def end_forward(self) -> None:
        """Stop watching what is kept: backward begins."""
        self._forward.close()

    def end(self) -> None:
        """Stop watching."""
        self._forward.close()
        self._hooks.close()

    def _watch_layer(self, name: str, module: nn.Module) -> None:
        operator, weight = operator_of(module), module.get_parameter("weight")
        assert operator is not None, "it can be trained in part"
        num_channels = weight.shape[operator.weight_dim]
        gains = torch.zeros(num_channels, dtype=torch.float64, device="cpu")
        self.layers.setdefault(name, LayerGain(gains, weight.numel() // num_channels, weight.element_size()))
        self.layers[name].kept_bytes = self.layers[name].position = 0
        self._watch(weight, functools.partial(self._note_weight, name, operator.weight_dim))
        self._forward.callback(module.register_forward_hook(self._after).remove)

    def _watch(self, p: nn.Parameter, note: Callable[[Tensor], None]) -> None:
        self._hooks.callback(p.register_post_accumulate_grad_hook(note).remove)

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._position += 1
        for found in (self.layers.get(name), self.biases.get(name)):
            if found is not None:
                found.position = found.position or self._position
        if name in self.layers:
            self._running.append((name, (*args, *kwargs.values())[0].numel()))

    def _after(self, *_: Any) -> None:
        self._running.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key in self._weights:
            return tensor
        if self._running and tensor.numel() == self._running[-1][1]:
            self.layers[self._running[-1][0]].kept_bytes += tensor.numel() * tensor.element_size()
        elif key not in self._batch:
            self.kept[key] = self._position, tensor.untyped_storage().nbytes()
        if key not in self._batch:
            self._all[key] = tensor.untyped_storage().nbytes()
        return tensor

    def _note_weight(self, name: str, weight_dim: int, weight: Tensor) -> None:
        if weight.grad is not None:
            squares = weight.grad.detach().float().transpose(0, weight_dim).flatten(1).square().sum(1)
            self.layers[name].gains += squares.to("cpu", torch.float64)

    def _note_bias(self, name: str, bias: Tensor) -> None:
        if bias.grad is not None:
            self.biases[name].gain += float(bias.grad.detach().float().square().sum())


def _drop_gradient(p: Tensor) -> None:
    p.grad = None
