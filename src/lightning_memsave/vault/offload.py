"""Offload: payloads leave the device's memory between forward and backward, and come back bit for bit."""

from __future__ import annotations

from typing import Protocol

from lightning_memsave.vault.forms import Form


class Offloader(Protocol):
    """Moves what a form holds somewhere else."""

    def take(self, form: Form) -> Form:
        """A form that holds the same elsewhere."""
