"""FSDP2 with memory saving: Lightning's model-parallel strategy, for a module that calls `fully_shard`.

`configure_model` shards over `device_mesh["data_parallel"]`. Lightning's own default makes that dimension as large as
there are nodes, and `"tensor_parallel"` as large as a node has devices: on one node, every "shard" is the whole. Here
the data-parallel dimension has all processes, unless a size of the other one is given.
"""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_memsave.strategies.memsave_mixin import MemSaveMixin


class MemSaveFSDPStrategy(MemSaveMixin, ModelParallelStrategy):
    """FSDP2 (Lightning's model-parallel strategy; the module calls `fully_shard` in `configure_model`).

    `"auto"`, the default of both sizes: what is left of all processes; one, for tensor parallelism, if both are left
    open.
    """

    def setup_environment(self) -> None:
        """Set up processes and their mesh."""
        num_processes = self.num_nodes * self.num_processes
        if self._tensor_parallel_size == "auto":
            data_parallel = self._data_parallel_size
            self._tensor_parallel_size = 1 if data_parallel == "auto" else num_processes // max(1, data_parallel)
        if self._data_parallel_size == "auto":
            self._data_parallel_size = num_processes // max(1, self._tensor_parallel_size)
        super().setup_environment()
