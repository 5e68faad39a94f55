"""Collectives that a process leaves out, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_memsave.torch_internals.collectives import CatchingUp, groups_of, num_issued


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def reduced():
    values = torch.ones(3)
    dist.all_reduce(values)
    return values


def test_the_first_collectives_are_left_out_and_the_others_are_issued(group):
    groups = groups_of(nn.Linear(2, 2))
    assert groups == [group]
    before = num_issued(groups)
    reduced()
    reduced()
    done = {name: number - before[name] for name, number in num_issued(groups).items()}
    assert done == {group.group_name: 2}
    with CatchingUp(done):
        for _ in range(2):
            assert torch.equal(reduced(), torch.ones(3))
        assert num_issued(groups)[group.group_name] == before[group.group_name] + 2
        reduced()
    assert num_issued(groups)[group.group_name] == before[group.group_name] + 3


@pytest.mark.filterwarnings("ignore")  # an older name of the same function
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_left_out_is_answered_by_this_process(group, is_async):
    shard, output = torch.arange(3.0), torch.full((3,), 7.0)
    with CatchingUp({group.group_name: 3}):
        work = dist.all_gather_into_tensor(output, shard, async_op=is_async)
        assert work is None or work.wait()
        assert torch.equal(output, shard)
        dist.reduce_scatter_tensor(output, 2 * shard)
        assert torch.equal(output, 2 * shard)
        dist.barrier()


def test_collectives_that_reach_their_group_unseen_are_refused(group):
    with CatchingUp({group.group_name: 1}), pytest.raises(NotImplementedError, match="cannot be left out"):
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", group.group_name)
