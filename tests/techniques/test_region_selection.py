"""Choice of the modules that become regions, and what is said of one that cannot be."""

from __future__ import annotations

import pytest
import transformers
from torch import nn

from lightning_memsave import Checkpointing, apply_checkpointing
from lightning_memsave.techniques.checkpointing.region_selection import repeated_blocks, select_regions

from .checkpointing_subjects import BLOCKS, Block, scripted, stack


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("Block", ["1.0", "1.1", "1.2"]),
        (Block, ["1.0", "1.1", "1.2"]),
        ("1.*", ["1.0", "1.1", "1.2"]),
        ("1.[02]", ["1.0", "1.2"]),
        (lambda name, module: name.endswith(".2"), ["1.2"]),
        ("1", ["1"]),
    ],
)
def test_selectors_choose_the_outermost_matches(modules, expected):
    model = stack()
    apply_checkpointing(model, Checkpointing(modules=modules))
    assert [n for n, m in model.named_modules() if "_checkpoint_region" in vars(m)] == expected


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Stage(Layers):
    """Layers of another class."""


class OfLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([Block(), Block()]), Block()])

    def forward(self, x):
        for block in (*self.blocks[0], self.blocks[1]):
            x = block(x)
        return x


@pytest.mark.parametrize("modules", ["blocks", "blocks*", "ModuleList", lambda name, module: "Block" not in name])
def test_of_a_list_that_nobody_calls_the_members_are_taken(modules):
    model = OfLists()
    applied = apply_checkpointing(model, Checkpointing(modules=modules))
    assert applied.summary == "3 regions: 3 x Block"
    with pytest.raises(ValueError, match=r"modules of the model that are called, got"):
        apply_checkpointing(OfLists(), Checkpointing(regions=[["blocks"]]))
    with pytest.raises(ValueError, match=r"This model has: Block \(3\)\."):
        apply_checkpointing(OfLists(), Checkpointing(modules="Nothing"))


def test_levels_that_only_hold_layers_are_no_regions():
    model = OfLists()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(2))
    for level in model.blocks:
        level.block = nn.ModuleList([Block(), Block()])
    assert [name for name, _ in repeated_blocks(model)] == [f"blocks.{i}.block.{j}" for i in (0, 1) for j in (0, 1)]


def test_of_stages_of_other_widths_the_blocks_inside_are_taken():
    def stage(width):
        blocks = nn.Sequential(Layers(nn.Linear(width, width)), Layers(nn.Linear(width, width)))
        return Stage(blocks, nn.Linear(width, 2 * width))

    pyramid = nn.Sequential(stage(8), stage(16), stage(32))
    assert [name for name, _ in repeated_blocks(pyramid)] == [f"{i}.layers.0.{j}" for i in (0, 1, 2) for j in (0, 1)]
    alike = nn.Sequential(stage(8), stage(8))
    assert [name for name, _ in repeated_blocks(alike)] == ["0", "1"]


def test_small_parts_that_repeat_inside_of_blocks_are_no_blocks():
    def block(width):
        heads = nn.ModuleList([Layers(nn.Linear(width, 2)), Layers(nn.Linear(width, 2))])
        return Block(width, heads)

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads, self.mlp = heads, nn.Linear(width, width)

        def forward(self, x):
            return self.mlp(x) + sum(head(x).sum() for head in self.heads)

    model = nn.ModuleList([block(16), block(24), block(32)])
    assert [name for name, _ in repeated_blocks(model)] == ["0", "1", "2"]


SMALL = {"num_labels": 2, "image_size": 32}
PYRAMIDS = {
    "Swin": ({"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}, "SwinLayer", 4),
    "ConvNext": ({"hidden_sizes": [8, 16, 24], "depths": [2, 3, 2], "num_stages": 3}, "ConvNextLayer", 7),
    "Segformer": ({"hidden_sizes": [16, 32, 64, 96]}, "SegformerLayer", 8),
    "ResNet": ({"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [3, 3]}, "ResNetBottleNeckLayer", 6),
}


@pytest.mark.parametrize("name", PYRAMIDS)
def test_blocks_of_pyramids_that_others_wrote(name):
    options, kind, number = PYRAMIDS[name]
    config = getattr(transformers, f"{name}Config")(**SMALL | options)
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    kinds = [type(block).__name__ for _, block in repeated_blocks(model)]
    assert (set(kinds), len(kinds)) == ({kind}, number)


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (Checkpointing(modules="Block"), "1.1.linear"),
        (Checkpointing(modules="1"), "1.1.linear"),
        (Checkpointing(regions=[["0"], ["1.1"]]), "1.1.linear"),
        (BLOCKS, "1.0.linear"),
    ],
)
def test_what_torchscript_runs_is_refused_by_name(config, where):
    model = stack()
    for block in model[1] if config is BLOCKS else [model[1][1]]:
        block.linear = scripted(block.linear)
    with pytest.raises(ValueError, match=rf"must not name what is or holds a TorchScript module.*got '{where}'"):
        apply_checkpointing(model, config)


def test_groups_of_plain_sequentials_are_found_when_there_is_nothing_else():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert [name for name, _ in repeated_blocks(model)] == ["0", "1", "2"]


def test_blocks_of_classes_that_are_made_anew_are_blocks():
    def block():
        class Made(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.act = nn.Linear(4, 4), nn.ReLU()

            def forward(self, x):
                return self.act(self.linear(x))

        return Made()

    model = nn.Sequential(*(block() for _ in range(3)))
    applied = apply_checkpointing(model, Checkpointing())
    assert applied.summary.startswith("3 regions")


def test_regions_by_name_are_taken_as_they_are():
    model = stack()
    for regions in ([("1.0", "1.1"), ("1.2",)], [("1",), ("1.0", "1.1")], [("0", "1", "2"), ("1",)], []):
        assert select_regions(model, None, regions) == regions


@pytest.mark.parametrize(
    ("regions", "rule"),
    [
        ([("1.0", "1.9")], "must name different modules"),
        ([("1.0", "1.0")], "must name different modules"),
        ([()], "must name different modules"),
        ([("1.0", "1.1"), ("1.1", "1.2")], "must lie inside of each other or apart"),
        ([("1.0", "1.1"), ("1.1", "1.0")], "must differ"),
        ([("1.0",), ("1.0",)], "must differ"),
    ],
)
def test_regions_that_cannot_be_are_refused(regions, rule):
    with pytest.raises(ValueError, match=rf"`Checkpointing.regions` {rule}.*For example"):
        select_regions(stack(), None, regions)


def test_a_shared_module_may_be_named_by_each_of_its_names():
    model = stack()
    model[1][2] = model[1][0]
    assert select_regions(model, None, [("1.2",)]) == [("1.2",)]
    assert select_regions(model, "Block") == [("1.0",), ("1.1",)], "by class it is one"


def test_the_model_itself_is_no_region():
    model = stack()
    assert select_regions(model, nn.Sequential) == [("1",)]
    assert select_regions(model, "*") == [("0",), ("1",), ("2",)]


def test_one_block_is_not_repeated():
    model = nn.Sequential(nn.Linear(8, 8), Block())
    assert repeated_blocks(model) == []
    with pytest.raises(
        ValueError, match=r"`checkpointing` needs blocks: modules of one class that repeat, got 'none'.*Block \(1\)"
    ):
        select_regions(model, None)
