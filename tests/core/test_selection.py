"""Modules by pattern, class and callable; what is a norm; what TorchScript runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave.core.selection import as_selectors, is_norm, is_scripted, is_selected, scripted_in, select


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(self.norm(x)))


def model():
    return nn.Sequential(Body(), Body(), nn.Linear(4, 2))


def names_of(net, selectors):
    by_module = {module: name for name, module in net.named_modules()}
    return [by_module[module] for module in select("keep", selectors, net)]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (("2",), ["2"]),
        (("*.up",), ["0.up", "1.up"]),
        (("?",), ["0", "1", "2"]),
        (("Linear",), ["0.up", "0.down", "1.up", "1.down", "2"]),
        (("linear",), None),  # case counts
        ((nn.Linear,), ["0.up", "0.down", "1.up", "1.down", "2"]),
        ((Body, "2"), ["0", "1", "2"]),
        (("2", nn.Linear, "Lin*"), ["0.up", "0.down", "1.up", "1.down", "2"]),  # each once
        ((lambda name, module: name.startswith("1."),), ["1.norm", "1.up", "1.down"]),
        (("Sequential",), [""]),
        ((nn.Conv2d,), None),
        (("2", "missing"), None),
    ],
)
def test_modules_that_are_meant_come_in_the_models_order(selectors, expected):
    net = model()
    if expected is None:
        with pytest.raises(ValueError, match=r"`keep` must match a module, got .*Classes in this model: Body, Layer"):
            names_of(net, selectors)
    else:
        assert names_of(net, selectors) == expected


def test_a_subclass_is_meant_by_its_base():
    class Special(nn.Linear):
        pass

    assert is_selected(nn.Linear, "x", Special(1, 1))
    assert not is_selected("Linear", "x", Special(1, 1))


@pytest.mark.parametrize("value", [3, None, 1.5, "", [""], [3], ["head", None], nn.Linear(1, 1), int, [nn.ReLU(), "x"]])
def test_what_is_no_selector_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"`keep` must be patterns, classes of modules, or `callable"):
        as_selectors("keep", value)


def test_one_selector_or_several_is_a_tuple():
    def chosen(name, module):
        return True

    assert as_selectors("keep", chosen) == (chosen,)
    assert as_selectors("keep", nn.Linear) == (nn.Linear,)
    assert as_selectors("keep", (each for each in ("a", nn.Linear))) == ("a", nn.Linear)
    assert as_selectors("keep", []) == ()


class RMSNormOfItsOwn(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Scale(RMSNormOfItsOwn):
    """Named otherwise: nothing says that it is a norm."""


class NormedLinear(nn.Linear):
    """Named so, but its parameter is a matrix."""


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm2d(3), True),
        (nn.SyncBatchNorm(3), True),
        (nn.InstanceNorm1d(3, affine=True), True),
        (nn.GroupNorm(1, 3), True),
        (nn.LayerNorm((3, 4)), True),  # its weight is a matrix, and it is torch's
        (nn.RMSNorm(3), True),
        (nn.LazyBatchNorm1d(), True),
        (RMSNormOfItsOwn(3), True),
        (RMSNormOfItsOwn(3, 4), False),
        (NormedLinear(3, 4), False),
        (Scale(3), False),
        (nn.Linear(3, 4), False),
        (nn.Sequential(nn.LayerNorm(3)), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_norms_are_torchs_and_those_that_say_so_and_hold_vectors(module, expected):
    assert is_norm(module) is expected


@pytest.mark.parametrize("how", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(2, 4))])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_found_wherever_it_is(how):
    net = model()
    assert scripted_in(net) is None
    net[1].up = how(net[1].up)
    assert is_scripted(net[1].up)
    assert not is_scripted(net[1])
    assert scripted_in(net) == "1.up"
    assert scripted_in(net[1].up) == ""
