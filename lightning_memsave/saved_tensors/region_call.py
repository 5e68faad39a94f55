"""One call of a module in a region: what it depended on, so that it can be made again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memsave.core.errors import RegionError
from lightning_memsave.saved_tensors.arguments import Arguments
from lightning_memsave.saved_tensors.buffers import Buffers
from lightning_memsave.saved_tensors.kept_noise import tile_around
from lightning_memsave.saved_tensors.module_state import Attributes, CallParameters, Surroundings
from lightning_memsave.saved_tensors.parameter_edits import RepeatedEdits
from lightning_memsave.saved_tensors.placeholders import Fingerprints
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.saved_tensors.region_members import Member
from lightning_memsave.torch_internals.autograd_graph import version_of


class EditsInputError(RegionError):
    """A region changed what it was given, so it cannot be run again from it."""


class ChangesAttributeError(RegionError):
    """A region changed an attribute that cannot be put back.

    Args:
        module: what changed it, by name and class.
        attribute: its name.
    """

    def __init__(self, module: str, attribute: str) -> None:
        super().__init__(f"A checkpointed module, {module}, changes `{attribute}`, which cannot be put back.")
        self.attribute = attribute


class RegionCall:
    """One call, as it can be made again.

    Args:
        member: what `module` remembers.
        module: is about to be called.
        given: its arguments, whose leaves stay until the call ends.
    """

    def __init__(self, member: Member, module: nn.Module, given: Arguments) -> None:
        self.member, self.module, self.given = member, module, given
        self._versions = [version_of(tensor) for tensor in given.tensors]
        owners = list(module.named_modules())
        self.weights = CallParameters(owners, is_checked=member.is_checked)
        devices = {tensor.device for tensor in given.tensors} | self.weights.devices
        self._buffers = Buffers(owners, member.changing.get(module.training), spares=member.spares)
        self._attributes = Attributes(owners, looks_inside=member.is_checked)
        self._surroundings = Surroundings(devices)
        private = [*member.generators(module), *given.generators()]
        self._before: Randomness | None = Randomness(devices, private)
        self._tile = tile_around()
        self.devices, self.private = self._before.devices, private  # whose generators it may draw from
        self.fingerprints = Fingerprints(module.buffers()) if member.is_checked else None
        self.outputs: list[tuple[int, weakref.ref[Tensor], int]] = []
        """Leaf, tensor, version."""
        self.edited: dict[str, Tensor] = {}
        """Trained parameters that the call has edited in place, by name."""
        self._repeated: RepeatedEdits | None = None

    def end(self, args: Any, kwargs: Any, output: Any) -> tuple[list[int], tuple[Randomness, Randomness] | None]:
        """Note what the call returned and changed.

        Returns:
            The leaves of its arguments that it has no use for, and the generators before and after, if numbers were
            drawn.

        Raises:
            EditsInputError: it has edited its input.
            ChangesAttributeError: it has changed a parameter, or an attribute that cannot be put back.
        """
        if self.fingerprints is not None:
            self.fingerprints.finish()
        if self._versions != [version_of(tensor) for tensor in self.given.tensors]:
            raise EditsInputError(type(self.module).__name__)
        # The first call may fill caches; what is set again in the second one is no cache.
        if (name := self._attributes.changed(but_filled=self.member.num_calls == 0)) is not None:
            raise ChangesAttributeError(f"`{self.member.name}` ({type(self.module).__name__})", name)
        self._check_parameters()
        unused = self.given.untouched_in_caches(args, kwargs)
        self.outputs = [
            (number, weakref.ref(leaf), version_of(leaf))
            for number, leaf in enumerate(leaves_of(output))
            if isinstance(leaf, Tensor)
        ]
        self.weights.note()
        if self.module.training in self.member.changing:
            self._buffers.end_call()
        else:
            self.member.changing[self.module.training] = self._buffers.changed()
        before, self._before = self._before, None
        assert before is not None, "it ends once"
        after = before.now()
        return unused, None if after.equals(before) else (before, after)

    def _check_repeated(self, repeated: RepeatedEdits) -> None:
        names, self._repeated = repeated.take(), RepeatedEdits(self.edited)
        if names:
            named, kind = ", ".join(f"`{name}`" for name in names), type(self.module).__name__
            error = RegionError(
                f"A checkpointed module, `{self.member.name}` ({kind}), edits in place, each time that it runs, the "
                f"parameters {named}. Leave it out of checkpointing."
            )
            error.edited = tuple(names)
            raise error

    def _check_parameters(self) -> None:
        """Refuse a call that changes parameters, but for edits of trained ones.

        Those may be what a repetition sets again (initial values, a clamp), which the comparison with it tells.
        """
        edited, replaced = self.weights.edited(), self.weights.replaced() if self.member.is_checked else ()
        for name in (*(name for name, p in edited.items() if not p.requires_grad), *replaced):
            raise ChangesAttributeError(f"`{self.member.name}` ({type(self.module).__name__})", name)
        self.edited = {f"{self.member.name}.{name}": p for name, p in edited.items()}
        if edited:
            self._repeated = RepeatedEdits(self.edited)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore everything as it was before the call.

        Raises:
            RegionError: the repetition has edited a trained parameter once more, to other values.
        """
        try:
            with (
                self._surroundings.again(),
                self.weights.again(),
                self._buffers.again(),
                self._attributes.again(),
                self._tile(),
            ):
                yield
        finally:  # also where the repetition stops before its end
            if self._repeated is not None:
                self.weights.note()  # of its own edits: another repetition may follow
                self._check_repeated(self._repeated)


def leaves_of(output: Any) -> list[Any]:
    """Return what a call returned, taken apart."""
    return [output] if isinstance(output, Tensor) else tree_leaves(output)
