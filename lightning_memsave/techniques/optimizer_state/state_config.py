"""The settings of lean optimizer state, and the parameters whose state they leave as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import check_unused, setting_error
from lightning_memsave.core.selection import Selector, as_selectors, is_norm, select

FirstMoment = Literal["8bit", "5bit", "4bit", "fp8", "32bit"]
SecondMoment = Literal["8bit", "4bit", "fp8", "32bit", "factored"]
Placement = Literal["device", "host", "paged"]
Projection = Literal["galore", "apollo"]
Gradients = Literal["keep", "release", "into-state"]
NormClipping = Literal["two-pass", "previous-step"]
Backend = Literal["auto", "bitsandbytes", "own"]
Checkpoint = Literal["plain", "compact"]

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "8bit": {},
    "4bit": {"first_moment": "4bit"},
    "fp8": {"first_moment": "fp8"},
    "factored": {"first_moment": "8bit", "second_moment": "factored"},
    "4bit-factored": {"first_moment": "4bit", "second_moment": "factored"},
    "5bit-factored": {"first_moment": "5bit", "second_moment": "factored"},
    "lowrank": {"projection": "galore"},
    "apollo": {"projection": "apollo"},
    "offload": {"placement": "host"},
    "paged": {"placement": "paged"},
    "32bit": {"first_moment": "32bit"},
}
"""Formats of state, as `OptimizerState.format` names them, with the settings that ask for each."""
SHORTHANDS = {"8bit": "8bit", "4bit": "4bit", "lean": "5bit-factored", "offload": "offload", "paged": "paged"}
"""Formats by the shorthand that `MemSave(optimizer_state=...)` takes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Settings of lean optimizer state.

    Raises:
        ValueError: an unknown choice, settings that change nothing or exclude each other, or a negative size.
    """

    first_moment: FirstMoment | None = None
    """How first moments (momentum) are kept: codes of 8, 5 or 4 bits, floats of 8 bits, or `"32bit"`, as the optimizer
    does. `None`: `"8bit"`, or `"32bit"` with another `placement` or a `projection`."""
    second_moment: SecondMoment | None = None
    """How second moments are kept: as first ones (`None`), or `"factored"`: means of rows and columns alone."""
    placement: Placement = "device"
    """Place of the state. `"host"`: host memory, exact. `"paged"`: memory that CUDA moves to the host when it must."""
    projection: Projection | None = None
    """Subspace whose moments are kept: the gradient's largest directions (`"galore"`), or a random one (`"apollo"`)."""
    gradients: Gradients = "keep"
    """`"release"`: each parameter steps inside of backward and frees its gradient, so that there is one at a time.
    `"into-state"`: each backward adds its gradients to the moments and frees them; microbatches need no gradients."""
    norm_clipping: NormClipping | None = None
    """When `"release"` finds the norm that `Trainer(gradient_clip_val=...)` clips by. `"two-pass"`: in a forward and a
    backward of its own, exact; they take their time. `"previous-step"`: it is that of the step before."""
    min_size: int = 4096
    """Parameters with fewer elements keep float32 state, on their device."""
    keep_embeddings_32bit: bool = True
    """Embedding tables keep float32 state, and so does what a model's `get_output_embeddings()` returns, as the heads
    of `transformers` for language; state that is only elsewhere is float32 anyway."""
    keep_norms_32bit: bool = True
    """Parameters of normalisation layers keep float32 state."""
    keep_32bit: tuple[Selector, ...] = ()
    """Further modules whose parameters keep float32 state, such as other heads: classes, patterns (`*`, `?`) for names
    of modules or of their classes, or `callable(name, module)`."""
    backend: Backend = "auto"
    """Backend of `"8bit"`; `"auto"`: bitsandbytes for parameters on CUDA where it has the optimizer, else our codes."""
    checkpoint: Checkpoint = "plain"
    """`"plain"`: float32 moments, which load anywhere. `"compact"`: codes, so that saving takes no memory."""
    rank: int = 128
    """Rank of the subspace of a `projection`."""

    def __post_init__(self) -> None:
        for name, value, choices, remedy in (
            ("OptimizerState.first_moment", self.first_moment or "8bit", FirstMoment, 'The default is "8bit".'),
            ("OptimizerState.second_moment", self.second_moment or "8bit", SecondMoment, "Leave it out."),
            ("OptimizerState.placement", self.placement, Placement, 'The default is "device".'),
            ("OptimizerState.projection", self.projection or "galore", Projection, "Leave it out."),
            ("OptimizerState.gradients", self.gradients, Gradients, 'The default is "keep".'),
            ("OptimizerState.norm_clipping", self.norm_clipping or "two-pass", NormClipping, "Leave it out."),
            ("OptimizerState.backend", self.backend, Backend, 'The default is "auto".'),
            ("OptimizerState.checkpoint", self.checkpoint, Checkpoint, 'The default is "plain".'),
        ):
            if value not in get_args(choices):
                listed = ", ".join(map(repr, get_args(choices)))
                raise setting_error(name, f"must be one of {listed}", value, remedy)
        self._check_format()
        object.__setattr__(self, "keep_32bit", as_selectors("OptimizerState.keep_32bit", self.keep_32bit))
        self._check_pairs()
        if self.min_size < 0:
            raise setting_error("OptimizerState.min_size", "must not be negative", self.min_size, "Use 0 for all.")
        if self.rank < 1:
            raise setting_error("OptimizerState.rank", "must be positive", self.rank, "The default is 128.")
        if not self.has_rank:
            check_unused(self, "rank", "a `projection`")
        if self.gradients != "release":
            check_unused(self, "norm_clipping", '`gradients="release"`')
        if self.format in ("lowrank", "apollo", "offload", "paged", "32bit"):
            check_unused(self, "checkpoint", "formats of codes or means")

    def _check_format(self) -> None:
        if self._settings not in map(_whole, FORMATS.values()):
            first, second, placement, projection = self._settings
            raise setting_error(
                "OptimizerState",
                "must keep second moments as first ones, or factored with first ones of 8, 5 or 4 bits; "
                "and moments in 32 bits with another placement or a projection, one of the two",
                f"first_moment={first!r}, second_moment={second!r}, {placement=}, {projection=}",
                'For example `OptimizerState(first_moment="4bit", second_moment="factored")`.',
            )

    @property
    def _settings(self) -> tuple[str, str, str, str | None]:
        return _whole(vars(self))

    @property
    def format(self) -> str:
        """Name of how state is kept: a key of `FORMATS`."""
        return next(name for name, settings in FORMATS.items() if _whole(settings) == self._settings)

    def _check_pairs(self) -> None:
        if self.format == "32bit" and self.gradients == "keep":
            raise setting_error(
                "OptimizerState",
                "must change something",
                'first_moment="32bit", gradients="keep"',
                'Use `optimizer_state=False`, or `gradients="release"`.',
            )
        if self.backend != "auto" and self.format != "8bit":
            raise setting_error(
                "OptimizerState.backend",
                "is for 8-bit state only",
                self.format,
                'Use `first_moment="8bit"`, or no backend.',
            )
        of_others = self.format in ("lowrank", "apollo", "paged") or self.backend == "bitsandbytes"
        if self.gradients == "into-state" and of_others:
            raise setting_error(
                "OptimizerState.gradients",
                '="into-state" needs moments of whole gradients in a format of our own',
                f"{self.format!r} with backend={self.backend!r}",
                'Use `first_moment="8bit"` with `backend="own"`, or `gradients="release"`.',
            )

    @property
    def has_rank(self) -> bool:
        """Whether moments are those of a subspace."""
        return self.format in ("lowrank", "apollo")

    @property
    def rows(self) -> tuple[str, ...]:
        """Settings that the compatibility table knows by name."""
        named = {"release": ("gradient release",), "into-state": ("into-state gradients",)}
        compact = ("compact checkpoints",) if self.checkpoint == "compact" else ()
        norm = "norm_clipping" if self.norm_clipping else "release without norm_clipping"
        norms = (norm,) if self.gradients == "release" else ()
        return (*named.get(self.gradients, ()), *norms, *compact)

    @classmethod
    def from_shorthand(cls, value: object) -> OptimizerState:
        """Return the settings of "8bit", "4bit", "lean", "offload" or "paged"; `True` is "8bit".

        Raises:
            ValueError: another value.

        >>> OptimizerState.from_shorthand("lean") == OptimizerState(first_moment="5bit", second_moment="factored")
        True
        """
        found = SHORTHANDS.get("8bit" if value is True else str(value))
        if found is None:
            raise setting_error(
                "optimizer_state",
                f"must be one of {', '.join(map(repr, SHORTHANDS))}",
                value,
                "Use `False` for none, or `OptimizerState(...)` for other ways to keep moments.",
            )
        return cls(**FORMATS[found])


def spelled(name: str) -> str:
    """Return how a user asks for a format.

    >>> spelled("8bit"), spelled("factored")
    ('optimizer_state="8bit"', 'optimizer_state=OptimizerState(first_moment="8bit", second_moment="factored")')
    """
    shorthand = next((short for short, found in SHORTHANDS.items() if found == name), None)
    settings = ", ".join(f'{key}="{value}"' for key, value in FORMATS[name].items())
    return f'optimizer_state="{shorthand}"' if shorthand else f"optimizer_state=OptimizerState({settings})"


def _whole(settings: Mapping[str, Any]) -> tuple[str, str, str, str | None]:
    """Return how first and second moments are kept, where, and the projection, with defaults in place of `None`."""
    placement, projection = settings.get("placement", "device"), settings.get("projection")
    is_elsewhere = placement != "device" or projection is not None
    first = settings.get("first_moment") or ("32bit" if is_elsewhere else "8bit")
    return first, settings.get("second_moment") or first, placement, projection


_MUST_MOVE = ("offload",)  # whatever it belongs to, as nothing is rounded


def parameters_kept_32bit(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> set[Tensor]:
    """Return the parameters that are small, complex, or of a module that `config` names.

    Of the whole model: what is unfrozen later comes into the optimizer then (`add_param_group`).

    Raises:
        ValueError: a selector that matches no module.
    """
    parameters = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    kept: set[Tensor] = {p for p in parameters if p.numel() < config.min_size or p.is_complex()}
    for module in select("OptimizerState.keep_32bit", config.keep_32bit, model):
        kept.update(module.parameters())
    if config.format in _MUST_MOVE:
        return kept
    heads = _output_embeddings(model)
    for module in model.modules():
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module in heads
        if (is_norm(module) and config.keep_norms_32bit) or (is_embedding and config.keep_embeddings_32bit):
            kept.update(module.parameters(recurse=False))
    return kept


def _output_embeddings(model: nn.Module) -> set[nn.Module]:
    """Return the heads that the models of `transformers` inside of `model` name: one score for each row of a table."""
    named = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    return {head for find in named if callable(find) and isinstance(head := find(), nn.Module)}
