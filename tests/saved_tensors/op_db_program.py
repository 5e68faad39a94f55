"""torch's own database of operations, forward and backward inside a store; `python -m
tests.saved_tensors.op_db_program`.

A program of its own: torch's testing modules freeze the flags of `torch.backends` for the process that imports them.
Prints JSON: for each operation what its saved tensors became, the largest error of its gradients, and what went wrong.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from itertools import islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore

NUM_SAMPLES = 3
VAULTS = {
    "lossy": lambda: SavedTensorStore(lossy=Fidelity.INT8, min_numel=1),
    "exact": lambda: SavedTensorStore(recompute=True, min_numel=1),
    "consumed": lambda: SavedTensorStore(
        recompute=True, min_numel=1
    ),  # sin() keeps the result: a reason to compute it again
}


class Data(torch.autograd.Function):
    """The same numbers, no longer made of weights alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def is_differentiable(t) -> bool:
    return isinstance(t, Tensor) and t.requires_grad and t.layout is torch.strided


def as_data(t):
    """A copy that dies with the forward pass."""
    if is_differentiable(t):
        return Data.apply(t)
    return t.clone() if isinstance(t, Tensor) and t.layout is torch.strided and not t.requires_grad else t


def gradients(call, sample, store: SavedTensorStore | None, consume: bool) -> list[Tensor | None]:
    """Of random multiples of all outputs, for all inputs."""
    torch.manual_seed(1)

    def leaf(t):
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t

    arguments = tree_map(leaf, (sample.input, sample.args, sample.kwargs))
    leaves = [t for t in tree_leaves(arguments) if is_differentiable(t)]

    def forward() -> list[Tensor]:
        made_data = arguments[:1] if consume else arguments  # then the others are weights
        data = (*tree_map(as_data, made_data), *arguments[len(made_data) :])
        outputs = tree_leaves(sample.output_process_fn_grad(call(data[0], *data[1], **data[2])))
        outputs = [out for out in outputs if is_differentiable(out)]
        return [Data.apply(out.sin() if consume else out) for out in outputs]

    if store is None:
        outputs = forward()
    else:
        with store.scope():
            outputs = forward()
    if not outputs:
        return []
    torch.manual_seed(2)
    directions = [torch.randn_like(out) for out in outputs]
    return list(torch.autograd.grad(outputs, leaves, directions, allow_unused=True))


def is_equal(ours: list[Tensor | None], plain: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        for a, b in zip(ours, plain, strict=True)
    )


def error(ours: list[Tensor | None], plain: list[Tensor | None]) -> float:
    """Relative, over all gradients together, where both are finite."""
    pairs = [
        (a.double().reshape(-1), b.double().reshape(-1)) for a, b in zip(ours, plain, strict=True) if a is not None
    ]
    a, b = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return float("inf")
    return float((a - b)[finite].norm() / b[finite].norm().clamp_min(1e-30))


class Report:
    """What became of one operation."""

    def __init__(self) -> None:
        self.kinds = {name: Counter() for name in VAULTS}
        self.wrong: list[str] = []
        self.error, self.num_samples = 0.0, 0

    def add(self, call, sample) -> None:
        """Run one sample; one that fails or is random under plain torch is left out."""
        for name, make in VAULTS.items():
            consume = name == "consumed"
            try:
                plain = gradients(call, sample, None, consume)
                if not is_equal(gradients(call, sample, None, consume), plain):
                    return
            except (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError):
                return
            store = make()
            try:
                ours = gradients(call, sample, store, consume)
            except Exception as problem:  # all of them are shown
                self.wrong.append(f"{name}: {problem!r}")
                return
            self.num_samples += name == "lossy"
            kinds = store.tally.entries
            self.kinds[name] += kinds
            if is_equal(ours, plain):
                continue
            if name == "lossy" and (kinds["int8"] or kinds["int8 derivative"]):
                self.error = max(self.error, error(ours, plain))
            else:
                self.wrong.append(f"{name}: gradients differ by {error(ours, plain):.1e}, {dict(kinds)}")


def main(dtype: torch.dtype, only: str = "") -> dict[str, dict]:
    """Reports by operation."""
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    reports = {}
    for op in op_db:
        if not op.supports_autograd or dtype not in op.supported_backward_dtypes("cpu") or only not in op.name:
            continue
        report = reports.setdefault(op.name, Report())
        try:
            torch.manual_seed(0)
            for sample in islice(op.sample_inputs_func(op, "cpu", dtype, True), NUM_SAMPLES):  # without its bookkeeping
                report.add(op.op, sample)
        except RuntimeError as problem:
            report.wrong.append(f"samples: {problem!r}")
    return {name: vars(report) for name, report in reports.items()}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(main(getattr(torch, sys.argv[1]), *sys.argv[2:])))
