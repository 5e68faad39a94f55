"""Settings of activation compression, and what it does to a module: hooks, copies, undoing, compiled blocks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from lightning_memsave import ActivationCompression, apply_activation_compression
from lightning_memsave.saved_tensors import Tally
from lightning_memsave.techniques.activation_compression import open_store, summarize, what_happened


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


class Deep(nn.Module):  # of torch's own containers, nothing is compiled
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, x):
        return self.blocks(x)


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def gradients(model):
    model.zero_grad()
    model(X).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codecs": ("int3",)}, "`activations` must be among 'exact'"),
        ({"codecs": ("int4", "int8")}, "one lossy one at most"),
        ({"codecs": ("exact", "exact")}, "must name codecs once"),
        ({"codecs": ()}, "must name codecs once"),
        ({"codecs": ("topk-1.5",)}, "`activations` must be among .*'topk-0.1', 'rows-0.3', 'fewbit-1'"),
        ({"codecs": ("rows-0",)}, "must be among"),
        ({"codecs": ("rows-many",)}, "must be among"),
        ({"codecs": ("fewbit-5",)}, "must be among"),
        (
            {"codecs": ("topk-0.1", "int4", "rows-0.3")},
            "one codec at most of .topk. and .rows., got .'topk-0.1', 'rows-0.3'",
        ),
        ({"codecs": ("fewbit-1", "fewbit-2")}, "one codec at most of .fewbit."),
        ({"modules": {"head": "rows-0.3"}}, r"modules\['head'\]` must be one of 'exact'"),
        ({"modules": {"head": "int4-chain"}}, r"modules\['head'\]` must be one of 'exact'"),
        ({"operations": {"gelu": "int5"}}, r"operations\['gelu'\]` must be one of"),
        ({"operations": {"nosuchfunction": "int4"}}, "must name functions of torch.*got 'nosuchfunction'"),
        ({"min_numel": 0}, "must be a positive integer, got 0"),
        ({"codecs": ("offload",), "offload_folder": "/no/such/folder"}, "must be an existing folder"),
        ({"offload_folder": "/tmp"}, 'is used with the codec "offload" only'),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ActivationCompression(**settings)


@pytest.mark.parametrize("value", [3, ["int4", 5], object()])
def test_a_wrong_shorthand_is_refused(value):
    with pytest.raises(ValueError, match="`activations` must be among"):
        ActivationCompression.from_shorthand(value)


def test_shorthands():
    assert ActivationCompression.from_shorthand(True) == ActivationCompression()
    assert ActivationCompression.from_shorthand("int8").codecs == ("int8",)
    assert ActivationCompression.from_shorthand(["exact", "int4"]).codecs == ("exact", "int4")


def test_loss_class_tells_of_any_lossy_setting():
    assert ActivationCompression(codecs=("exact", "offload", "linear-cross-entropy")).is_exact
    assert not ActivationCompression(codecs=("bf16",)).is_exact
    assert not ActivationCompression(modules={"*": "int8"}).is_exact
    assert not ActivationCompression(operations={"gelu": "int8"}).is_exact
    assert not ActivationCompression(codecs=("exact", "rows-0.3")).is_exact
    assert not ActivationCompression(codecs=("fewbit-4",)).is_exact


@pytest.mark.parametrize(
    ("codecs", "before", "after"),
    [
        (("exact",), "exact", "exact"),
        (("int4", "fewbit-2"), "approximate", "approximate"),
        (("rows-0.3",), "approximate", "unbiased"),
        (("fewbit-2", "rows-0.3"), "approximate", "unbiased"),
        (("rows-1",), "approximate", "exact"),
        (("topk-0.1", "int4"), "changed", "changed"),
        (("topk-0.1", "offload"), "changed", "changed"),
    ],
)
def test_the_loss_class_is_the_worst_first_and_then_what_happened(codecs, before, after):
    config, model = ActivationCompression(codecs=codecs, min_numel=1), nn.Sequential(nn.Linear(32, 32), Block())
    store, applied = open_store(model, config)
    assert applied.loss_class == before
    with store.scope():
        loss = model(X).sum()
    assert what_happened(applied, config, store).loss_class == after
    loss.backward()


def test_apply_and_undo_leave_a_plain_module():
    model = stack()
    keys, expected = list(model.state_dict()), gradients(model)
    applied = apply_activation_compression(model, ActivationCompression())
    assert torch.equal(gradients(model), expected)
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="must be applied once"):
        apply_activation_compression(model, ActivationCompression())
    applied.undo()
    applied.undo()
    assert vars(model).keys() == vars(stack()).keys()
    apply_activation_compression(model, ActivationCompression(codecs=("int8",)))
    assert not torch.equal(gradients(model), expected)


def test_undo_gives_back_an_instance_forward():
    model, calls = stack(), []
    model.forward = lambda x: (calls.append(1), nn.Sequential.forward(model, x))[1]
    mine = model.forward
    applied = apply_activation_compression(model, ActivationCompression())
    gradients(model)
    applied.undo()
    assert model.forward is mine
    assert calls == [1]


@pytest.mark.parametrize("codecs", [("exact",), ("int8",), ("exact", "offload")])
def test_copies_and_pickles_compute_with_their_own_weights(codecs):
    model = stack()
    apply_activation_compression(model, ActivationCompression(codecs=codecs))
    gradients(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), model(X))
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert torch.equal(twin(X), X)
        gradients(twin)


def test_modules_choose_their_codec():
    model = stack()
    store, _ = open_store(model, ActivationCompression(codecs=("int8",), modules={"1": "exact", "*.down": "int4"}))
    with store.scope():
        loss = model(X).sum()
    assert store.tally.entries["int4"] == 3  # what the three `down` keep, in block 1 as well: the innermost decides
    assert store.tally.entries["int8"] == 1 + 2  # inputs of norm and up in blocks 0 and 2, but for the batch
    assert store.tally.entries["int8 derivative"] == 2
    loss.backward()
    assert store.within == []


def test_samples_and_levels_leave_modules_and_operations_alone_that_have_a_codec():
    model, config = stack(), {"codecs": ("rows-0.3", "fewbit-2")}
    kept = [{}, {"modules": {"1": "exact"}}, {"operations": {"linear": "exact"}}, {"operations": {"gelu": "int8"}}]
    found = []
    for settings in kept:
        store, _ = open_store(model, ActivationCompression(**config, **settings))
        with store.scope():
            loss = model(X).sum()
        found.append({name: store.tally.entries[name] for name in ("rows-0.3", "fewbit-2", "int8")})
        loss.backward()
    assert found == [
        {"rows-0.3": 6, "fewbit-2": 3, "int8": 0},
        {"rows-0.3": 4, "fewbit-2": 2, "int8": 0},
        {"rows-0.3": 0, "fewbit-2": 3, "int8": 0},
        {"rows-0.3": 6, "fewbit-2": 0, "int8": 3},
    ]


def test_a_module_that_raises_leaves_nothing_behind():
    model = stack()
    store, applied = open_store(model, ActivationCompression(modules={"1": "int8"}))
    with pytest.raises(RuntimeError), store.scope():
        model(torch.randn(4, 5))
    with pytest.raises(RuntimeError), store.scope():
        model[1](torch.randn(4, 5))
    assert store.within == []
    applied.undo()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_pattern_that_matches_nothing_is_refused():
    model = stack()
    with pytest.raises(ValueError, match=r"`ActivationCompression.modules` must match modules, got 'haed'.*LayerNorm"):
        open_store(model, ActivationCompression(modules={"0": "exact", "haed": "exact"}))
    assert not any(m._forward_hooks for m in model.modules())


def test_operations_go_before_the_table():
    model = nn.Linear(32, 32)
    for operations, kind in (({}, "raw"), ({"sin": "int8"}, "int8")):
        store, _ = open_store(model, ActivationCompression(codecs=("int4",), operations=operations))
        with store.scope():
            loss = torch.sin(model(X)).sum()
        assert dict(store.tally.entries) == {kind: 1}
        loss.backward()


def test_summary_says_what_was_kept():
    config = ActivationCompression(codecs=("exact", "int8"))
    assert summarize(config, Tally()) == "exact, int8"
    model = stack()
    store, _ = open_store(model, config)
    with store.scope():
        model(X).sum()
        told = summarize(config, store.tally)
    assert told == "exact, int8"
    loss = None
    with store.scope():
        loss = model(X).sum()
    assert summarize(config, store.tally).startswith("exact, int8: ")
    assert "recomputed" in summarize(config, store.tally)
    del loss


# ---------------------------------------------------------------------------------------------------- torch.compile
@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
@pytest.mark.parametrize("codec", ["exact", "int4"])
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_blocks_stay_compiled_and_equal(fresh_dynamo, codec, in_place):
    model = stack()
    for i, block in enumerate(model):
        if in_place:
            block.compile(backend="aot_eager")
        else:
            model[i] = torch.compile(block, backend="aot_eager")
    expected = gradients(model)
    graphs = counters["stats"]["unique_graphs"]
    applied = apply_activation_compression(model, ActivationCompression(codecs=(codec,)))
    for _ in range(2):
        assert torch.equal(gradients(model), expected)
    anew = 0 if codec == "exact" else graphs  # codes are compiled into what is compiled; this backend asks nobody
    assert counters["stats"]["unique_graphs"] == graphs + anew
    assert not counters["graph_break"]
    applied.undo()
    assert torch.equal(gradients(model), expected)
    assert counters["stats"]["unique_graphs"] == graphs + 2 * anew


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_function_that_is_met_still_computes(fresh_dynamo):
    model = stack()
    expected = gradients(model)
    plain = model[1].forward
    model[1].forward = torch.compile(plain, backend="eager")
    apply_activation_compression(model, ActivationCompression())
    assert torch.equal(gradients(model), expected)


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


WAYS_TO_COMPILE = {"torch.compile": whole, "compile()": in_place, "inside": lambda m: nn.Sequential(whole(m))}


@pytest.mark.parametrize("codec", ["offload", "linear-cross-entropy", "topk-0.1", "rows-0.3", "fewbit-3"])
@pytest.mark.parametrize("wrap", WAYS_TO_COMPILE.values(), ids=WAYS_TO_COMPILE)
def test_what_works_between_calls_is_refused_in_a_whole_model_that_is_compiled(fresh_dynamo, wrap, codec):
    with pytest.raises(ValueError, match=rf"cannot do '{codec}' in a whole model that is compiled.*block\.compile"):
        apply_activation_compression(wrap(stack()), ActivationCompression(codecs=("int4", codec)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("wrap", WAYS_TO_COMPILE.values(), ids=WAYS_TO_COMPILE)
def test_exact_leaves_a_whole_model_that_is_compiled_alone(fresh_dynamo, wrap):
    model = wrap(Deep())
    expected = gradients(model)
    graphs = counters["stats"]["unique_graphs"]
    applied = apply_activation_compression(model, ActivationCompression())
    assert torch.equal(gradients(model), expected)
    applied.undo()
    assert torch.equal(gradients(model), expected)
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_guard_that_fires_is_told_of():
    """Rows of a layer's output lie around 3000, thousands of times their deviation."""
    layer = nn.Linear(32, 64)
    with torch.no_grad():
        layer.bias.fill_(3000.0)
    model, config = nn.Sequential(layer, nn.LayerNorm(64), nn.Linear(64, 64)), ActivationCompression(codecs=("int4",))
    store, applied = open_store(model, config)
    with store.scope():
        loss = model(X).square().mean()
    assert store.tally.num_guarded == 1
    found = what_happened(applied, config, store)
    assert "; 1 of 3 tensors keep more bits: a normalisation would multiply their noise" in found.summary
    assert found.loss_class == "approximate"
    loss.backward()
