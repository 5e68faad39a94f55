"""The private names of torch and Lightning that this package uses, and what is lost where a version lacks one.

Neither project promises anything about them, so each is looked for: at import, and again by whoever needs it. A name
that is gone costs the features of its `Part` and nothing else: a default steps aside with one line, what was asked for
by name is refused before training, and a figure becomes `None`. Attributes that a node of the autograd graph keeps
(`_saved_*`, `_raw_saved_*`) are not listed: where one is missing, its tensor is kept instead of recomputed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.versions import UntestedVersionWarning


class Part(NamedTuple):
    """Names that are needed together."""

    names: tuple[str, ...]
    lost: str
    """What is lost where one of them is missing."""
    test: str
    """The tests of what these names do."""


_AUTOGRAD = """
torch._C._autograd.SavedTensor.data torch._C._autograd.SavedTensor.unpack_hook
torch._C._autograd._top_saved_tensors_default_hooks torch._C._current_autograd_node torch._C._current_graph_task_id
torch._C._functions.AccumulateGrad._input_metadata torch._C._functions.AccumulateGrad._sequence_nr
torch._C._functorch.peek_interpreter_stack torch._C._functorch.is_functorch_wrapped_tensor
            torch._C._get_function_stack_at torch._C._len_torch_function_stack
torch._C._storage_Use_Count torch._C._will_engine_execute_node torch._C.DisableTorchFunction
torch.autograd._unsafe_preserve_version_counter
torch.autograd.forward_ad._current_level torch.multiprocessing.reductions.StorageWeakRef
torch._ops.OpOverload torch._ops.OpOverloadPacket torch.UntypedStorage._new_with_weak_ptr
torch._C._dynamo.eval_frame.get_eval_frame_callback torch._C._dynamo.eval_frame.set_eval_frame
torch._assert_async torch._dynamo.eval_frame.OptimizedModule torch._dynamo.trace_rules.add
torch._dynamo.utils.counters torch.Tensor._make_wrapper_subclass
"""

PARTS: Mapping[str, Part] = {
    "everything": Part(
        (
            "torch.Tensor._backward_hooks",
            "torch.Tensor._version",
            "torch.UntypedStorage._cdata",
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._python_dispatch._disable_current_modes",
            "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
            "torch.utils._pytree.TreeSpec",
            "torch.utils._pytree.tree_flatten",
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_map",
            "torch.utils._pytree.tree_map_only",
            "torch.utils._pytree.tree_unflatten",
        ),
        "the package: its import raises an ImportError that says so",
        "tests/torch_internals/test_private_names.py",
    ),
    "autograd": Part(
        tuple(_AUTOGRAD.split()),
        "activation compression, checkpointing and sparsity, and measured peaks (`None`)",
        "tests/saved_tensors",
    ),
    "compiled codes": Part(
        (
            "torch._functorch.partitioners.min_cut_rematerialization_partition",
            "torch._inductor.custom_graph_pass.CustomPartitionerFn",
        ),
        "codes in compiled code, which then keeps everything as it is",
        "tests/saved_tensors/test_compiled_partitioner.py",
    ),
    "gradient sums": Part(
        ("torch.autograd.graph._engine_run_backward", "torch.Tensor._use_count"),
        "exactness of measured peaks where gradients are summed: they may be too high by the largest sum",
        "tests/measuring/test_gradient_sums.py",
    ),
    "allocation events": Part(
        ("torch._C._autograd._profiler_enabled", "torch._C._profiler._ExtraFields_Allocation"),
        "`workspace_bytes`, peaks of compiled steps on CPU (`None`), and `budget`",
        "tests/measuring/test_profiler_peak.py",
    ),
    "fake tensors": Part(
        (
            "torch._subclasses.fake_tensor.DataDependentOutputException",
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._subclasses.fake_tensor.FakeTensorMode",
            "torch._subclasses.fake_tensor.unset_fake_temporarily",
        ),
        "predictions: `predict`, `plan_training`, `budget`",
        "tests/simulation/test_fake_model.py",
    ),
    "optimizers": Part(
        ("torch.optim.Optimizer._patch_step_function",),
        "compact optimizer state and low-precision weights",
        "tests/strategies/test_lightning_compat.py",
    ),
    "sharded parameters": Part(
        (
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.tensor._dtensor_spec.TensorMeta",
            "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._init_mp_dtypes",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded",
            "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
            "torch.distributed._composable_state._module_state_mapping",
        ),
        "compact optimizer state and low-precision weights under FSDP2",
        "tests/techniques/test_sharded_state.py",
    ),
    "DDP": Part(
        (
            "torch.nn.parallel.DistributedDataParallel._sync_buffers",
            "torch.nn.parallel.DistributedDataParallel.will_sync_module_buffers",
            "torch.nn.parallel.DistributedDataParallel._pre_forward",
            "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        ),
        "microbatching and out-of-memory recovery under DDP, recovery under FSDP2",
        "tests/loops/test_late_reduction.py",
    ),
    "FSDP2 after an error": Part(
        (
            "torch.distributed.distributed_c10d._get_default_store",
            "torch._C._distributed_c10d.FakeWork",
            "torch._C._distributed_c10d.ProcessGroup.unbox",
        ),
        "out-of-memory recovery under FSDP2",
        "tests/loops/test_joint_recovery.py",
    ),
    "planning beside processes": Part(
        (
            "torch.distributed.distributed_c10d._update_default_pg",
            "torch.distributed.tensor._random._rng_tracker",
            "torch.distributed.tensor.DTensor._op_dispatcher",
            "torch.testing._internal.distributed.fake_pg",
        ),
        "`budget` and `max_gradient_noise` under FSDP2",
        "tests/prediction/test_simulated_process_group.py",
    ),
    "allocator snapshot": Part(
        ("torch.cuda.memory._record_memory_history", "torch.cuda.memory._dump_snapshot"),
        "`MemoryMonitor(snapshot=...)`",
        "tests/measuring/test_allocator_snapshot.py",
    ),
    "training loop": Part(
        (
            "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization",
            "lightning.pytorch.loops.optimization.automatic.Closure",
            "lightning.pytorch.loops.optimization.automatic.ClosureResult",
            "lightning.pytorch.loops.utilities._block_parallel_sync_behavior",
        ),
        "microbatching, out-of-memory recovery and early zeroing of gradients",
        "tests/strategies/test_lightning_compat.py",
    ),
}


class Gone:
    """Stands for a name that is missing: nothing is an instance of it, and none can be made."""

    path = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"this version has no `{self.path}`")


def find(path: str) -> Any:
    """Return what has this name, or a subclass of `Gone` where nothing has.

    >>> find("torch.Tensor._version")
    <attribute '_version' of 'torch._C.TensorBase' objects>
    >>> find("torch.Tensor._nothing")()
    Traceback (most recent call last):
        ...
    NotImplementedError: this version has no `torch.Tensor._nothing`
    """
    names = path.split(".")
    found: Any = import_module(names[0])
    for number, name in enumerate(names[1:], 2):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = import_module(".".join(names[:number]))
            except ImportError:
                return type(name, (Gone,), {"path": path})
    return found


def is_there(path: str) -> bool:
    """Return whether something has this name."""
    found = find(path)
    return not (isinstance(found, type) and issubclass(found, Gone))


@functools.cache
def missing(part: str) -> tuple[str, ...]:
    """Return the names of a part that the installed versions lack."""
    return tuple(path for path in PARTS[part].names if not is_there(path))


def require(part: str, setting: str) -> None:
    """Refuse a setting that needs what the installed versions lack.

    Raises:
        ValueError: a name of this part is missing.
    """
    if gone := missing(part):
        raise setting_error(
            setting,
            f"needs {', '.join(gone)}, which the installed torch or Lightning lacks",
            version("torch"),
            f"Install a version that is tested, or leave `{setting}` out.",
        )


def check_names() -> None:
    """Say once, at import, what is lost with names that are gone.

    Raises:
        ImportError: nothing works without one of them.
    """
    if gone := missing("everything"):
        raise ImportError(
            f"lightning-memsave needs {', '.join(gone)}, which the installed torch lacks. "
            "Install a version that is tested: see `lightning_memsave.core.versions.TESTED`."
        )
    for name, part in PARTS.items():
        if gone := missing(name):
            warnings.warn(
                f"There is no {', '.join(gone)} in the installed torch or Lightning, so lightning-memsave lacks "
                f"{part.lost}.",
                UntestedVersionWarning,
                stacklevel=3,
            )
