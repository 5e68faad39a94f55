"""16-bit weights on shards (FSDP2) in two processes on CPU (gloo), run by `test_sharded_state.py`; rank 0 prints `ok`.

The referees are unsharded: each process also trains the whole model on the whole batch.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_memsave.techniques.low_precision import LowPrecision, apply_low_precision, estimate_low_precision
from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state
from lightning_memsave.torch_internals import optimizer_class
from tests.techniques.sharded_state_program import adamw, batch, distance, make, run, whole

FORMATS = ("bf16-sr", "bf16+8", "bf16-kahan")


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = batch(step, isinstance(net.head.weight, DTensor))
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(ids).flatten(0, 1).float(), (ids % 67).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def lowered(precision: str, is_sharded: bool, state: OptimizerState | None = None):
    net = make(is_sharded)
    optimizer = adamw(net)
    if state is not None:
        apply_optimizer_state(optimizer, state, net)
    applied = apply_low_precision(net, optimizer, LowPrecision(format=precision))
    return net, optimizer, applied


def weight_bytes(net: nn.Module) -> int:
    local = [p.to_local() if isinstance(p, DTensor) else p for p in net.parameters()]
    return sum(t.nbytes for t in (*local, *net.buffers()))


def values(net: nn.Module) -> Tensor:
    """The weights with their corrections, in float32."""
    state = net.state_dict()
    return torch.cat(
        [(t.full_tensor() if isinstance(t, DTensor) else t).detach().float().flatten() for t in state.values()]
    )


def check_training() -> None:
    """Sharded and unsharded are no further apart than the format's own noise; bytes are those of the format."""
    net = make(False)
    optimizer = adamw(net)
    train(net, optimizer, range(10))
    plain = whole(net)
    start = whole(make(False))
    for precision in FORMATS:
        for state in (None, OptimizerState()):
            one, optimizer, _ = lowered(precision, False, state)
            train(one, optimizer, range(10))
            net, optimizer, applied = lowered(precision, True, state)
            assert weight_bytes(net) == estimate_low_precision(make(True), LowPrecision(format=precision))
            assert {p.dtype for p in net.parameters()} == {torch.bfloat16}  # each group has a matrix
            train(net, optimizer, range(10))
            noise = distance(values(one), plain)
            assert 0 < noise < distance(plain, start) / 4
            assert distance(values(net), values(one)) <= 2 * noise, precision
            assert distance(values(net), plain) <= 1.5 * noise, precision
            expected = values(net)
            applied.undo()
            assert {p.dtype for p in net.parameters()} == {torch.float32}
            assert torch.equal(whole(net), expected), precision
            train(net, optimizer, range(10, 12))  # gathered in float32 again


def check_parts() -> None:
    """Corrections of a shard that steps in parts are its own: equal to the bit where rounding draws nothing."""
    ends = []
    for size in (2**20, 2048):
        sizes, optimizer_class.PART_NUMEL["cpu"] = optimizer_class.PART_NUMEL["cpu"], size
        try:
            net, optimizer, _ = lowered("bf16+8", True)
            train(net, optimizer, range(4))
        finally:
            optimizer_class.PART_NUMEL["cpu"] = sizes
        ends.append(values(net))
    assert torch.equal(*ends)


def check_state_dicts() -> None:
    """State dicts hold float32 weights, sharded, from which weights and corrections come back to the bit."""
    for precision in FORMATS:
        net, optimizer, _ = lowered(precision, True)
        train(net, optimizer, range(4))
        saved = {name: value.clone() for name, value in get_model_state_dict(net).items()}
        if precision != "bf16-sr":
            assert {value.dtype for value in saved.values()} == {torch.float32}
        expected, buffers = whole(net), [b.clone() for b in net.buffers()]
        again, _, _ = lowered(precision, True)
        set_model_state_dict(again, saved)
        assert torch.equal(whole(again), expected)
        assert all(torch.equal(a, b) for a, b in zip(buffers, again.buffers(), strict=True))


def check_gathered_and_left() -> None:
    """Parameters that a forward pass has gathered are shards again; gradients of an earlier fit are cast."""
    net = make(True)
    with torch.no_grad():
        net(batch(0, True))
    assert not all(isinstance(p, DTensor) for p in net.parameters()), "the outermost module keeps its own"
    expected = estimate_low_precision(make(True), LowPrecision(format="bf16+8"))
    assert estimate_low_precision(net, LowPrecision(format="bf16+8")) == expected
    with torch.no_grad():
        net(batch(0, True))
    optimizer = adamw(make(True))
    applied = apply_low_precision(net, optimizer, LowPrecision(format="bf16+8"))
    assert weight_bytes(net) == expected
    assert all(isinstance(p, DTensor) for p in net.parameters())
    applied.undo()

    net = make(True)
    optimizer = adamw(net)
    train(net, optimizer, range(2))
    ids = batch(2, True)
    F.cross_entropy(net(ids).flatten(0, 1), (ids % 67).flatten()).backward()
    before = {p: p.grad.full_tensor() for p in net.parameters() if p.grad is not None}
    apply_low_precision(net, optimizer, LowPrecision())
    for p, gradient in before.items():
        assert p.grad.dtype == torch.bfloat16
        torch.testing.assert_close(p.grad.full_tensor().float(), gradient, rtol=2**-8, atol=0)
    optimizer.step()
    train(net, optimizer, range(3, 4))


def lowered_on_meta(precision: str):
    """Lower a model without memory, give it some, check its weights, and give it back; without a reference to it."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = LowPrecision(format=precision).lower(net)
    net.to_empty(device="cpu")
    for buffer in net.buffers():
        buffer.fill_(77)  # what nobody has written
    for layer in net:
        layer.reset_parameters()
    expected = whole(net).float()
    weights.materialized()
    assert torch.equal(values(net), expected), precision
    weights.restore()
    assert torch.equal(whole(net), expected), precision
    return weights, weakref.ref(net)


def check_meta() -> None:
    """Corrections of weights that get memory later are those of the values that they get."""
    for precision in FORMATS:
        weights, model = lowered_on_meta(precision)
        gc.collect()
        assert model() is None, "what checkpoints still ask does not hold the model"
        assert not weights.are_sharded


def check_refused() -> None:
    """What looks at more than one element, or at all gradients, is refused, and leaves the weights as they were."""

    class ByNorm(torch.optim.SGD):
        """Stands for Muon, LARS and others that divide by the norm of a matrix."""

    for precision, cls, message in (
        ("bf16-sr", ByNorm, r"precision.*each element by itself.*ByNorm"),
        ("bf16+8", torch.optim.Adafactor, r"precision.*each element by itself.*Adafactor"),
        ("fp16-scaled", torch.optim.AdamW, r"precision.*under FSDP2.*fp16-scaled"),
        ("bf16-gradients", torch.optim.AdamW, r"precision.*under FSDP2.*bf16-gradients"),
        ("int8-sr", torch.optim.AdamW, r"precision.*under FSDP2.*int8-sr"),
    ):
        net = make(True)
        optimizer = cls(net.parameters(), 1e-3)
        with pytest.raises(ValueError, match=message):
            apply_low_precision(net, optimizer, LowPrecision(format=precision))
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        assert type(optimizer) is cls


def check_kept() -> None:
    """A module that is sharded by itself may stay float32; one that is gathered with others is refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    batchnorm = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), mesh=mesh)
    with pytest.raises(ValueError, match=r"precision.*fully_shard.*1.weight"):
        apply_low_precision(batchnorm, adamw(batchnorm), LowPrecision())
    net = make(True)
    with pytest.raises(ValueError, match=r"precision.*fully_shard.*head.weight"):
        apply_low_precision(net, adamw(net), LowPrecision(keep_32bit=("head",)))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    apply_low_precision(net, adamw(net), LowPrecision(keep_32bit=("blocks.1", "blocks.1.*")))
    for name, p in net.named_parameters():
        assert p.dtype == (torch.float32 if name.startswith("blocks.1.") else torch.bfloat16), name


if __name__ == "__main__":
    run(
        *(check_training, check_parts, check_state_dicts, check_gathered_and_left),
        *(check_meta, check_refused, check_kept),
    )
