import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.measuring import Ledger
from lightning_memsave.torch_internals.autograd_graph import autograd_is_running

MIB = 2**20


def measure(step, model=None, optimizers=(), batch=()):
    with Ledger().watching(nn.Module() if model is None else model, optimizers, batch) as ledger:
        step()
    measured = ledger.measurement
    assert list(measured.by_category) == list(CATEGORIES)
    assert sum(measured.by_category.values()) == measured.peak_bytes
    assert min(measured.by_category.values()) >= 0
    assert measured.held_bytes <= measured.peak_bytes
    return measured


def nonzero(measured):
    return {category: size for category, size in measured.by_category.items() if size}


def new(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8)


# ---------------------------------------------------------------------- arithmetic
def test_the_analytic_chain():
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, g = torch.randn(4096, 512), torch.randn(4096, 512)

    def step():
        y = model(x)
        y.backward(g)
        optimizer.step()

    measured = measure(step, model, [optimizer], (x, g))
    # One activation is 8 MiB, one weight 1 MiB. The peak lies in the second layer from the top: 15 outputs, two
    # gradients of outputs, two of weights.
    assert measured.peak_bytes == 178_257_920
    assert nonzero(measured) == {
        "weights": 16 * MIB,
        "data": 2 * 8 * MIB,
        "activations": 15 * 8 * MIB,
        "temporary": 2 * 8 * MIB,
        "gradients": 2 * MIB,
    }
    assert measured.held_bytes == 32 * MIB


def test_storages_count_until_they_die():
    def step():
        a = new(1000)
        b = new(300)
        del a
        c = new(600)
        del b, c

    assert measure(step).peak_bytes == 1300


def test_nothing_happens():
    model = nn.Linear(3, 5)
    assert measure(lambda: None, model, batch=new(7)).by_category == {
        **dict.fromkeys(CATEGORIES, 0),
        "weights": (15 + 5) * 4,
        "data": 7,
    }


def test_a_peak_at_the_very_start():
    batch = [new(5000)]

    def step():
        batch.clear()
        new(100)

    assert measure(step, batch=batch).peak_bytes == 5000


def test_views_count_once():
    def step():
        a = new(1000)
        views = [a.view(10, 100), a[3:], a.t(), a.reshape(100, 10), a.unsqueeze(0).expand(7, 1000), a.detach()]
        b = views[0].view(torch.int8).chunk(4)
        del a
        assert len(views) + len(b) == 10

    assert measure(step).peak_bytes == 1000


def test_a_view_keeps_its_storage_alive():
    def step():
        view = new(1000)[:1]
        other = new(500)
        del view, other

    assert measure(step).peak_bytes == 1500


def test_in_place_operations_are_free():
    def step():
        a = torch.zeros(250)
        a.add_(1).mul_(2)
        a[:10].fill_(3)
        torch.exp(a, out=a)

    assert measure(step).peak_bytes == 1000


def test_resize_grows_and_shrinks_the_storage():
    def step():
        a = new(1000)
        a.resize_(4000)
        a.untyped_storage().resize_(0)
        a.add_(0) if a.numel() == 0 else a.resize_(0)
        b = new(3900)
        del b

    assert measure(step).peak_bytes == 4000


def test_a_resized_parameter_stays_in_its_category():
    parameter = nn.Parameter(torch.empty(10))
    model = nn.Module()
    model.p = parameter
    measured = measure(lambda: parameter.data.resize_(1000), model)
    assert nonzero(measured) == {"weights": 4000}


def test_tied_parameters_and_buffers_count_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    model[1].register_buffer("same", model[0].weight.detach())
    expected = 8 * 8 * 4 + 2 * 8 * 4 + 2 * 8 * 4 + 2 * 8 * 4 + 8
    assert nonzero(measure(lambda: None, model)) == {"weights": expected}


@pytest.mark.parametrize("touch", [lambda t: t.view(10, 10), lambda t: t.add_(1), lambda t: t[:3]])
def test_tensors_that_were_not_handed_in_are_data_when_an_operation_returns_them(touch):
    unknown = torch.zeros(100)

    def step():
        before = new(70)
        del before
        touch(unknown)

    measured = measure(step)
    assert measured.by_category["data"] == 400
    assert measured.peak_bytes == 470  # it was there all the time


def test_tensors_that_are_only_read_stay_unseen():
    unknown = torch.zeros(100)
    assert measure(lambda: unknown + 1).peak_bytes == 400


def test_other_devices_are_not_booked():
    def step():
        torch.empty(1000, device="meta") + 1

    assert measure(step, nn.Linear(5, 5, device="meta"), batch=torch.empty(9, device="meta")).peak_bytes == 0


# ---------------------------------------------------------------------- categories
def test_activations_are_what_backward_finds():
    x = torch.randn(10, 100)
    model = nn.Sequential(nn.Linear(100, 100), nn.Sigmoid())

    def step():
        scratch = x * 2  # dies before backward: not an activation
        loss = model(x).sum()
        del scratch
        loss.backward()
        del loss
        new(10**6)

    measured = measure(step, model, batch=x)
    assert measured.by_category["activations"] == 0  # at the peak, after backward, they are gone
    assert measured.by_category["temporary"] == 10**6
    assert measured.by_category["gradients"] == measured.by_category["weights"] == (100 * 100 + 100) * 4


def test_gradients_from_before_and_from_this_step():
    model = nn.Linear(100, 100, bias=False)
    x = torch.randn(2, 100)
    model(x).sum().backward()
    assert nonzero(measure(lambda: None, model, batch=x)) == {"weights": 40_000, "gradients": 40_000, "data": 800}

    def step():
        model.zero_grad()
        model(x).sum().backward()
        new(10**5)

    assert nonzero(measure(step, model, batch=x)) == {
        "weights": 40_000,
        "gradients": 40_000,
        "data": 800,
        "temporary": 10**5,
    }


def test_gradients_of_frozen_parameters_do_not_exist():
    model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    model[0].weight.requires_grad_(False)

    def step():
        model(torch.randn(2, 50)).sum().backward()
        new(10**5)

    assert measure(step, model).by_category["gradients"] == 50 * 50 * 4


def test_sparse_embedding_gradients():
    model = nn.Embedding(1000, 16, sparse=True)
    index = torch.arange(20)

    def step():
        model(index).sum().backward()
        new(10**6)

    measured = measure(step, model, batch=index)
    assert model.weight.grad.is_sparse
    values, indices = 20 * 16 * 4, 20 * 8
    # The indices are the batch itself, seen through a view.
    shares = model.weight.grad._indices().untyped_storage()._cdata == index.untyped_storage()._cdata
    assert measured.by_category["gradients"] + measured.by_category["data"] == values + indices + (
        0 if shares else index.nbytes
    )
    assert measured.by_category["weights"] == 1000 * 16 * 4
    again = measure(lambda: None, model)
    assert again.by_category["gradients"] == values + indices


def test_sparse_and_compressed_tensors_in_the_batch():
    dense = torch.eye(10)
    assert nonzero(measure(lambda: None, batch=dense.to_sparse())) == {"data": 10 * 4 + 2 * 10 * 8}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_csr_tensors_in_the_batch():
    tensor = torch.sparse_csr_tensor(torch.arange(11), torch.arange(10), torch.ones(10), (10, 10))
    assert nonzero(measure(lambda: None, batch=tensor)) == {"data": 10 * 4 + 11 * 8 + 10 * 8}


def test_optimizer_state_that_is_made_within_the_step():
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 100)

    def step():
        model(x).sum().backward()
        optimizer.step()
        new(10**6)

    expected = {
        "weights": 40_000,
        "gradients": 40_000,
        "optimizer_state": 2 * 40_000 + 4,
        "temporary": 10**6,
        "data": 800,
    }
    assert nonzero(measure(step, model, [optimizer], x)) == expected
    optimizer.zero_grad()
    assert nonzero(measure(step, model, [optimizer], x)) == expected


def test_several_optimizers():
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in model]
    model(torch.randn(2, 10)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert measure(lambda: None, model, optimizers).by_category["optimizer_state"] == 2 * 400


class Deep(nn.Module):
    """`layers` sigmoids, each saving its output of `x.nbytes`."""

    def __init__(self, layers, **settings):
        super().__init__()
        self.layers, self.settings = layers, settings

    def block(self, x):
        for _ in range(self.layers):
            x = torch.sigmoid(x)
        return x

    def forward(self, x):
        return checkpoint(self.block, x, **self.settings) if self.settings else self.block(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_are_activations(use_reentrant):
    x = torch.randn(1000, requires_grad=True)
    plain = measure(lambda: Deep(20)(x).sum().backward(), batch=x)
    recomputed = measure(lambda: Deep(20, use_reentrant=use_reentrant)(x).sum().backward(), batch=x)
    assert plain.by_category["activations"] >= 20 * 4000
    assert recomputed.by_category["activations"] >= 19 * 4000
    assert recomputed.by_category["temporary"] <= 3 * 4000


def test_checkpointing_saves_what_arithmetic_says():
    x = torch.randn(1000, requires_grad=True)

    def step(settings):
        y = x
        for _ in range(5):
            y = Deep(4, **settings)(y)
        y.sum().backward()

    plain, saved = measure(lambda: step({}), batch=x), measure(lambda: step({"use_reentrant": False}), batch=x)
    assert plain.by_category["activations"] // 4000 == 20
    assert 5 + 3 <= saved.by_category["activations"] // 4000 <= 5 + 4


def test_every_backward_of_a_step_has_its_activations():
    model, x = Deep(10), torch.randn(1000, requires_grad=True)
    small = torch.randn(10, requires_grad=True)

    def step():
        model(small).sum().backward()
        model(x).sum().backward()  # the peak is here
        model(small).sum().backward()

    measured = measure(step, batch=(x, small))
    assert measured.by_category["activations"] >= 10 * 4000
    assert measured.by_category["temporary"] <= 3 * 4000


def test_a_second_graph_that_is_alive_during_the_first_backward():
    model, x = Deep(10), torch.randn(1000, requires_grad=True)

    def step():
        first, second = model(x).sum(), model(x).sum()
        first.backward()
        second.backward()

    assert measure(step, batch=x).by_category["activations"] >= 20 * 4000


def test_autograd_grad_counts_as_a_backward():
    model, x = Deep(10), torch.randn(1000, requires_grad=True)
    measured = measure(lambda: torch.autograd.grad(model(x).sum(), x), batch=x)
    assert measured.by_category["activations"] >= 10 * 4000


def test_forward_without_backward_has_no_activations():
    model, x = nn.Linear(10, 10), torch.randn(5, 10)
    with torch.no_grad():
        assert nonzero(measure(lambda: model(x), model, batch=x)) == {"weights": 440, "data": 200, "temporary": 200}


def test_reserved_bytes():
    ledger = Ledger().watching(nn.Module())
    ledger.reserve("gradients", 5000)
    with ledger:
        new(100)
    assert ledger.measurement.peak_bytes == 5100
    assert ledger.measurement.by_category["gradients"] == 5000
    assert ledger.measurement.held_bytes == 5000


# ---------------------------------------------------------------------- leaving no trace
def test_nothing_of_the_ledger_survives():
    model, x = nn.Linear(10, 10), torch.randn(5, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ledger = Ledger().watching(model, [optimizer], x)
    with ledger:
        y = model(x)
        y.sum().backward()
        optimizer.step()
    alive = [model.weight, model.weight.grad, x, y, optimizer.state[model.weight]["momentum_buffer"]]
    assert [weakref.getweakrefs(t.untyped_storage()) for t in alive] == [[]] * 5
    assert not model.weight._post_accumulate_grad_hooks

    booked, measurement = ledger._bytes, ledger.measurement
    peak = measurement.peak_bytes
    references = [weakref.ref(o) for o in (model, x, optimizer, y)]
    del model, x, y, optimizer, alive
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert ledger._bytes == booked  # no callback fired into the closed ledger
    assert ledger._events == []
    assert measurement.peak_bytes == peak

    dead = weakref.ref(ledger)
    del ledger
    gc.collect()
    assert dead() is None


def test_a_measurement_can_follow_another():
    model, x = nn.Linear(10, 10), torch.randn(5, 10)

    def step():
        model(x).sum().backward()
        model.zero_grad()

    first = measure(step, model, batch=x)
    assert measure(step, model, batch=x) == first


def test_an_exception_leaves_the_mode_stack_clean():
    model = nn.Linear(10, 10)
    x = torch.zeros(5, 10)
    ledger = Ledger().watching(model, batch=x)

    def step():
        new(1000)
        model(torch.zeros(5, 11))

    with pytest.raises(RuntimeError, match="shapes"), ledger:
        step()
    assert _get_current_dispatch_mode_stack() == []
    assert not model.weight._post_accumulate_grad_hooks
    assert ledger.measurement.peak_bytes >= 440 + 200 + 1000


def test_an_exception_in_a_backward_hook_leaves_the_mode_stack_clean():
    model, x = nn.Linear(10, 10), torch.randn(5, 10)

    def fail(_):
        raise ValueError("in the hook")

    def step():
        y = model(x)
        y.register_hook(fail)
        y.sum().backward()

    with pytest.raises(ValueError, match="in the hook"):
        measure(step, model, batch=x)
    assert _get_current_dispatch_mode_stack() == []
    assert not autograd_is_running()


def test_results_are_those_of_an_unmeasured_step():
    def losses(context):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.Linear(10, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, out = torch.randn(5, 10), []
        for _ in range(3):
            with context(model, optimizer, x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            out.append(loss.item())
        return out

    expected = losses(lambda *_: torch.enable_grad())
    assert losses(lambda model, optimizer, x: Ledger().watching(model, [optimizer], x)) == expected


# ---------------------------------------------------------------------- private names of torch
def test_post_accumulate_hooks_run_with_the_gradient_in_place():
    parameter, seen = nn.Parameter(torch.ones(3)), []
    handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    (parameter * 2).sum().backward()
    handle.remove()
    assert seen == [True]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")  # torch 2.12
def test_higher_order_operators_are_operations():
    """Dispatch modes that do not say that they know them make torch raise."""
    q = torch.randn(1, 2, 16, 8)
    with Ledger() as ledger:
        out = flex_attention(q, q, q)
        chosen = torch.cond(q.sum() > 0, lambda x: x + 1, lambda x: x - 1, (q,))
    assert ledger.measurement.peak_bytes >= out.nbytes + chosen.nbytes
    assert torch.allclose(out, nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_counted(layout):
    model = nn.Linear(2, 4)
    with Ledger("cpu").watching(model) as ledger:
        rows = torch.nested.nested_tensor([torch.ones(30, 2), torch.ones(20, 2)], layout=layout)
        out = model(rows)
    assert ledger.measurement.peak_bytes >= 4 * (50 * 2 + 50 * 4)
    assert len(out.unbind()) == 2
