"""Batches that run out of memory: run again, they have the same bits as those that had that setting from the start."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_memsave import ActivationCompression, MemSave, Microbatching, MicrobatchWarning
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError, is_out_of_memory
from lightning_memsave.loops.recovery import RecoveryPolicy
from tests.strategies.record import Record

pytestmark = pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.NotLosslessWarning")  # numbers are drawn

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Hungry(nn.Module):
    """Fails above a number of samples, in forward or in the middle of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.limit, self.where, self.message, self.tried = 10**9, "forward", "CUDA out of memory. Tried ...", Record()

    def fail(self, num_samples):
        self.tried.append(num_samples)
        raise torch.OutOfMemoryError(self.message)

    def forward(self, x):
        if torch.is_grad_enabled() and len(x) > self.limit:
            if self.where == "forward":
                self.fail(len(x))
            x = x * 1
            x.register_hook(lambda gradient: self.fail(len(gradient)))
        return x


class Net(L.LightningModule):
    def __init__(self, p=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.first, self.norm, self.drop, self.hungry = nn.Linear(16, 32), norm(32), nn.Dropout(p), Hungry()
        self.last, self.metric, self.seen = nn.Linear(32, 1), MeanMetric(), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(batch_idx)
        z = self.norm(torch.relu(self.first(x))) + 0.01 * random.random() + 0.01 * np.random.rand()  # noqa: NPY002  # the generator that users seed
        loss = (self.last(self.hungry(self.drop(z))) - y).square().mean()
        self.metric(loss.detach())
        self.log_dict({"loss": loss, "metric": self.metric}, on_step=True, on_epoch=True)
        return {"loss": loss, "prediction": z[:, 0].detach()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Outputs(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((outputs["loss"].clone(), outputs["prediction"].clone()))


def data(num_samples=96):
    x = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 32)


def fit(size, limit=10**9, where="forward", *, module=None, make=Net, slots=None, **options):
    L.seed_everything(0, verbose=False)
    module = module or make()
    module.hungry.limit, module.hungry.where = limit, where
    memsave, outputs = MemSave(microbatch=Microbatching(size=size, reduction="mean"), **(slots or {})), Outputs()
    trainer = L.Trainer(**{**QUIET, "max_epochs": 2, **options}, callbacks=[memsave, outputs])
    L.seed_everything(1, verbose=False)
    trainer.fit(module, data())
    return module, memsave, trainer, outputs.seen


def assert_same_run(first, second):
    for a, b in zip(first[0].state_dict().values(), second[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    logged = [
        {k: v for k, v in run[2].callback_metrics.items() if not k.startswith("memsave/")} for run in (first, second)
    ]
    assert logged[0] == logged[1]
    for one, other in zip(first[3], second[3], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def logged(trainer):
    return {name: value for name, value in trainer.callback_metrics.items() if not name.startswith("memsave/")}


@pytest.mark.filterwarnings("ignore:Microbatches change the result")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(("p", "norm"), [(0.0, nn.LayerNorm), (0.3, nn.LayerNorm), (0.3, nn.BatchNorm1d)])
def test_a_recovered_run_has_the_bits_of_one_with_that_size_from_the_start(where, accumulate, p, norm):
    make = functools.partial(Net, p, norm)
    recovered = fit("auto", 8, where, make=make, accumulate_grad_batches=accumulate)
    direct = fit(8, make=make, accumulate_grad_batches=accumulate)
    assert_same_run(recovered, direct)
    report = recovered[1].report
    assert report.microbatch_size == 8
    assert report.num_oom_recovered == 4
    assert report.metrics()["memsave/num_oom_recovered"] == 4
    assert recovered[0].seen == direct[0].seen  # lists that training_step appends to are put back


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_noise_of_codes_is_that_of_a_run_with_that_size_from_the_start(where):
    slots = {"activations": ActivationCompression(codecs=("int4",), min_numel=16), "checkpointing": False}
    recovered, direct = fit("auto", 8, where, slots=slots), fit(8, slots=slots)
    assert_same_run(recovered, direct)
    assert recovered[1].report.num_oom_recovered > 0
    with pytest.raises(AssertionError):
        assert_same_run(fit(8), direct)  # there is noise


@pytest.mark.parametrize("limit", [4, 3])
def test_the_loss_is_probed_with_fewer_samples_where_memory_runs_out(limit):
    class Tight(L.LightningModule):
        """Fails above a number of samples without gradients as well."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 1)

        def training_step(self, batch, batch_idx):
            if len(batch[0]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")
            return (self.layer(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-2)

    def trained(memsave, batch_size):
        torch.manual_seed(0)
        module = Tight()
        loader = DataLoader(data(32).dataset, batch_size)
        accumulate = {"accumulate_grad_batches": 32 // batch_size}
        L.Trainer(**QUIET, max_epochs=2, callbacks=[memsave], **(accumulate if batch_size < 32 else {})).fit(
            module, loader
        )
        return module

    memsave = MemSave()
    ours, plain = trained(memsave, 32), trained(MemSave("measure"), 2)
    assert memsave.report.microbatch_size <= limit
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_memory_that_runs_out_while_the_loss_is_probed_says_nothing_about_the_loss():
    class Probed(Net):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 5:
                self.hungry.fail(len(batch[0]))
            return (self.last(self.norm(self.first(batch[0]))) - batch[1]).square().mean()

    module, memsave = Probed(), MemSave(microbatch="auto")
    L.Trainer(**QUIET, max_epochs=1, callbacks=[memsave]).fit(module, data())
    assert memsave.report.microbatch_size == 4  # the probe takes no more samples than fit


MESSAGES = (
    "CUDA out of memory. Tried to allocate 2.00 MiB",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "XPU out of memory. Tried to allocate 2.00 GiB",
    "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8.",
)


@pytest.mark.parametrize("message", MESSAGES)
def test_out_of_memory_is_told_by_its_text(message):
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError(message))
    assert is_out_of_memory(MemoryError())


def test_other_errors_are_not_caught():
    module = Net()
    module.hungry.fail = lambda num_samples: (_ for _ in ()).throw(RuntimeError("mine"))
    with pytest.raises(RuntimeError, match="mine"):
        fit("auto", 8, module=module)


def test_nothing_fits():
    module = Net()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(
        OutOfMemoryUnrecoverableError, match=r"one sample per microbatch.*held: .*weights 2\.5 KiB.*save most"
    ):
        fit("auto", 0, module=module)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert not hasattr(module.first, "_checkpoint_region")


def test_the_optimizers_update_is_not_run_again():
    class Update(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    module = Net()
    module.configure_optimizers = lambda: Update(module.parameters(), 0.1)
    with pytest.raises(OutOfMemoryUnrecoverableError, match=r"optimizer's update.*foreach=False"):
        fit("auto", module=module)
    assert module.seen == [0]


class Words(L.LightningModule):
    """Batches of many lengths; memory is for so many words."""

    def __init__(self, limit):
        super().__init__()
        self.embedding, self.last, self.limit, self.sizes = nn.Embedding(50, 8), nn.Linear(8, 1), limit, []

    def training_step(self, batch, batch_idx):
        if torch.is_grad_enabled() and batch.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if torch.is_grad_enabled():
            self.sizes.append(tuple(batch.shape))
        return self.last(self.embedding(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_lengths_from_32_to_1024_finish_and_long_samples_come_in_small_microbatches():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, 1025, (12,), generator=generator).tolist()
    batches = [torch.randint(0, 50, (16, length), generator=generator) for length in lengths]
    module, memsave = Words(limit=4000), MemSave(microbatch="auto")
    trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=[memsave])
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert trainer.global_step == 12
    assert max(n * length for n, length in module.sizes) <= 4000
    assert len({n for n, _ in module.sizes}) > 1
    assert sum(n for n, _ in module.sizes) == 12 * 16


def test_what_was_learned_is_resumed(tmp_path):
    first = fit("auto", 8, max_epochs=1)
    first[2].save_checkpoint(tmp_path / "a.ckpt")
    assert "limit_elements" in str(torch.load(tmp_path / "a.ckpt")["callbacks"])
    module = Net()
    module.hungry.limit = 8
    memsave = MemSave(microbatch=Microbatching(size="auto", reduction="mean"))
    L.Trainer(**QUIET, max_epochs=2, callbacks=[memsave]).fit(module, data(), ckpt_path=tmp_path / "a.ckpt")
    assert module.hungry.tried == []
    assert memsave.report.num_oom_recovered == 0


def test_a_loss_that_cannot_be_cut_ends_with_a_reason():
    class Pairs(Net):
        def training_step(self, batch, batch_idx):
            z = self.hungry(self.first(batch[0]))
            return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))  # in-batch negatives

    module = Pairs()
    module.hungry.limit = 8
    memsave = MemSave(microbatch="auto")
    with (
        pytest.warns(UserWarning, match="neither the mean nor the sum"),
        pytest.raises(OutOfMemoryUnrecoverableError, match="cannot be cut"),
    ):
        L.Trainer(**QUIET, max_epochs=1, callbacks=[memsave]).fit(module, data())


def test_refused_where_a_batch_cannot_be_run_again():
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="manual optimization"):
        L.Trainer(**QUIET, max_epochs=1, callbacks=[MemSave(microbatch="auto")]).fit(module, data())


REAL = """
    import resource, sys, torch, lightning as L
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from lightning_memsave import MemSave

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            hidden = [nn.Tanh() for _ in range(4)]
            self.net = nn.Sequential(nn.Linear(64, 4096), *hidden, nn.Linear(4096, 1))
        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(torch.randn(16384, 64)), 8192)
    module = Net()
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[MemSave(microbatch="auto", summary=False)] if sys.argv[1] == "auto" else [])
    module.net(torch.randn(2, 64)).sum().backward()  # libraries take their address space now
    module.zero_grad()
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + 400 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    trainer.fit(module, data)
    print("finished", trainer.global_step)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_a_real_limit_kills_plain_lightning_and_not_this():
    def run(mode):
        command = [sys.executable, "-c", textwrap.dedent(REAL), mode]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    plain, recovered = run("plain"), run("auto")
    assert plain.returncode != 0
    assert "can't allocate memory" in plain.stderr
    assert "finished 2" in recovered.stdout, recovered.stderr[-2000:]
    assert "run again with" in recovered.stderr


# ---------------------------------------------------------------------- the smallest microbatches
def measured(activations, rest):
    split = {"weights": rest, "gradients": 0, "optimizer_state": 0, "activations": activations, "temporary": 0}
    return SimpleNamespace(peak_bytes=activations + rest, by_category={**split, "data": 0})


def smallest(module=None):
    policy = RecoveryPolicy(Microbatching(goal="smallest"))
    policy.begin(module or nn.Linear(2, 2))
    return policy


def test_the_smallest_microbatch_is_one_sample_or_two_where_statistics_are_taken():
    batch = torch.zeros(8, 4)
    assert smallest().size_for(batch) == 1
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert smallest(norm).size_for(batch) == 2
    assert smallest(norm.eval()).size_for(batch) == 1


def test_the_smallest_microbatches_grow_while_activations_are_the_smaller_part():
    policy, batch = smallest(), torch.zeros(8, 4)
    assert policy.size_for(batch) == 1
    assert policy.measured(None, batch, measured(10, 100))
    assert policy.size_for(batch) == 2
    assert policy.measured(None, batch, measured(20, 100))
    assert policy.size_for(batch) == 4
    assert not policy.measured(None, batch, measured(60, 100))  # twice that would be more than the rest
    assert not policy.measured(None, batch, measured(1, 100))
    assert policy.size_for(batch) == 4


def test_a_batch_that_has_no_samples_has_no_microbatches_that_could_grow():
    assert not smallest().measured(None, object(), measured(10, 100))


def test_a_settled_size_stays_settled_in_a_run_that_is_resumed():
    policy, batch = smallest(), torch.zeros(8, 4)
    policy.size_for(batch)
    policy.measured(None, batch, measured(60, 100))
    resumed = smallest()
    resumed.load_state_dict(policy.state_dict())
    assert not resumed.measured(None, batch, measured(1, 100))
    assert resumed.size_for(batch) == 1


def test_the_smallest_microbatches_end_at_the_whole_batch():
    policy, batch = smallest(), torch.zeros(2, 4)
    policy.size_for(batch)
    assert policy.measured(None, batch, measured(1, 100))
    assert policy.size_for(batch) == 2
    assert not policy.measured(None, batch, measured(2, 100))


def test_a_batch_whose_loss_does_not_tell_is_not_said_to_be_cut(lines):
    """Its rows have no labels that count: nobody knows how losses of microbatches would add up."""

    class Silent(Net):
        def training_step(self, batch, batch_idx):
            return self.last(self.hungry(self.norm(self.first(batch[0])))).square().mean() * 0.0

    torch.manual_seed(0)
    module = Silent()
    module.hungry.limit = 2
    with (
        pytest.warns(MicrobatchWarning, match="its loss is zero, not finite, none, or the same for all samples"),
        pytest.raises(OutOfMemoryUnrecoverableError, match="and this batch cannot be cut into microbatches"),
    ):
        L.Trainer(**QUIET, max_epochs=1, callbacks=[MemSave()]).fit(module, data())
    assert sum("microbatches of at most" in line for line in lines) == 1, "after which it is known"
