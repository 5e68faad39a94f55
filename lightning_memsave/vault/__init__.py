"""What is kept between forward and backward: entries, codes, recipes, offload."""

from lightning_memsave.vault.derivatives import DifferentiatedTwiceError
from lightning_memsave.vault.forms import Rank
from lightning_memsave.vault.graph import refuses_hooks
from lightning_memsave.vault.tally import Tally
from lightning_memsave.vault.vault import Vault

__all__ = ["DifferentiatedTwiceError", "Rank", "Tally", "Vault", "refuses_hooks"]
