"""Activations such as GELU: a code of the derivative, in place of one of the input.

The backward pass of y = f(x) multiplies by f'(x). With noise of variance v in x, f'(x) is off by f'''(x) v / 2 on
average: 1.6 % of the gradient at 4 bits. Here d = f'(x) is coded, and decoded to some x* with f'(x*) = d, which is what
the activation's own backward is given: noise in d leaves the gradient unbiased, and is smaller, since d hardly leaves
[0, 1] where x is large. Between its least and its greatest value the derivative of each of these functions takes all
values in between, so that x* is found there by a table.

x* stands for x in that one place alone. An entry that anybody else reads has a code of x, and so has one that others
are computed from. Differentiated twice it would be wrong, and raises.

Source: Novikov et al., "Few-Bit Backward", 2022 (https://arxiv.org/abs/2202.00441) keep the derivative as one of a few
levels, the nearest. Different: stochastic rounding and a range per block, so that it is unbiased; and no function is
replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memsave.numerics.fakes import is_fake, with_values
from lightning_memsave.vault.call import Call

aten = torch.ops.aten

_TABLE_SIZE = 2**12
_FARTHEST = 30.0  # there no derivative changes any more


class Derivative(NamedTuple):
    """That of an activation with its settings."""

    name: str
    settings: tuple[Any, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """f'(x), as the activation's own backward computes it."""
        found: Tensor = _BACKWARD[self.name](torch.ones_like(x), x, *self.settings)
        return found

    def invert(self, d: Tensor) -> Tensor:
        """Some x* whose derivative is `d`, float32 [n], in place."""
        low, high, table = _table(self, d.device)
        if is_fake(d):
            table = d.new_empty(_TABLE_SIZE)
        place = d.sub_(low).mul_((_TABLE_SIZE - 1) / (high - low)).add_(0.5).clamp_(0, _TABLE_SIZE - 1)
        return torch.index_select(table, 0, place.to(torch.int64), out=d)


@functools.cache
def _table(derivative: Derivative, device: torch.device) -> tuple[float, float, Tensor]:
    """The ends of the derivative, and x* for equally spaced values between them."""

    def built() -> tuple[float, float, Tensor]:
        x = torch.linspace(-_FARTHEST, _FARTHEST, 600_001, dtype=torch.float64)
        d = derivative(x)
        first, last = int(d.argmin()), int(d.argmax())
        low, high = float(d[first]), float(d[last])
        branch = slice(first, last + 1)
        x_star = np.interp(np.linspace(low, high, _TABLE_SIZE), d[branch].numpy(), x[branch].numpy())
        return low, high, torch.from_numpy(x_star).float().to(device)

    return with_values(built)


def derivative_of(call: Call) -> Derivative | None:
    """That of the activation that is running; `None` for other functions, and where no x* need exist."""
    read = _SETTINGS.get(call.name)
    settings = None if read is None else read(call)
    return None if settings is None else Derivative(call.name, settings)


def _unless_in_place(call: Call, position: int) -> tuple[Any, ...] | None:
    return None if call.argument(position, "inplace", False) else ()


def _elu(call: Call) -> tuple[Any, ...] | None:
    if call.argument(1, "alpha", 1.0) != 1 or call.argument(2, "inplace", False):
        return None  # its derivative jumps
    return (1.0, 1.0, 1.0, False)


_SETTINGS: Mapping[str, Callable[[Call], tuple[Any, ...] | None]] = {
    "gelu": lambda call: (call.argument(1, "approximate", "none"),),
    "silu": lambda call: _unless_in_place(call, 1),
    "mish": lambda call: _unless_in_place(call, 1),
    "hardswish": lambda call: _unless_in_place(call, 1),
    "softplus": lambda call: (call.argument(1, "beta", 1.0), call.argument(2, "threshold", 20.0)),
    "elu": _elu,
}
"""What the backward pass needs to know of a call; `None` where there is no x* for each value."""

_BACKWARD: Mapping[str, Callable[..., Tensor]] = {
    "gelu": lambda ones, x, approximate: aten.gelu_backward(ones, x, approximate=approximate),
    "silu": aten.silu_backward,
    "mish": aten.mish_backward,
    "hardswish": aten.hardswish_backward,
    "softplus": aten.softplus_backward,
    "elu": lambda ones, x, alpha, scale, input_scale, is_result: aten.elu_backward(
        ones, alpha, scale, input_scale, is_result, x
    ),
}
