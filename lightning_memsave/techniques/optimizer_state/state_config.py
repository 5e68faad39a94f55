"""The settings of lean optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_memsave.core.errors import check_unused, setting_error
from lightning_memsave.core.selection import Selector, as_selectors

Format = Literal[
    "8bit",
    "4bit",
    "fp8",
    "factored",
    "4bit-factored",
    "5bit-factored",
    "lowrank",
    "apollo",
    "offload",
    "paged",
    "32bit",
]
Gradients = Literal["keep", "release", "into-state"]
Backend = Literal["auto", "bitsandbytes", "own"]
Checkpoint = Literal["plain", "compact"]


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Settings of lean optimizer state.

    Raises:
        ValueError: an unknown choice, settings that change nothing or exclude each other, or a negative size.
    """

    format: Format = "8bit"
    """How moments are stored; `"32bit"` leaves them to the optimizer."""
    gradients: Gradients = "keep"
    """`"release"`: each parameter steps inside of backward and frees its gradient, so that there is one at a time.
    `"into-state"`: each backward adds its gradients to the moments and frees them; microbatches need no gradients."""
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
    """Rank of `"lowrank"` and `"apollo"`."""

    def __post_init__(self) -> None:
        for name, value, choices, remedy in (
            ("optimizer_state", self.format, Format, "Use `False` for none."),
            ("OptimizerState.gradients", self.gradients, Gradients, 'The default is "keep".'),
            ("OptimizerState.backend", self.backend, Backend, 'The default is "auto".'),
            ("OptimizerState.checkpoint", self.checkpoint, Checkpoint, 'The default is "plain".'),
        ):
            if value not in get_args(choices):
                listed = ", ".join(map(repr, get_args(choices)))
                raise setting_error(name, f"must be one of {listed}", value, remedy)
        object.__setattr__(self, "keep_32bit", as_selectors("OptimizerState.keep_32bit", self.keep_32bit))
        self._check_pairs()
        if self.min_size < 0:
            raise setting_error("OptimizerState.min_size", "must not be negative", self.min_size, "Use 0 for all.")
        if self.rank < 1:
            raise setting_error("OptimizerState.rank", "must be positive", self.rank, "The default is 128.")
        if not self.has_rank:
            check_unused(self, "rank", 'format="lowrank" or "apollo"')
        if self.format in ("lowrank", "apollo", "offload", "paged", "32bit"):
            check_unused(self, "checkpoint", "formats of codes or means")

    def _check_pairs(self) -> None:
        if self.format == "32bit" and self.gradients == "keep":
            raise setting_error(
                "OptimizerState",
                "must change something",
                'format="32bit", gradients="keep"',
                'Use `optimizer_state=False`, or `gradients="release"`.',
            )
        if self.backend != "auto" and self.format != "8bit":
            raise setting_error(
                "OptimizerState.backend", "is of 8-bit state alone", self.format, 'Use `format="8bit"`, or no backend.'
            )
        of_others = self.format in ("lowrank", "apollo", "paged") or self.backend == "bitsandbytes"
        if self.gradients == "into-state" and of_others:
            raise setting_error(
                "OptimizerState.gradients",
                '="into-state" needs moments of whole gradients that we can add to',
                f"format={self.format!r}, backend={self.backend!r}",
                'Use `format="8bit"` with `backend="own"`, or `gradients="release"`.',
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
        return (*named.get(self.gradients, ()), *compact)

    @classmethod
    def from_shorthand(cls, value: object) -> OptimizerState:
        """`optimizer_state="8bit"` is `OptimizerState(format="8bit")`; `True` means the same."""
        return cls(format="8bit" if value is True else value)  # type: ignore[arg-type]  # checked in __post_init__
