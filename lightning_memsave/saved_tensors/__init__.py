"""What is kept between forward and backward: entries, codes, recomputations, offload."""

from lightning_memsave.saved_tensors.activation_derivatives import DifferentiatedTwiceError
from lightning_memsave.saved_tensors.byte_tally import Tally
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.logits_form import LogitsAskedError
from lightning_memsave.saved_tensors.store import SavedTensorStore
from lightning_memsave.torch_internals.autograd_graph import refuses_hooks

__all__ = ["DifferentiatedTwiceError", "Fidelity", "LogitsAskedError", "SavedTensorStore", "Tally", "refuses_hooks"]
