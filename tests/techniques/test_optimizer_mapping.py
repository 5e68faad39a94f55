"""The optimizers that bitsandbytes has an equal of, and the settings that it does not have."""

import copy
from contextlib import nullcontext

import bitsandbytes
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    estimate_optimizer_state,
    uses_bitsandbytes,
)
from lightning_memsave.techniques.optimizer_state.optimizer_mapping import OPTIMIZER_MAPPINGS, check_paged, find_mapping

from .optimizer_state_subjects import (
    CONFIG,
    PLAIN,
    Lamb,
    big_model,
    flat,
    run_steps,
)


def test_the_tests_know_every_kin():
    assert set(PLAIN) == set(OPTIMIZER_MAPPINGS)


def test_lamb_is_found_under_its_other_name():
    model = big_model()
    optimizer = Lamb(model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    assert isinstance(optimizer, bitsandbytes.optim.LAMB8bit)


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight decay"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "momentum"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), "momentum"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "lr_decay"),
    ],
)
def test_settings_without_a_kin_are_refused(build, word):
    model = big_model()
    optimizer = build(list(model.parameters()))
    plain_class, attributes = type(optimizer), set(vars(optimizer))
    with pytest.raises(ValueError, match=word):
        apply_optimizer_state(optimizer, CONFIG, model)
    with pytest.raises(ValueError, match=word):
        estimate_optimizer_state(optimizer, CONFIG, model)
    assert type(optimizer) is plain_class
    assert set(vars(optimizer)) == attributes


@pytest.mark.parametrize("build", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, momentum=0.9)])
def test_parameters_without_a_kernel_are_refused(build):
    """bitsandbytes has none for float64, and for bfloat16 beside a 32-bit momentum none on CUDA."""
    model = big_model(torch.float64)
    with pytest.raises(ValueError, match=r'float64 .* on cpu.*backend="own"'):
        apply_optimizer_state(build(list(model.parameters())), CONFIG, model)
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(8, device="cuda", dtype=torch.bfloat16))
        optimizer = build([p])
    has_kernel = isinstance(optimizer, torch.optim.AdamW)
    with nullcontext() if has_kernel else pytest.raises(ValueError, match="bfloat16 under SGD on cuda"):
        find_mapping(optimizer)
    assert uses_bitsandbytes(optimizer, OptimizerState()) is has_kernel


def test_one_bad_group_of_two_is_refused():
    model = big_model()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[2].parameters()}], lr=0.1
    )
    with pytest.raises(ValueError, match="needs SGD with momentum"):
        apply_optimizer_state(optimizer, CONFIG, model)


def test_an_unknown_optimizer_is_refused_and_the_error_lists_the_known():
    model = big_model()
    with pytest.raises(ValueError, match="Rprop") as error:
        apply_optimizer_state(torch.optim.Rprop(model.parameters()), CONFIG, model)
    assert all(name in str(error.value) for name in OPTIMIZER_MAPPINGS)


def test_adam_with_decoupled_weight_decay_is_taken():
    model = nn.Linear(30, 30)
    second = copy.deepcopy(model)
    plain, ours = (
        torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True)
        for m in (model, second)
    )
    apply_optimizer_state(ours, CONFIG, second)
    start = flat(model)
    expected, found = run_steps(model, plain, range(5)) - start, run_steps(second, ours, range(5)) - start
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_settings_are_read_as_bitsandbytes_calls_them():
    """Two coefficients and an epsilon, of each optimizer's own group."""
    p = [nn.Parameter(torch.zeros(2))]
    coefficients = {
        torch.optim.AdamW(p, betas=(0.8, 0.95)): (0.8, 0.95),
        torch.optim.SGD(p, 0.1, momentum=0.7): (0.7, 0.0),
        torch.optim.RMSprop(p, alpha=0.9): (0.9, 0.0),
        torch.optim.Adagrad(p): (0.0, 0.0),
    }
    for optimizer, expected in coefficients.items():
        assert find_mapping(optimizer).betas(optimizer.param_groups[0]) == expected


@pytest.mark.parametrize("name", OPTIMIZER_MAPPINGS)
def test_bitsandbytes_has_the_classes_and_torch_the_moments(name):
    mapping, p = OPTIMIZER_MAPPINGS[name], nn.Parameter(torch.ones(3))
    optimizer = PLAIN[name]([p])
    p.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state[p]
    assert set(state) - {"step"} == set(mapping.moments)
    assert ("step" in state) is mapping.has_step
    for class_name in filter(None, (mapping.class_name, mapping.paged_name)):
        assert issubclass(getattr(bitsandbytes.optim, class_name), bitsandbytes.optim.optimizer.Optimizer8bit)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "LAMB"])
def test_what_bitsandbytes_does_not_page_is_refused(name):
    optimizer = PLAIN[name]([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=rf'is paged for AdamW, Adam, Lion.*got {name!r}.*optimizer_state="offload"'):
        check_paged(optimizer)


def test_parameters_beside_cuda_have_no_pages():
    with pytest.raises(ValueError, match=r'="paged" needs parameters on CUDA.*cpu'):
        check_paged(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(2, device="cuda"))
        check_paged(torch.optim.AdamW([p]))


def test_a_parameter_beyond_the_kernels_counters_is_refused():
    large = nn.Parameter(torch.empty(2**31, device="meta"))
    with pytest.raises(ValueError, match=r'no kernel for such a parameter, got .2147483648 elements.*backend="own"'):
        find_mapping(torch.optim.AdamW([large]))
    find_mapping(torch.optim.AdamW([nn.Parameter(torch.empty(2**31 - 1, device="meta"))]))
