"""Sharded parameters (DTensor, of FSDP2 and tensor parallelism): what this process has of them.

An optimizer of ours steps a stand-in for the local shard, with the local gradient and state, and keeps what has the
shape of the shard as a DTensor, as torch's own optimizers do: distributed checkpoints read it. Codes stay local.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.torch_internals.fake_tensors import is_fake
from lightning_memsave.torch_internals.private_names import find

try:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
    from torch.distributed.tensor import DTensor
except ImportError:  # a build without torch.distributed

    class DTensor:  # type: ignore[no-redef]
        """Nothing is an instance of it."""

    class FSDPModule:  # type: ignore[no-redef]
        """Nothing is an instance of it."""

    class CPUOffloadPolicy:  # type: ignore[no-redef]
        """Nothing is an instance of it."""


_States = find("torch.distributed._composable_state._module_state_mapping")
_Spec = find("torch.distributed.tensor._dtensor_spec.DTensorSpec")
_Meta = find("torch.distributed.tensor._dtensor_spec.TensorMeta")


def is_sharded(p: object) -> bool:
    """Return whether `p` is a DTensor."""
    return isinstance(p, DTensor)


def frees_weights(model: nn.Module) -> bool:
    """Return whether weights of modules are freed when these have been called (FSDP2)."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def check_no_offload(model: nn.Module, device_type: str) -> None:
    """Refuse FSDP2's `CPUOffloadPolicy` away from the CPU: Lightning moves shards to the device, where torch fails.

    Raises:
        ValueError: a module of `model` is sharded with it, and trains on a device of another type.
    """
    if device_type != "cpu" and any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _groups(model)):
        raise setting_error(
            "offload_policy",
            "must keep shards on the device: Lightning's `ModelParallelStrategy` moves them there",
            "CPUOffloadPolicy",
            "Call `fully_shard` without it; `optimizer_state='offload'` keeps the optimizer's state in host memory.",
        )


def is_sharding(kind: type) -> bool:
    """Return whether modules of a class free their weights when they have been called (FSDP2)."""
    return issubclass(kind, FSDPModule)


def as_local(value: Any) -> Any:
    """Return what this process has of a sharded tensor, without gradient; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    detached: Any = value.detach()
    return detached.to_local()


def whole(value: Tensor) -> Tensor:
    """Return what all processes have of a sharded tensor together; any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def written_part(value: Tensor) -> Tensor:
    """Return the tensor whose version tells of edits: FSDP2 adds to the shard of a gradient, behind the DTensor."""
    return value._local_tensor if isinstance(value, DTensor) else value


def with_shards(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a model by name; of what is sharded, also while it is gathered, the shard, where edits go.

    Of a shard there are two that count edits: the DTensor, and what this process has of it.
    """
    groups = list(_groups(model))
    gathered = ((getattr(each, "_unsharded_param", None), each) for group in groups for each in group.fsdp_params)
    shards = {id(whole): each.sharded_param for whole, each in gathered if whole is not None}
    for name, tensor in named:
        found = shards.get(id(tensor), tensor)
        yield name, found
        if isinstance(found, DTensor):
            yield name, found._local_tensor


def has_fake_parameters(model: nn.Module) -> bool:
    """Return whether some parameters, or local shards, have a shape and no values, as in a prediction."""
    return any(is_fake(as_local(p)) for p in model.parameters())


def local_gradient(p: Tensor) -> Tensor | None:
    """Return the gradient of what this process has of `p`.

    Tensor parallelism may leave each process one summand (`Partial`). Then all processes wait for each other here.
    """
    gradient = p.grad
    if isinstance(gradient, DTensor) and isinstance(p, DTensor) and gradient.placements != p.placements:
        gradient = gradient.redistribute(p.device_mesh, p.placements)
    found: Tensor | None = as_local(gradient)
    return found


def as_sharded(value: Any, p: Tensor) -> Any:
    """Return what is kept of the local shard of `p`, in its shape, as a sharded tensor; anything else as it is."""
    if not isinstance(p, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.dim() == 0 or value.shape != p._local_tensor.shape:
        return value
    return _with_shard(p, value)


def _with_shard(p: DTensor, local: Tensor) -> Any:
    """Return a DTensor as `p`, whose local shard is `local`, in its dtype.

    `DTensor.from_local` would move moments in host memory, on their way to a checkpoint, to the device.
    """
    meta = _Meta(p.shape, p.stride(), local.dtype)
    return DTensor(local, _Spec(p.device_mesh, p.placements, tensor_meta=meta), requires_grad=False)


def shard_number(p: Tensor) -> int:
    """Return the number of the local shard among all: 0 where `p` is whole, and the same for replicas of a shard."""
    if not isinstance(p, DTensor):
        return 0
    number, mesh = 0, p.device_mesh
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(p.placements):
        if coordinate is not None and not placement.is_replicate():
            number = number * mesh.size(dim) + coordinate[dim]
    return number


def set_values(p: Tensor, values: Tensor) -> None:
    """Let `p`, or the local shard of it, have other values, also of another dtype. FSDP2: see `renew_groups`."""
    if not isinstance(p, DTensor):
        p.data = values
        return
    p.data = made = _with_shard(p, values)
    p._local_tensor, p._spec = made._local_tensor, made._spec  # which assigning `data` leaves as they are


def has_shards_inside(module: nn.Module) -> bool:
    """Return whether modules in a module gather their weights themselves, under FSDP2."""
    return any(isinstance(each, FSDPModule) for each in module.modules() if each is not module)


def free_gathered(model: nn.Module) -> None:
    """Free parameters that FSDP2 has gathered: after a forward pass the outermost module keeps them for backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_again(tensor: Tensor) -> None:
    """Let FSDP2 gather a parameter whose memory it has taken back, before its turn in backward; in all processes.

    Args:
        tensor: the gathered parameter, or a view of it. What has memory stays as it is.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() or not tensor.numel():
        return
    for module in [each for each in _States if isinstance(each, FSDPModule)]:
        for group in _groups_of_one(module):
            known = (getattr(each, "_unsharded_param", None) for each in group.fsdp_params)
            if any(p is not None and p.untyped_storage()._cdata == storage._cdata for p in known):
                module.unshard()
                return


def groups_of(model: nn.Module) -> list[list[Tensor]]:
    """Return the parameters that FSDP2 gathers together, which must be of one dtype where they train."""
    return [[each.sharded_param for each in group.fsdp_params] for group in _groups(model)]


def renew_groups(model: nn.Module) -> None:
    """Let FSDP2 see the dtypes that the parameters of `model` have now; what is gathered, after an error, is freed."""
    for group in _groups(model):
        group._to_sharded()
        for each in group.fsdp_params:
            each.reset_sharded_param()
            each.all_gather_outputs = []
            if hasattr(each, "_unsharded_param"):
                del each._unsharded_param
        group._init_mp_dtypes()


def can_begin_anew() -> bool:
    """Return whether `reset_after_error` works: since torch 2.13."""
    return hasattr(FSDPModule, "reset_iter_state")


def reset_after_error(model: nn.Module) -> None:
    """Let FSDP2 begin anew after an error in the middle of a forward or backward pass.

    Gathered parameters are freed, and gradients that were not reduced yet are dropped; those of shards stay.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
            module.reset_iter_state()
    for group in _groups(model):
        for each in group.fsdp_params:  # which torch leaves as they are
            each.unsharded_accumulated_grad = None
            if (gathered := getattr(each, "_unsharded_param", None)) is not None:
                gathered.grad = None


def end_forward(model: nn.Module) -> None:
    """Free what FSDP2 has gathered for a forward pass that ended in an error, unless gradients wait to be reduced."""
    if can_begin_anew() and frees_weights(model) and not has_unreduced_gradients(model):
        reset_after_error(model)


def has_unreduced_gradients(model: nn.Module) -> bool:
    """Return whether FSDP2 keeps gradients of whole parameters, which no process has averaged with others yet.

    So it does after backward with `set_requires_gradient_sync(False)` or `set_requires_all_reduce(False)`.
    """
    return any(
        group._partial_reduce_output is not None
        or any(
            each.unsharded_accumulated_grad is not None
            or getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
            for each in group.fsdp_params
        )
        for group in _groups(model)
    )


def reduces_gradients(model: nn.Module) -> bool:
    """Return whether backward ends with gradients that FSDP2 has averaged over all processes."""
    return all(group.reduce_grads and group.all_reduce_grads for group in _groups(model))


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups_of_one(module)


def _groups_of_one(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]
