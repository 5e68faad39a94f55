"""The simulated device: its values are the CPU's, its allocator is torch's."""

from __future__ import annotations

import copy
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors.dropout import native_dropout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("MEMSAVE_SIMULATED_CUDA" not in os.environ, reason="of the simulated device"),
]


def test_a_network_trains_as_on_the_cpu():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    x, y, losses = torch.randn(8, 3, 8, 8), torch.arange(8), {}
    for device in ("cuda", "cpu"):
        moved = copy.deepcopy(net).to(device)
        optimizer, losses[device] = torch.optim.AdamW(moved.parameters(), 1e-2), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(moved(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses[device].append(float(loss.detach()))
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-6)


def test_memory_is_the_caching_allocators():
    before = torch.cuda.memory_allocated()
    x = torch.ones(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    y = x + x
    assert torch.cuda.memory_allocated() - before == 2 * 4096
    del x, y
    assert torch.cuda.memory_allocated() == before


def test_a_limit_is_kept():
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**27, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_random_numbers_are_those_of_the_cuda_generator():
    state = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    first, mask = torch.rand(5, device="cuda"), F.dropout(torch.ones(50, device="cuda"))
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(5, device="cuda"), first)
    assert torch.equal(F.dropout(torch.ones(50, device="cuda")), mask)
    assert not torch.equal(torch.rand(5, device="cuda"), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_runs_in_a_thread_of_the_engine():
    threads = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            threads.append(threading.get_ident())
            return gradient

    Note.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()
    assert threads
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.7])
def test_dropout_rounds_as_the_package_expects_of_cuda(dtype, p):
    x = torch.randn(1000, dtype=dtype, device="cuda")
    dropped, mask = torch.native_dropout(x, p, True)
    assert torch.equal(dropped, native_dropout(x, mask, p))
    exact = x.double() * mask / (1 - p)
    torch.testing.assert_close(dropped.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


def test_pinned_memory_is_known_as_such():
    x = torch.arange(10).pin_memory()
    assert x.is_pinned()
    assert x.pin_memory() is x
    assert not torch.arange(10).is_pinned()
    assert torch.equal(x.to("cuda", non_blocking=True).cpu(), x)


def test_threads_that_draw_leave_the_cpus_generator_alone():
    state = torch.get_rng_state()
    threads = [threading.Thread(target=lambda: [torch.rand(50, device="cuda") for _ in range(50)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_kernel_that_it_lacks_is_an_error_and_no_wrong_number():
    x = torch.ones(2, 3, device="cuda")
    with pytest.raises(NotImplementedError, match="has no kernel for aten::_fused_dropout"):
        torch._fused_dropout(x, 0.5)
    with pytest.raises(RuntimeError, match="has no kernel for this"):
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)).cuda().coalesce()
