"""What autograd holds instead of tensors: an entry for each storage, and a handle for each tensor kept of it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_memsave.saved_tensors.code_rows import Rows
from lightning_memsave.saved_tensors.encodings import Encoding, Fidelity, Identity, IntCodes, Part, Recompute, Shape
from lightning_memsave.saved_tensors.samples import Sample
from lightning_memsave.torch_internals.autograd_graph import (
    Kept,
    WeakStorage,
    check_version,
    is_held_elsewhere,
    let_go,
    storage_key,
    version_of,
    watch,
    watch_again,
)


class Recent:
    """The entry that was decoded last keeps its values until another one is: consumers that follow each other share."""

    def __init__(self) -> None:
        self._entry: weakref.ref[SavedStorage] | None = None

    def replace(self, entry: SavedStorage | None) -> None:
        """Make `entry` the one that keeps its values."""
        previous = self._entry() if self._entry is not None else None
        if previous is not None:
            previous.decoded = None
        self._entry = None if entry is None else weakref.ref(entry)


class SavedStorage:
    """One storage that backward needs, in one encoding. It dies, and frees its bytes, with its last handle."""

    __slots__ = (
        "__weakref__",
        "_recent",
        "_version",
        "_watched",
        "decoded",
        "encoding",
        "fidelity_of_values",
        "has_gradient",
        "interval",
        "is_coupled",
        "is_guarded",
        "keeps_sign",
        "made_as",
        "need",
        "nonlinear",
        "normalised_by",
        "num_uses",
        "original",
        "part",
        "plain_bytes",
        "rows",
        "storage_key",
    )

    def __init__(self, tensor: Tensor, recent: Recent) -> None:
        self._watched = watch(tensor)
        self._version = tensor._version
        self._recent = recent
        self.encoding: Encoding = Identity(self._watched)
        self.decoded: Tensor | None = None
        self.has_gradient = tensor.requires_grad
        """Whether it is a result that is differentiated, and no mask or noise."""
        self.need = Fidelity.SHAPE
        """The most that any consumer needs."""
        self.interval: tuple[float, float] | None = None
        """The mask that is needed asks whether values lie inside it; `None`: whether they are positive."""
        self.part: Part | None = None
        """What is needed instead of values, where that is enough."""
        self.fidelity_of_values = Fidelity.INT4
        """Fidelity of that part, or of the values where these are needed after all."""
        self.keeps_sign = False
        """Whether a consumer of a lossy copy reads signs."""
        self.is_guarded = False
        """Whether it keeps more bits than its consumers asked for."""
        base = tensor if tensor._base is None else tensor._base
        self.made_as = base.shape, base.stride()
        """Shape and strides of the tensor that the storage was made for."""
        self.rows: Rows | None = None
        """Rows in which its consumers bear noise; `None`: in any."""
        self.normalised_by: list[int] = []
        """The calls of normalisations that read it, by number."""
        self.nonlinear: frozenset[str] = frozenset()
        """Functions that read it, whose gradients are not linear in it."""
        self.num_uses, self.is_coupled = 0, False
        """How often a lossy copy is read, and whether that goes on into a product with something else."""
        self.original = WeakStorage(tensor)
        self.storage_key = storage_key(tensor)
        self.plain_bytes = tensor.untyped_storage().nbytes()

    @property
    def is_raw(self) -> bool:
        """Whether the bytes themselves are held."""
        return isinstance(self.encoding, Identity)

    @property
    def is_lossy(self) -> bool:
        """Whether it is kept in an encoding with noise."""
        return Fidelity.MASK < self.encoding.fidelity < Fidelity.EXACT

    @property
    def need_of_values(self) -> Fidelity:
        """How faithful a code is that can be read as values: one of a derivative may still become one of its input."""
        is_open = self.need == Fidelity.PART and self.is_raw and not isinstance(self.part, Sample)
        return self.fidelity_of_values if is_open else self.need

    @property
    def needs_values(self) -> bool:
        """Whether values are read, if only some, and not a sign, a shape or a derivative."""
        return self.need > Fidelity.PART or (self.need == Fidelity.PART and isinstance(self.part, Sample))

    def joint_need(self, need: Fidelity, part: Part | None) -> Fidelity:
        """Return what one more consumer needs in view of the parts that are enough for it, and for others.

        Args:
            need: of values.
            part: that is enough for it, if one is.
        """
        bears_mask = isinstance(part or self.part, Sample) and self.interval is None  # a sample keeps signs beside
        if part is not None:
            if self.need == Fidelity.SHAPE or (self.need == Fidelity.MASK and bears_mask):
                self.part, self.fidelity_of_values = part, need
                return Fidelity.PART
            if self.need == Fidelity.PART and self.part == part:
                return Fidelity.PART
        if self.need == Fidelity.PART and need != Fidelity.SHAPE:
            return Fidelity.PART if need == Fidelity.MASK and bears_mask else max(need, self.fidelity_of_values)
        return need

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether somebody else keeps the bytes alive as well, so that holding them costs nothing."""
        return self.is_raw and is_held_elsewhere(self._watched)

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has changed the storage in place since it was kept."""
        return self._watched._version == self._version

    def check(self, size: torch.Size) -> None:
        """Raise `RuntimeError` when the storage was changed in place since it was kept."""
        check_version(self._watched, self._version, size)

    def become(self, encoding: Encoding) -> None:
        """Hold another encoding, and let the bytes go."""
        self.encoding, self.decoded = encoding, None
        let_go(self._watched)

    def become_raw(self, storage: torch.UntypedStorage) -> None:
        """Hold the bytes again."""
        watch_again(self._watched, storage)
        self.encoding, self.decoded = Identity(self._watched), None

    def raw(self, handle: SavedTensor) -> Tensor:
        """Return a tensor of the bytes that are held."""
        watched = self._watched
        if (watched.shape, watched.stride(), watched.storage_offset()) == (handle.size, handle.stride, handle.offset):
            return watched.detach()
        return watched.as_strided(handle.size, handle.stride, handle.offset)

    def flat(self) -> Tensor:
        """Return all elements of the storage, [n]."""
        if self.is_raw:
            return self.encoding.flat()
        if self.decoded is None:
            decoded = self.encoding.flat()
            self._recent.replace(self)
            self.decoded = decoded
        return self.decoded


class SavedTensor(Kept):
    """One tensor of an entry, as a consumer kept it: shape, strides and offset are restored exactly."""

    __slots__ = ("__weakref__", "entry", "offset", "producer", "size", "stride")

    def __init__(self, entry: SavedStorage, tensor: Tensor) -> None:
        self.entry = entry
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.producer = None if tensor.grad_fn is None else tensor.grad_fn.name()

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place since it was kept, as autograd itself would.
        """
        entry = self.entry
        if not entry.is_unchanged:
            entry.check(self.size)
        if entry.is_raw:
            return entry.raw(self)
        if (
            isinstance(entry.encoding, Shape)
            and (cheap := entry.encoding.without_memory(self.size, self.stride)) is not None
        ):
            return cheap
        return entry.flat().as_strided(self.size, self.stride, self.offset)


class Passed(Kept):
    """A tensor that the store leaves alone: a parameter, something small, a subclass."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), version_of(tensor)

    def get(self) -> Tensor:
        """Return the tensor; raises as `SavedTensor.get` does."""
        if version_of(self._tensor) != self._version:
            check_version(self._tensor, self._version)
        return self._tensor


def codes_behind(entry: SavedStorage) -> set[SavedStorage | IntCodes]:
    """Return what an entry's values come from.

    Itself, or entries with bytes or codes of their own, and codes of chains.
    """
    return codes_of(entry.encoding.needs) if isinstance(entry.encoding, Recompute) else {entry}


def codes_of(needs: Sequence[object]) -> set[SavedStorage | IntCodes]:
    """Return what the values of all that a recomputation needs come from."""
    codes: set[SavedStorage | IntCodes] = set()
    for need in needs:
        if isinstance(need, SavedTensor):
            codes |= codes_behind(need.entry)
        elif isinstance(need, IntCodes):
            codes.add(need)
    return codes


def kept_bytes(entries: list[SavedStorage]) -> int:
    """Return bytes that entries keep alive, each storage once."""
    tensors = [tensor for entry in entries for tensor in entry.encoding.payload()]
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
