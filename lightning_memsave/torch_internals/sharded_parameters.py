"""Sharded parameters (DTensor, of FSDP2 and tensor parallelism): what this process has of them.

An optimizer of ours steps a stand-in for the local shard, with the local gradient and state, and keeps what has the
shape of the shard as a DTensor, as torch's own optimizers do: distributed checkpoints read it. Codes stay local.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_memsave.torch_internals.private_names import find

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # a build without torch.distributed

    class DTensor:  # type: ignore[no-redef]
        """Nothing is an instance of it."""


_Spec = find("torch.distributed.tensor._dtensor_spec.DTensorSpec")
_Meta = find("torch.distributed.tensor._dtensor_spec.TensorMeta")


def is_sharded(p: object) -> bool:
    """Return whether `p` is a DTensor."""
    return isinstance(p, DTensor)


def as_local(value: Any) -> Any:
    """Return what this process has of a sharded tensor, without gradient; anything else as it is."""
    return value.detach().to_local() if isinstance(value, DTensor) else value


def as_sharded(value: Any, p: Tensor) -> Any:
    """Return what is kept of the local shard of `p`, in its shape, as a sharded tensor; anything else as it is."""
    if not isinstance(p, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.dim() == 0 or value.shape != p._local_tensor.shape:
        return value
    meta = _Meta(p.shape, p.stride(), value.dtype)
    # Not `from_local`: that moves moments in host memory, on their way to a checkpoint, to the device.
    return DTensor(value, _Spec(p.device_mesh, p.placements, tensor_meta=meta), requires_grad=False)


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
