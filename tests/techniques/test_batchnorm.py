"""BatchNorm in microbatches against the statistics of the whole batch, computed by hand in float64."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import Ledger, MemSave, Microbatching
from lightning_memsave.core.errors import NotLosslessWarning
from lightning_memsave.techniques.batchnorm import pooled_batchnorm, pools_statistics, unpooled

pytestmark = pytest.mark.filterwarnings("ignore:Microbatches change the result")


def run_parts(norm, x, sizes, **options):
    outputs = []
    with pooled_batchnorm(norm, **options) as batch:
        for part in x.split(sizes):
            with batch.microbatch():
                outputs.append(norm(part))
    return torch.cat(outputs)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    shape=st.sampled_from([(), (3,), (2, 4)]),
    momentum=st.sampled_from([0.1, 0.7, 1.0, None]),
    seed=st.integers(0, 2**31),
    mode=st.sampled_from(["ghost", "running"]),
)
def test_running_statistics_are_updated_once_as_by_the_whole_batch(sizes, shape, momentum, seed, mode):
    generator = torch.Generator().manual_seed(seed)
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(shape)]
    norm = kind(3, momentum=momentum).double()
    for _ in range(2):  # so that a cumulative average has something to average
        x = 2 + 3 * torch.randn(sum(sizes), 3, *shape, generator=generator, dtype=torch.float64)
        before = copy.deepcopy(norm)
        run_parts(norm, x, sizes, mode=mode)
        before(x)  # torch's own update by the whole batch
        torch.testing.assert_close(norm.running_mean, before.running_mean, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(norm.running_var, before.running_var, rtol=1e-12, atol=1e-13)
        assert norm.num_batches_tracked == before.num_batches_tracked
    assert (norm.momentum, norm.training, norm._forward_hooks, norm._forward_pre_hooks) == (momentum, True, {}, {})


def test_ghost_normalises_by_the_microbatch_and_running_by_the_running_statistics():
    x = torch.randn(6, 3, dtype=torch.float64)
    norm = nn.BatchNorm1d(3).double()
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    frozen = copy.deepcopy(norm).eval()
    ghost = run_parts(copy.deepcopy(norm), x, [3, 3])
    expected = torch.cat([(p - p.mean(0)) / (p.var(0, correction=0) + norm.eps).sqrt() for p in x.split(3)])
    torch.testing.assert_close(ghost, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(run_parts(copy.deepcopy(norm), x, [2, 4], mode="running"), frozen(x))


def test_a_module_that_is_called_twice_is_updated_twice():
    norm, x = nn.BatchNorm1d(3).double(), torch.randn(8, 3, dtype=torch.float64)
    twin = copy.deepcopy(norm)
    with pooled_batchnorm(norm, "running") as batch:
        for part in x.split(2):
            with batch.microbatch():
                norm(part)
                norm(part * 2)
    twin(x)
    twin(x * 2)
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_mean, twin.running_mean, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(norm.running_var, twin.running_var, rtol=1e-12, atol=1e-13)


def test_nothing_is_updated_when_the_batch_fails_or_the_forward_does_not_count():
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    before = copy.deepcopy(norm.state_dict())

    def fails():
        with pooled_batchnorm(norm) as batch, batch.microbatch():
            norm(x)
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    with pooled_batchnorm(norm) as batch, batch.microbatch(), unpooled():
        norm(x)
    with pooled_batchnorm(norm):
        norm(x)  # as a repetition in backward
    assert all(torch.equal(a, b) for a, b in zip(before.values(), norm.state_dict().values(), strict=True))
    assert norm.training
    assert norm.momentum == 0.1


@pytest.mark.parametrize("mode", ["ghost", "running"])
def test_a_layer_that_training_step_evaluates_is_left_alone(mode):
    norm = nn.BatchNorm1d(3)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    before, x = copy.deepcopy(norm.state_dict()), torch.randn(6, 3)
    expected = copy.deepcopy(norm).eval()(x)
    outputs = []
    with pooled_batchnorm(norm, mode) as batch:
        for part in x.split(2):
            with batch.microbatch():
                norm.eval()  # where layers are frozen that Lightning puts into training mode
                outputs.append(norm(part))
    assert torch.equal(torch.cat(outputs), expected)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), norm.state_dict().values(), strict=True))
    assert not norm.training


def frozen_by_lightning(norm):
    norm.track_running_stats = False  # as `BaseFinetuning.freeze` does: still in training mode, buffers still there
    return norm


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm2d(3), True),
        (nn.BatchNorm2d(3).eval(), False),
        (nn.BatchNorm2d(3, track_running_stats=False), False),
        (nn.SyncBatchNorm(3), False),
        (frozen_by_lightning(nn.BatchNorm2d(3)), False),
        (nn.LazyBatchNorm1d(), False),
        (nn.GroupNorm(1, 3), False),
    ],
)
def test_which_modules_are_pooled(module, expected):
    assert pools_statistics(module) is expected


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def fit(microbatching, *, epochs=2, module=None, **slots):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    module = module or Net()
    memsave = MemSave(microbatch=microbatching, **slots)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        precision="64-true",
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 12))
    return module, memsave


def test_running_is_the_same_for_every_size_of_microbatch():
    def trained(size):
        return fit(Microbatching(size=size, batchnorm="running", batchnorm_warmup=0))

    whole, memsave = trained(12)
    assert memsave.report.loss_class == "changed"
    for size in (1, 2, 5):
        module, _ = trained(size)
        for a, b in zip(whole.state_dict().values(), module.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_the_warm_up_is_counted_by_the_module_itself_so_that_it_is_resumed():
    module, _ = fit(Microbatching(size=4, batchnorm="running", batchnorm_warmup=4), epochs=1)
    ghost, _ = fit(Microbatching(size=4), epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), ghost.parameters(), strict=True))
    assert module.net[1].num_batches_tracked == 4
    # From the fifth batch on, whatever the size.
    after = [
        fit(Microbatching(size=s, batchnorm="running", batchnorm_warmup=4), module=copy.deepcopy(module), epochs=1)[0]
        for s in (3, 12)
    ]
    for a, b in zip(after[0].state_dict().values(), after[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("slots", [{"checkpointing": "blocks"}, {"checkpointing": "sqrt"}, {"activations": "exact"}])
@pytest.mark.filterwarnings("ignore:.*had no effect")
def test_repeated_forwards_are_not_counted(slots):
    class Blocks(Net):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(6, 16), *(nn.Sequential(nn.BatchNorm1d(16), nn.ReLU()) for _ in range(4)), nn.Linear(16, 1)
            )

    def make():
        torch.manual_seed(0)
        return Blocks()

    plain, _ = fit(4, module=make(), activations=False, checkpointing=False)
    module, memsave = fit(4, module=make(), **slots)
    assert len(memsave.report.applied) == 3
    for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_modules_are_named():
    with pytest.warns(NotLosslessWarning, match=r"net\.1 \(BatchNorm1d"):
        fit(4, epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batchnorm": "sync"}, r'"ghost" or "running", got \'sync\''),
        ({"batchnorm_warmup": -1}, "number of batches, got -1"),
        ({"growth_interval": 0}, "positive integer, got 0"),
        ({"headroom_fraction": 1.0}, r"in \[0, 1\), got 1.0"),
        ({"max_bytes": "much"}, "positive size"),
        ({"max_bytes": "1GiB", "size": 4}, r"max_bytes` is used with size=\"auto\" only, got '1GiB'"),
        ({"growth_interval": 10, "size": 4}, r'growth_interval` is used with size="auto" only, got 10'),
        ({"start": 2, "size": 4}, r'start` is used with size="auto" only, got 2'),
        ({"start": 0}, "positive integer, got 0"),
        ({"batchnorm_warmup": 7}, r'batchnorm_warmup` is used with batchnorm="running" only, got 7'),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Microbatching(**options)


@pytest.mark.parametrize("mode", ["ghost", "running"])
def test_what_is_remembered_does_not_grow_with_the_number_of_microbatches(mode):
    norm = nn.BatchNorm1d(1000)

    def held_bytes(num_parts):
        x = torch.randn(4 * num_parts, 1000)
        with pooled_batchnorm(norm, mode) as batch, Ledger().watching(norm, batch=x) as ledger:
            for part in x.split(4):
                with batch.microbatch(), torch.no_grad():
                    norm(part)
            return ledger.live_bytes - 4 * x.numel()

    assert held_bytes(50) == held_bytes(2)


@pytest.mark.parametrize("mode", ["ghost", "running"])
def test_a_batchnorm_that_is_called_by_keyword(mode):
    norms = [nn.BatchNorm1d(3) for _ in range(2)]
    x = torch.randn(8, 3)
    for norm, call in zip(norms, (lambda n, p: n(p), lambda n, p: n(input=p)), strict=True):
        with pooled_batchnorm(norm, mode) as batch:
            for part in x.split(4):
                with batch.microbatch():
                    call(norm, part)
    assert torch.equal(norms[0].running_mean, norms[1].running_mean)
    assert torch.equal(norms[0].running_var, norms[1].running_var)


def test_a_batchnorm_that_cannot_be_pooled_leaves_the_others_as_they_were(monkeypatch):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))

    def clone():
        raise torch.OutOfMemoryError("of a buffer")

    monkeypatch.setattr(model[1].running_mean, "clone", clone)
    with pytest.raises(torch.OutOfMemoryError), pooled_batchnorm(model):
        pass
    assert model[0].momentum == 0.1
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("mode", ["ghost", "running"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_buffers_of_16_bits_are_those_of_32(dtype, mode):
    """Deviations of many values overflow float16, and one part more changes nothing in a sum of bfloat16."""
    x = (2 + 2 * torch.randn(2048, 3, 8, 8, generator=torch.Generator().manual_seed(0))).to(dtype)
    norm = nn.BatchNorm2d(3, momentum=1.0)
    expected = copy.deepcopy(norm).double()
    expected(x.double())
    run_parts(norm.to(dtype), x, 4, mode=mode)
    torch.testing.assert_close(norm.running_var.double(), expected.running_var, rtol=0.01, atol=0)
    torch.testing.assert_close(norm.running_mean.double(), expected.running_mean, rtol=0.01, atol=0)


class Penalised(L.LightningModule):
    """Its `training_step` calls backward, in which a region is computed again."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2)))

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        out = self.blocks(x)
        slope = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        return out.square().mean() + slope.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_region_that_is_repeated_in_a_step_is_no_second_call():
    found = []
    for checkpointing in (False, "blocks"):
        torch.manual_seed(0)
        module, _ = fit(Microbatching(size=4, reduction="mean"), module=Penalised(), checkpointing=checkpointing)
        found.append({name: b.clone() for name, b in module.named_buffers()})
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, rtol=0, atol=0)


def test_running_statistics_are_refused_where_nobody_pools():
    class Manual(Penalised):
        automatic_optimization = False

    with pytest.raises(ValueError, match=r"running statistics.*manual optimization.*nobody pools"):
        fit(Microbatching(size=4, batchnorm="running"), module=Manual())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_compiled_block_stays_in_one_piece():
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    expected = copy.deepcopy(block)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    run_parts(expected, x, 4)
    with pooled_batchnorm(block) as batch:
        block.compile(backend="eager", fullgraph=True)
        for part in x.split(4):
            with batch.microbatch():
                block(part)
    torch.testing.assert_close(block[1].running_var, expected[1].running_var, rtol=0, atol=0)
