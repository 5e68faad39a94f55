"""Take private names away, each in a process of its own, and train: prints a line of JSON for each.

The first name of each part of the table, without a plan for a budget, which takes longest; or `--all`.
A name is gone before the package is imported, as with a version of torch or Lightning that has never had it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import gc
import importlib.util
import inspect
import json
import os
import sys
import traceback
import types
import warnings
from pathlib import Path

import lightning as L
import torch
import torch._dynamo
import torch._functorch.partitioners
import torch._inductor.config
import torch._inductor.custom_graph_pass
import torch._subclasses.fake_tensor
import torch.distributed
import torch.multiprocessing.reductions
from lightning.pytorch.demos.boring_classes import RandomDataset

SETTINGS = {
    "nothing": {},
    "recipe": {"recipe": "extreme"},
    "activations": {"activations": "int4"},
    "checkpointing": {"checkpointing": "blocks"},
    "optimizer_state": {"optimizer_state": "8bit"},
    "precision": {"precision": "bf16-sr"},
    "microbatch": {"microbatch": 2},
    "sparsity": {"sparsity": 0.7},
    "budget": {"budget": "1MiB"},
}


def parts():
    """The table, without importing the package whose names are to go."""
    root = Path(importlib.util.find_spec("lightning_memsave").origin).parent
    code = (root / "torch_internals" / "private_names.py").read_text()
    names = {"PARTS": None}
    head = code[: code.index("class Gone")].replace("from lightning_memsave", "#")
    exec(compile(head, "private_names", "exec"), names)
    return names["PARTS"]


def remove(path):
    """Take a name away from the package; torch and Lightning, which need some of them themselves, still see it."""
    owner, _, name = path.rpartition(".")
    if "torch._C._functions" in path:  # an attribute of every class of nodes
        for cls in vars(torch._C._functions).values():
            for found in [each for each in vars(cls) if fnmatch.fnmatch(each, name)] if isinstance(cls, type) else ():
                _delete(cls, found)
        return
    found = sys.modules[path.partition(".")[0]]
    for step in owner.split(".")[1:]:
        found = getattr(found, step)
    if isinstance(found, types.ModuleType):
        found.__class__ = type("Module", (types.ModuleType,), {name: _hidden(lambda self: vars(self)[name])})
    elif path in HIDDEN:
        before = inspect.getattr_static(found, name)
        setattr(found, name, _hidden(lambda self: before.__get__(self, found), getattr(before, "__set__", None)))
    else:
        for cls in found.__mro__:
            if name in vars(cls):
                _delete(cls, name)
        assert not hasattr(found, name), path


OF_NODES = ("torch._C._functions.*._saved_*", "torch._C._functions.*._raw_saved_*")
"""What nodes keep for their backward is in no table: a tensor that has no rule is kept."""
HIDDEN = ("torch.Tensor._backward_hooks", "torch.optim.Optimizer._patch_step_function")
"""Attributes of classes that torch itself reads in the runs below."""


class _hidden(property):  # noqa: N801  # a kind of property
    """An attribute that the package's code does not find."""

    def __get__(self, obj, cls=None):
        if sys._getframe(1).f_globals["__name__"].startswith("lightning_memsave"):
            raise AttributeError("hidden")
        return self if obj is None else super().__get__(obj, cls)


def _delete(cls, name):
    try:
        delattr(cls, name)
    except TypeError:  # a class of C: its dictionary is behind a proxy
        (names,) = [each for each in gc.get_referents(vars(cls)) if isinstance(each, dict)]
        del names[name]
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU()) for _ in range(2)
        )

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(*callbacks):
    torch.manual_seed(0)
    module = Model()
    data = torch.utils.data.DataLoader(RandomDataset(64, 16), batch_size=4)
    trainer = L.Trainer(
        callbacks=[*callbacks],
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return [p.detach().clone() for p in module.parameters()]


def outcome(path, left_out):
    """What comes of every setting but one: "trained", or the error."""
    plain = train()
    if path is not None:
        remove(path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            import lightning_memsave
        except ImportError as error:
            return {"import": str(error)}
    found = {"import": "", "warned": [str(w.message) for w in seen if "lightning-memsave lacks" in str(w.message)]}
    for name, settings in SETTINGS.items():
        if name == left_out:
            continue
        memsave = lightning_memsave.MemSave(**settings, summary=False)
        try:
            weights = train(memsave)
            found[name] = "trained"
            if name == "nothing":
                found["is_plain"] = all(map(torch.equal, plain, weights))
                found["peak_bytes"] = memsave.report.peak_bytes
                found["applied"] = [applied.technique for applied in memsave.report.applied]
        except ValueError as error:
            found[name] = f"refused: {error}"
        except Exception:
            found[name] = "failed: " + traceback.format_exc()[-1500:]
    return found


def main(all_of_them):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table = [(part, path) for part, each in parts().items() for path in each.names[: None if all_of_them else 1]]
    for part, path in [("", None), *(("nodes", path) for path in OF_NODES), *table]:
        if not (child := os.fork()):
            with contextlib.redirect_stdout(sys.stderr):
                found = {"part": part, "path": path, **outcome(path, "" if all_of_them else "budget")}
            print(json.dumps(found), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"part": part, "path": path, "crashed": status}), flush=True)


if __name__ == "__main__":
    main("--all" in sys.argv)
