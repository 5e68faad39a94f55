"""Ask a LightningModule how its loss depends on the batch, without leaving a trace of having asked."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.numerics.fakes import is_fake
from lightning_memsave.strategies.out_of_memory import is_out_of_memory
from lightning_memsave.strategies.rehearsal import without_a_trace
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.microbatching.reduction import Finding, Reduction, infer_reduction
from lightning_memsave.techniques.microbatching.split import cloned, take

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}
_COARSE_TOLERANCE = 2e-2  # half precision anywhere in the model or by autocast


@dataclass(frozen=True)
class ProbeResult:
    """The reduction, or why there is none; neither when this batch does not tell."""

    reduction: Reduction | None = None
    why_not: str = ""
    has_failed: bool = False
    """Whether the loss could not be evaluated, which says nothing about other samples."""


def infer_module_reduction(
    trainer: Any, kwargs: dict[str, Any], num_samples: int, config: Microbatching
) -> ProbeResult:
    """Evaluate `training_step` three times on some samples of a batch, in eval mode, with the same noise.

    Without gradients, unless the step itself asks for some (`torch.autograd.grad`).

    Args:
        trainer: Lightning's trainer, inside its fit loop.
        kwargs: the arguments of `training_step`, `batch` among them.
        num_samples: how many samples the batch has.
        config: tells how many samples fit at once, and how to cut the batch.
    """
    module, batch = trainer.lightning_module, kwargs["batch"]
    if any(is_fake(p) for p in module.parameters()):  # a prediction, which flags it
        return ProbeResult("mean")
    if config.split_fn is None:
        assert config.size != "auto", "who cuts knows the size"
        num_used = min(num_samples, max(3, 2 * config.size))
        cut = max(1, num_used // 3)
        whole = take(batch, 0, num_used, num_samples)
        parts: list[tuple[Any, float]] = [
            (take(whole, 0, cut, num_used), cut),
            (take(whole, cut, num_used, num_used), num_used - cut),
        ]
    else:
        whole = batch
        parts = config.parts(batch)

    dtypes = set()
    sizes = [int(n) for _, n in parts]
    starts, num_all = [0, *itertools.accumulate(sizes[:-1])], sum(sizes)

    def loss_of(part: Any, start: int, num_samples: int) -> float:
        # A copy, as the parts are views of the batch, which a step may change.
        with SampleNoise(start, num_samples, num_all):
            loss = _loss_in(trainer.strategy.training_step(*{**kwargs, "batch": cloned(part)}.values()))
        dtypes.add(loss.dtype)
        return float(loss.detach())

    def find() -> Finding:
        weighted = parts
        if config.weight_fn is not None:
            weighted = [(part, float(config.weight_fn(part))) for part, _ in parts]
        losses = {id(whole): loss_of(whole, 0, num_all)}
        losses |= {id(part): loss_of(part, start, n) for (part, _), start, n in zip(parts, starts, sizes, strict=True)}
        tolerance = _relative_tolerance(trainer, dtypes)
        return infer_reduction(lambda part: losses[id(part)], whole, weighted, tolerance)

    with without_a_trace(trainer, module, batch):
        _evaluate(module)
        try:
            found = _without_graph(find)
        except Exception as error:  # whatever user code raises outside its usual mode
            if is_out_of_memory(error):  # says nothing about the loss
                raise
            why_not = f"the loss cannot be evaluated in eval mode ({type(error).__name__}: {error})."
            return ProbeResult(why_not=why_not, has_failed=True)
    if found == "either":
        return ProbeResult()
    if found == "neither":
        return ProbeResult(
            why_not="the loss of a batch is neither the mean nor the sum of the losses of its parts "
            "(in-batch negatives, or a mean over something else than samples).",
        )
    return ProbeResult(found)


def _evaluate(module: Any) -> None:
    module.eval()
    for layer in module.modules():
        # Bitsandbytes' 4-bit layers (seen in 0.50) pack their weights in eval mode, for good, on CPUs with instructions
        # for bfloat16, and no gradient goes through them any more.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.train()


def _without_graph(find: Callable[[], Finding]) -> Finding:
    """Without gradients, unless that fails. Beyond this stance a compiled region that a mode met would stay eager."""
    with torch.compiler.set_stance("force_eager"):
        try:
            with torch.no_grad():
                return find()
        except RuntimeError as error:  # perhaps for want of a graph
            if is_out_of_memory(error):
                raise
            return find()


class SampleNoise(TorchDispatchMode):
    """Inside, each sample of a batch has noise of its own, which is the same when the sample is in a part of the batch.

    So a loss that draws noise (diffusion, variational autoencoders) can be compared between a batch and its parts. What
    is drawn with one entry per sample is drawn for the whole batch, of which a part takes its own. Noise whose
    distribution is in tensors (`torch.bernoulli(p)`) is drawn as it is. Generators start anew, so that what is drawn
    once for all samples is equal, too.

    Args:
        start: the place of the first sample in the whole batch.
        num_samples: of the part.
        num_all: of the whole batch.

    Example:
        >>> with SampleNoise(0, 5, 5):
        ...     whole = torch.randn(5, 3)
        >>> with SampleNoise(2, 3, 5):
        ...     part = torch.randn(3, 3)
        >>> torch.equal(whole[2:], part), torch.equal(part[0], part[1])
        (True, False)
    """

    supports_higher_order_operators = True

    def __init__(self, start: int, num_samples: int, num_all: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._span, self._num_samples = slice(start, start + num_samples), num_samples
        self._num_all, self._num_drawn = num_all, 0

    def __enter__(self) -> SampleNoise:
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        self._num_drawn += 1
        torch.manual_seed(self._num_drawn)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        gives_shape = func._schema.is_mutable or func._schema.name.endswith("_like")
        if len(tensors) > gives_shape:  # their values count
            return func(*args, **kwargs)
        of_all = [self._of_all(value) for value in args]
        if all(mine is theirs for mine, theirs in zip(of_all, args, strict=True)):
            return func(*args, **kwargs)
        drawn = func(*of_all, **kwargs)[self._span]
        return args[0].copy_(drawn) if func._schema.is_mutable else drawn.clone()

    def _of_all(self, value: Any) -> Any:
        """A size, or a tensor that gives one, of the whole batch instead of the part."""
        if isinstance(value, Tensor) and value.dim() and len(value) == self._num_samples:
            return value.new_empty(self._num_all, *value.shape[1:])
        if isinstance(value, list | tuple) and value and value[0] == self._num_samples:
            return type(value)([self._num_all, *value[1:]])
        return value


def _loss_in(output: Any) -> Tensor:
    """The loss that `training_step` returned; not a number where Lightning skips the batch."""
    loss = output["loss"] if isinstance(output, dict) else output
    if loss is None:
        return torch.tensor(math.nan)
    if not isinstance(loss, Tensor):
        raise TypeError("training_step returned no loss")
    return loss


def _relative_tolerance(trainer: Any, dtypes: set[torch.dtype]) -> float:
    """For losses of these dtypes, of which transformers' are float32 even where the model is float64."""
    with trainer.precision_plugin.train_step_context():
        if torch.is_autocast_enabled(trainer.strategy.root_device.type):
            return _COARSE_TOLERANCE
    dtypes = dtypes | {p.dtype for p in trainer.lightning_module.parameters() if p.is_floating_point()}
    return max((_TOLERANCE.get(dtype, _COARSE_TOLERANCE) for dtype in dtypes), default=_COARSE_TOLERANCE)
