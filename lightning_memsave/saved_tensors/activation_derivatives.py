"""Activations such as GELU: a code of the derivative, in place of one of the input.

The backward pass of y = f(x) multiplies by f'(x). With noise of variance v in x, f'(x) is off by f'''(x) v / 2 on
average: 1.6 % of the gradient at 4 bits. Here d = f'(x) is coded, and decoded to some x* with f'(x*) = d, which is what
the activation's own backward is given. The gradient is linear in d, and noise is smaller, since d hardly leaves [0, 1]
where x is large. What is left of bias comes from the ends: a block's range is rounded outwards, and what is decoded
beyond the least or greatest value of f' is cut off, by at most 1 % of f' range. So the class stays *approximate*.
Between its least and its greatest value the derivative of each of these functions takes all values in between, so that
x* is found there by a table.

x* stands for x in that one place alone. An entry that anybody else reads has a code of x, and so has one that others
are computed from. Differentiated twice it would be wrong, and raises.

Source: Novikov et al., "Few-Bit Backward", 2022 (https://arxiv.org/abs/2202.00441) keep the derivative as one of a few
levels, the nearest. Different: stochastic rounding and a range per block, and no function is
replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memsave.numerics import kernels
from lightning_memsave.numerics.kbit import mix
from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.code_rows import Rows
from lightning_memsave.saved_tensors.encodings import Fidelity, IntCodes
from lightning_memsave.torch_internals.fake_tensors import is_fake, with_values

aten = torch.ops.aten

_TABLE_SIZE = 2**12
_FARTHEST = 30.0  # there no derivative changes any more; of softplus, for beta = 1
_LEAST_THRESHOLD = 10.0  # from which softplus's derivative jumps by less than 5e-5 to 1


class Derivative(NamedTuple):
    """Derivative of an activation with its settings."""

    name: str
    settings: tuple[Any, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Return f'(x), as the activation's own backward computes it."""
        found: Tensor = _BACKWARD[self.name](torch.ones_like(x), x, *self.settings)
        return found

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value of f'."""
        return _table(self, torch.device("cpu"))[:2]

    def invert(self, d: Tensor) -> Tensor:
        """Return some x* whose derivative is `d`, float32 [n], in place."""
        low, high, table = _table(self, d.device)
        if is_fake(d):
            table = d[:1]  # the table is there before the step
        per_unit = (_TABLE_SIZE - 1) / (high - low)
        return kernels.look_up(d, table, per_unit, 0.5 - low * per_unit)

    def encode(self, flat: Tensor, fidelity: Fidelity, seed: int, rows: Rows, signed: bool) -> CodedDerivative | None:
        """Return codes of the derivatives; `None` when a value is not finite."""
        return CodedDerivative.of(flat, self, fidelity, seed, rows)


@functools.cache
def _table(derivative: Derivative, device: torch.device) -> tuple[float, float, Tensor]:
    """Return the ends of the derivative, and x* for equally spaced values between them."""

    def built() -> tuple[float, float, Tensor]:
        farthest = _FARTHEST / (derivative.settings[0] if derivative.name == "softplus" else 1.0)
        x = torch.linspace(-farthest, farthest, 600_001, dtype=torch.float64, device="cpu")
        d = derivative(x)
        first, last = int(d.argmin()), int(d.argmax())
        low, high = float(d[first]), float(d[last])
        branch = slice(first, last + 1)
        x_star = np.interp(np.linspace(low, high, _TABLE_SIZE), d[branch].numpy(), x[branch].numpy())
        return low, high, torch.from_numpy(x_star).float().to(device)

    return with_values(built)


def derivative_of(call: Call) -> Derivative | None:
    """Return the derivative of the running activation; `None` for other functions, and where no x* need exist."""
    read = _SETTINGS.get(call.name)
    settings = None if read is None else read(call)
    return None if settings is None else Derivative(call.name, settings)


def _unless_in_place(call: Call) -> tuple[Any, ...] | None:
    return None if call.argument(1, "inplace", False) else ()


def _softplus(call: Call) -> tuple[Any, ...] | None:
    beta, threshold = call.argument(1, "beta", 1.0), call.argument(2, "threshold", 20.0)
    return (beta, threshold) if beta > 0 and threshold >= _LEAST_THRESHOLD else None  # else its derivative jumps


def _elu(call: Call) -> tuple[Any, ...] | None:
    if call.argument(1, "alpha", 1.0) != 1 or call.argument(2, "inplace", False):
        return None  # its derivative jumps
    return (1.0, 1.0, 1.0, False)


_SETTINGS: Mapping[str, Callable[[Call], tuple[Any, ...] | None]] = {
    "gelu": lambda call: (call.argument(1, "approximate", "none"),),
    "silu": _unless_in_place,
    "mish": _unless_in_place,
    "softplus": _softplus,
    "elu": _elu,
}
"""What the backward pass needs to know of a call; `None` where there is no x* for each value."""

_BACKWARD: Mapping[str, Callable[..., Tensor]] = {
    "gelu": lambda ones, x, approximate: aten.gelu_backward.default(ones, x, approximate=approximate),
    "silu": aten.silu_backward,
    "mish": aten.mish_backward,
    "softplus": aten.softplus_backward,
    "elu": lambda ones, x, alpha, scale, input_scale, is_result: aten.elu_backward(
        ones, alpha, scale, input_scale, is_result, x
    ),
}


# ------------------------------------------------------------------------------- the encoding
class DifferentiatedTwiceError(RuntimeError):
    """A backward pass with `create_graph=True` asks for what only a first derivative is kept of."""


def refuse_second_derivative(derivative: Derivative, codec: str, codec_of_input: str) -> None:
    """Raise `DifferentiatedTwiceError` where backward itself is differentiated.

    Args:
        derivative: of which a code is kept.
        codec: of the code.
        codec_of_input: that keeps the activation's input instead.
    """
    if torch.is_grad_enabled():
        name = derivative.name
        raise DifferentiatedTwiceError(
            f"`activations={codec!r}` keeps the derivative of `{name}`, which cannot be differentiated again. For "
            f"`create_graph=True`, keep its input: `ActivationCompression(codecs=({codec!r},), "
            f"operations={{{name!r}: {codec_of_input!r}}})`."
        )


class CodedDerivative:
    """A code of f'(x), decoded to some x* of which f' is the same."""

    fidelity = Fidelity.PART

    def __init__(self, parts: list[IntCodes], like: Tensor, derivative: Derivative) -> None:
        self._parts, self._derivative = parts, derivative
        self._size, self._dtype, self._device = like.numel(), like.dtype, like.device
        self.kind = f"{parts[0].kind} derivative"

    @classmethod
    def of(
        cls, flat: Tensor, derivative: Derivative, fidelity: Fidelity, seed: int, rows: Rows
    ) -> CodedDerivative | None:
        """Return codes of the derivatives; `None` when a value is not finite."""
        parts: list[IntCodes] = []
        rows = Rows(rows.length)  # as it lies in memory: no normalisation reads it
        size = cls._chunk(flat, rows)
        for number, part in enumerate(flat.split(size) if flat.numel() > size else (flat,)):
            d = derivative(part.float())
            coded = IntCodes.of(d, fidelity, mix((seed + number) & 0xFFFFFFFF), False, rows)
            if coded is None:
                return None
            parts.append(coded)
        return cls(parts, flat, derivative)

    @staticmethod
    def _chunk(flat: Tensor, rows: Rows) -> int:
        """Return elements at a time: whole rows, few enough to stay in a CPU's cache, and a small part of the tensor.

        The derivative of a part, and what it takes to compute it, are there besides the tensor.
        """
        largest, smallest = (2**16, 2**14) if flat.device.type == "cpu" else (2**22, 2**20)
        wanted = min(largest, max(smallest, flat.numel() // 8))
        return rows.length * max(1, wanted // rows.length)

    def flat(self) -> Tensor:
        """Return values with nearly these derivatives.

        Raises:
            DifferentiatedTwiceError: backward itself is differentiated, for which they are no use.
        """
        codec = self.kind.split()[0]
        refuse_second_derivative(self._derivative, codec, codec)
        out, first = torch.empty(self._size, dtype=self._dtype, device=self._device), 0
        for part in self._parts:
            last = first + part.size
            if self._dtype == torch.float32:
                self._derivative.invert(part.flat(out[first:last]))
            else:
                out[first:last] = self._derivative.invert(part.flat())
            first = last
        return out

    def payload(self) -> Iterator[Tensor]:
        """Yield codes and ranges."""
        for part in self._parts:
            yield from part.payload()
