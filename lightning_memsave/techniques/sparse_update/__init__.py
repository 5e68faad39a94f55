"""Sparse update: some input channels of some layers are trained, and the rest of a pretrained network stays as it is.

What shrinks: a layer keeps, for its weight's gradient, the input channels that are trained; what lies before the
earliest trained layer keeps nothing. Gradients and optimizer state exist for what is trained. With the fraction f of a
layer's input channels, bytes per element, float32:

|                                             | full | fraction f | frozen, behind the earliest | before it |
|---------------------------------------------|-----:|-----------:|----------------------------:|----------:|
| input of the layer                          |    4 |        4 f |                           0 |         0 |
| weight                                      |    4 |    4 + 4 f |                           4 |         4 |
| gradient                                    |    4 |        4 f |                           0 |         0 |
| momentum                                    |    4 |        4 f |                           0 |         0 |
| Adam's state                                |    8 |        8 f |                           0 |         0 |

What activations and normalisations keep stays, from the earliest trained layer on. The weight takes 4 f more because
the trained columns are a parameter of their own, besides the dense weight into which they are written.

The plan for a budget. The gain of a channel is the square of the gradient of its weights in the first batches: what a
small step along it would lower the loss by. Its cost is the input that is kept for it, and the bytes of gradient and
optimizer state. For each layer as the earliest, what has to be kept anyway and the biases come first, then channels by
gain per byte; the earliest layer whose total gain is the largest is taken.

Loss class: `changed`: frozen weights stay as they are. The gradients of what is trained are those of full training.

Source: Lin et al., "On-Device Training Under 256KB Memory", 2022 (https://arxiv.org/abs/2206.15472). Different: layers
and channels are chosen by one backward pass for each of the first batches, where they train one layer at a time and
search by evolution; channels are chosen one by one, where they take the first ones; weights are not in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.core.selection import is_selected
from lightning_memsave.core.units import counted
from lightning_memsave.techniques.sparse_update.channel_gains import GainMeter
from lightning_memsave.techniques.sparse_update.channel_plan import plan_sparse_update, planned
from lightning_memsave.techniques.sparse_update.partial_layers import (
    PartialLayer,
    become_frozen,
    become_partial,
    channels_of,
    is_convolution,
    num_owners_of,
    operator_of,
    partial_layers,
    why_whole,
)
from lightning_memsave.techniques.sparse_update.sparse_update_config import Share, SparseUpdate
from lightning_memsave.torch_internals.compact_layers import CompactLayer, compact_layers, make_dense
from lightning_memsave.torch_internals.fake_tensors import is_fake

__all__ = [
    "GainMeter",
    "PartialLayer",
    "SparseUpdate",
    "apply_sparse_update",
    "estimate_sparse_update",
    "partial_layers",
    "plan_sparse_update",
    "planned",
    "with_channels",
]


def apply_sparse_update(model: nn.Module, config: SparseUpdate) -> Applied:
    """Freeze `model` but for what `config` says, in place. Parameters stay the same objects, of other shapes.

    `state_dict` stays that of the dense model.

    Args:
        model: the model.
        config: has `layers`, as `plan_sparse_update` returns it for a budget.

    Returns:
        The record; `undo` makes the layers plain again, and trains what was trained before.

    Raises:
        ValueError: a pattern matches nothing, nothing would be trained, there is no such channel, or layers have
            changed already.
    """
    if already := list(compact_layers(model)):
        rule = "must be applied once, to dense layers"
        raise setting_error("sparse_update", rule, already[0], "Call `.undo()` of the first one.")
    shares, left = _select(model, config)
    modules = dict(model.named_modules())
    parts = {name: _channels(modules[name], name, share) for name, share in shares.items() if share != 1.0}
    trained, total = _trained(model, config, shares), sum(p.numel() for p in model.parameters() if p.requires_grad)
    replaced = {modules[name].get_parameter("weight") for name in parts}
    frozen = [p for p in model.parameters() if p.requires_grad and p not in trained | replaced]
    for p in frozen:
        p.requires_grad_(False)
    layers: list[CompactLayer] = [become_partial(modules[name], channels) for name, channels in parts.items()]
    layers += [become_frozen(module) for module in modules.values() if _keeps_input_in_vain(module)]

    def restore() -> None:
        make_dense(layers)
        for p in frozen:
            p.requires_grad_(True)

    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    not_taken = f"; frozen: {', '.join(f'{name} ({reason})' for name, reason in left.items())}" if left else ""
    where = f"{counted(len(shares), 'layer')} ({len(parts)} in part)"
    return Applied(
        technique="sparse_update",
        summary=f"{num_trained:,} of {total:,} numbers are trained, of weights in {where}{not_taken}",
        loss_class="changed",
        reasons=(f"all but {num_trained:,} of {total:,} numbers are frozen",),
        restore=restore,
    )


def with_channels(model: nn.Module, config: SparseUpdate) -> SparseUpdate:
    """Return the settings with names of layers and numbers of channels, as they are for the weights of `model` now.

    Raises:
        ValueError: as `apply_sparse_update`.
    """
    shares, _ = _select(model, config)
    modules = dict(model.named_modules())
    layers = {name: share if share == 1.0 else _channels(modules[name], name, share) for name, share in shares.items()}
    return replace(config, layers=layers)


def estimate_sparse_update(model: nn.Module, config: SparseUpdate) -> int:
    """Return bytes of the gradients of what `config` would train; exact."""
    shares, _ = _select(model, config)
    total = sum(p.nbytes for p in _trained(model, config, shares) if p.requires_grad)
    for name, share in shares.items():
        module = model.get_submodule(name)
        if share != 1.0:
            num_channels = channels_of(module)
            assert num_channels is not None, "only such layers are trained in part"
            total += module.get_parameter("weight").nbytes // num_channels * len(_channels(module, name, share))
    return total


def _select(model: nn.Module, config: SparseUpdate) -> tuple[dict[str, Share], dict[str, str]]:
    """Return what share of which modules is trained, and why layers that match are not."""
    if config.layers is None:
        remedy = "Make one: `plan_sparse_update(model, losses, config)`; in a run, `MemSave` does."
        raise setting_error("sparse_update", "needs a plan for its budget first", config.budget, remedy)
    num_owners = num_owners_of(model)
    shares: dict[str, Share] = {}
    left: dict[str, str] = {}
    unused = dict(config.layers)
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        pattern = next((each for each in config.layers if own and is_selected(each, name, module)), None)
        if pattern is None:
            continue
        unused.pop(pattern, None)
        share = config.layers[pattern]
        if share == 1.0 or (isinstance(share, tuple) and len(share) == channels_of(module)):
            if any(p.requires_grad for p in own.values()):
                shares[name] = 1.0
        elif (reason := why_whole(module, num_owners)) is None:
            shares[name] = share
        elif reason:
            left[name] = reason
    if unused or not shares:
        rule = "must match a module with parameters" if unused else "must match a layer that can be trained in part"
        frozen = "; ".join(f"{name} ({reason})" for name, reason in left.items()) or "no Linear or Conv"
        remedy = "Names are those of `model.named_modules()`." if unused else f"Matching, but frozen: {frozen}."
        raise setting_error("SparseUpdate.layers", rule, next(iter(unused or config.layers)), remedy)
    return shares, left


def _channels(module: nn.Module, name: str, share: Share) -> tuple[int, ...]:
    """Return the channels that are trained: those that are named, or those with the largest weights."""
    operator, weight = operator_of(module), module.get_parameter("weight").detach()
    assert operator is not None, "it is such a layer"
    num_channels = weight.shape[operator.weight_dim]
    if isinstance(share, tuple):
        if share[-1] >= num_channels:
            rule = f"must have channels below {num_channels}, which {name!r} has"
            raise setting_error("SparseUpdate.layers", rule, share[-1], "Count from 0.")
        return share
    num_trained = max(1, round(share * num_channels))
    if is_fake(weight):
        return tuple(range(num_trained))
    sizes = weight.float().transpose(0, operator.weight_dim).flatten(1).square().sum(1)
    return tuple(sorted(sizes.topk(num_trained).indices.tolist()))


def _trained(model: nn.Module, config: SparseUpdate, shares: Mapping[str, Share]) -> set[Tensor]:
    """Return the parameters that are trained as a whole."""
    trained: set[Tensor] = set()
    has_begun = False
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        has_begun |= name in shares
        is_layer = channels_of(module) is not None
        if shares.get(name) == 1.0:
            trained.update(p for key, p in own.items() if key != "bias" or not is_layer)
        if isinstance(config.biases, tuple):
            is_wanted = any(is_selected(each, name, module) for each in config.biases)
        else:
            is_wanted = config.biases and has_begun
        if is_wanted and "bias" in own:
            trained.add(own["bias"])
    return trained


def _keeps_input_in_vain(module: nn.Module) -> bool:
    """Return whether it is a convolution with a frozen weight, of whose input torch reads the shape alone."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and not weight.requires_grad and is_convolution(module)
