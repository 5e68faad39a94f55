"""Collectives of this process: how many it has taken part in, and how it catches up with processes that wait in one.

A process that stopped in the middle of its work leaves the others waiting in the next collective. Where it does the
same work again, those that it has already taken part in must not be issued a second time: here they are answered by
what this process has. The values are then wrong, and the result must be dropped, by all processes.

A step that exchanges something itself is told from one that only torch's own layers exchange for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_memsave.torch_internals.dispatch_mode import DispatchMode
from lightning_memsave.torch_internals.private_names import find
from lightning_memsave.torch_internals.sharded_parameters import is_sharded

_Work = find("torch._C._distributed_c10d.FakeWork")
_ProcessGroup = find("torch._C._distributed_c10d.ProcessGroup")


def groups_of(model: nn.Module) -> list[Any]:
    """Return the process groups that sharded parameters are gathered in, and that of all processes."""
    sharded: Iterable[Any] = (p for p in model.parameters() if is_sharded(p))
    meshes = dict.fromkeys(p.device_mesh for p in sharded)
    groups = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
    return list({group.group_name: group for group in groups}.values())


def num_issued(groups: Sequence[Any]) -> dict[str, int]:
    """Return how many collectives this process has taken part in, by the names of the groups."""
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


class CatchingUp(DispatchMode):
    """Leaves out the first collectives of each group, which the other processes have behind them.

    Args:
        num_done: by the name of a group, how many.
    """

    def __init__(self, num_done: Mapping[str, int]) -> None:
        super().__init__()
        self._num_left = dict(num_done)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            raise NotImplementedError(f"{func} cannot be left out")  # it goes on to the group by itself
        if func.namespace == "c10d":
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            if (boxed := given.get("process_group")) is not None:
                group = _ProcessGroup.unbox(boxed)
                if self._num_left.get(group.group_name, 0) > 0:
                    self._num_left[group.group_name] -= 1
                    return _answered(func, args, group)
        return func(*args, **(kwargs or {}))


def _answered(func: Any, args: Any, group: Any) -> Any:
    """Return what a collective returns, where the other processes would have what this one has."""
    name = func._schema.name
    if name == "c10d::_allgather_base_":
        output, shard, *_ = args
        # [processes, elements of a shard]; FSDP2's own shard is part of the output
        output.view(group.size(), -1).copy_(shard.clone().view(1, -1))
    elif name == "c10d::_reduce_scatter_base_":
        output, values, *_ = args
        output.copy_(values.reshape(group.size(), -1)[group.rank()].view_as(output))
    work = _Work().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


class ExchangesError(Exception):
    """A step exchanges something with other processes, where they do not run it."""


class NoExchange(DispatchMode):
    """Raises `ExchangesError` in place of a collective that user code calls; those of torch's own layers go on.

    The other processes may be elsewhere, so it must not begin.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None
        """The first of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in _OF_COLLECTIVES and not _is_of_a_layer():
            self.found = self.found or func._schema.name
            raise ExchangesError(f"`{func._schema.name}` among processes that do not all run this")
        return func(*args, **(kwargs or {}))


_OF_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_TORCH, _OWN = str(Path(torch.__file__).parent / "_")[:-1], str(Path(__file__).parent.parent / "_")[:-1]
_LAYERS = tuple(
    str(Path(_TORCH, path))
    for path in ("distributed/fsdp/", "distributed/tensor/", "nn/parallel/distributed.py", "nn/modules/_functions.py")
)


def _is_of_a_layer() -> bool:
    """Return whether torch's FSDP, DTensor, DDP or SyncBatchNorm calls, and not the code that calls them."""
    frame = sys._getframe(1)
    while frame is not None and (name := frame.f_code.co_filename).startswith((_TORCH, _OWN)):
        if name.startswith(_LAYERS):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # `None` at the end
    return False
