from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memsave.torch_internals import private_names
from lightning_memsave.torch_internals.private_names import PARTS, find, is_there, missing, require

ROOT = Path(__file__).parents[2]
REFUSED = {
    "autograd": {"activations", "checkpointing", "sparsity", "budget"},
    "gradient sums": set(),
    "allocation events": {"budget"},
    "fake tensors": {"budget"},
    "optimizers": {"optimizer_state", "precision"},
    "DDP": set(),
    "FSDP2 after an error": set(),
    "allocator snapshot": set(),
    "training loop": {"microbatch", "budget"},
}
"""What of the program's settings is refused without the names of a part; all others train."""
SETTINGS = ("nothing", "recipe", "activations", "checkpointing", "optimizer_state", "precision", "microbatch")
SETTINGS += ("sparsity", "budget")


@pytest.mark.parametrize("path", [path for part in PARTS.values() for path in part.names])
def test_the_installed_versions_have_each_name(path):
    assert is_there(path), f"{path} is gone: say in `torch_internals.private_names` what is lost, or find another way"


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_each_part_says_which_tests_there_are(part):
    assert (ROOT / part.test).exists()


def test_a_missing_name_has_no_instances_and_is_refused_by_name(monkeypatch):
    gone = find("torch.nothing.of.this")
    assert not isinstance(1, gone)
    with pytest.raises(NotImplementedError, match=r"no `torch\.nothing\.of\.this`"):
        gone()
    monkeypatch.setitem(PARTS, "autograd", PARTS["autograd"]._replace(names=("torch.Tensor", "torch.no_such_name")))
    monkeypatch.setattr(private_names, "missing", missing.__wrapped__)
    assert missing.__wrapped__("autograd") == ("torch.no_such_name",)
    with pytest.raises(ValueError, match=r"`activations` needs torch.no_such_name, which .* Install a version"):
        require("autograd", "activations")


def _outcomes(*options):
    program = Path(__file__).with_name("missing_name_program.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(found):
    part, path = found["part"], found["path"]
    assert "crashed" not in found
    if part == "everything":
        assert found["import"].startswith(f"lightning-memsave needs {path}, which")
        return
    refused = REFUSED.get(part, set())
    for setting in found.keys() & set(SETTINGS):
        assert found[setting].startswith("refused" if setting in refused else "trained"), (path, found[setting])
        if setting in refused and part != "training loop":
            assert path in found[setting]
    assert found["is_plain"], "by default, weights are those of plain Lightning"
    assert (found["peak_bytes"] is None) == (part == "autograd")
    assert found["applied"] == ([] if part == "training loop" else ["early_zero_grad"])
    assert [path in warning for warning in found["warned"]] == ([True] if part in PARTS else [])


def test_without_a_name_of_each_part_a_model_trains_and_what_needs_it_is_refused():
    found = _outcomes()
    assert [each["part"] for each in found] == ["", "nodes", "nodes", *PARTS]
    for each in found:
        assert each["import"] or each.keys() >= set(SETTINGS) - {"budget"}
        _check(each)


@pytest.mark.slow
def test_without_any_one_name_a_model_trains_and_what_needs_it_is_refused():
    found = _outcomes("--all")
    assert len(found) == 3 + sum(len(part.names) for part in PARTS.values())
    for each in found:
        assert each["import"] or each.keys() >= set(SETTINGS)
        _check(each)
