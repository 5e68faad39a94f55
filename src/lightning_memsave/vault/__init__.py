"""What is kept between forward and backward: entries, codes, recipes, offload."""

from lightning_memsave.vault.forms import Rank
from lightning_memsave.vault.vault import Tally, Vault, refuses_hooks

__all__ = ["Rank", "Tally", "Vault", "refuses_hooks"]
