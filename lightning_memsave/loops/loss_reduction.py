"""Ask a LightningModule how its loss depends on the batch, without leaving a trace of having asked.

`training_step` is evaluated on a few samples, spread over the batch, and on two uneven parts of them, without
gradients. Some bits of weights are flipped before, as at the start of training all samples may have the same loss (a
head of zeros), of which any weights make the mean; where that is not enough (an LSTM, whose gates hardly move), some
weights are eight times as large. Gradients of the last layers' inputs must obey the same rules (`last_layers`). The
mode is that of training, so that terms behind `self.training` count; BatchNorm alone is in evaluation mode, as what its
statistics change is known. Where random numbers are no sample's own, or the step fails, all is in evaluation mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import add_note
from lightning_memsave.lightning_compat import Batch, session_of
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.loops.last_layers import InputGradient, LastLayers, compare
from lightning_memsave.loops.loss_terms import LossTerms, Term
from lightning_memsave.loops.out_of_memory import is_out_of_memory
from lightning_memsave.loops.perturbed_weights import enlarged, moved
from lightning_memsave.loops.probe_samples import FEWEST_SAMPLES, Subject
from lightning_memsave.loops.sample_noise import SampleNoise
from lightning_memsave.loops.side_effect_free import set_mode, without_a_trace
from lightning_memsave.loops.wide_numbers import WideNumbers
from lightning_memsave.measuring.allocator import free_memory
from lightning_memsave.saved_tensors.kept_noise import in_tile
from lightning_memsave.saved_tensors.parameter_edits import ParametersKept
from lightning_memsave.techniques.activation_compression import has_wide_head
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.microbatching.reduction import Losses, ReductionRule, rules_for
from lightning_memsave.techniques.microbatching.split import are_equal, cloned
from lightning_memsave.torch_internals.collectives import ExchangesError, NoExchange
from lightning_memsave.torch_internals.sharded_parameters import end_forward, free_gathered, has_fake_parameters

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-6}
"""Fraction of a loss, or of a term of it, that its parts may be off.

With 190 architectures of transformers it was at most 2e-7 on a CPU, and 1e-5 and more where samples are related.
"""
_ELSEWHERE = 10.0  # times as much on other devices, whose kernels may round otherwise for other numbers of samples
_OF_GRADIENTS = 10.0  # times as much of gradients; of means it was 1e-7 at most
_WITH_LESS_MEMORY = 3  # a part of one and one of two


@dataclass(frozen=True)
class Answer:
    """The rules that the loss obeys in this batch, or why there is none; neither when the batch does not tell."""

    rules: tuple[ReductionRule, ...] = ()
    why_not: str = ""
    has_failed: bool = False
    """Whether the loss could not be evaluated, which says nothing about other samples."""
    is_of_this_batch: bool = False
    """Whether another batch may have a rule."""
    explained_by: tuple[ReductionRule, ...] = ()
    """Rules under which the loss of a part has no value."""
    is_exchanged: bool = False
    """Whether the step exchanges something with other processes."""
    holds_here_alone: bool = False
    """Whether all samples are the same one, of which any weights make the mean: another batch may have other rules."""


class _Mode(NamedTuple):
    """How the step is evaluated."""

    is_training: bool
    moves_weights: bool
    enlarges_weights: bool = False


_MODES = (
    *(_Mode(True, True), _Mode(False, True), _Mode(False, False)),
    *(_Mode(True, True, True), _Mode(False, True, True)),
)


_Found = tuple[Answer, bool]
"""An answer, and whether it is the last one."""


def ask(
    trainer: L.Trainer,
    kwargs: dict[str, Any],
    num_samples: int,
    config: Microbatching,
    agreed: Callable[[_Found], _Found] | None = None,
) -> Answer:
    """Return which rules the loss obeys: means and a sum, with the weights that `config` gives or the batch allows.

    Where memory runs out, fewer samples are taken.

    Args:
        trainer: Lightning's trainer, inside its fit loop.
        kwargs: the arguments of `training_step`, `batch` among them.
        num_samples: how many samples the batch has.
        config: tells how many samples fit at once, and how to cut the batch.
        agreed: makes what is found the same in all processes, where they wait for each other in every forward: else one
            would evaluate the loss again, and the others would not.
    """
    if has_fake_parameters(trainer.lightning_module):  # a prediction, which flags it
        return Answer((ReductionRule("mean", config.weight_fn),))
    if agreed is None and config.split_fn is None:
        try:
            return _asked(trainer, kwargs, num_samples, config, FEWEST_SAMPLES)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
        return _asked(trainer, kwargs, num_samples, config, _WITH_LESS_MEMORY)
    return _asked(trainer, kwargs, num_samples, config, FEWEST_SAMPLES, agreed)


def _asked(
    trainer: L.Trainer,
    kwargs: dict[str, Any],
    num_samples: int,
    config: Microbatching,
    fewest: int,
    agreed: Callable[[_Found], _Found] | None = None,
) -> Answer:
    module, batch = trainer.lightning_module, kwargs["batch"]
    answer = Answer(why_not="the loss cannot be evaluated.", has_failed=True)
    with without_a_trace(trainer, module, batch) as start:
        subject = Subject.of(batch, num_samples, config, fewest)
        widens = agreed is None and not _weights_of(module) <= _TOLERANCE.keys()
        is_thorough = agreed is None and config.split_fn is None  # by which the whole batch is cut here
        no_exchange = NoExchange()
        for mode in _MODES:
            evaluation = _Evaluation(trainer, kwargs, mode, start, no_exchange)
            found = _found(evaluation, subject, config, num_samples, is_thorough, agreed is not None)
            if widens:  # afterwards, so that what a step keeps for later (`lru_cache`) has its own dtype
                in_32 = _Evaluation(trainer, kwargs, mode, start, no_exchange, widens)
                found = _found_in_float32(in_32, subject, config, num_samples, is_thorough) or found
            if no_exchange.found is not None:  # which answers the question, in the middle of a forward pass
                end_forward(module)
                found = found[0], True
            answer, is_last = found if agreed is None else agreed(found)
            if is_last:
                break
    free_gathered(module)  # no backward follows
    return answer if no_exchange.found is None else Answer(why_not=EXCHANGES, is_exchanged=True)


_OTHERS_WAIT = (
    "memsave: the error came where `training_step` ran on a few samples, to find out how the loss depends on them. The "
    "others may wait there, so this process cannot go on without it. `microbatch=False` runs batches whole."
)
EXCHANGES = (
    "`training_step` exchanges something with other processes, which may cut their batches into other numbers of parts."
)


def _found_in_float32(
    evaluation: _Evaluation, subject: Subject, config: Microbatching, num_samples: int, is_thorough: bool
) -> _Found | None:
    """Return what is found; `None` where the step takes 16 bits alone, or there is no room for a weight in 32."""
    try:
        found = _found(evaluation, subject, config, num_samples, is_thorough)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    else:
        return None if found[0].has_failed else found
    free_memory()
    return None


def _found(
    evaluation: _Evaluation,
    subject: Subject,
    config: Microbatching,
    num_samples: int,
    is_thorough: bool,
    waits: bool = False,
) -> _Found:
    batch, mode = evaluation.batch, evaluation.mode
    try:
        whole, *parts = evaluation.of(subject)
    except Exception as error:  # whatever user code raises outside its usual mode
        if is_out_of_memory(error):  # says nothing about the loss
            raise
        if waits and not isinstance(error, ExchangesError):
            add_note(error, _OTHERS_WAIT)
            raise
        why_not = f"the loss cannot be evaluated ({type(error).__name__}: {error})."
        return Answer(why_not=why_not, has_failed=True), False
    rules, tolerance = evaluation.rules(batch, config), evaluation.tolerance
    losses = Losses(whole.loss, tuple(part.loss for part in parts), tolerance)
    if not losses.are_finite:
        if not math.isfinite(whole.loss) or evaluation.has_skipped:
            return Answer(), False
        why_not = "the loss of some of its samples is not finite, where that of all is."
        explaining = tuple(rule for rule in rules if not all(subject.weights(rule)))  # a mean over nothing
        answer = Answer(why_not=why_not, is_of_this_batch=True, explained_by=explaining)
        return answer, evaluation.is_sure or not mode.is_training
    answer = _judge(losses, _terms(whole, parts, losses), subject, rules, mode)
    answer = dataclasses.replace(answer, rules=tuple(_as_counted(list(answer.rules), subject, parts)))
    if answer.rules and is_thorough:
        assert config.size != "auto", "who cuts knows the size"
        if config.size > 1:  # the graph takes no more than that of a microbatch
            few = Subject.of(batch, num_samples, config.of_size(1), min(FEWEST_SAMPLES, config.size))
            answer = _with_gradients(answer, evaluation, few)
        answer = _over_all(answer, evaluation, Subject.all_of(batch, num_samples, config))
    if not answer.rules and not answer.why_not and losses.fit_mean([n for _, n in subject.parts]):
        same = config.split_fn is None and are_equal(batch, num_samples)
        if same and not losses.fit_sum():
            answer = Answer((ReductionRule("mean"),), holds_here_alone=True)
    return answer, bool(answer.rules or (answer.why_not and (evaluation.is_sure or not mode.is_training)))


class _Evaluated(NamedTuple):
    """What a step has computed."""

    loss: float
    terms: tuple[Term, ...]
    """Terms that the loss is the sum of."""
    num_labels: int | None
    """Number of labels that the loss has a mean over, as far as that is known."""
    inputs: list[InputGradient]
    """Inputs of the last layers, where gradients were asked for."""


def _terms(whole: _Evaluated, parts: Sequence[_Evaluated], losses: Losses) -> list[Losses]:
    """Return the terms of a loss apart, where it has several; not those of 16 bits, whose rounding hides them.

    Each as its function made it, before it was scaled: numbers in there are taken to be of order 1.
    """
    kinds = {tuple(term.function for term in each.terms) for each in (whole, *parts)}
    if losses.tolerance is None or len(kinds) > 1 or len(whole.terms) < 2:
        return []
    found = []
    for number, term in enumerate(whole.terms):
        first, *rest = (each.terms[number].value / (term.scale or 1.0) for each in (whole, *parts))
        scale = max(1.0, abs(first), *map(abs, rest)) / max(abs(first), *map(abs, rest), 1e-30)
        found.append(Losses(first, tuple(rest), losses.tolerance * scale))
    return [each for each in found if each.are_finite]


def _as_counted(rules: list[ReductionRule], subject: Subject, parts: Sequence[_Evaluated]) -> list[ReductionRule]:
    """Return those that weigh parts as the loss function has counted their labels; all where none do.

    Losses that are nearly equal hardly tell shifted labels from others.
    """
    counts = [part.num_labels for part in parts]
    if None in counts:
        return rules
    return [rule for rule in rules if _shares(subject.weights(rule)) == _shares(counts)] or rules


def _shares(weights: Sequence[Any]) -> list[Fraction]:
    """Return fractions that add up to 1; none of nothing."""
    total = sum(map(Fraction, weights))
    return [Fraction(weight) / total for weight in weights] if total else []


def _with_gradients(answer: Answer, evaluation: _Evaluation, subject: Subject) -> Answer:
    """Return an answer with the rules that gradients obey, or why none does; as it is where gradients do not tell."""
    found = [] if evaluation.tolerance is None else evaluation.gradients_of(subject)
    if not found:
        return answer
    assert evaluation.tolerance is not None, "as above"
    counted = [part for part in subject.parts if part[1]]
    sizes, fitting = [int(n) for _, n in counted], []
    for rule in answer.rules:
        compared = compare(found[0], found[1:], sizes, rule.weights(counted))
        if compared is None:
            return answer
        if compared.of_gradients <= _OF_GRADIENTS * max(evaluation.tolerance, compared.of_inputs):
            fitting.append(rule)
    if fitting:
        return dataclasses.replace(answer, rules=tuple(fitting))
    return Answer(
        why_not="the gradient of a batch is neither the mean nor the sum of the gradients of its parts, although its "
        "loss is nearly so (a ratio of sums over the batch, as of Dice or class weights, or a term without a value)."
    )


def _over_all(answer: Answer, evaluation: _Evaluation, subjects: Iterable[Subject]) -> Answer:
    """Return an answer with the rules that all samples of the batch obey, as many at a time as fit.

    A class that is rare, or two samples of one class, may not be among the few samples that were looked at first.
    """
    for subject in subjects if answer.rules and evaluation.tolerance is not None else ():
        try:
            whole, *parts = evaluation.of(subject)
        except Exception as error:  # whatever user code raises
            if is_out_of_memory(error):
                free_memory()
            return answer
        losses = Losses(whole.loss, tuple(part.loss for part in parts), evaluation.tolerance)
        if not losses.are_finite or len(parts) < len(subject.parts):
            continue  # nothing counts in one of the parts
        rules = tuple(rule for rule in answer.rules if losses.fit(rule, subject.weights(rule)))
        answer = dataclasses.replace(answer, rules=rules) if rules else Answer(why_not=_NEITHER.format(""))
    return answer


_NEITHER = (
    "the loss of a batch is neither the mean nor the sum of the losses of its parts{} (in-batch negatives, class "
    "weights, or a mean over something else than samples)."
)


def _judge(
    losses: Losses, terms: Sequence[Losses], subject: Subject, rules: list[ReductionRule], mode: _Mode
) -> Answer:
    means = losses.best(rules, subject.weights)
    for term in terms:
        fitting = term.best(means, subject.weights)
        means = [rule for rule in means if rule in fitting]
    has_sums = losses.fit_sum() and all(term.fit_sum() for term in terms)
    sums = [rule for rule in rules if rule.reduction == "sum" and has_sums]
    if means and (sums or not losses.lie_apart):
        return Answer()
    if means or sums:
        return Answer((*means, *sums))
    return Answer(why_not=_NEITHER.format(" in training mode" if mode.is_training else ""))


class _Evaluation:
    """The losses of one subject in one mode.

    Args:
        trainer: Lightning's.
        kwargs: of `training_step`.
        mode: of the module.
        start: what each evaluation begins with.
        no_exchange: raises where the step exchanges something with other processes.
        widens: whether 16-bit weights are computed with as float32.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        kwargs: dict[str, Any],
        mode: _Mode,
        start: BatchStart,
        no_exchange: NoExchange,
        widens: bool = False,
    ) -> None:
        self._no_exchange = no_exchange if trainer.world_size > 1 else contextlib.nullcontext()
        self._trainer, self._kwargs, self.mode, self._start = trainer, kwargs, mode, start
        self.module: L.LightningModule = trainer.lightning_module
        self._dtypes, self._widens = {torch.float32} if widens else _weights_of(self.module), widens
        self._is_wide = self._dtypes <= _TOLERANCE.keys()
        """Whether all that computes may do so with 32 bits or more."""
        self._seen, self._last_layers = LossTerms(), LastLayers(self.module)
        self._differentiates = False
        self.has_skipped = False
        """Whether the step has returned no loss, as Lightning allows."""
        self.is_sure = True
        """Whether all random numbers were told to be a sample's own."""

    @property
    def batch(self) -> Batch:
        """Return the whole batch."""
        return self._kwargs["batch"]

    def of(self, subject: Subject) -> list[_Evaluated]:
        """Evaluate the whole and its parts."""
        sizes = [int(n) for _, n in subject.parts]
        starts = [0, *itertools.accumulate(sizes[:-1])]
        counted = [(p, s, n) for (p, _), s, n in zip(subject.parts, starts, sizes, strict=True) if n]
        with contextlib.ExitStack() as stack:
            if self.mode.moves_weights:
                stack.enter_context(moved(self.module))
            if self.mode.enlarges_weights:
                stack.enter_context(enlarged(self.module))
            subjects = ((subject.whole, 0, sum(sizes)), *counted)
            run = _with_graph if self._differentiates else _without_graph
            return [run(functools.partial(self._loss_of, *each, sum(sizes))) for each in subjects]

    def gradients_of(self, subject: Subject) -> list[list[InputGradient]]:
        """Return gradients of the whole and of its parts by the inputs of the last layers; none where that fails."""
        # A graph would keep the logits of a wide head; and where one sample does not fit, nothing is left for a graph.
        fallbacks = session_of(self._trainer).fallbacks
        if self._last_layers.are_hooked or has_wide_head(self.module) or fallbacks.tiling is not None:
            return []
        self._differentiates = True
        try:
            return [each.inputs for each in self.of(subject)]
        except Exception as error:  # whatever user code raises where layers are given no graph
            if is_out_of_memory(error):
                free_memory()
            return []
        finally:
            self._differentiates = False

    def rules(self, batch: Batch, config: Microbatching) -> list[ReductionRule]:
        """Return the rules that come into question."""
        if config.weight_fn is not None:
            return [ReductionRule("mean", config.weight_fn)]
        return rules_for(batch, self._seen.ignored)

    def _loss_of(self, part: Batch, start: int, num_samples: int, num_all: int) -> _Evaluated:
        trainer, module = self._trainer, self.module
        self._start.restore()
        free_gathered(module)  # as backward has, before a step
        self._seen.begin()
        module._current_fx_name = "training_step"
        set_mode(module, self.mode.is_training)
        # A copy, as the parts are views of the batch, which a step may change.
        arguments = tuple({**self._kwargs, "batch": cloned(part)}.values())
        kind = trainer.strategy.root_device.type
        with contextlib.ExitStack() as stack:
            stack.enter_context(trainer.precision_plugin.train_step_context())
            if torch.is_autocast_enabled(kind) and self._is_wide:  # else autocast is what brings dtypes together
                stack.enter_context(torch.autocast(kind, enabled=False))
            if not (self._widens or self._differentiates):
                stack.enter_context(session_of(trainer).scopes.evaluating(trainer))
            stack.enter_context(ParametersKept(module))
            stack.enter_context(self._no_exchange)
            noise = stack.enter_context(SampleNoise(start, num_samples, num_all))
            stack.enter_context(self._seen)
            if self._differentiates:
                stack.enter_context(in_tile())  # whose test would run
                stack.enter_context(self._last_layers.apart())
            stack.enter_context(WideNumbers() if self._widens else contextlib.nullcontext())
            # Not through DDP, whose forward exchanges buffers; shards need their strategy.
            wrapped = trainer.strategy.model
            direct = wrapped is module or isinstance(wrapped, nn.parallel.DistributedDataParallel)
            output = (module if direct else trainer.strategy).training_step(*arguments)
            loss, num_drawn = _loss_in(output), noise.num_drawn
            inputs = self._last_layers.gradients(loss) if self._differentiates else []
            if noise.num_drawn > num_drawn:  # in a forward pass that backward makes again: other numbers
                inputs = []
        self.has_skipped |= (output.get("loss") if isinstance(output, dict) else output) is None
        self.is_sure &= noise.is_sure
        self._dtypes.add(loss.dtype)
        found = _Evaluated(float(loss.detach()), self._seen.of(loss), self._seen.num_labels(loss), inputs)
        self._seen.begin()
        return found

    @property
    def tolerance(self) -> float | None:
        """Return the tolerance for losses of these dtypes.

        Transformers' are float32 even where the model is float64.
        """
        if not self._is_wide or not self._dtypes <= _TOLERANCE.keys():
            return None
        found = max((_TOLERANCE[dtype] for dtype in self._dtypes), default=_TOLERANCE[torch.float32])
        return found if self._trainer.strategy.root_device.type == "cpu" else _ELSEWHERE * found


def _weights_of(module: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters() if p.is_floating_point()}


def _with_graph(loss_of: Callable[[], _Evaluated]) -> _Evaluated:
    with torch.compiler.set_stance("force_eager"), torch.enable_grad():
        return loss_of()


def _without_graph(loss_of: Callable[[], _Evaluated]) -> _Evaluated:
    """Run without gradients, unless that fails.

    Beyond this stance a compiled region that a mode met would stay eager.
    """
    with torch.compiler.set_stance("force_eager"):
        try:
            with torch.no_grad():
                return loss_of()
        except RuntimeError as error:  # perhaps for want of a graph
            if is_out_of_memory(error):
                raise
            return loss_of()


def _loss_in(output: Any) -> Tensor:
    """Return the loss that `training_step` returned; not a number where Lightning skips the batch."""
    loss = output["loss"] if isinstance(output, dict) else output
    if loss is None:
        return torch.tensor(math.nan, device="cpu")
    if not isinstance(loss, Tensor):
        raise TypeError("training_step returned no loss")
    return loss
