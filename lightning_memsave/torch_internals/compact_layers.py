"""Layers whose weight is made of another parameter, which takes fewer bytes: what they become, and are on disk.

The class of a layer changes in place to a subclass, so that its type, its place in the model, and the order of its
parameters stay. `state_dict` has the dense weight. The technique says what the other parameter is: live
values (`techniques.sparsity`), two factors (`techniques.low_rank`), or some columns (`techniques.sparse_update`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, SupportsIndex, cast

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error


class CompactLayer(nn.Module):
    """What a layer becomes, together with its own class."""

    dense_class: type[nn.Module]
    compact_base: type[CompactLayer]
    prefix: ClassVar[str]
    """Start of the subclass's name."""
    parameter_name: ClassVar[str]
    """Name of the parameter that stands in the place of `weight`."""
    steady_buffers: ClassVar[frozenset[str]] = frozenset()
    """Names of buffers that hold the same after a forward pass as before, so that none needs a copy of them."""
    own_attributes: ClassVar[tuple[str, ...]] = ()
    """Names of what a compact layer has besides its parameter and `dense_shape`."""
    dense_shape: torch.Size

    @property
    def weight(self) -> Tensor:
        """The dense weight, made anew; its gradient goes to the other parameter."""
        raise NotImplementedError

    def become_dense(self) -> None:
        """Have a plain parameter `weight` again, and the class that it had."""
        name = self.parameter_name
        weight = self._dense_of(self.get_parameter(name).detach())
        for attribute in ("dense_shape", *self.own_attributes):
            delattr(self, attribute)
        self.__class__ = self.dense_class  # type: ignore[assignment]  # the class it had
        rename_parameter(self, name, "weight", weight)

    def whole_values(self) -> Tensor:
        """Return the parameter's values as they go to disk, with what low precision keeps beside them."""
        raise NotImplementedError

    def _dense_of(self, whole: Tensor) -> Tensor:
        """Return the dense weight of the parameter's values."""
        raise NotImplementedError

    def _taken_from(self, dense: Tensor) -> Tensor:
        """Return the parameter's values for a dense weight."""
        raise NotImplementedError

    @property
    def _correction(self) -> Tensor | None:
        """What low precision keeps of the parameter besides 16 bits, under the name that it gives it."""
        return dict(self.named_buffers(recurse=False)).get(f"_{self.parameter_name}_correction")

    # The two methods that torch calls for each module, and that its own subclasses override (seen in torch 2.13).
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, keep_vars)
        for key, tensor in own.items():
            if key == f"{prefix}{self.parameter_name}":
                destination[f"{prefix}weight"] = self.weight if keep_vars else self._dense_of(self.whole_values())
            else:
                destination[key] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight, compact = f"{prefix}weight", f"{prefix}{self.parameter_name}"
        given = {key: tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
        dense = given.pop(weight, None)
        if dense is not None and dense.shape == self.dense_shape:
            given[compact] = self._taken_from(dense)
        elif dense is not None:
            error_msgs.append(f"size mismatch for {weight}: {dense.shape} in the checkpoint, {self.dense_shape} here.")
            given[compact] = self.get_parameter(self.parameter_name)
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [weight if key == compact else key for key in missing_keys]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Reduce for copies and pickles: classes that are made on the fly are not found by name."""
        _, (cls, *arguments), *rest = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return _new, (cls.compact_base, cls.dense_class, *arguments), *rest


def _new(base: type[CompactLayer], dense_class: type[nn.Module], *arguments: Any) -> CompactLayer:
    cls = compact_class(base, dense_class)
    return cls.__new__(cls, *arguments)


_CLASSES: dict[tuple[type, type], type[CompactLayer]] = {}


def compact_class(base: type[CompactLayer], dense_class: type[nn.Module]) -> type[CompactLayer]:
    """Return the subclass of a layer's class that takes its weight from `base`."""
    key = base, dense_class
    if key not in _CLASSES:
        body = {"dense_class": dense_class, "compact_base": base, "__module__": base.__module__}
        _CLASSES[key] = type(f"{base.prefix}{dense_class.__name__}", (base, dense_class), body)
    return _CLASSES[key]


def compact_layers(model: nn.Module) -> dict[str, CompactLayer]:
    """Return the compact layers of a model, of every technique, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CompactLayer)}


def export_dense(module: nn.Module) -> nn.Module:
    """Make every sparse, low-rank or partly trained layer of `module` plain again, in place.

    It has the weight that it computes with.

    Returns:
        The module.

    Raises:
        ValueError: there is no such layer in it.
    """
    layers = compact_layers(module)
    if not layers:
        rule = "must have sparse, low-rank or partly trained layers"
        raise setting_error("module", rule, type(module).__name__, "It is dense already.")
    for layer in layers.values():
        layer.become_dense()
    return module


def rename_parameter(module: nn.Module, old: str, new: str, values: Tensor) -> None:
    """Give a parameter another name and other values, and no gradient.

    It stays the same object, as optimizers may hold it already, and the order of all, which optimizers number them by,
    stays.
    """
    own = dict(module.named_parameters(recurse=False))
    for name in own:
        delattr(module, name)
    own[old].grad = None
    _hold(own[old], values)
    for name, p in own.items():
        module.register_parameter(new if name == old else name, p)


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter values of another number; it stays the same object."""
    if values.shape == parameter.shape:
        parameter.detach().copy_(values)  # an edit that a graph's own backward notices
    else:
        _hold(parameter, values.clone())


def _hold(parameter: nn.Parameter, values: Tensor) -> None:
    """Let a parameter hold `values` themselves."""
    # Another dtype in between makes torch forget the node that took gradients of the old shape: alive in a graph of an
    # earlier step that somebody keeps, it would refuse those of the new shape.
    another = torch.float32 if values.dtype == torch.float64 else torch.float64
    parameter.data = values.new_empty(0, dtype=another)
    parameter.detach().zero_()  # an edit that such a graph's own backward notices
    parameter.data = values


def make_dense(layers: Iterable[nn.Module]) -> None:
    """Give compact layers their dense weight back; those that were exported since have it."""
    for layer in layers:
        if isinstance(layer, CompactLayer):
            layer.become_dense()
