"""Strategies of a run on paper: one device, or one process of several whose others are not there.

Torch's "fake" process group answers every collective at once, as if all processes had the same. DDP and FSDP2 are the
real ones, so buckets, views into them, shards and what is gathered from them are allocated by their own code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import counterpart, kinds_of, namespace_of
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.simulation.fake_model import Copying, fake_copy
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode
from lightning_memsave.torch_internals.fake_tensors import FakeTensorMode
from lightning_memsave.torch_internals.private_names import find, missing, require
from lightning_memsave.torch_internals.sharded_parameters import frees_weights

T = TypeVar("T")

_set_default_group = find("torch.distributed.distributed_c10d._update_default_pg")
_debug = find("torch.distributed.tensor.debug")
_DTensor = find("torch.distributed.tensor.DTensor")
_random = find("torch.distributed.tensor._random")


@contextlib.contextmanager
def on_paper(namespace: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings of a `Trainer` that starts no process and moves no module; this is rank 0 of its processes.

    Args:
        namespace: of Lightning.
        settings: as for `Trainer`. A strategy is copied; `PlanningGroups` stand for that of the run that they are of.

    Raises:
        ValueError: the strategy is neither one device's, nor DDP, nor Lightning's for FSDP2; `devices` or `num_nodes`
            is no number; or this process is one of several already.
    """
    num_processes, strategy = num_processes_of(settings), settings.get("strategy", "auto")
    if isinstance(strategy, PlanningGroups):
        with strategy.on_paper():
            yield {**settings, "strategy": strategy.sharded_on_paper(), "accelerator": "cpu"}
        return
    strategy = _strategy(namespace, strategy, num_processes)
    options = {"devices": 1, **settings, "strategy": strategy, "accelerator": "cpu"}
    if isinstance(strategy, counterpart(SimulatedDevice, namespace)):
        yield options
        return
    if dist.is_initialized():
        remedy = "Predict before the run, or in a process of its own."
        raise setting_error(
            "devices", "cannot be predicted in a process that has a process group", num_processes, remedy
        )
    excepthook = sys.excepthook  # replaced with every group
    dist.init_process_group("fake", rank=0, world_size=num_processes)
    try:
        with _meshes_forgotten():
            yield options
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def num_processes_of(settings: Mapping[str, Any]) -> int:
    """Return the number of processes on all nodes together.

    Raises:
        ValueError: `devices` or `num_nodes` is no number.
    """
    numbers = [settings.get(name, 1) for name in ("devices", "num_nodes")]
    for name, number in zip(("devices", "num_nodes"), numbers, strict=True):
        if type(number) is not int or number < 1:
            raise setting_error(name, "must be an integer of at least 1 in a prediction", number, "As the run has.")
    return math.prod(numbers)


def _strategy(namespace: str, strategy: str | Strategy, num_processes: int) -> Any:
    strategies = import_module(f"{namespace}.strategies")
    if strategy in ("auto", "memsave") or isinstance(strategy, strategies.SingleDeviceStrategy):
        if num_processes == 1:
            return counterpart(SimulatedDevice, namespace)(device="cpu")
        strategy = "ddp"
    named = strategies.StrategyRegistry
    if isinstance(strategy, str) and strategy not in named:
        raise setting_error("strategy", "must be one that Lightning knows", strategy, "For example 'ddp'.")
    kind: Any = named[strategy]["strategy"] if isinstance(strategy, str) else type(strategy)
    is_ours = issubclass(kind, strategies.DDPStrategy | strategies.ModelParallelStrategy)
    if not is_ours or issubclass(kind, strategies.DeepSpeedStrategy):  # which derives from DDP's
        rule = "must be one device's, DDP or FSDP2 ('memsave_fsdp') in a prediction"
        remedy = "Others own the step, and cannot be run without their processes."
        raise setting_error("strategy", rule, strategy if isinstance(strategy, str) else kind.__name__, remedy)
    found = named.get(strategy) if isinstance(strategy, str) else copy.deepcopy(strategy)
    found.__class__ = _simulated(kind, namespace)
    return found


class SimulatedDevice(SingleDeviceStrategy):
    """One device; neither moves a module, which torch refuses for fake parameters, nor brings it back."""

    def model_to_device(self) -> None:
        """Leave the module where it is."""

    def teardown(self) -> None:
        """Leave the module where it is."""


class SimulatedProcess(Strategy):
    """Mixin of a strategy of several processes, for one of them; the process group is there already."""

    _ddp_kwargs: dict[str, Any]

    def _configure_launcher(self) -> None:
        pass

    def setup_environment(self) -> None:
        """Set up ranks and meshes, which are made of numbers."""
        with _disable_current_modes():
            super().setup_environment()

    def model_to_device(self) -> None:
        """Leave the module where it is."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Wrap the model; called for DDP only, where `init_sync` would compare numbers of all processes."""
        ddp = _LonelyDDP(model, **{**self._ddp_kwargs, "init_sync": False})
        ddp.register_comm_hook(None, noop_hook)  # the "fake" group would not hand it the result
        return ddp

    def barrier(self, *_: object, **__: object) -> None:
        """Wait for nobody."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return what this process has."""
        return obj

    def teardown(self) -> None:
        """Leave the module where it is."""


@contextlib.contextmanager
def _meshes_forgotten() -> Iterator[None]:
    """Keep the meshes inside and outside apart: torch remembers some, and takes one for another of the same numbers."""
    if missing("planning beside processes"):
        yield
        return
    tracker, _random._rng_tracker = _random._rng_tracker, None
    _forget_meshes()
    try:
        yield
    finally:
        _random._rng_tracker = tracker
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear torch's caches of operations on DTensors; there is one function for all where there are several."""
    clear = getattr(_debug, "_clear_sharding_prop_cache", None)
    (clear or _DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear)()


class PlanningGroups:
    """Process groups and meshes that take the place of a run's (FSDP2) while it is planned, in all processes together.

    One has as many processes as the run, of which only this one is there, for predictions. The other has this process
    alone, for trials: with real numbers, and nothing divided.

    Args:
        trainer: whose process group is there.

    Raises:
        ValueError: private names that it takes are gone.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        require("planning beside processes", "budget")
        import_module("torch.testing._internal.distributed.fake_pg")  # makes "fake" known to `new_group`
        self._trainer, self._namespace = trainer, namespace_of(trainer.strategy)
        self._device = trainer.strategy.root_device
        self._run, rank, num = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        self._on_paper = dist.new_group(backend="fake")
        self._rest_on_paper = dist.new_group([rank], backend="fake", use_local_synchronization=True)
        self._alone = dist.new_group([rank], use_local_synchronization=True)
        groups = [self._on_paper, self._rest_on_paper]
        ranks = [[each] for each in range(num)]
        self._mesh_on_paper = DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=_MESH)
        self._with_layers: dict[int, Any] = {}
        with self.alone():  # where this process is the first
            groups = [self._alone, self._alone]
            self._mesh_alone = DeviceMesh.from_group(groups, self._device.type, [[0]], mesh_dim_names=_MESH)

    def close(self) -> None:
        """Give all of them up."""
        for group in (self._on_paper, self._rest_on_paper, self._alone):
            dist.destroy_process_group(group)

    def on_paper(self) -> AbstractContextManager[None]:
        """Take part in collectives whose other processes are not there."""
        return self._instead(self._on_paper)

    def alone(self) -> AbstractContextManager[None]:
        """Take part in collectives of this process alone."""
        return self._instead(self._alone)

    @contextlib.contextmanager
    def _instead(self, group: Any) -> Iterator[None]:
        _set_default_group(group)
        try:
            with _meshes_forgotten():
                yield
        finally:
            _set_default_group(self._run)

    def with_layers(self, module: L.LightningModule) -> Any:
        """Return a copy of a module, of fake tensors, as it is once `configure_model` was called.

        Raises:
            ValueError: the module is sharded already, or `configure_model` fails.
        """
        if frees_weights(module):
            rule = "must be given to the first fit: a module that is sharded already cannot be copied"
            remedy = "Make the module anew, or train with the plan of another run: `MemSave(plan)`."
            raise setting_error("budget", rule, type(module).__name__, remedy)
        if id(module) not in self._with_layers:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            twin: Any = fake_copy(module, mode)
            twin._device_mesh, twin._trainer = self._mesh_on_paper, self._trainer
            try:
                with self.on_paper(), Randomness.untouched(), mode, Copying():
                    twin.configure_model()
            except Exception as error:  # whatever the user's code raises
                rule = "needs a `configure_model` that can be called on a copy of the module without values"
                remedy = f"It fails ({type(error).__name__}: {error}). Set techniques by hand instead."
                raise setting_error("budget", rule, type(module).__name__, remedy) from error
            twin._trainer = None
            self._with_layers[id(module)] = twin
        return self._with_layers[id(module)]

    def sharded_on_paper(self) -> Any:
        """Return a strategy that shards over as many processes as the run's."""
        return counterpart(_ShardedOnPaper, self._namespace)(self._mesh_on_paper, torch.device("cpu"))

    def sharded_alone(self) -> Any:
        """Return a strategy that shards over this process alone, on the device of the run."""
        return counterpart(_ShardedOnMesh, self._namespace)(self._mesh_alone, self._device)


_MESH = ("data_parallel", "tensor_parallel")
_PLANNING: weakref.WeakKeyDictionary[Strategy, PlanningGroups] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def planning_groups(trainer: L.Trainer) -> Iterator[None]:
    """Have `planning_groups_of` return some while entered, where a run needs them (FSDP2); in all processes at once."""
    if "ModelParallelStrategy" not in kinds_of(trainer.strategy):
        yield
        return
    groups = _PLANNING[trainer.strategy] = PlanningGroups(trainer)
    try:
        yield
    finally:
        del _PLANNING[trainer.strategy]
        groups.close()


def planning_groups_of(trainer: L.Trainer | None) -> PlanningGroups | None:
    """Return what takes the place of the process group of a run that is planned; `None` where nothing has to."""
    return None if trainer is None else _PLANNING.get(trainer.strategy)


def with_layers(module: L.LightningModule, trainer: L.Trainer | None) -> L.LightningModule:
    """Return what has the layers that a module will have in a run that is planned, its own as far as it can."""
    groups = planning_groups_of(trainer)
    return module if groups is None else groups.with_layers(module)


class _ShardedOnMesh(ModelParallelStrategy):
    """FSDP2 on a mesh that is there, whose process group is the default one.

    Args:
        mesh: of data-parallel and tensor-parallel processes.
        device: of this process.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(mesh.size(0), mesh.size(1))
        self._mesh, self._device = mesh, device

    def _configure_launcher(self) -> None:
        pass

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._device

    @property
    def local_rank(self) -> int:
        """The number of this process on the mesh."""
        return self.global_rank

    @property
    def global_rank(self) -> int:
        """The number of this process on the mesh."""
        return int(self._mesh.get_local_rank(0))

    @property
    def world_size(self) -> int:
        """The number of processes on the mesh."""
        return self._mesh.size()

    def setup_environment(self) -> None:
        """Hand the mesh to the module; ranks that logs know stay those of the run."""
        module: Any = self.lightning_module
        assert self.accelerator is not None, "Lightning has set it"
        self.accelerator.setup_device(self._device)
        module._device_mesh = self._device_mesh = self._mesh


class _ShardedOnPaper(_ShardedOnMesh):
    """The same for one process of several whose others are not there, and for a module without values."""

    def model_to_device(self) -> None:
        """Leave the module where it is."""

    def barrier(self, *_: object, **__: object) -> None:
        """Wait for nobody."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return what this process has."""
        return obj

    def teardown(self) -> None:
        """Leave the module where it is."""


@functools.cache
def _simulated(kind: type, namespace: str) -> type:
    """Return a class of strategies for one process of several; under the name of the strategy, for messages."""
    return type(kind.__name__, (counterpart(SimulatedProcess, namespace), kind), {"__module__": __name__})


class _LonelyDDP(nn.parallel.DistributedDataParallel):
    """Orders its buckets anew after the first step, for which it must read numbers."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with _RealNumbers():
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # as above


class _RealNumbers(DispatchMode):
    """DDP's own indices, which are its only int32 tensors, are real among fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run operations on DDP's indices without fake tensors, and any other as it is."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_index = all(t.dtype == torch.int32 for t in tensors) if tensors else kwargs.get("dtype") == torch.int32
        with _disable_current_modes() if is_index else contextlib.nullcontext():
            return func(*args, **kwargs)
