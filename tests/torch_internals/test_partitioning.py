"""The compiler's partitioner: who has a say in it, when, and what is forgotten."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.torch_internals.compiled_regions import num_compiled_graphs
from lightning_memsave.torch_internals.partitioning import CompiledAnew, partitioned_by

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
settings = torch._inductor.config


def test_a_partitioner_is_asked_inside_alone_also_after_an_error():
    mine = object()

    def fail():
        with partitioned_by(mine):
            assert settings.custom_partitioner_fn is mine
            with partitioned_by(mine):
                assert settings.custom_partitioner_fn is mine
            assert settings.custom_partitioner_fn is mine
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert settings.custom_partitioner_fn is None


def test_the_users_own_partitioner_is_not_replaced():
    with (
        settings.patch(custom_partitioner_fn=object()),
        pytest.raises(ValueError, match="which another one has, got 'object'"),
        partitioned_by(object()),
    ):
        pass


def test_what_was_compiled_is_compiled_again_and_what_was_not_is_left_alone():
    torch.compiler.reset()
    function = torch.compile(lambda x: x.sin() + 1, backend="aot_eager", dynamic=False)
    first = num_compiled_graphs()
    CompiledAnew().end()
    function(torch.ones(3))
    assert num_compiled_graphs() == first + 1
    anew = CompiledAnew()
    function(torch.ones(3))
    assert num_compiled_graphs() == first + 2
    anew.end()
    function(torch.ones(3))
    assert num_compiled_graphs() == first + 3
    function(torch.ones(3))
    assert num_compiled_graphs() == first + 3
    torch.compiler.reset()
