"""What is kept between forward and backward: entries, codes, recipes, offload."""

from lightning_memsave.saved_tensors.activation_derivatives import DifferentiatedTwiceError
from lightning_memsave.saved_tensors.byte_tally import Tally
from lightning_memsave.saved_tensors.encodings import Rank
from lightning_memsave.saved_tensors.store import Vault
from lightning_memsave.torch_internals.autograd_graph import refuses_hooks

__all__ = ["DifferentiatedTwiceError", "Rank", "Tally", "Vault", "refuses_hooks"]
