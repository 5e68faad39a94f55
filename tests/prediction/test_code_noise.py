"""The noise of codes, measured site by site: against gradients of the whole batch, and what a bound promises."""

from __future__ import annotations

import copy
import math

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memsave import ActivationCompression, MemSave, Plan, plan_training, verify
from lightning_memsave.prediction.code_noise import CodeNoise, classes_in
from lightning_memsave.techniques.activation_compression import open_store
from tests.prediction.budget_runs import Net, Wide, data, train


class Attention(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return x + F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y))


class Step(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x).flatten(1), y)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Language(L.LightningModule):
    """GPT-2 of transformers, untrained."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 100}
        self.net = GPT2LMHeadModel(GPT2Config(**shape, use_cache=False, loss_type="ForCausalLMLoss"))

    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def sequences(kind=Attention):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), kind(32), kind(32), nn.Flatten(1), nn.Linear(32 * 32, 5))
    return Step(net).train(), (torch.randn(24, 32, 16), torch.randint(5, (24,)))


def images(depth=3):
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, *[16] * (depth - 1)):
        layers += [nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(1), nn.Linear(64, 5))
    return Step(net).train(), (torch.randn(32, 3, 8, 8), torch.randint(5, (32,)))


def language():
    torch.manual_seed(0)
    return Language().train(), torch.randint(100, (16, 32))


SUBJECTS = {"attention": sequences, "convolutions with BatchNorm": images, "GPT-2 with dropout": language}


def gradient(module, batch, config=None, seed=0):
    """The gradient of the whole batch, as one vector in float64; with codes, if a config is given."""
    module = copy.deepcopy(module)
    module.log = lambda *_, **__: None
    torch.manual_seed(3)
    if config is None:
        found = module.training_step(batch, 0)
    else:
        store, _ = open_store(module, config)
        store.noise.begin(seed)
        with store.scope():
            found = module.training_step(batch, 0)
    (found["loss"] if isinstance(found, dict) else found).backward()
    return torch.cat([p.grad.flatten().double() for p in module.parameters() if p.grad is not None])


def noise_of(module, batch, config, num_draws=4):
    """The noise of a whole batch's gradient: what the measurement on a few samples is to foretell."""
    exact = gradient(module, batch)
    squares = [
        float((gradient(module, batch, config, seed) - exact).square().sum()) for seed in range(1, num_draws + 1)
    ]
    return math.sqrt(sum(squares) / num_draws) / float(exact.norm())


def codes(codec="int4", **options):
    return ActivationCompression(codecs=("exact", codec), min_numel=64, **options)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_noise_of_sites_adds_up_to_that_of_all_codes(name, codec):
    module, batch = SUBJECTS[name]()
    noise = CodeNoise(module, batch, codes())
    everywhere = (codec,) * len(noise.sites.sites)
    expected = noise_of(module, batch, codes(codec))
    assert noise.sites.noise_of(everywhere) == pytest.approx(expected, rel=0.25)
    assert noise.measured(everywhere) == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("name", SUBJECTS)
def test_bytes_of_sites_are_those_that_the_store_keeps(name):
    module, batch = SUBJECTS[name]()
    noise = CodeNoise(module, batch, codes())
    sites = noise.sites

    def held(config):
        twin = copy.deepcopy(module)
        twin.log = lambda *_, **__: None
        store, _ = open_store(twin, config)
        with store.scope():
            found = twin.training_step(batch, 0)
        assert found is not None
        return store.tally.held_bytes

    as_it_is = held(codes("int8"))
    for max_noise in (0.02, 0.1):
        codecs = sites.fewest_bytes(max_noise)
        config = sites.as_config(codecs, codes(), classes_in(module))
        saved = sites.bytes_of(("int8",) * len(codecs)) - sites.bytes_of(codecs)
        assert as_it_is - held(config) == pytest.approx(saved, rel=0.02, abs=2048)


def test_modules_that_read_one_tensor_are_one_site():
    module, batch = sequences()
    found = [site.modules for site in CodeNoise(module, batch, codes()).sites.sites]
    shared = ("net.1.norm", "net.1.query", "net.1.key", "net.1.value")
    assert next(site for site in found if "net.1.key" in site) == shared


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("bound", [0.01, 0.03, 0.08])
def test_a_bound_is_kept_by_the_whole_batch(name, bound):
    module, batch = SUBJECTS[name]()
    chosen = CodeNoise(module, batch, codes()).within(bound)
    assert chosen.noise <= bound
    assert noise_of(module, batch, chosen.config) <= 1.1 * bound


def test_a_lower_bound_keeps_more_bytes_up_to_the_lossiest_codec():
    module, batch = language()
    sites = CodeNoise(module, batch, codes()).sites
    kept = [sites.bytes_of(sites.fewest_bytes(bound)) for bound in (0.001, 0.01, 0.03, 0.1, 0.9)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 1.5 * kept[-1]
    assert kept[-1] == sites.bytes_of(("int4",) * len(sites.sites))


def test_the_module_and_the_random_state_are_as_before():
    module, batch = images()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert CodeNoise(module, batch, codes()).within(0.05).noise > 0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


class Manual(Net):
    automatic_optimization = False


class Changing(Net):
    """Its step is another one each time."""

    times = 0

    def training_step(self, batch, batch_idx):
        self.times += 1
        return super().training_step(batch, batch_idx) * self.times


@pytest.mark.parametrize(
    ("kind", "words"), [(Manual, "automatic optimization"), (Changing, "same when it is repeated")]
)
def test_what_cannot_be_measured_is_refused(kind, words):
    with pytest.raises(ValueError, match=f"max_gradient_noise.*{words}"):
        train(MemSave(max_gradient_noise=0.05), kind)


def test_compiled_modules_are_refused():
    module = Net()
    module.net[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"max_gradient_noise.*`net\.1`.*compiled"):
        train(MemSave(max_gradient_noise=0.05), module)
    with pytest.raises(ValueError, match=r"max_gradient_noise.*`Net`.*compiled"):
        train(MemSave(max_gradient_noise=0.05), torch.compile(Net(), backend="eager"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_gradient_noise": 0}, "above 0 and below 1"),
        ({"max_gradient_noise": 1.0}, "above 0 and below 1"),
        ({"max_gradient_noise": True}, "above 0 and below 1"),
        ({"max_gradient_noise": 0.1, "activations": "exact"}, "needs one of the codecs"),
        ({"max_gradient_noise": 0.1, "activations": "int4-chain"}, "needs one of the codecs"),
        ({"max_gradient_noise": 0.1, "activations": False}, "needs activations in codes"),
        ({"max_gradient_noise": 0.1, "sparse_update": 0.2}, "beside a sparse update"),
        ({"max_gradient_noise": 0.1, "activations": ["int4", "rows-0.3"]}, "nothing else may"),
        (
            {
                "max_gradient_noise": 0.1,
                "activations": ActivationCompression(codecs=("int4",), modules={"net": "int8"}),
            },
            "nothing else may",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=f"max_gradient_noise.*{words}"):
        MemSave(**arguments)


def test_outside_of_a_run_of_memsave_a_bound_is_refused():
    with pytest.raises(ValueError, match=r"max_gradient_noise.*callback `MemSave`"):
        open_store(nn.Linear(2, 2), codes(max_gradient_noise=0.1))


# ---------------------------------------------------------------------------------------------------- in runs
SMALL = codes("int4")


def bounded(bound=0.03, **options):
    return MemSave(activations=SMALL, max_gradient_noise=bound, **options)


def test_a_run_keeps_its_bound_and_says_so():
    memsave = bounded()
    train(memsave)
    report = memsave.report
    assert 0 < report.gradient_noise <= 0.03
    assert report.loss_class == "approximate"
    assert f"noise of a gradient: {report.gradient_noise:.1%}" in str(report)
    assert report.metrics()["memsave/gradient_noise"] == report.gradient_noise
    result = verify(Net().train(), next(iter(data())), bounded())
    assert result.holds
    assert result.noise.size <= 1.15 * 0.03


def test_a_resumed_run_has_the_same_codecs(tmp_path):
    memsave = bounded()
    trainer, _ = train(memsave, max_epochs=1, loader=data(shuffle=False))
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    other = bounded()
    _, resumed = train(other, ckpt_path=tmp_path / "half.ckpt", loader=data(shuffle=False))
    again = bounded()
    _, whole = train(again, loader=data(shuffle=False))
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert state["callbacks"]
    assert other.state_dict()["chosen_codecs"] == memsave.state_dict()["chosen_codecs"]
    assert other.report.gradient_noise == memsave.report.gradient_noise
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_another_bound_is_measured_anew():
    first = bounded(0.03)
    train(first, max_epochs=1)
    second = bounded(0.01)
    second.load_state_dict(first.state_dict())
    train(second, max_epochs=1)
    assert second.report.gradient_noise <= 0.01


def test_another_model_is_measured_anew():
    memsave = MemSave(activations=SMALL, max_gradient_noise=0.5)
    train(memsave, max_epochs=1)
    first = memsave.report.gradient_noise
    train(memsave, Wide, max_epochs=1)
    again = MemSave(activations=SMALL, max_gradient_noise=0.5)
    train(again, Wide, max_epochs=1)
    assert first != memsave.report.gradient_noise == again.report.gradient_noise


def test_a_resumed_run_with_other_settings_is_measured_anew():
    first = bounded(0.3)
    train(first, max_epochs=1)
    second = MemSave(activations=codes("int8"), max_gradient_noise=0.3)
    second.load_state_dict(first.state_dict())
    train(second, max_epochs=1)
    assert "int4" not in second.state_dict()["chosen_codecs"]["codecs"]


def test_what_a_checkpoint_says_after_the_choice_is_not_taken():
    """So it is under FSDP2, where the choice is made before a checkpoint is read."""
    first, second = bounded(0.3), bounded(0.3)
    train(first, max_epochs=1)

    class Reads(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.chosen = second.state_dict()["chosen_codecs"]
            second.load_state_dict({"chosen_codecs": {**first.state_dict()["chosen_codecs"], "noise": 0.123}})

    train(second, max_epochs=1, callbacks=[reads := Reads()])
    assert second.state_dict()["chosen_codecs"] == reads.chosen
    assert second.report.gradient_noise != 0.123


class Summed(Net):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")


class InBatch(Net):
    """A loss that relates the samples of a batch, which cannot be cut."""

    def training_step(self, batch, batch_idx):
        z = F.normalize(self.net(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)).roll(1))


class Doubled(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [torch.cat([each, each]) for each in batch] if len(batch[0]) == 96 else batch


class Short(Net):
    """Takes a batch alone, and reads what a hook of its own sets."""

    def on_train_batch_start(self, batch, batch_idx):
        self.weight_of_loss = 2.0

    def training_step(self, batch):
        return self.weight_of_loss * F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [Summed, InBatch])
def test_the_noise_is_that_of_the_whole_batch_whatever_the_loss_does_with_samples(kind):
    torch.manual_seed(0)
    module, batch = kind().train(), next(iter(data(shuffle=False)))
    noise = CodeNoise(module, batch, codes(), stays_whole=kind is InBatch)
    everywhere = ("int4",) * len(noise.sites.sites)
    expected = noise_of(module, batch, codes(), 8)
    assert noise.sites.noise_of(everywhere) == pytest.approx(expected, rel=0.3)
    assert noise.measured(everywhere) == pytest.approx(expected, rel=0.15)


def test_samples_are_counted_where_the_step_gets_them():
    torch.manual_seed(0)
    module, batch = Doubled().train(), next(iter(data(shuffle=False)))
    noise = CodeNoise(module, batch, codes())
    everywhere = ("int4",) * len(noise.sites.sites)
    assert noise.measured(everywhere) == pytest.approx(
        noise_of(module, module.on_after_batch_transfer(batch, 0), codes(), 8), rel=0.15
    )


@pytest.mark.parametrize("kind", [Short, InBatch, Doubled])
def test_steps_of_other_kinds_are_measured_in_a_run(kind):
    memsave = bounded()
    train(memsave, kind, max_epochs=1)
    assert 0 < memsave.report.gradient_noise <= 0.03


def test_a_gradient_of_zero_is_refused():
    class Masked(Net):
        def training_step(self, batch, batch_idx):
            return 0 * super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"max_gradient_noise.*finite and not zero"):
        train(bounded(), Masked)


def test_scripted_modules_go_with_what_is_around_them():
    module = Net()
    module.net[1].up = torch.jit.script(module.net[1].up)
    memsave = bounded()
    train(memsave, module, max_epochs=1)
    assert 0 < memsave.report.gradient_noise <= 0.03


def test_operations_of_a_papers_name_stay():
    module, batch = sequences()
    chosen = CodeNoise(module, batch, ActivationCompression(codecs=("mesa",), min_numel=64)).within(0.5)
    assert chosen.config.operations == {"softmax": "int8"}


def test_a_bound_beside_a_plan_is_refused_by_its_name():
    plan = plan_training(*images(), MemSave(budget="2GiB", **OTHERS))
    with pytest.raises(ValueError, match="`max_gradient_noise` cannot be set beside a plan"):
        MemSave(plan, max_gradient_noise=0.05)


OTHERS = dict.fromkeys(("microbatch", "precision", "checkpointing", "optimizer_state", "sparsity", "tiling"), False)


@pytest.fixture(scope="module")
def plans():
    module, batch = images(10)
    settings = {
        "exact": MemSave("balanced", budget="0.7x", **OTHERS),
        "some noise": MemSave("balanced", budget="0.46x", **OTHERS),
        "more noise": MemSave("balanced", budget="0.4x", **OTHERS),
        "bounded": MemSave(budget="0.5x", max_gradient_noise=0.1, **OTHERS),
    }
    return {name: plan_training(module, batch, memsave) for name, memsave in settings.items()}


def test_a_budget_takes_what_is_exact_first_then_as_little_noise_as_fits(plans):
    assert plans["exact"].gradient_noise is None
    assert plans["exact"].loss_class == "exact"
    assert 0 < plans["some noise"].gradient_noise < plans["more noise"].gradient_noise <= 0.2


@pytest.mark.parametrize("name", ["some noise", "more noise", "bounded"])
def test_a_plan_keeps_its_budget_and_names_its_noise(plans, name):
    plan = plans[name]
    assert plan.needed_bytes <= plan.budget_bytes
    assert f"{plan.gradient_noise:.1%} of its norm" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    config = next(each for each in plan.techniques if isinstance(each, ActivationCompression))
    assert config.max_gradient_noise is None
    assert noise_of(*images(10), config) == pytest.approx(plan.gradient_noise, rel=0.2)


def test_a_bound_allows_codes_under_any_recipe(plans):
    assert plans["bounded"].recipe == "lossless"
    assert plans["bounded"].loss_class == "approximate"


def test_a_budget_that_the_bound_forbids_is_refused():
    with pytest.raises(ValueError, match=r"must be at least .* which activations=\"exact\" would come to"):
        plan_training(*images(10), MemSave(budget="0.4x", max_gradient_noise=0.001, **OTHERS))
