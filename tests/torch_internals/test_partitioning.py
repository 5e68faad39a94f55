"""The compiler's partitioner: who has a say in it, when, and what is forgotten."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.torch_internals.compiled_regions import num_compiled_graphs
from lightning_memsave.torch_internals.partitioning import compile_anew, partitioned_by

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


def test_what_was_compiled_is_compiled_again():
    torch.compiler.reset()
    function = torch.compile(lambda x: x.sin() + 1, backend="aot_eager", dynamic=False)
    function(torch.ones(3))
    num_graphs = num_compiled_graphs()
    function(torch.ones(3))
    assert num_compiled_graphs() == num_graphs
    compile_anew()
    function(torch.ones(3))
    assert num_compiled_graphs() == num_graphs + 1
    torch.compiler.reset()


def test_code_is_compiled_again_under_another_partitioner():
    compile_anew()
    function = torch.compile(lambda x: x.sin() + 1, backend="aot_eager", dynamic=False)
    one, other, counts = object(), object(), []
    for partitioner in (one, one, other, one):
        with partitioned_by(partitioner):
            function(torch.ones(3))
        counts.append(num_compiled_graphs())
    assert [count - counts[0] for count in counts] == [0, 0, 1, 2]
    compile_anew()
