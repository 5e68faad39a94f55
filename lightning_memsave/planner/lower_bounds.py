"""What settings need at least, told from steps that were predicted under other settings.

A prediction says what is alive at each moment of a step, by category. Another setting leaves at least a part of each
category: microbatches of half the samples half of the activations, 8-bit state a quarter of the state. So every
prediction bounds what every other choice of settings needs, and the highest bound counts. How much codecs and regions
leave of activations depends on the model: a low guess is used until two predictions that differ only in that setting
show it. A search then asks only about choices whose bound does not rule them out.

Bounds are good, not proven: a choice may be ruled out that would have fitted by a little.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.planner.memory_budget import needed_bytes
from lightning_memsave.planner.search_space import Choice, Option
from lightning_memsave.saved_tensors.codec_names import HEAD
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.registry import Config
from lightning_memsave.techniques.sparsity import Sparsity
from lightning_memsave.techniques.tiling import Tiling

_ROWS = (*CATEGORIES, "update", "rest")
"""Categories of bytes; temporaries of the optimizer's update, and what a timeline does not show, apart."""
_GRADIENTS, _ACTIVATIONS, _TEMPORARY = (_ROWS.index(name) for name in ("gradients", "activations", "temporary"))
_STATE_PARTS = {"32bit": 1.0, "8bit": 0.25, "4bit": 0.125, "offload": 0.0}
_LASTING = [_ROWS.index(name) for name in ("weights", "optimizer_state", "data")]
_LEARNED_KINDS = (ActivationCompression, Tiling, Checkpointing)
_SLACK, _NO_EFFECT = 0.8, 0.99
"""Part of what a codec or regions left of activations in one step that they leave at least in another; the part from
which on they leave all."""


class LowerBounds:
    """Bounds from below of what each choice needs.

    Args:
        kinds: of the dimensions.
        choices: to be bounded, each with a setting for every dimension; the one with all of them off among them.
        asking: bytes that some steps of a choice need beside weights, optimizer state and data.
    """

    def __init__(
        self,
        kinds: Sequence[type[Config]],
        choices: Sequence[Choice],
        asking: Callable[[Choice], int] | None = None,
    ) -> None:
        self._kinds, self._choices = tuple(kinds), choices
        self._numbers = {_key(choice): number for number, choice in enumerate(choices)}
        self._steps: list[tuple[Choice, _Step, bool]] = []  # the last: whether it shows what settings leave at least
        self._learned: dict[tuple[str, str], float] = {}
        self._logits_matter = any(HEAD in _codecs(choice) for choice in choices)
        columns = [*zip(*choices, strict=True)]
        self._options = [{option.text: option for option in column} for column in columns]
        self._places = [_places(column, options) for column, options in zip(columns, self._options, strict=True)]
        self.bytes = torch.zeros(len(choices), dtype=torch.float64, device="cpu")
        """The bound of each choice; what it needs where that is known; infinite where it cannot be used."""
        self.is_known = torch.zeros(len(choices), dtype=torch.bool, device="cpu")
        asked = [0 if asking is None else asking(choice) for choice in choices]
        self._asked = torch.tensor(asked, dtype=torch.float64, device="cpu")

    def of(self, choice: Choice) -> float:
        """Return the bound of a choice; 0 where it is none of those that are bounded."""
        number = self._numbers.get(_key(choice))
        return 0.0 if number is None else float(self.bytes[number])

    def learn(self, choice: Choice, prediction: Prediction) -> None:
        """Take note of what a choice needs, and raise the bounds of the others."""
        self._set(choice, needed_bytes(prediction))
        has_budget = any(isinstance(o.config, Checkpointing) and o.config.budget is not None for o in choice)
        self._take(choice, _Step(prediction), not has_budget)  # which regions use up

    def learn_refusal(self, choice: Choice, lowest_bytes: int | None = None) -> None:
        """Take note that a choice cannot be used; a setting that is refused alone is ruled out everywhere.

        Args:
            choice: the settings.
            lowest_bytes: what regions for a budget would come to, where that was the reason.
        """
        self._set(choice, math.inf)
        on = [number for number, option in enumerate(choice) if option.config is not None]
        if lowest_bytes is None and len(on) == 1 and _key(choice) in self._numbers:
            place = self._places[on[0]]
            has_it = place == place[self._numbers[_key(choice)]]
            self.bytes[has_it & ~self.is_known] = math.inf
            self.is_known |= has_it
        if lowest_bytes is not None and self._steps:
            first, plain, _ = self._steps[0]
            if any(isinstance(option.config, Microbatching) for option in choice):
                plain = plain.holding_gradients()
            self._take(choice, plain.with_total(lowest_bytes, self._parts_of(first, choice)), True)

    def _set(self, choice: Choice, num_bytes: float) -> None:
        if (number := self._numbers.get(_key(choice))) is not None:
            self.bytes[number], self.is_known[number] = num_bytes, True

    def _take(self, choice: Choice, step: _Step, is_least: bool) -> None:
        logits_mattered = self._logits_matter
        others = [(other, seen) for other, seen, too in self._steps if is_least and too]
        has_learned = [self._compare(choice, step, other, seen) for other, seen in others]
        self._steps.append((choice, step, is_least))
        if logits_mattered and not self._logits_matter:
            shown = [(each, seen) for each, seen, too in self._steps if too]
            has_learned += [self._compare(*one, *two) for one, two in itertools.combinations(shown, 2)]
        for each, seen, _ in self._steps if any(has_learned) else self._steps[-1:]:  # what was learned raises all
            self._raise(each, seen)

    def _compare(self, choice: Choice, step: _Step, other: Choice, seen: _Step) -> bool:
        """Note which part of activations a setting has left, if two steps differ in that alone.

        Logits of many classes may be most of what is there: a step that keeps them does not show what settings leave in
        one that keeps none.
        """
        pairs = zip(self._kinds, choice, other, strict=True)
        differ = [(kind, a, b) for kind, a, b in pairs if a.text != b.text]
        if len(differ) != 1 or differ[0][0] not in _LEARNED_KINDS:
            return False
        _, one, two = differ[0]
        sizes = sorted((step.for_samples, seen.for_samples))
        if set(_codecs(choice)) ^ set(_codecs(other)) == {HEAD} and sizes[0] > _NO_EFFECT * sizes[1]:
            self._logits_matter = False
        if self._logits_matter and not (HEAD in _codecs(choice) and HEAD in _codecs(other)):
            return False
        for old, new, before, after in ((one, two, step, seen), (two, one, seen, step)):
            part = after.for_samples / max(1.0, before.for_samples)
            part = 1.0 if part > _NO_EFFECT else _SLACK * part
            self._learned[old.text, new.text] = min(part, self._learned.get((old.text, new.text), 1.0))
        return True

    def _parts_of(self, old: Choice, new: Choice) -> Tensor:
        rows = [self._part(*each) for each in zip(self._kinds, old, new, strict=True)]
        return torch.tensor(rows, dtype=torch.float64, device="cpu").prod(0)

    def _raise(self, choice: Choice, step: _Step) -> None:
        """Raise the bounds of all choices to what one step tells of them."""
        parts = torch.ones(len(self._choices), len(_ROWS), dtype=torch.float64, device="cpu")
        holds = torch.zeros(len(self._choices), dtype=torch.bool, device="cpu")
        for number, (kind, options) in enumerate(zip(self._kinds, self._options, strict=True)):
            old, place = choice[number], self._places[number]
            rows = [self._part(kind, old, new) for new in options.values()]
            parts *= torch.tensor(rows, dtype=torch.float64, device="cpu")[place]
            if kind is Microbatching and old.config is None:
                holds = torch.tensor([new.config is not None for new in options.values()], device="cpu")[place]
        bound = step.bound(parts)
        bound = torch.where(holds, torch.maximum(bound, step.holding_gradients().bound(parts)), bound)
        bound = torch.where(self._asked > 0, torch.maximum(bound, self._asked + step.lasting(parts)), bound)
        self.bytes = torch.where(self.is_known, self.bytes, torch.maximum(self.bytes, bound))

    def _part(self, kind: type[Config], old: Option, new: Option) -> list[float]:
        """Return the part of each row of bytes that `new` leaves at least where `old` was before."""
        part = dict.fromkeys(_ROWS, 1.0)
        if kind is Microbatching:
            before, after = old.strength or 1, new.strength or 1
            part["activations"] = part["temporary"] = min(1.0, before / after)
            part["data"] = 1.0 if after >= before else 0.0  # with what is noted of each microbatch
            if new.config is None:  # the whole batch's backward makes them one after the other
                part["gradients"] = 0.0 if old.config is not None else 1.0
        elif new.text != old.text and not new.is_no_stronger_than(old):
            part |= _least_part(new.config, old.config)
            if kind in _LEARNED_KINDS and (learned := self._learned.get((old.text, new.text))) is not None:
                part["activations"] = part["temporary"] = learned  # of both together
        return list(part.values())


def _codecs(choice: Choice) -> tuple[str, ...]:
    configs = (option.config for option in choice)
    return next((each.written_out for each in configs if isinstance(each, ActivationCompression)), ())


def _key(choice: Choice) -> tuple[str, ...]:
    return tuple(option.text for option in choice)


def _places(column: Sequence[Option], options: Mapping[str, Option]) -> Tensor:
    """Return the place of each choice's setting among those of its dimension."""
    places = {text: place for place, text in enumerate(options)}
    return torch.tensor([places[option.text] for option in column], device="cpu")


def _least_part(new: Config | None, old: Config | None) -> dict[str, float]:
    """Return the parts of rows that a setting leaves at least."""
    if isinstance(new, Sparsity):
        return dict.fromkeys(("weights", "gradients", "optimizer_state", "temporary", "update"), 0.1)
    if isinstance(new, LowPrecision):
        return dict.fromkeys(_ROWS[:5], 0.5)
    if isinstance(new, ActivationCompression):
        had = old.written_out if isinstance(old, ActivationCompression) else ()
        if HEAD in new.written_out and HEAD not in had:  # of which most may be logits
            return {"activations": 0.0, "temporary": 0.0}
        return {"activations": 0.2 if new.codecs == ("exact",) else 0.05}
    if isinstance(new, Tiling) and new.dim != 0:  # the hidden layer of an MLP may be all that there is
        return {"activations": 0.02, "temporary": 0.02}
    if isinstance(new, (Checkpointing, Tiling)):
        return {"activations": 0.02, "temporary": 0.5}
    if isinstance(new, OptimizerState):
        before = _STATE_PARTS[old.format] if isinstance(old, OptimizerState) else 1.0
        part = min(1.0, _STATE_PARTS[new.format] / before) if before else 1.0
        left = {"optimizer_state": part, "update": 0.0}
        if new.placement == "host":
            left["rest"] = 0.0  # gaps between blocks of the state go with it
        return left | ({"gradients": 0.0} if new.gradients == "release" else {})
    return {}


class _Step:
    """Bytes of each row at some moments of a predicted step; without a timeline, at its peak alone."""

    def __init__(self, prediction: Prediction) -> None:
        line = prediction.timeline
        peak = {name: [size] for name, size in prediction.by_category.items()}
        moments = peak if line is None else line.by_category
        columns = torch.tensor([moments.get(name, [0]) for name in CATEGORIES], dtype=torch.float64, device="cpu")
        rest = torch.zeros(2, columns.shape[1], dtype=torch.float64, device="cpu")
        self._rows = torch.cat([columns, rest])
        if line is not None:  # after the last activations comes the update
            with_samples = self._rows[_ACTIVATIONS].nonzero()
            begin = int(with_samples[-1]) + 1 if len(with_samples) else 0
            self._rows[-2, begin:] = self._rows[_TEMPORARY, begin:]
            self._rows[_TEMPORARY, begin:] = 0
        lasting = [prediction.by_category.get(_ROWS[place], 0) for place in _LASTING]
        self._lasting = torch.tensor(lasting, dtype=torch.float64, device="cpu")
        self._rows[-1] = max(0.0, prediction.peak_bytes - float(columns.sum(0).max()))
        if prediction.cuda is not None:  # of what lies between tensors, other steps may have less
            self._rows[-1] += max(0, needed_bytes(prediction) - prediction.peak_bytes) / 2

    @property
    def for_samples(self) -> float:
        """The most that activations and temporaries of forward and backward take together."""
        return float(self._rows[[_ACTIVATIONS, _TEMPORARY]].sum(0).max())

    def bound(self, parts: Tensor) -> Tensor:
        """Return the highest total if parts of each row are left, [num_choices]."""
        return torch.amax(parts @ self._rows, dim=1)

    def lasting(self, parts: Tensor) -> Tensor:
        """Return what is left of weights, optimizer state and data, [num_choices]."""
        return parts[:, _LASTING] @ self._lasting

    def with_total(self, num_bytes: float, parts: Tensor) -> _Step:
        """Return one moment of a step whose total is known: with parts of what is here, and activations for the rest.

        Args:
            num_bytes: the total.
            parts: of each row, [num_rows].
        """
        other = copy.copy(self)
        other._lasting = parts[_LASTING] * self._lasting
        other._rows = (parts[:, None] * self._rows)[:, :1].clone()
        other._rows[_ACTIVATIONS] = 0
        other._rows[_ACTIVATIONS] = max(0.0, num_bytes - float(other._rows.sum()))
        return other

    def holding_gradients(self) -> _Step:
        """Return the same step with all gradients alive throughout, as they are from the second microbatch on."""
        other = copy.copy(self)
        other._rows = self._rows.clone()
        other._rows[_GRADIENTS] = self._rows[_GRADIENTS].max()
        return other
