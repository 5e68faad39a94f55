import functools
import json
import re
import subprocess
import sys

import pytest

import lightning_memsave_cli as cli
from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.core.units import format_bytes
from lightning_memsave.reporting.runs import Run


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--epochs", "0"], "`epochs` must be at least 1, got 0"),
        (["--batch-size", "-3"], "`batch_size` must be at least 1, got -3"),
        (["--batchnorm-momentum", "0"], "`batchnorm_momentum` must be above 0 and at most 1, got 0.0"),
        (["--data-dir", "/nonexistent"], "/nonexistent/data_batch_1.bin is missing"),
    ],
)
def test_wrong_settings_are_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert complaint in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_module_of_the_users_is_no_extra(capsys, tmp_path, monkeypatch):
    (tmp_path / "model_of_mine.py").write_text("def make():\n    import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "model_of_mine:make", "--batch", "model_of_mine:make"]) == 2
    assert capsys.readouterr().err == "error: No module named 'a_module_that_is_not_there'\n"


@pytest.fixture
def two_runs(tmp_path):
    for name, peak, accuracy in (("small", 1000, 0.5), ("large", 4000, 0.75)):
        report = MemoryReport(peak_bytes=peak, by_category=dict.fromkeys(CATEGORIES, 0) | {"data": peak})
        run = Run(name=name, report=report, metrics={"acc": accuracy, "loss": accuracy})
        (tmp_path / f"{name}.json").write_text(run.to_json())
    return [str(tmp_path / "large.json"), str(tmp_path / "small.json")]


def test_compare_prints_a_table_and_writes_a_page(capsys, two_runs, tmp_path):
    assert cli.main(["compare", *two_runs, "--out", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    assert "4000" in out
    assert "4.00x" in out
    assert "better acc (higher is better)" in out
    assert err == f"Page: {tmp_path / 'page.html'}\n"
    assert "4000" in (tmp_path / "page.html").read_text("utf-8")


def test_compare_without_page_needs_no_plotly(capsys, two_runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)  # importing it now raises
    assert cli.main(["compare", *two_runs]) == 0
    assert "4.00x" in capsys.readouterr().out


def test_compare_as_json(capsys, two_runs):
    assert cli.main(["compare", *two_runs, "--json", "--metric", "loss", "--better", "higher"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["quality"] == {"metric": "loss", "better": "higher is better"}
    assert [(run["name"], run["peak_bytes"], run["loss"]) for run in document["runs"]] == [
        ("large", 4000, 0.75),
        ("small", 1000, 0.5),
    ]


@pytest.mark.parametrize(("arguments", "complaint"), [(["/nowhere"], "/nowhere"), (["--metric", "none"], "none")])
def test_compare_refuses_in_one_line(capsys, two_runs, arguments, complaint):
    assert cli.main(["compare", two_runs[0], *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert complaint in err
    assert err.count("\n") == 1


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users.py").write_text(
        """
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

class Data(L.LightningDataModule):
    def __init__(self, num_samples: int = 8):
        super().__init__()
        self.num_samples, self.calls = num_samples, []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)
        self.samples = torch.ones(64, 32)

    def train_dataloader(self):
        return DataLoader(self.samples, self.num_samples)

class Doubling(Data):
    # Its loader gives rows of 16, of which a hook makes the 32 that the model takes.
    def setup(self, stage):
        self.samples = torch.ones(64, 16)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return torch.cat([batch, batch], 1)

data = Data(16)

def make_data(num_samples: int = 16):
    return Data(num_samples)

batch = torch.ones(8, 32)
loader = DataLoader(torch.ones(16, 32), 8)

wide = torch.ones(4096, 32)
random = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))

class Wide(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

class Rectified(Wide):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(*(torch.nn.Linear(32, 32), torch.nn.ReLU()) * 3, torch.nn.Linear(32, 2))

class Grown(torch.autograd.Function):
    # A gradient that grows with the number of samples, in front of the last layer, where nobody looks.
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * len(gradient)

class Growing(torch.nn.Module):
    def forward(self, x):
        return Grown.apply(x)

class RectifiedScaling(Rectified):
    def __init__(self):
        super().__init__()
        self.layer.insert(len(self.layer) - 1, Growing())

class Scaling(BoringModel):
    # The gradient of a statistic of the batch, behind a loss that does not show it.
    def training_step(self, batch, batch_idx):
        statistic = self.layer(batch).sum(0).square().sum()
        return super().training_step(batch, batch_idx)["loss"] + statistic - statistic.detach()
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "users", raising=False)
    yield
    sys.modules.pop("users", None)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["users:BoringModel", "--batch", "users:batch", "--microbatch", "2"], 0, "exact, so differences must be"),
        (["users:BoringModel", "--batch", "users:loader", "--precision", "bf16-sr"], 0, "changed, so differences"),
        (["users:Scaling", "--batch", "users:batch", "--microbatch", "2"], 1, "NO"),
        (["users:Nothing", "--batch", "users:batch"], 2, "must name what can be imported"),
        (["users:BoringModel", "--batch", "users"], 2, "must name what can be imported"),
        (["users:BoringModel", "--batch", "users:batch", "--microbatch", "0"], 2, "positive integer"),
    ],
)
def test_verify(users_module, capsys, arguments, status, says):
    """What a step does with its whole batch is not seen, so the claim to be exact is false, which is found out."""
    assert cli.main(["verify", *arguments]) == status
    assert says in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            ["users:Rectified"],
            0,
            r"[\d.]+ % of the gradient's size: expected of int4, whose noise averages to zero\n.*: yes\n",
        ),
        (["users:RectifiedScaling", "--microbatch", "32"], 1, "more than expected of int4, whose noise averages.*: NO"),
        (
            ["users:Rectified", "--precision", "bf16-sr"],
            0,
            "changed, so differences are expected.*: yes\n  weights are",
        ),
    ],
)
def test_verify_says_what_the_differences_of_a_noisy_setting_mean(users_module, capsys, arguments, status, says):
    assert cli.main(["verify", *arguments, "--batch", "users:random", "--activations", "int4"]) == status
    assert re.search(says, capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize("named", ["Data", "data", "make_data"])
def test_a_data_module_gives_its_first_training_batch(users_module, capsys, named):
    num_samples = 8 if named == "Data" else 16
    assert cli.main(["plan", "users:BoringModel", "--batch", f"users:{named}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_category"]["data"] == num_samples * 32 * 4
    assert cli.main(["verify", "users:BoringModel", "--batch", f"users:{named}", "--microbatch", "2"]) == 0
    assert sys.modules["users"].data.calls == (["prepare", "fit"] * 2 if named == "data" else [])


def test_a_batch_goes_through_the_hooks_of_its_data_module(users_module, capsys):
    assert cli.main(["plan", "users:BoringModel", "--batch", "users:Doubling"]) == 0
    assert cli.main(["verify", "users:BoringModel", "--batch", "users:Doubling", "--microbatch", "2"]) == 0
    assert "exact, so differences must be at most 1e-03: yes" in capsys.readouterr().out


@pytest.mark.parametrize("named", ["Data", "make_data"])
def test_the_largest_value_may_be_one_of_a_data_module(users_module, capsys, named):
    arguments = ["plan", "users:BoringModel", "--batch", f"users:{named}", "--device-memory", "9KiB", "--json"]
    assert cli.main([*arguments, "--largest", "num_samples"]) in (0, 1)
    largest = json.loads(capsys.readouterr().out)["largest_num_samples"]
    for num_samples, status in ((largest, 0), (largest + 1, 1)):
        sys.modules["users"].data.num_samples = num_samples
        assert cli.main([*arguments[:3], "users:data", *arguments[4:]]) == status
    assert 8 < largest < 63


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 0, "predicted peak of a training step"),
        (["--device-memory", "1GiB"], 0, "fits in 1.0 GiB"),
        (["--device-memory", "1KiB", "--microbatch", "2"], 1, "does NOT fit in 1.0 KiB"),
        (["--device-memory", "1MiB", "--largest", "batch"], 0, "largest batch that fits"),
        (["--largest", "batch"], 2, "needs --device-memory"),
        (["--target", "cuda"], 0, "reserved"),
        (["--recipe", "nothing"], 2, "must be one of"),
        (["--devices", "2", "--target", "cuda"], 0, "NCCL's buffers"),
        (["--budget", "1GiB"], 0, 'Plan for a budget of 1.0 GiB ("lossless"'),
        (["--budget", "1GiB", "--target", "cuda"], 2, "planned here for a CPU in the module's own precision"),
        (["--budget", "1KiB"], 2, "`budget` must be at least"),
        (["--devices", "0"], 2, "must be an integer of at least 1"),
        (["--strategy", "deepspeed_stage_3"], 2, "must be one device's, DDP or FSDP2"),
    ],
)
def test_plan(users_module, capsys, arguments, status, says):
    assert cli.main(["plan", "users:BoringModel", "--batch", "users:loader", *arguments]) == status
    assert says in " ".join("".join(capsys.readouterr()).split())


def test_the_answer_to_what_is_largest_comes_first(users_module, capsys):
    arguments = ["--device-memory", "1MiB", "--largest", "batch"]
    assert cli.main(["plan", "users:BoringModel", "--batch", "users:loader", *arguments]) == 0
    first, rest = capsys.readouterr().out.split("\n", 1)
    assert re.fullmatch(r"largest batch that fits: \d+ samples", first)
    assert "by category" in rest


def test_a_plan_for_a_budget_is_predicted_and_leaves_data_alone(users_module, capsys):
    arguments = ["plan", "users:Wide", "--batch", "users:wide", "--json"]
    assert cli.main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)["peak_bytes"]
    assert cli.main([*arguments, "--recipe", "balanced", "--budget", "0.7x"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["peak_bytes"] <= 0.7 * plain
    assert "Plan for a budget of" in err
    assert '("balanced"' in err


def test_plan_as_data_and_as_a_picture(users_module, capsys, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "step.html"
    assert cli.main(["plan", "users:BoringModel", "--batch", "users:batch", "--json", "--figure", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["by_category"].values()) == found["peak_bytes"] == sum(found["by_module"].values())
    assert found["source"] == "fake"
    assert "predicted training step" in page.read_text()
    assert "plain" not in found, "nothing was set"


def test_settings_are_shown_beside_the_plain_step(users_module, capsys, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "steps.html"
    subject = ["plan", "users:Rectified", "--batch", "users:wide"]
    assert cli.main([*subject, "--recipe", "measure", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.main([*subject, "--activations", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plain"]["peak_bytes"] == plain["peak_bytes"] > found["peak_bytes"]
    assert cli.main([*subject, "--budget", "0.9x", "--figure", str(page)]) == 0
    out = capsys.readouterr().out
    assert f"plain step, {format_bytes(plain['peak_bytes'])}" in out
    assert re.search(r"^with the settings, \d", out, re.MULTILINE)
    assert "- the budget" in out
    assert "what the peaks hold" in page.read_text()


CONFIGURED = """
import lightning as L
import torch
from torch.utils.data import DataLoader

class Deep(L.LightningModule):
    def __init__(self, depth: int = 2, width: int = 32):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch["a"] if isinstance(batch, dict) else batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(L.LightningDataModule):
    def __init__(self, num_samples: int = 8):
        super().__init__()
        self.num_samples = num_samples

    def train_dataloader(self):
        return DataLoader(torch.ones(64, 32), self.num_samples)

class Loaders(Data):
    def train_dataloader(self):
        return {"a": DataLoader(torch.ones(64, 32), 4), "b": DataLoader(torch.ones(64, 32), 4)}

def batch(length: int = 4):
    return torch.ones(length, 32)

def loader():
    return DataLoader(torch.ones(64, 32), 8)
"""


@pytest.fixture
def configured(tmp_path, monkeypatch):
    (tmp_path / "configured.py").write_text(CONFIGURED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    sys.modules.pop("configured", None)
    yield tmp_path / "config.yaml"
    sys.modules.pop("configured", None)


def _plan(capsys, *arguments):
    status = cli.main(["plan", *arguments, "--json"])
    out = capsys.readouterr()
    assert status in (0, 1), out.err
    return json.loads(out.out)


def test_plan_of_a_config_file(configured, capsys):
    configured.write_text(
        """
seed_everything: 1
ckpt_path: null
trainer:
  precision: bf16-mixed
  accelerator: gpu
  logger: {class_path: lightning.pytorch.loggers.WandbLogger}
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    - {class_path: lightning_memsave.MemSave, init_args: {recipe: lossless, microbatch: 2}}
model: {class_path: configured.Deep, init_args: {depth: 5}}
data: {class_path: configured.Data, init_args: {num_samples: 16}}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001}}
"""
    )
    found = _plan(capsys, "--config", str(configured))
    weights = 5 * 4 * (32 * 32 + 32)
    split = found["by_category"]
    assert split["weights"] == weights
    assert split["optimizer_state"] == 2 * weights + 10 * 4  # AdamW of the file, with a count for each parameter
    assert split["data"] == 16 * 32 * 4
    whole = _plan(capsys, "--config", str(configured), "--microbatch", "16")
    single = _plan(capsys, "--config", str(configured), "--trainer-precision", "32-true")
    assert found["peak_bytes"] not in (whole["peak_bytes"], single["peak_bytes"])


def test_a_setting_beside_a_config_file_leaves_the_others_of_its_memsave(configured, capsys):
    configured.write_text(
        """
trainer:
  callbacks:
    - {class_path: lightning_memsave.MemSave, init_args: {microbatch: 2, optimizer_state: {class_path: \
lightning_memsave.OptimizerState, init_args: {first_moment: 8bit, min_size: 0}}}}
model: {class_path: configured.Deep, init_args: {depth: 5}}
data: {class_path: configured.Data, init_args: {num_samples: 16}}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001}}
"""
    )
    own = _plan(capsys, "--config", str(configured))
    cut = _plan(capsys, "--config", str(configured), "--microbatch", "16")
    other = _plan(capsys, "--config", str(configured), "--recipe", "lossless")
    assert cut["by_category"]["optimizer_state"] == own["by_category"]["optimizer_state"]
    assert other["by_category"]["optimizer_state"] > own["by_category"]["optimizer_state"]


def test_the_planning_time_of_a_config_file_holds_beside_other_settings(configured, capsys):
    configured.write_text(
        """
trainer:
  callbacks:
    - {class_path: lightning_memsave.MemSave, init_args: {budget: 0.75x, planning_seconds: 1.0e-6}}
model: {class_path: configured.Deep, init_args: {depth: 5}}
data: {class_path: configured.Data, init_args: {num_samples: 512}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.001, momentum: 0.9}}
"""
    )
    for besides in ([], ["--optimizer-state", "8bit"]):
        assert cli.main(["plan", "--config", str(configured), *besides]) == 0
        assert "after the 0 s that it may take (`planning_seconds`)" in capsys.readouterr().err


def test_plan_of_a_config_file_without_classes(configured, capsys):
    configured.write_text("model: {depth: 3}\n")
    found = _plan(capsys, "configured:Deep", "--batch", "configured:batch", "--config", str(configured))
    assert found["by_category"]["weights"] == 3 * 4 * (32 * 32 + 32)
    assert cli.main(["plan", "configured:Deep", "--config", str(configured)]) == 2
    assert "`--batch` must be given" in capsys.readouterr().err
    configured.write_text("- 1\n")
    assert cli.main(["plan", "--config", str(configured)]) == 2
    assert "must hold settings by name" in capsys.readouterr().err


def test_plan_of_a_config_file_with_short_names_and_several_loaders(configured, capsys):
    text = """
fit:
  trainer: {callbacks: %s}
  model: {class_path: configured.Deep}
  data: {class_path: configured.Loaders}
"""
    peaks = []
    for callback in ("lightning_memsave.MemSave", "{class_path: MemSave, init_args: {microbatch: 1}}"):
        configured.write_text(text % callback)
        found = _plan(capsys, "--config", str(configured))
        assert found["by_category"]["data"] == 2 * 4 * 32 * 4  # a batch of each loader
        peaks.append(found["peak_bytes"])
    assert peaks[0] != peaks[1]


def test_plan_of_a_config_file_with_a_budget(configured, capsys):
    configured.write_text(
        """
trainer: {callbacks: {class_path: lightning_memsave.MemSave, init_args: {budget: 0.9x}}}
model: {class_path: configured.Deep, init_args: {width: 32, depth: 2}}
data: {class_path: configured.Data, init_args: {num_samples: 64}}
optimizer: {class_path: torch.optim.AdamW}
"""
    )
    planned = _plan(capsys, "--config", str(configured))["peak_bytes"]
    plain = _plan(capsys, "--config", str(configured), "--recipe", "measure")["peak_bytes"]
    assert planned <= 0.9 * plain


@pytest.mark.parametrize(
    ("trainer", "options", "said"),
    [
        ("precision: bf16-mixed", [], "precision='bf16-mixed'"),
        ("gradient_clip_val: 0.5", [], "gradient_clip_val=0.5"),
        ("accumulate_grad_batches: 2", [], "accumulate_grad_batches=2"),
        ("max_epochs: 2", ["--target", "cuda"], "target='cuda'"),
        ("max_epochs: 2", ["--trainer-precision", "bf16-mixed"], "precision='bf16-mixed'"),
    ],
)
def test_a_budget_is_not_planned_for_another_step_than_that_of_the_run(configured, capsys, trainer, options, said):
    configured.write_text(
        f"""
trainer:
  {trainer}
  callbacks: {{class_path: lightning_memsave.MemSave, init_args: {{budget: 0.9x}}}}
model: {{class_path: configured.Deep, init_args: {{width: 32, depth: 2}}}}
data: {{class_path: configured.Data, init_args: {{num_samples: 64}}}}
"""
    )
    assert cli.main(["plan", "--config", str(configured), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "num_buckets"),
    [
        ("{}", 0),
        ("{devices: auto, strategy: auto}", 0),
        ("{devices: [0]}", 0),
        ("{devices: [-1]}", 0),
        ("{devices: 2}", 1),
        ("{devices: '0,1', num_nodes: '2'}", 1),
        ("{strategy: {class_path: lightning.pytorch.strategies.DDPStrategy}, devices: 2}", 1),
        ("{strategy: {class_path: DDPStrategy}, devices: 2}", 1),
    ],
)
def test_plan_of_a_config_file_with_several_processes(configured, capsys, trainer, num_buckets):
    configured.write_text(f"{{trainer: {trainer}, model: {{class_path: configured.Deep}}}}")
    arguments = ("--batch", "configured:batch", "--config", str(configured), "--recipe", "measure")
    split = _plan(capsys, *arguments)["by_category"]
    assert split["gradients"] == (1 + num_buckets) * split["weights"]
    assert (
        _plan(capsys, *arguments, "--devices", "1", "--strategy", "auto", "--num-nodes", "1")["by_category"][
            "gradients"
        ]
        == split["weights"]
    )


def test_plan_of_a_config_file_with_a_strategy_that_cannot_be_made(configured, capsys):
    strategy = "{class_path: lightning.pytorch.strategies.NoStrategy}"
    configured.write_text(f"{{trainer: {{strategy: {strategy}}}, model: {{class_path: configured.Deep}}}}")
    assert cli.main(["plan", "--batch", "configured:batch", "--config", str(configured)]) == 2
    assert "`strategy` must be a class that can be made" in capsys.readouterr().err


def test_a_budget_is_not_planned_for_several_processes(configured, capsys):
    memsave = "{class_path: lightning_memsave.MemSave, init_args: {budget: 0.9x}}"
    configured.write_text(f"{{trainer: {{devices: 2, callbacks: {memsave}}}, model: {{class_path: configured.Deep}}}}")
    assert cli.main(["plan", "--batch", "configured:batch", "--config", str(configured)]) == 2
    assert "`devices` must be 1 where a budget" in capsys.readouterr().err


def test_plan_imports_from_the_current_folder_as_a_program(configured):
    configured.write_text("{model: {class_path: configured.Deep}, data: {class_path: configured.Data}}")
    program = [sys.executable, "-P", "-m", "lightning_memsave_cli", "plan", "--config", "config.yaml"]
    done = subprocess.run(program, cwd=configured.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "predicted peak" in done.stdout


@pytest.mark.parametrize("name", ["length", "depth"])
def test_plan_finds_the_largest_value_of_an_argument(configured, capsys, name):
    subject = ["configured:Deep", "--batch", "configured:batch"]
    found = _plan(capsys, *subject, "--device-memory", "100KiB", "--largest", name)[f"largest_{name}"]
    peaks = []
    for value in (found, found + 1):
        module = sys.modules["configured"]
        module.deep = functools.partial(module.Deep, **({"depth": value} if name == "depth" else {}))
        module.samples = functools.partial(module.batch, **({"length": value} if name == "length" else {}))
        peaks.append(_plan(capsys, "configured:deep", "--batch", "configured:samples")["peak_bytes"])
    assert peaks[0] <= 100 * 1024 < peaks[1]


def test_plan_finds_the_largest_value_with_a_loader(configured, capsys):
    subject = ["configured:Deep", "--batch", "configured:loader", "--device-memory", "100KiB"]
    assert _plan(capsys, *subject, "--largest", "depth")["largest_depth"] > 2
    assert cli.main(["plan", *subject, "--largest", "width"]) == 2  # the batch has 32 columns
    assert "width=64 fails: RuntimeError" in capsys.readouterr().err


def test_plan_names_the_arguments_that_there_are(configured, capsys):
    arguments = ["configured:Deep", "--batch", "configured:batch", "--device-memory", "1MiB", "--largest", "height"]
    assert cli.main(["plan", *arguments]) == 2
    assert "There are: batch, depth, width, length" in capsys.readouterr().err


def test_a_class_of_a_config_file_that_cannot_be_imported_is_named(configured, capsys):
    configured.write_text("{model: {class_path: nowhere.Deep}, data: {class_path: configured.Data}}")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--config", str(configured)])
    assert stopped.value.code == 2
    assert "nowhere" in capsys.readouterr().err
