"""Buckets of an exchange in one process; what two processes make of them is in `strategies/ddp_release_program.py`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_memsave.techniques.optimizer_state.gradient_exchange import (
    GradientExchange,
    default_bucket_bytes,
    dense_gradient,
    exchanged_bytes,
    in_any_process,
    in_buckets,
    send_from_first,
)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_buckets_are_of_one_dtype_and_bounded():
    gradients = [torch.zeros(n, dtype=d) for d in (torch.float32, torch.bfloat16) for n in (10, 10, 10, 60)]
    buckets = in_buckets(gradients, 100)
    assert [gradient for bucket in buckets for gradient in bucket] == gradients
    for bucket in buckets:
        assert len({gradient.dtype for gradient in bucket}) == 1
        assert len(bucket) == 1 or sum(gradient.nbytes for gradient in bucket) <= 100
    assert len(buckets) == 5


def test_sparse_gradients_become_dense_as_processes_differ_in_rows():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    gradient = dense_gradient(embedding.weight)
    assert gradient.layout is torch.strided
    assert gradient[:, 0].tolist() == [0, 2, 0, 1, 0]
    frozen = nn.Parameter(torch.ones(3))
    assert torch.equal(dense_gradient(frozen), torch.zeros(3))


@pytest.mark.parametrize(("megabytes", "expected"), [(1, 1), (256, 4), (8192, 25)])
def test_buckets_are_a_64th_of_all_gradients_from_1_to_25_mib(megabytes, expected):
    parameters = [torch.empty(megabytes, 2**20, dtype=torch.uint8, device="meta")]
    assert default_bucket_bytes(parameters) == expected * 2**20


def test_three_buckets_are_there_at_most():
    layers = nn.Sequential(nn.Linear(10, 9), nn.Linear(9, 9))  # 396 + 360 bytes
    assert exchanged_bytes(layers, 400) == 3 * 396
    assert exchanged_bytes(layers) == 3 * 756
    assert exchanged_bytes(layers.requires_grad_(False)) == 0


def test_gradients_are_used_in_order_and_one_bucket_late(process_group):
    """The first backward exchanges parameters backwards, and later ones in the order in which gradients came."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    numbers = {p: number for number, p in enumerate(parameters)}
    exchange = GradientExchange(parameters, finds_unused=False, broadcast=lambda order: order, bucket_bytes=8)
    used = []

    def use(p):
        used.append((numbers[p], p.grad.tolist()))
        p.grad = None

    exchange.use = use
    for came, after_each in (([0, 3, 1, 2], [0, 0, 0, 3]), ([0, 3, 1, 2], [0, 1, 2, 3])):
        used.clear()
        for number, num_used in zip(came, after_each, strict=True):
            parameters[number].grad = torch.full((2,), float(number))
            exchange.add(parameters[number])
            assert len(used) == num_used
        exchange.finish()
        assert {number: values for number, values in used} == {n: [n, n] for n in range(4)}
    assert [number for number, _ in used] == came


@pytest.mark.parametrize("finds_unused", [False, True])
def test_what_no_process_has_is_not_used(process_group, finds_unused):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    exchange = GradientExchange(parameters, finds_unused=finds_unused, broadcast=lambda order: order)
    used = []
    exchange.use = used.append
    parameters[1].grad = torch.ones(2)
    exchange.add(parameters[1])
    if not finds_unused:
        with pytest.raises(RuntimeError, match="1 of 2 parameters had no gradient in a backward"):
            exchange.finish()
        return
    exchange.finish()
    assert used == [parameters[1]]
    assert parameters[0].grad is None
    assert in_any_process([True, False], torch.device("cpu")) == [True, False]


def test_other_parameters_than_those_of_rank_0_are_refused():
    with pytest.raises(RuntimeError, match=r"trains 1 parameters.*all processes need the same model"):
        GradientExchange([torch.zeros(3)], finds_unused=False, broadcast=lambda ours: [((2,), "torch.float32")])


def test_a_second_gradient_in_one_step_is_refused(process_group):
    p = nn.Parameter(torch.ones(2))
    exchange = GradientExchange([p], finds_unused=False, broadcast=lambda order: order)
    exchange.use = lambda p: None
    for _ in range(2):  # steps
        p.grad = torch.ones(2)
        exchange.add(p)
        with pytest.raises(RuntimeError, match="second gradient in one step"):
            exchange.add(p)
        exchange.finish()


def test_what_lies_in_pieces_is_sent_whole(process_group):
    """In one process nothing changes, and what has no memory of its own for each element is refused."""
    tensors = [
        torch.randn(3, 4)[:, ::2],
        torch.randn(2, 3).t(),
        torch.tensor(True),
        torch.empty(0),
        torch.ones(2).int(),
    ]
    before = [tensor.clone() for tensor in tensors]
    send_from_first(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    with pytest.raises(RuntimeError, match="more than one element"):
        send_from_first([torch.ones(1).expand(3)])
