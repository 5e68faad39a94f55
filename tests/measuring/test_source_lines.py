"""The line that made a tensor: the user's innermost one, and none of a library."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch import nn

from lightning_memsave.measuring import Ledger
from lightning_memsave.measuring.source_lines import line_text, user_line


def code_of(module):
    """A function of a module of that name, which calls what it is given."""
    room = {"__name__": module}
    exec("def call(function):\n    return function()", room)
    return room["call"]


def own_line():
    return sys._getframe(1).f_lineno


def test_the_callers_line_is_told():
    line, expected = user_line(), own_line()
    assert line[1] == expected
    assert line_text(line) == f"measuring/test_source_lines.py:{expected} test_the_callers_line_is_told"


@pytest.mark.parametrize(
    "library", ["torch", "torch.nn.modules.linear", "lightning.fabric.x", "torchmetrics.functional"]
)
def test_code_of_libraries_is_passed_over(library):
    line, expected = code_of(library)(user_line), own_line()
    assert line == (sys._getframe().f_code, expected)


@pytest.mark.parametrize(
    "own", ["torchvision.models", "my.torch", "lightning_bolts", "transformers.modeling", "torched"]
)
def test_code_of_others_is_a_users(own):
    code, number = code_of(own)(user_line)
    assert (code.co_name, number) == ("call", 2)


@pytest.mark.parametrize(
    "inside", ["torch.optim.adamw", "lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.x"]
)
def test_the_call_of_fit_is_no_users_line(inside):
    assert code_of(inside)(user_line) is None
    assert code_of(inside)(lambda: code_of("torch.nn")(user_line))[0].co_name == "<lambda>"  # a model's, say
    torch_inside = functools.partial(code_of("torch"), user_line)
    assert code_of("torch.nn")(functools.partial(code_of(inside), torch_inside)) is None


def test_frames_can_be_skipped():
    def inner(depth):
        return user_line(depth)

    here, expected = inner(2), own_line()
    assert here[1] == expected
    assert inner(1)[0].co_name == "inner"


N = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).relu()


def test_a_tensor_is_made_in_the_forward_that_calls_the_layer():
    model, x = Net(), torch.zeros(4, 8)
    with Ledger().watching(model, batch=x) as ledger:
        out = model(x)
    assert out.shape == (4, 8)
    (line,) = ledger.measurement.by_line
    assert line == line_text((Net.forward.__code__, Net.forward.__code__.co_firstlineno + 1))
    assert line.endswith(" forward")


def test_what_no_user_has_made_is_said_so():
    assert line_text(None) == "the backward pass, the optimizer, or a library"


def test_lines_add_up_to_what_the_step_made_of_its_peak():
    model = nn.Sequential(nn.Linear(N, N), nn.ReLU())
    with Ledger().watching(model) as ledger:
        x = torch.randn(8, N)
        y = model(x)
    measured = ledger.measurement
    assert y.shape == (8, N)
    made = measured.peak_bytes - measured.by_category["weights"]
    assert sum(measured.by_line.values()) == made == 3 * 8 * N * 4
    assert len(measured.by_line) == 2
    assert all(line.startswith("measuring/test_source_lines.py:") for line in measured.by_line)


@pytest.mark.parametrize("inside", ["backward", "optimizer"])
def test_what_no_user_line_made_is_said_so(inside):
    model = nn.Linear(N, N)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(8, N)).sum()
    if inside == "optimizer":
        loss.backward()
    with Ledger().watching(model, [optimizer]) as ledger:
        loss.backward() if inside == "backward" else optimizer.step()
    made = ledger.measurement.by_line
    made = {line: size for line, size in made.items() if size > 4}  # backward begins with a 1 that its caller makes
    assert list(made) == ["the backward pass, the optimizer, or a library"]
