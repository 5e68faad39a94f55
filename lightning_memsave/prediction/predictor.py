"""The peak of a step before it is run: Lightning's own loop, with the run's own settings, on fake tensors.

Nothing here models what a technique does. A copy of the module that is made of fake tensors is trained for two steps
by a real `Trainer`, and the ledger counts what the real one would have allocated: so gradients that are held through
the next forward, optimizer state, microbatches, regions, codes and sparse weights are all there, in the code that
trains. A module whose step reads values is run on real samples instead, few of them, three times, and what that took is
extended to the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import Batch, namespace_of
from lightning_memsave.loops.recovery import smallest_size
from lightning_memsave.measuring.allocation_trace import Allocations, extended, with_more_parts
from lightning_memsave.measuring.module_attribution import Breakdown
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.planner.memory_budget import machine_bytes
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.dry_run import StepWatch, dry_run
from lightning_memsave.prediction.microbatch_extrapolation import few_of_many
from lightning_memsave.prediction.simulated_process_group import num_processes_of
from lightning_memsave.prediction.update_plan import needs_a_plan, with_layers
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.simulation.cuda_autocast import CudaAutocast
from lightning_memsave.simulation.fake_model import Copying, fake_copy, fakes_of, hidden_from_transformers, unlogged
from lightning_memsave.simulation.global_state_guard import names_kept, outside_kept
from lightning_memsave.simulation.known_sizes import ReadsValueError
from lightning_memsave.simulation.predicted_step import Prediction, prediction_of
from lightning_memsave.simulation.value_propagation import FactsMode
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.microbatching import Microbatching, UnsplittableBatchError, batch_size
from lightning_memsave.techniques.microbatching.split import cloned, even_sizes, resized, take
from lightning_memsave.torch_internals.autograd_graph import autograd_is_running
from lightning_memsave.torch_internals.fake_tensors import FakeTensorMode, is_fake
from lightning_memsave.torch_internals.model_copies import collect_copies, copied
from lightning_memsave.torch_internals.private_names import require
from lightning_memsave.torch_internals.sharded_parameters import check_no_offload

_MOST = 2**30
_GROWING = (
    "the first batch's microbatches are predicted; later ones are doubled, as long as activations and temporaries take "
    "less than half of what is held anyway"
)


class Predictor:
    """Predicts steps of one module on one batch.

    Args:
        module: a LightningModule, or a function that makes one: called among fake tensors, so that no memory is taken.
            It is copied, not changed.
        batch: what `training_step` takes, or a function that makes it.
        trainer: arguments of the `Trainer` that steps depend on: `precision`, `accumulate_grad_batches`,
            `gradient_clip_val`, `gradient_clip_algorithm`; `strategy`, `devices` and `num_nodes`: of these processes
            the first is predicted, which has the largest shards.
        data_module: of the run, which a step may ask.
        target: `"cuda"`: what a CUDA device would hold, besides; dropout then keeps its mask as it does there.
        deadline: the processor time (`time.process_time`) at which a prediction on fake tensors is given up.
        only_fake: whether a step that reads values is an error, instead of being run on real ones.

    Raises:
        ValueError: `module` is no LightningModule, or `devices` is no number.
    """

    def __init__(
        self,
        module: Any,
        batch: Batch,
        *,
        data_module: Any = None,
        target: Literal["cpu", "cuda"] = "cpu",
        deadline: float = math.inf,
        only_fake: bool = False,
        **trainer: Any,
    ) -> None:
        if target not in ("cpu", "cuda"):
            raise setting_error("target", "must be 'cpu' or 'cuda'", target, "The default is 'cpu'.")
        require("fake tensors", "prediction")
        self._target, self._deadline, self._only_fake = target, deadline, only_fake
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._make = (lambda: module) if isinstance(module, nn.Module) else module
        is_made = isinstance(batch, (types.FunctionType, types.MethodType, functools.partial, type))  # not: callable
        self._make_batch = batch if is_made else lambda: batch
        self._module = module if isinstance(module, nn.Module) else self._made_of_fakes(module)
        self._batch = self._made_of_fakes(batch) if is_made else batch
        try:
            self._namespace, self._trainer = namespace_of(self._module), {"max_epochs": 1, **trainer}
        except TypeError as error:
            kind = type(self._module).__name__
            remedy = "Pass what was compiled." if hasattr(self._module, "_orig_mod") else "Predict its training step."
            raise setting_error("module", "must be a LightningModule", kind, remedy) from error
        self._data_module, self._num_processes = data_module, num_processes_of(trainer)
        self._why: str | None = None  # not on fake tensors

    def _made_of_fakes(self, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, without memory; a constructor that reads values gets real ones.

        Raises:
            ValueError: it reads values, and the parameters made until then take over a quarter of the machine's memory.
        """
        found: list[nn.Parameter | None] = []
        hook = register_module_parameter_registration_hook(lambda _, __, parameter: found.append(parameter))
        with Randomness.untouched():
            try:
                with self._mode, FactsMode(), Copying():
                    return make()
            except Exception as error:  # of user code
                _check_size(sum(p.nbytes for p in set(found) if p is not None), f"{type(error).__name__}: {error}")
            finally:
                hook.remove()
            return make()

    @property
    def num_samples(self) -> int | None:
        """Number of samples of the batch; `None` where they cannot be told."""
        try:
            return batch_size(self._batch)
        except UnsplittableBatchError:
            return None

    def __call__(self, techniques: Recipe | Sequence[Any] = (), *, num_samples: int | None = None) -> Prediction:
        """Predict a step.

        Args:
            techniques: what is switched on: a recipe, or Configs.
            num_samples: in the batch, instead of as many as it has.

        Raises:
            ValueError: settings cannot be combined, a technique refuses the model, or a step reads values and the
                module exists as fake tensors only.
        """
        recipe = techniques if isinstance(techniques, Recipe) else Recipe("predicted", tuple(techniques))
        first = self._with_first_size(recipe)
        found = self._predicted(self._with_layers(first, num_samples), num_samples)
        return found if first is recipe else replace(found, flags=(*found.flags, _GROWING))

    def _predicted(self, recipe: Recipe, num_samples: int | None) -> Prediction:
        if self._why is None:
            try:
                return self._on_fakes(recipe, num_samples)
            except (ValueError, TimeoutError):
                raise
            except Exception as error:  # a value is read, or there is no kernel for shapes alone
                text = " ".join(str(error).split())[:200]
                self._why = text if isinstance(error, ReadsValueError) else f"{type(error).__name__}: {text}"
        if self._only_fake:
            why, self._why = self._why, None
            raise ValueError(f"The step cannot be run without values ({why}).")
        return self._measured(recipe, num_samples)

    def _with_first_size(self, recipe: Recipe) -> Recipe:
        """Return a recipe whose smallest microbatches have the size that they have in the first batch."""
        config = recipe.get(Microbatching)
        if config is None or config.goal != "smallest":
            return recipe
        return recipe.with_settings(config.of_size(config.start or smallest_size(self._module)))

    def _with_layers(self, recipe: Recipe, num_samples: int | None) -> Recipe:
        """Return a recipe whose sparse update has its layers, chosen by real steps on this batch."""
        if not needs_a_plan(recipe):
            return recipe
        self._make_real()
        present, batch = self.num_samples, self._batch
        if num_samples is not None and present is not None:
            batch = resized(batch, present, num_samples)
        return with_layers(recipe, self._module, [batch])

    def _on_fakes(self, recipe: Recipe, num_samples: int | None) -> Prediction:
        """Predict for shapes alone; many microbatches from a few (CUDA: without rounding what the others leave)."""
        if (few := few_of_many(self._microbatch_sizes(recipe, num_samples))) is not None:
            step = self._fake(recipe, sum(few.sizes))
            longer = [(self._fake(recipe, sum(few.sizes) + size), times) for size, times in few.more]
            if step.has_parts and (found := _with_more_parts(step, longer)) is not None:
                return self._prediction(step, found)
        step = self._fake(recipe, num_samples)
        return self._prediction(step, step.breakdown)

    def _microbatch_sizes(self, recipe: Recipe, num_samples: int | None) -> list[int]:
        """Return the numbers of samples; none where few microbatches would not show what many take."""
        config, regions = recipe.get(Microbatching), recipe.get(Checkpointing)
        if config is None or config.size == "auto" or config.split_fn is not None:
            return []
        if regions is not None and regions.budget is not None:  # which is that of the whole batch
            return []
        num_samples = num_samples or self.num_samples
        return even_sizes(num_samples, config.size) if num_samples else []

    def _fake(self, recipe: Recipe, num_samples: int | None) -> StepWatch:
        module: Any = fake_copy(self._module, self._mode)
        batch = fakes_of(self._batch, self._mode)
        # A function that is compiled for the first time while modes are on stays eager for ever.
        eager = torch.compiler.set_stance("force_eager")
        with (
            outside_kept(module),
            eager,
            self._mode,
            FactsMode(),
            Copying(),
            hidden_from_transformers(),
            unlogged(),
            self._as_on_target(),
            _given_up_at(self._deadline),
        ):
            if num_samples is not None:
                batch = resized(batch, batch_size(batch), num_samples)
            return self._train(module, batch, recipe, fake=True)

    def _measured(self, recipe: Recipe, num_samples: int | None) -> Prediction:
        self._make_real()
        try:
            with names_kept(self._module):
                return self._measured_as_it_is(recipe, num_samples)
        finally:
            collect_copies(self._module)

    def _measured_as_it_is(self, recipe: Recipe, num_samples: int | None) -> Prediction:
        present, why = self.num_samples, f"the step cannot be run without values ({self._why})"
        if present is None:
            watch = self._train(copied(self._module), self._batch, recipe, fake=False)
            return self._prediction(watch, watch.breakdown, f"{why}: measured")
        wanted = num_samples or present
        config = recipe.get(Microbatching)
        least = config.size if config is not None and isinstance(config.size, int) else 1
        few = max(least, wanted // 8)
        steps: list[Allocations] = []
        while len(steps) < 3 and 3 * few < wanted and all(step.is_like(steps[0]) for step in steps[1:]):
            watch = self._with_samples(recipe, few * (len(steps) + 1))
            steps.append(watch.breakdown.allocations)
        if len(steps) == 3 and (step := extended(steps, Fraction(wanted, few))) is not None:
            numbers = f"{few}, {2 * few} and {3 * few}"
            return self._prediction(watch, step, f"{why}: measured with {numbers} samples, and extended")
        watch = self._with_samples(recipe, wanted)
        return self._prediction(watch, watch.breakdown, f"{why}: measured")

    def _with_samples(self, recipe: Recipe, num_samples: int) -> Any:
        present = self.num_samples
        assert present is not None, "it has been told"
        batch = self._batch
        if num_samples < present:
            batch = cloned(take(batch, 0, num_samples, present))
        elif num_samples > present:
            batch = resized(batch, present, num_samples)
        return self._train(copied(self._module), batch, recipe, fake=False)

    def _make_real(self) -> None:
        """Make module and batch for good, where they are only fake so far.

        Raises:
            ValueError: the parameters would take more than a quarter of the machine's memory.
        """
        fakes = [p for p in self._module.parameters() if is_fake(p)]
        _check_size(sum(p.nbytes for p in fakes), self._why)
        with Randomness.untouched():
            if fakes:
                self._module = self._make()
            if any(map(is_fake, tensors_in(self._batch))):
                self._batch = self._make_batch()

    def _train(self, module: Any, batch: Batch, recipe: Recipe, *, fake: bool) -> StepWatch:
        if not fake:
            collect_copies(module)
        watch = dry_run(self._namespace, module, batch, recipe, self._trainer, self._data_module, fake=fake)
        check_no_offload(module, self._target)
        return watch

    def _prediction(self, watch: StepWatch, found: Breakdown | Allocations, *flags: str) -> Prediction:
        """Return what was found; of a step that was not taken, only the allocations are known."""
        is_measured = bool(flags)
        if watch.is_cut and not is_measured:
            flags = (
                *flags,
                "the loss of a batch is assumed to be the mean over its parts; a run checks it before it cuts",
            )
        if self._target == "cuda":
            flags = (*flags, "CUDA: reserved bytes are a replay")
            if self._num_processes > 1:
                flags = (*flags, "CUDA: NCCL's buffers, and pools of streams that only collectives use, come on top")
        step, rest = (found.allocations, found) if isinstance(found, Breakdown) else (found, None)
        return prediction_of(
            step,
            watch.breakdown.shared_names,
            has_cuda=self._target == "cuda",
            top=rest.top if rest else (),
            seconds=rest.seconds if rest else None,
            num_operations=rest.num_operations if rest else None,
            source="measured" if is_measured else "fake",
            flags=(*watch.flags, *flags),
        )

    @contextlib.contextmanager
    def _as_on_target(self) -> Iterator[None]:
        """Allocate as on the target.

        On CUDA autocast is another, dropout keeps a byte and not a float, and torch's optimizers step all parameters
        together.
        """
        if self._target == "cpu":
            yield
            return
        before = F.dropout

        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if inplace or not training or not p:
                return before(input, p, training, inplace)
            return torch.native_dropout(input, p, training)[0]

        F.dropout = dropout
        together = register_optimizer_step_pre_hook(_step_together)
        try:
            with CudaAutocast():
                yield
        finally:
            together.remove()
            F.dropout = before


def _step_together(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Let an optimizer take torch's `foreach` step, as it does on CUDA where nobody has chosen."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _check_size(num_bytes: int, why: str | None) -> None:
    if 4 * num_bytes > (machine_bytes() or math.inf):
        raise ValueError(
            f"The step cannot be run without values ({why}), and the module is too large to be made for it: predict a "
            "smaller one."
        )


def _with_more_parts(step: StepWatch, longer: Sequence[tuple[StepWatch, int]]) -> Breakdown | None:
    """Return the step of many microbatches, as `allocation_trace.with_more_parts`."""
    found, others = step.breakdown, [(other.breakdown, times) for other, times in longer]
    allocations = with_more_parts(found.allocations, [(other.allocations, times) for other, times in others])
    if allocations is None:
        return None
    return replace(
        found,
        top=(),  # of other sizes
        allocations=allocations,
        seconds=found.seconds + sum(times * (other.seconds - found.seconds) for other, times in others),
        num_operations=found.num_operations
        + sum(times * (other.num_operations - found.num_operations) for other, times in others),
    )


@contextlib.contextmanager
def _given_up_at(deadline: float) -> Iterator[None]:
    """Give up when a module is called after the deadline; not in backward, where an error would end the process.

    Raises:
        TimeoutError: it is over.
    """

    def check(*_: Any) -> None:
        if time.process_time() > deadline and not autograd_is_running():
            raise TimeoutError("a prediction takes longer than it may")

    hook = nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def largest_batch(predictor: Predictor, device_bytes: int, techniques: Recipe | Sequence[Any] = ()) -> int:
    """Return the largest number of samples that fits; 0 where one does not.

    Args:
        predictor: of the step, with a batch whose samples can be told.
        device_bytes: what the device has; for CUDA, the upper bound must fit.
        techniques: as in a prediction.

    Raises:
        ValueError: the samples of the batch cannot be told, or more than a thousand million fit.
    """
    if (present := predictor.num_samples) is None:
        raise setting_error(
            "batch", "must show how many samples it has", "none", "Its tensors must share their first dimension."
        )
    return _largest(lambda num: predictor(techniques, num_samples=num).needed_bytes[1], device_bytes, max(1, present))


def largest_value(
    name: str,
    module: L.LightningModule,
    batch: Batch,
    device_bytes: int,
    techniques: Recipe | Sequence[Any] = (),
    **settings: Any,
) -> int:
    """Return the largest value of an argument with which a step fits; 0 where 1 does not.

    Args:
        name: of an integer argument of `module`, of `batch`, or of both: a length, a depth, a width.
        module: what makes the LightningModule.
        batch: what makes the batch, or the batch.
        device_bytes: as for `largest_batch`.
        techniques: as in a prediction.
        settings: further arguments of `Predictor`.

    The search begins at the argument's default, and doubles or halves from there.

    Raises:
        ValueError: neither takes such an argument, or a step with one of its values cannot be predicted.
    """
    known = [_arguments(each) for each in (module, batch)]
    if not any(name in arguments for arguments in known):
        listed = ", ".join(dict.fromkeys(["batch", *(argument for arguments in known for argument in arguments)]))
        rule = "must be `batch` or an argument of what makes the model or the batch"
        raise setting_error("--largest", rule, name, f"There are: {listed}.")

    def needed_bytes(value: int) -> int:
        made = [
            functools.partial(make, **{name: value}) if name in arguments else make
            for make, arguments in zip((module, batch), known, strict=True)
        ]
        try:
            return Predictor(*made, **settings)(techniques).needed_bytes[1]
        except Exception as error:  # of the user's code: not every number is a width
            rule = "must be an argument whose values, by doubling and bisection, all make a step"
            remedy = f"{name}={value} fails: {type(error).__name__}: {error}"
            raise setting_error("--largest", rule, name, remedy) from error

    defaults = [arguments[name] for arguments in known if name in arguments]
    return _largest(needed_bytes, device_bytes, next((each for each in defaults if type(each) is int and each > 0), 1))


def _arguments(make: Any) -> dict[str, Any]:
    """Return the arguments that can be given by name, and their defaults."""
    if not callable(make) or isinstance(make, nn.Module):
        return {}
    parameters = inspect.signature(make).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _largest(needed_bytes: Callable[[int], int], limit: int, start: int = 1) -> int:
    """Search exponentially, then by secant and bisection alternately, as needs may bend."""
    low, high, above = 0, start, needed_bytes(start)
    below = 0
    while above <= limit:
        low, below, high = high, above, 2 * high
        if high > _MOST:
            raise ValueError(f"More than {_MOST} fit: the step takes no memory for them.")
        above = needed_bytes(high)
    along_the_line = low > 0
    while high - low > 1:
        guess = low + (high - low) * (limit - below) // (above - below) if along_the_line else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        if (needed := needed_bytes(middle)) <= limit:
            low, below = middle, needed
        else:
            high, above = middle, needed
        along_the_line = not along_the_line
    return low
