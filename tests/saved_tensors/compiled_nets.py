"""Networks that are compiled in tests, and a backend that runs the two halves of a graph as they are, without C++."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from lightning_memsave.saved_tensors.compiled_partitioner import CodePartitioner, Settings
from lightning_memsave.saved_tensors.compiled_policy import is_view
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.seeds import NoiseSeeds


class Counting:
    """Stands for a store: draws seeds, and counts what compiled code keeps."""

    def __init__(self) -> None:
        self.noise, self.noted = NoiseSeeds(0), []

    def note_compiled(self, kind, plain_bytes, kept):
        self.noted.append((kind, plain_bytes, sum(each.nbytes for each in kept)))


class Kept:
    """A backend of the compiler, and what its forwards keep for backward: [(name, dtype, bytes)] of each graph."""

    def __init__(self, fidelity=Fidelity.INT8, partitioner=None, **settings) -> None:
        chosen = {"overrides": {}, "modules": {}, "min_numel": 64, **settings}
        self._partitioner = partitioner or CodePartitioner(
            Settings(lossy=fidelity, **chosen), lambda path: chosen["modules"].get(path), str
        )
        self.graphs, self.forwards, self.backwards = [], [], []
        self.backend = aot_autograd(
            fw_compiler=self._record(self.forwards),
            bw_compiler=self._record(self.backwards),
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
        )

    def _partition(self, joint, inputs, *, num_fwd_outputs, **options):
        forward, backward = self._partitioner(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        kept = [node for node in output.args[0][num_fwd_outputs:] if _root(node).op != "placeholder"]
        values = [(node.name, node.meta["val"]) for node in kept if isinstance(node.meta["val"], torch.Tensor)]
        self.graphs.append([(name, value.dtype, value.numel() * value.element_size()) for name, value in values])
        return forward, backward

    def _record(self, modules):
        def compiler(module, _):
            modules.append(module)
            return make_boxed_func(module.forward)

        return compiler

    @property
    def num_bytes(self) -> int:
        """What all graphs keep."""
        return sum(num_bytes for graph in self.graphs for *_, num_bytes in graph)


def _root(node):
    while is_view(node):
        node = node.args[0]
    return node


class MLP(nn.Module):
    def __init__(self, activation=F.gelu, width=64) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


class Residual(nn.Module):
    """Convolution, BatchNorm and an activation, twice, around which `x` goes."""

    def __init__(self, activation=F.relu, channels=16) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2, self.activation = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), activation

    def forward(self, x):
        h = self.conv1(self.activation(self.norm1(x)))
        return x + self.conv2(self.activation(self.norm2(h)))


class Images(nn.Module):
    def __init__(self, activation=F.relu) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(*(Residual(activation) for _ in "ab"))

    def forward(self, x):
        return self.blocks(self.stem(x)).mean((2, 3))


class Attention(nn.Module):
    def __init__(self, width=64, heads=4, dropout=0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.heads, self.dropout = MLP(width=width), heads, dropout

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        found = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + F.dropout(self.out(found.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + self.mlp(x)


class Gated(nn.Module):
    """A Llama's MLP behind its normalisation."""

    def __init__(self, width=64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ByHand(nn.Module):
    """RMSNorm as language models write it, between two layers."""

    def __init__(self, square=lambda x: x.pow(2), width=64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.weight, self._square = nn.Parameter(torch.ones(width)), square

    def forward(self, x):
        x = x + self.first(x)
        return self.last(self.weight * (x * torch.rsqrt(self._square(x).mean(-1, keepdim=True) + 1e-6)))


TOKENS, IMAGES = (4, 32, 64), (4, 3, 16, 16)
NETS = {
    "MLP": (MLP, TOKENS),
    "MLP, SiLU": (lambda: MLP(F.silu), TOKENS),
    "MLP, GELU by tanh": (lambda: MLP(nn.GELU("tanh")), TOKENS),
    "MLP, Mish": (lambda: MLP(F.mish), TOKENS),
    "MLP, ELU": (lambda: MLP(F.elu), TOKENS),
    "images, SiLU": (lambda: Images(F.silu), IMAGES),
    "images": (Images, IMAGES),
    "images, leaky ReLU": (lambda: Images(F.leaky_relu), IMAGES),
    "attention": (Attention, TOKENS),
    "gated": (Gated, TOKENS),
    "norm by hand": (ByHand, TOKENS),
    "layers": (lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64)), TOKENS),
}
"""What codes work in: how it is made, and the shape of its input."""


def made(name):
    """Return a network of `NETS` and a batch, the same each time."""
    make, shape = NETS[name]
    torch.manual_seed(0)
    return make(), torch.randn(shape)


def gradients(model, run, x):
    """Return the gradients of a network's parameters, joined."""
    model.zero_grad()
    (run(x) ** 2).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])
