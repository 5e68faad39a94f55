import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

from lightning_memsave import MemoryReport, MemSave, wandb_logger
from lightning_memsave.reporting.wandb_run import is_wandb
from tests.reporting.wandb_file import BLOCK_BYTES, FRAGMENT, HEADER, payloads, read_wandb, wandb_paths

CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "temporary", "data")
ODD_BYTES = 2**24 + 1  # a total that float32 cannot hold
WEIGHT_BYTES = (32 * 2 + 2) * 4 + ODD_BYTES
BATCH_BYTES = 4 * 32 * 4
MEASURED_STEPS = (1, 2)  # the second and the third batch

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


class OddModel(BoringModel):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor
        self.register_buffer("ballast", torch.zeros(ODD_BYTES, dtype=torch.uint8), persistent=False)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch) * self.factor
        self.log_dict({"seen/batch_idx": float(batch_idx), "seen/loss": loss})
        return loss

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 16), batch_size=4)


def fit(model, memsave, loggers, *others, **options):
    L.Trainer(
        max_epochs=1,
        limit_val_batches=0,
        log_every_n_steps=1,
        accelerator="cpu",
        callbacks=[memsave, *others],
        logger=loggers,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(model)


@contextlib.contextmanager
def wandb_session():
    """Lightning and wandb write into the environment; put it back, and leave no wandb process behind."""
    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        wandb.finish()
        wandb.teardown()
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)


@pytest.fixture
def session():
    with wandb_session():
        yield


def only_file(folder):
    (path,) = wandb_paths(folder)
    return read_wandb(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    memsave = MemSave(microbatch=2)
    memsave.compare_to(MemoryReport(peak_bytes=3 * 2**25))
    with wandb_session(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        logger = wandb_logger("a project", save_dir=str(folder), offline=True, name="a run")
        csv = CSVLogger(folder, name="csv")
        fit(OddModel(), memsave, [csv, logger])
        wandb.finish()
        wandb.teardown()
        return only_file(folder), memsave.report


def test_run_is_complete_and_named(run):
    file, _ = run
    assert file.finished
    assert file.name == "a run"


def test_history_has_the_peak_at_the_steps_of_lightnings_own_rows(run):
    file, report = run
    rows = {row["trainer/global_step"]: row for row in file.history if "memsave/peak_weights_bytes" in row}
    assert sorted(rows) == [*MEASURED_STEPS, 4]  # 4: the final figures
    seen = {row["seen/batch_idx"]: row["trainer/global_step"] for row in file.history if "seen/batch_idx" in row}
    assert seen == {0.0: 0, 1.0: 1, 2.0: 2, 3.0: 3}
    for row in rows.values():
        by_category = {category: row[f"memsave/peak_{category}_bytes"] for category in CATEGORIES}
        assert by_category["weights"] == WEIGHT_BYTES
        assert 0 <= by_category["data"] - BATCH_BYTES <= 64  # besides, what Lightning keeps of the logged values
        assert by_category["optimizer_state"] == 0
        assert by_category["activations"] > 0
        assert sum(by_category.values()) == row["memsave/peak_bytes"]
    assert max(row["memsave/peak_bytes"] for row in rows.values()) == report.peak_bytes


def test_summary_has_the_report(run):
    file, report = run
    assert report.peak_bytes is not None
    assert float(torch.tensor(report.peak_bytes, dtype=torch.float32)) != report.peak_bytes  # else it proves nothing
    assert file.summary["memsave/peak_bytes"] == report.peak_bytes
    assert {c: file.summary[f"memsave/peak_{c}_bytes"] for c in CATEGORIES} == dict(report.by_category)
    assert file.summary["memsave/factor"] == pytest.approx(3 * 2**25 / report.peak_bytes, rel=1e-12)
    assert file.summary["memsave/microbatch_size"] == 2
    assert file.summary["memsave/step_seconds"] == report.step_seconds > 0
    assert file.summary["memsave/loss_class"] == "exact"
    assert file.summary["memsave/applied"] == [
        "early_zero_grad: gradients are freed before the forward pass",
        "microbatching: batches run in parts of at most 2 samples (loss: mean over samples)",
    ]


def test_the_metrics_that_are_logged_and_no_definition_is_ours(run):
    file, _ = run
    logged = {name for row in file.history for name in row if name.startswith("memsave/")}
    charts = {name for name in logged if "_table." in name}
    assert {name.partition(".")[0] for name in charts} == {"memsave/breakdown_table", "memsave/timeline_table"}
    logged -= charts
    assert len(logged) >= 10
    assert not any(name.startswith("memsave/") for name in file.metrics)
    assert set(file.globs) == {"*"}  # Lightning's own


def test_techniques_are_tags(run):
    assert run[0].tags == ["memsave:early_zero_grad", "memsave:microbatching"]


def test_own_tags_are_kept(tmp_path, session):
    logger = wandb_logger(save_dir=str(tmp_path), offline=True, tags=["mine"])
    fit(OddModel(), MemSave(microbatch=2), logger)
    assert logger.experiment.tags == ("mine", "memsave:early_zero_grad", "memsave:microbatching")


def test_charts_have_the_bytes_of_the_report(run):
    file, report = run
    (row,) = [row for row in file.history if "memsave/breakdown_table.path" in row]
    tables = {
        name: json.loads((file.path.parent / "files" / row[f"memsave/{name}_table.path"]).read_text())["data"]
        for name in ("breakdown", "timeline")
    }
    assert {name: size for name, size in tables["breakdown"]} == dict(report.by_category)
    totals = Counter()
    for event, _, size in tables["timeline"]:
        totals[event] += size
    assert tuple(totals.values()) == report.timeline.total_bytes
    assert max(totals.values()) == report.peak_bytes
    assert {"_wandb.visualize.memsave/breakdown", "_wandb.visualize.memsave/timeline"} <= set(file.config)


def test_config_has_the_resolved_recipe(run):
    config = run[0].config["memsave"]
    microbatching = config.pop("microbatching")
    assert config == {"recipe": "lossless, microbatch=2", "early_zero_grad": {}, "every": 200}
    assert microbatching == {
        "size": 2,
        "reduction": "auto",
        "weight_fn": None,
        "split_fn": None,
        "strict": False,
        "batchnorm": "ghost",
        "batchnorm_warmup": 100,
        "growth_interval": 500,
        "headroom_fraction": 0.1,
        "max_bytes": None,
        "goal": "fit",
        "keeps_gradients": True,
        "start": None,
    }


def test_nan_loss_keeps_the_figures(tmp_path, session):
    memsave = MemSave()
    fit(OddModel(factor=math.nan), memsave, wandb_logger(save_dir=str(tmp_path), offline=True))
    wandb.finish()
    wandb.teardown()
    file = only_file(tmp_path)
    assert all(math.isnan(row["seen/loss"]) for row in file.history if "seen/loss" in row)
    assert file.summary["memsave/peak_bytes"] == memsave.report.peak_bytes > WEIGHT_BYTES
    assert file.summary["memsave/peak_weights_bytes"] == WEIGHT_BYTES
    steps = [row["trainer/global_step"] for row in file.history if "memsave/peak_data_bytes" in row]
    assert steps == [*MEASURED_STEPS, 4]


def test_run_that_raises_keeps_its_rows_and_their_maximum(tmp_path, session):
    class Raises(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("out of luck")

    memsave = MemSave()
    logger = wandb_logger(save_dir=str(tmp_path), offline=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(OddModel(), memsave, logger, Raises())
    wandb.finish()
    wandb.teardown()
    file = only_file(tmp_path)
    peaks = [row["memsave/peak_bytes"] for row in file.history if "memsave/peak_bytes" in row]
    assert len(peaks) == len(MEASURED_STEPS) + 1, "a row for each measured step, and one of the final figures"
    assert max(peaks) == peaks[-1] == memsave.report.peak_bytes
    assert file.summary["memsave/peak_bytes"] == memsave.report.peak_bytes
    assert file.summary["memsave/loss_class"] == "exact"


def test_a_run_that_goes_on_has_the_figures_of_its_highest_step(tmp_path, session):
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(dict(trainer.logger.experiment.summary))

    class Falls(OddModel):
        def training_step(self, batch, batch_idx):
            most = torch.zeros(2**20) if batch_idx == MEASURED_STEPS[0] else None
            loss = super().training_step(batch, batch_idx)
            del most
            return loss

    memsave = MemSave().compare_to(MemoryReport(peak_bytes=2**25))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_memsave.callbacks.monitor.log_summary", lambda *arguments: None)
        fit(Falls(), memsave, wandb_logger(save_dir=str(tmp_path), offline=True), Looks())
    assert memsave.report.peak_bytes > WEIGHT_BYTES + 2**22
    assert "memsave/peak_bytes" not in seen[0]
    assert len(seen) == 4
    for figures in seen[2:]:
        assert figures["memsave/peak_bytes"] == memsave.report.peak_bytes
        assert sum(figures[f"memsave/peak_{category}_bytes"] for category in CATEGORIES) == memsave.report.peak_bytes
        assert figures["memsave/factor"] == pytest.approx(memsave.report.factor)


def go_online(monkeypatch, folder, api_key):
    """No account, no credentials, and a server that refuses: nothing of this reaches the network."""
    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("NETRC", str(folder / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(folder / "config"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_SILENT", "true")
    if api_key:
        monkeypatch.setenv("WANDB_API_KEY", api_key)


@pytest.mark.parametrize("mode", [None, "online"])
@pytest.mark.parametrize("api_key", [None, "0123456789" * 4])
def test_without_account_or_network_the_run_is_kept_offline(tmp_path, monkeypatch, session, mode, api_key):
    go_online(monkeypatch, tmp_path, api_key)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    # wandb waits for a server that does not answer; a short wait proves the same.
    options = {"settings": wandb.Settings(init_timeout=1.0, silent=True)} if api_key else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger = wandb_logger("fallback", save_dir=str(tmp_path), quiet=True, name="kept", log_model="all", **options)
        logger.experiment.log({"figure": 2**24 + 1})
    assert isinstance(logger, WandbLogger)
    assert len(caught) == 1
    assert "wandb sync" in str(caught[0].message)
    assert "`log_model` needs a connection" in str(caught[0].message)
    assert str(tmp_path) in str(caught[0].message)
    assert logger.experiment.settings.mode == "offline"
    wandb.finish()
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    file = read_wandb(path)
    assert file.name == "kept"
    assert [row["figure"] for row in file.history] == [2**24 + 1]


def test_asking_for_offline_is_enough_when_wandb_runs_already(tmp_path, monkeypatch, session):
    go_online(monkeypatch, tmp_path, None)
    wandb.setup()  # has read the environment, so what Lightning writes there comes too late
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger = wandb_logger(save_dir=str(tmp_path), offline=True, quiet=True)
        assert logger.experiment.settings.mode == "offline"


def test_own_settings_are_kept(tmp_path, session):
    settings = wandb.Settings(x_transaction_log_flush_interval=7.0, silent=True)
    logger = wandb_logger(save_dir=str(tmp_path), offline=True, settings=settings, tags=["mine"])
    assert logger.experiment.settings.x_transaction_log_flush_interval == 7.0
    assert logger.experiment.tags == ("mine",)


KILLED = """
import sys, time
import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_memsave import MemSave, wandb_logger

memsave = MemSave()

class Slow(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            print("measured", memsave.report.peak_bytes, flush=True)
        if batch_idx > 2:
            time.sleep(0.05)

L.Trainer(
    max_epochs=100, limit_val_batches=0, accelerator="cpu", callbacks=[memsave, Slow()], enable_checkpointing=False,
    logger=wandb_logger(save_dir=sys.argv[1], offline=True, quiet=True), enable_progress_bar=False,
    enable_model_summary=False,
).fit(BoringModel())
"""


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def peaks_in(folder):
    try:
        file = only_file(folder)
    except ValueError:  # not begun
        return []
    assert not file.finished, "a killed run has no end"
    return [row["memsave/peak_bytes"] for row in file.history if "memsave/peak_bytes" in row]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds wandb's process in /proc")
def test_killed_run_has_its_peak_in_the_file(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    service = []
    try:
        line = next((line for line in process.stdout if line.startswith("measured ")), None)
        assert line is not None, "the run ended before its third step"
        service = children_of(process.pid)
        assert service, "wandb's process is not there"
        # Two seconds do; a busy machine gets more, but less than the 15 s after which wandb writes by itself.
        deadline = time.monotonic() + 8
        time.sleep(2)
        while len(peaks_in(tmp_path)) < len(MEASURED_STEPS) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert process.poll() is None, "the run ended by itself"
    finally:
        # The process that writes the file goes first, as when a container is killed for memory.
        for pid in (*service, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    peaks = peaks_in(tmp_path)
    assert len(peaks) == len(MEASURED_STEPS), "the measured steps are not in the file"
    assert max(peaks) == int(line.split()[1]) > 0


def test_is_wandb_does_not_import_wandb(tmp_path, monkeypatch):
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    derived = type("Derived", (WandbLogger,), {})(save_dir=tmp_path, offline=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises
    assert is_wandb(logger)
    assert is_wandb(derived)
    assert not is_wandb(CSVLogger(tmp_path))
    assert not is_wandb(None)


def log_of(*fragments):
    """Header and fragments (kind, payload), written by this test's own arithmetic."""
    from zlib import crc32

    out = bytearray(HEADER.pack(b":W&B", 0xBEE1, 0))
    for kind, payload in fragments:
        out += FRAGMENT.pack(crc32(payload, crc32(bytes([kind]))), len(payload), kind) + payload
    return bytes(out)


def test_reader_joins_fragments_and_skips_padding():
    first = b"a" * (BLOCK_BYTES - HEADER.size - FRAGMENT.size - 3)  # leaves three bytes of the block, too few for more
    content = log_of((1, first))
    content += bytes(3) + log_of((2, b"bc"), (3, b"d"), (4, b"ef"), (1, b"g"))[HEADER.size :]
    assert list(payloads(content)) == [first, b"bcdef", b"g"]
    assert list(payloads(content[:-1])) == [first, b"bcdef"]


@pytest.mark.parametrize(
    "content", [b"", b"not a log", log_of((1, b"abc"))[:-1] + b"x"], ids=["empty", "foreign", "damaged"]
)
def test_reader_refuses(content):
    with pytest.raises(ValueError, match=r"not a \.wandb file|damaged"):
        list(payloads(content))
