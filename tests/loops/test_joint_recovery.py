"""Recovery of all processes together; what happens in two of them is in `tests/strategies/fsdp_recovery_program.py`."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_memsave import Microbatching
from lightning_memsave.loops.joint_recovery import FailedTryError, JointRecovery, with_one_sample
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
from lightning_memsave.loops.recovery import RecoveryPolicy


class Module(L.LightningModule):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)


@pytest.fixture
def joint(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    found = JointRecovery(Module(nn.Linear(3, 3)))
    yield found
    found.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "layers", "parts", "expected"),
    [
        (Microbatching(), (), [(torch.arange(7), 0.0)], [[0]]),
        (Microbatching(), (), [(torch.arange(4), 4), (torch.arange(4, 7), 3)], [[0], [4]]),
        (Microbatching(), (nn.BatchNorm1d(3),), [(torch.arange(4), 4)], [[0, 1]]),
        (Microbatching(split_fn=lambda batch, size: batch.split(2 * size)), (), [(torch.arange(7), 7)], [[0, 1]]),
    ],
    ids=["whole", "parts", "BatchNorm", "split_fn"],
)
def test_each_part_is_repeated_with_its_first_samples(config, layers, parts, expected):
    found = with_one_sample(parts, config, Module(*layers))
    assert [part.tolist() for part, _ in found] == expected
    assert [num_samples for _, num_samples in found] == [num_samples for _, num_samples in parts]


def test_parts_whose_samples_cannot_be_told_are_repeated_whole():
    batch = {"x": torch.zeros(3), "y": torch.zeros(4)}
    assert with_one_sample([(batch, 0.0)], Microbatching(), Module()) == [(batch, 0.0)]


def test_a_repetition_adds_to_no_gradient_and_ends_its_try(joint):
    joint.begin()
    joint.count()
    (weight, bias) = joint._module.parameters()
    weight.grad = kept = torch.ones(3, 3)

    def repeat():
        assert weight.grad is None
        joint._module.layers(torch.ones(1, 3)).sum().backward()
        joint.finish()

    joint.catch_up("the forward pass", repeat)
    assert weight.grad is kept
    assert torch.equal(kept, torch.ones(3, 3))
    assert bias.grad is None
    joint.begin()  # the next try counts
    joint.finish()
    joint.finish()


def test_a_try_that_failed_somewhere_does_not_count(joint):
    joint.begin()
    joint._has_failed = True
    with pytest.raises(FailedTryError):
        joint.finish()


def test_what_ended_a_process_explains_the_errors_of_others_until_the_next_run(joint):
    lost = RuntimeError("Connection closed by peer")
    joint.begin()
    joint.count()
    assert joint.explain(lost) is None
    with pytest.raises(
        OutOfMemoryUnrecoverableError, match=r"rank 0, and one sample could not be repeated.*pass: full"
    ):
        joint.catch_up("the forward pass: full", lambda: nn.Linear(2, 2)(torch.ones(3)))
    joint.phase = "the backward pass of part 1 of 2"
    with pytest.raises(OutOfMemoryUnrecoverableError, match=r"Rank 0 waited for it in the backward.*Connection closed"):
        joint.explain(lost)
    JointRecovery(joint._module).close()
    assert joint.explain(lost) is None


def test_sizes_are_of_samples_and_those_of_another_kind_of_run_are_forgotten():
    """Processes must cut batches of one number of samples into as many parts, however long the samples are."""
    policy, answers = RecoveryPolicy(Microbatching(growth_interval=1)), [False, True]
    policy.decide_jointly(lambda flag: flag and answers.pop(0), speaks=False)
    batch = torch.zeros(8, 5)
    assert policy.size_for(batch) is None
    policy.limit_elements = 2.0
    assert [policy.size_for(torch.zeros(8, length)) for length in (1, 5, 100)] == [2, 2, 2]
    for expected in (2, 4):  # another process has no room for more, then it has
        policy.succeed(batch, 4, torch.device("cpu"), None)
        assert policy.size_for(batch) == expected
    learned = policy.state_dict()
    assert learned["counts_samples"]
    same, other = RecoveryPolicy(Microbatching()), RecoveryPolicy(Microbatching())
    same.decide_jointly(lambda flag: flag, speaks=True)
    for each in (same, other):
        each.load_state_dict(learned)
    assert (same.size_for(batch), other.size_for(batch)) == (4, None)
