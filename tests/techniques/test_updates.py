"""Updates of patterns, verified per position: who goes, who grows, and what of values and moments is carried."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import (
    Checkpointing,
    LowPrecision,
    MaskUpdates,
    OptimizerState,
    Sparsity,
    UpdateSchedule,
    apply_checkpointing,
    apply_low_precision,
    apply_optimizer_state,
    apply_sparsity,
)
from lightning_memsave.techniques.optimizer_state import from_plain, to_plain
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.techniques.sparsity import sparse_layers
from lightning_memsave.techniques.sparsity.checkpoints import layouts_of
from lightning_memsave.torch_internals.state_layout import from_dense_layout, to_dense_layout

OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), ["momentum_buffer"]),
    "Adam": (lambda p: torch.optim.Adam(p, 0.01), ["exp_avg", "exp_avg_sq"]),
    "AdamW": (lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.conv, self.head = nn.Embedding(30, 8), nn.Conv1d(8, 16, 3), nn.Linear(16, 12)

    def forward(self, ids):
        return self.head(self.conv(self.embed(ids).transpose(1, 2)).tanh().mean(2))


IDS = torch.randint(0, 30, (6, 9), generator=torch.Generator().manual_seed(3))
TARGET = torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(4))


def setting(method: str, **options) -> Sparsity:
    schedule = {"every": 2, "until": 20, "fraction": 0.3} | options.pop("schedule", {})
    moves = {} if method == "static" else {"schedule": UpdateSchedule(**schedule)}
    return Sparsity(**({"sparsity": 0.8} | options), method=method, min_size=1, **moves)


def make(config: Sparsity, optimizer: str = "AdamW"):
    torch.manual_seed(0)
    model = Net()
    apply_sparsity(model, config)
    made = OPTIMIZERS[optimizer][0](model.parameters())
    return model, made, MaskUpdates(model, made, config)


def backward(model, optimizer, parts: int = 1):
    optimizer.zero_grad()
    for ids, target in zip(IDS.chunk(parts), TARGET.chunk(parts), strict=True):
        (nn.functional.cross_entropy(model(ids), target) / parts).backward()


def train(model, optimizer, updates, num_steps: int) -> list[int]:
    moved = []
    for _ in range(num_steps):
        backward(model, optimizer)
        optimizer.step()
        moved.append(updates.step())
    return moved


def by_position(layer, optimizer, moments):
    """Each live weight: value and moments."""
    vectors = [layer.values.detach(), *(optimizer.state[layer.values][m] for m in moments)]
    return dict(zip(layer.layout.positions().tolist(), torch.stack(vectors, 1).tolist(), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["set", "rigl"])
def test_the_smallest_go_the_rest_is_carried_and_the_grown_start_at_zero(method, optimizer):
    config, moments = setting(method), OPTIMIZERS[optimizer][1]
    model, made, updates = make(config, optimizer)
    layers = sparse_layers(model)
    parameters = list(model.parameters())
    assert train(model, made, updates, 1) == [0]
    dense = copy.deepcopy(model)
    for layer in sparse_layers(dense).values():
        layer.values.grad = None
    backward(model, made)
    made.step()
    before = {name: by_position(layer, made, moments) for name, layer in layers.items()}
    gradients = dense_gradients(dense)
    fraction = 0.3 if method == "set" else 0.15 * (1 + torch.tensor(torch.pi * 2 / 20).cos().item())
    expected = {name: int(layer.values.numel() * fraction) for name, layer in layers.items()}
    assert updates.step() == sum(expected.values())
    for name, layer in layers.items():
        after = by_position(layer, made, moments)
        gone, grown = before[name].keys() - after.keys(), after.keys() - before[name].keys()
        assert len(gone) == len(grown) == expected[name] > 0
        assert all(after[position] == before[name][position] for position in before[name].keys() & after.keys())
        assert all(after[position] == [0.0] * (1 + len(moments)) for position in grown)
        largest_gone = max(abs(before[name][position][0]) for position in gone)
        assert all(abs(v[0]) >= largest_gone for p, v in before[name].items() if p not in gone)
        if method == "rigl":
            gradient = gradients[name].abs().view(-1)
            smallest_grown = min(gradient[position].item() for position in grown)
            others = set(range(gradient.numel())) - before[name].keys() - grown
            assert all(gradient[position].item() <= smallest_grown for position in others)
        assert layer.dense_gradient is None
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]


def dense_gradients(model) -> dict[str, torch.Tensor]:
    """Of a plain copy: the gradient of every weight, live or not."""
    plain = Net()
    plain.load_state_dict(model.state_dict())
    nn.functional.cross_entropy(plain(IDS), TARGET).backward()
    return {name: plain.get_submodule(name).weight.grad for name in sparse_layers(model)}


def test_rigl_adds_up_the_gradients_of_microbatches():
    patterns = []
    for parts in (1, 3):
        model, made, updates = make(setting("rigl", schedule={"every": 1}), "SGD")
        model.double()
        backward(model, made, parts)
        gradients = dense_gradients(copy.deepcopy(model).float())
        for name, layer in sparse_layers(model).items():
            torch.testing.assert_close(layer.dense_gradient.float(), gradients[name], rtol=1e-4, atol=1e-6)
        made.step()
        updates.step()
        patterns.append([layer.layout.positions() for layer in sparse_layers(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*patterns, strict=True))


def test_rigl_adds_up_the_gradients_of_a_layer_that_regions_call_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(self.linear(x).tanh())

    found = []
    for has_regions in (False, True):
        torch.manual_seed(0)
        model = Twice()
        apply_sparsity(model, setting("rigl"))
        (layer,) = sparse_layers(model).values()
        layer.watches_gradient = True
        if has_regions:
            apply_checkpointing(model, Checkpointing(modules="linear"))
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        found.append(layer.dense_gradient)
    assert torch.equal(*found)


def test_a_step_that_is_run_again_counts_once():
    model, made, _ = make(setting("rigl", schedule={"every": 1}), "SGD")
    for _ in range(2):  # the first time it stops half way, say because memory ran out
        backward(model, made, parts=2)
    once = {name: layer.dense_gradient for name, layer in sparse_layers(model).items()}
    other, made, _ = make(setting("rigl", schedule={"every": 1}), "SGD")
    backward(other, made, parts=2)
    for name, layer in sparse_layers(other).items():
        assert torch.equal(layer.dense_gradient, once[name])


def test_dense_gradients_exist_for_the_update_only():
    model, made, updates = make(setting("rigl", schedule={"every": 3}), "SGD")
    for step in range(1, 7):
        backward(model, made)
        held = [layer.dense_gradient is not None for layer in sparse_layers(model).values()]
        assert held == [step % 3 == 0] * 3
        made.step()
        updates.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dsr_moves_values_between_layers_and_keeps_their_number(optimizer):
    config, moments = setting("dsr", schedule={"every": 1}), OPTIMIZERS[optimizer][1]
    model, made, updates = make(config, optimizer)
    layers = sparse_layers(model)
    with torch.no_grad():
        layers["conv"].values.mul_(1e-4)  # the smallest of all
    num_live = sum(layer.values.numel() for layer in layers.values())
    sizes = {name: layer.values.numel() for name, layer in layers.items()}
    backward(model, made)
    made.param_groups[0]["lr"] = 0.0
    made.step()
    before = {name: by_position(layer, made, moments) for name, layer in layers.items()}
    num_moved = updates.step()
    assert sum(layer.values.numel() for layer in layers.values()) == num_live
    num_gone = 0
    smallest = sorted(abs(v[0]) for weights in before.values() for v in weights.values())[: int(0.3 * num_live)]
    for name, layer in layers.items():
        after = by_position(layer, made, moments)
        gone = {position for position, v in before[name].items() if abs(v[0]) <= smallest[-1]}
        num_gone += len(gone)
        assert not gone & after.keys()
        survivors = before[name].keys() - gone
        assert all(after[position] == before[name][position] for position in survivors)
        assert all(after[p] == [0.0] * (1 + len(moments)) for p in after.keys() - survivors)
    assert num_moved == num_gone == len(smallest)
    assert layers["conv"].values.numel() < sizes["conv"]
    assert layers["embed"].values.numel() > sizes["embed"]
    train(model, made, updates, 3)  # and training goes on with vectors of other lengths


def test_dsr_adapts_its_threshold():
    model, _, updates = make(setting("dsr", schedule={"every": 1}), "SGD")
    updates.load_state_dict({"num_steps": 0, "threshold": 1e-3})
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            layer.values.fill_(1.0)
    updates.step()
    assert updates.state_dict()["threshold"] == 2e-3
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            layer.values.fill_(1e-9)
    updates.step()
    assert updates.state_dict()["threshold"] == 1e-3
    assert all(layer.values.numel() >= 1 for layer in sparse_layers(model).values())


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_gradual_follows_the_cubic_curve_and_keeps_the_largest(distribution):
    config = setting("gradual", sparsity=0.9, distribution=distribution, schedule={"every": 4, "until": 10})
    model, made, updates = make(config, "SGD")
    layers = sparse_layers(model)
    total = sum(layer.dense_shape.numel() for layer in layers.values())
    assert sum(layer.values.numel() for layer in layers.values()) == total
    for step in range(1, 15):
        backward(model, made)
        made.step()
        before = {name: by_position(layer, made, ["momentum_buffer"]) for name, layer in layers.items()}
        updates.step()
        num_live = sum(layer.values.numel() for layer in layers.values())
        due = [s for s in (4, 8, 10) if s <= step]
        density = 0.1 + 0.9 * (1 - due[-1] / 10) ** 3 if due else 1.0
        assert abs(num_live - density * total) <= 3
        for name, layer in layers.items():
            after = by_position(layer, made, ["momentum_buffer"])
            assert all(after[p] == before[name][p] for p in after)
            gone = [abs(v[0]) for p, v in before[name].items() if p not in after]
            assert max(gone, default=0) <= min(abs(v[0]) for v in after.values())
        assert [p.grad is None or p.grad.shape == p.shape for p in model.parameters()] == [True] * 5


def test_snip_keeps_what_matters_in_the_first_step():
    model, made, updates = make(setting("static", initial="snip"), "SGD")
    layers = sparse_layers(model)
    backward(model, made)
    made.param_groups[0]["lr"] = 0.0
    made.step()
    scores = {n: (layer.values.detach() * layer.values.grad).abs() for n, layer in layers.items()}
    assert updates.step() > 0
    for name, layer in layers.items():
        k = round(0.2 * layer.dense_shape.numel())
        assert layer.values.numel() == k
        live = scores[name][layer.layout.positions()]
        assert torch.equal(live.sort().values, scores[name].sort().values[-k:])
    assert train(model, made, updates, 5) == [0] * 5


@pytest.mark.parametrize("distribution", ["uniform", "global"])
def test_snip_prunes_where_most_scores_are_zero(distribution):
    """Tokens that the batch does not have leave most rows of the embedding without a gradient."""
    model, made, updates = make(setting("static", initial="snip", distribution=distribution), "SGD")
    made.zero_grad()
    model(IDS[:1]).sum().backward()
    made.step()
    updates.step()
    layers = sparse_layers(model).values()
    total = sum(layer.dense_shape.numel() for layer in layers)
    assert abs(sum(layer.values.numel() for layer in layers) - 0.2 * total) <= 3


def test_dsr_goes_on_from_many_zeros():
    model, _, updates = make(setting("dsr", schedule={"every": 1}), "SGD")
    layers = sparse_layers(model).values()
    with torch.no_grad():
        for layer in layers:
            layer.values.zero_()
    assert updates.step() == 0
    with torch.no_grad():
        for layer in layers:
            layer.values.normal_()
    assert updates.step() == int(0.3 * sum(layer.values.numel() for layer in layers))


def test_a_layer_without_a_gradient_does_not_grow():
    model, made, updates = make(setting("rigl", schedule={"every": 1}), "SGD")
    positions = model.embed.layout.positions()
    made.zero_grad()
    model.head(torch.randn(4, 16)).square().sum().backward()
    made.step()
    assert updates.step() == int(0.3 * (1 + torch.tensor(torch.pi / 20).cos().item()) / 2 * model.head.values.numel())
    assert torch.equal(model.embed.layout.positions(), positions)


def test_static_patterns_stay():
    model, made, updates = make(setting("static"))
    positions = [layer.layout.positions() for layer in sparse_layers(model).values()]
    assert train(model, made, updates, 25) == [0] * 25
    for layer, before in zip(sparse_layers(model).values(), positions, strict=True):
        assert torch.equal(layer.layout.positions(), before)


@pytest.mark.parametrize("weights", ["bf16+8", "bf16-kahan"])
@pytest.mark.parametrize("method", ["set", "dsr"])
def test_corrections_of_low_precision_move_along(method, weights):
    config = setting(method)
    model = Net()
    apply_sparsity(model, config)
    made = torch.optim.AdamW(model.parameters(), 0.01)
    apply_low_precision(model, made, LowPrecision(format=weights))
    updates, layers = MaskUpdates(model, made, config), sparse_layers(model)
    for step in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            backward(model, made)
        made.step()
        before = {name: dense_state(model, name) for name in layers}
        updates.step()
        assert all(layer._values_correction.shape == layer.values.shape for layer in layers.values())
        for name, layer in layers.items():
            after = dense_state(model, name)
            live = layer.layout.dense(torch.ones(layer.values.shape)) != 0
            survived = live & (after != 0)
            assert after.dtype == torch.float32
            assert torch.equal(after[survived], before[name][survived]), step
    state = model.state_dict()
    for name in layers:
        assert not torch.equal(state[f"{name}.weight"], state[f"{name}.weight"].bfloat16().float())
    model.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def dense_state(model, name):
    return model.state_dict()[f"{name}.weight"]


@pytest.mark.parametrize("method", ["set", "rigl", "dsr", "gradual"])
def test_bfloat16_weights(method):
    config = setting(method)
    torch.manual_seed(0)
    model = Net()
    apply_sparsity(model.bfloat16(), config)
    made = torch.optim.AdamW(model.parameters(), 0.01)
    assert sum(train(model, made, MaskUpdates(model, made, config), 6)) > 0
    assert all(layer.values.dtype == torch.bfloat16 for layer in sparse_layers(model).values())


def test_updates_end_on_time():
    model, made, updates = make(setting("set", schedule={"every": 2, "until": 5}))
    assert [n > 0 for n in train(model, made, updates, 8)] == [False, True, False, True, False, False, False, False]


@pytest.mark.parametrize("method", ["set", "rigl", "dsr", "gradual"])
def test_a_resumed_run_is_bit_equal(method):
    config = setting(method)
    straight = make(config)
    train(*straight, 9)
    half = make(config)
    train(*half, 5)
    model, made, updates = half
    layouts = layouts_of(model)
    saved = copy.deepcopy(
        (
            model.state_dict(),
            to_dense_layout(made, made.state_dict(), layouts),
            updates.state_dict(),
            {name: layer.values_index for name, layer in sparse_layers(model).items()},
        )
    )
    torch.manual_seed(1)
    resumed = Net()
    resumed.load_state_dict(saved[0])
    apply_sparsity(resumed, config, patterns=saved[3])
    again = OPTIMIZERS["AdamW"][0](resumed.parameters())
    again.load_state_dict(from_dense_layout(again, saved[1], layouts_of(resumed)))
    updates = MaskUpdates(resumed, again, config)
    updates.load_state_dict(saved[2])
    train(resumed, again, updates, 4)
    for a, b in zip(straight[0].parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_patterns_of_other_layers_are_refused():
    model, _, _ = make(setting("set"))
    patterns = {name: layer.values_index for name, layer in sparse_layers(model).items()}
    with pytest.raises(ValueError, match=r"must select the layers of the checkpoint, got \['head'\]"):
        apply_sparsity(Net(), setting("set"), patterns={n: p for n, p in patterns.items() if n != "head"})


# ------------------------------------------------------------------------------- optimizer state on disk
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_is_dense_on_disk_both_ways(optimizer):
    config = setting("static")
    model, made, updates = make(config, optimizer)
    train(model, made, updates, 3)
    saved = to_dense_layout(made, made.state_dict(), layouts_of(model))
    plain = Net()
    plain_optimizer = OPTIMIZERS[optimizer][0](plain.parameters())
    nn.functional.cross_entropy(plain(IDS), TARGET).backward()
    plain_optimizer.step()
    expected = plain_optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in saved["state"][number].items()}
    plain_optimizer.load_state_dict(copy.deepcopy(saved))
    plain_optimizer.step()
    compact = from_dense_layout(made, saved, layouts_of(model))
    for number, state in made.state_dict()["state"].items():
        assert all(torch.equal(compact["state"][number][name], moment) for name, moment in state.items())
    made.load_state_dict(from_dense_layout(made, expected, layouts_of(model)))
    for layer in sparse_layers(model).values():
        for name in OPTIMIZERS[optimizer][1]:
            assert made.state[layer.values][name].shape == layer.values.shape


def test_8bit_state_is_dense_on_disk_and_comes_back_to_the_bit():
    config = setting("static", sparsity=0.5)
    model, made, updates = make(config, "Adam")
    state = OptimizerState(min_size=0, keep_embeddings_32bit=False, backend="bitsandbytes")
    apply_optimizer_state(made, state, model)
    train(model, made, updates, 3)
    saved = to_dense_layout(made, to_plain(made), layouts_of(model))
    for p, shape in zip(saved["state"].values(), [p.shape for p in Net().parameters()], strict=True):
        assert p["exp_avg"].shape == shape
    before = copy.deepcopy([{n: t for n, t in s.items() if isinstance(t, torch.Tensor)} for s in made.state.values()])
    assert before[0]["state1"].dtype == torch.uint8
    from_plain(made, from_dense_layout(made, saved, layouts_of(model)))
    for old, new in zip(before, made.state.values(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
@pytest.mark.parametrize("method", ["set", "rigl", "dsr", "gradual"])
def test_moving_weights_with_low_bit_state_is_refused(method, bits):
    config = setting(method, sparsity=0.5)
    model, made, updates = make(config, "Adam")
    apply_optimizer_state(made, OptimizerState(**BY_NAME[bits], min_size=0, keep_embeddings_32bit=False), model)
    with pytest.raises(ValueError, match=rf"low-bit, as it is coded in blocks, got '{method}'"):
        train(model, made, updates, 2)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_snip_waits_where_a_step_has_overflowed(value):
    """As under a scaler of losses, which leaves such a step out."""
    model, made, updates = make(setting("static", initial="snip"), "SGD")
    backward(model, made)
    model.head.bias.grad[3] = value  # all others are zero where a norm of that is clipped
    assert updates.step() == 0
    assert model.head.values.numel() == 16 * 12
    expected = make(setting("static", initial="snip"), "SGD")
    assert train(model, made, updates, 2) == train(*expected, 2)
    assert model.head.values.numel() < 16 * 12
    assert torch.equal(model.head.values_index, expected[0].head.values_index)


def test_snip_does_not_compare_scaled_gradients_with_others():
    model, made, _ = make(setting("static", initial="snip"), "SGD")
    model.head.values.data = model.head.values.data.half()
    config = Sparsity(initial="snip", distribution="global", min_size=1)
    with pytest.raises(ValueError, match=r"Sparsity.initial.*layers of float16.*got 'snip'"):
        MaskUpdates(model, made, config)
    MaskUpdates(model, made, Sparsity(initial="snip", min_size=1))  # layer by layer


def test_snip_needs_gradients_after_the_step():
    model, made, updates = make(setting("static", initial="snip"), "SGD")
    backward(model, made)
    made.step()
    made.zero_grad()
    with pytest.raises(ValueError, match="needs the gradients of the first step"):
        updates.step()


def test_the_length_of_the_run_is_asked_for():
    config = Sparsity(method="set", min_size=1)
    model = Net()
    apply_sparsity(model, config)
    made = torch.optim.SGD(model.parameters(), 0.1)
    for num_steps in (None, float("inf")):
        with pytest.raises(ValueError, match=r"UpdateSchedule.until.*10_000"):
            MaskUpdates(model, made, config, num_steps)
    assert MaskUpdates(model, made, config, 1000)._until == 750
    assert MaskUpdates(model, made, config, 0)._until == 1


@pytest.mark.parametrize("method", ["dsr", "gradual", "set", "snip"])
def test_a_graph_that_is_kept_does_not_disturb_the_next_step(method):
    config = setting("static", initial="snip") if method == "snip" else setting(method, schedule={"every": 1})
    model, optimizer, updates = make(config)
    plain_model, plain_optimizer, plain_updates = make(config)
    kept = []
    for _ in range(4):
        for each, its, moves in ((model, optimizer, updates), (plain_model, plain_optimizer, plain_updates)):
            its.zero_grad()
            loss = torch.nn.functional.cross_entropy(each(IDS), TARGET)
            if each is model:
                kept.append(loss)
            loss.backward(retain_graph=each is model)
            its.step()
            moves.step()
    for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(a, b)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept[0].backward()
