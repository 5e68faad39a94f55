"""Generated data: the same from the same seed, and what it says it is."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.models.generated import fractals
from benchmarks.models.generated import german_numbers as german


def test_images_are_the_same_from_the_same_seed_only():
    config = fractals.FractalConfig(num_classes=4)
    images, labels = fractals.generate(40, 1, config)
    again, _ = fractals.generate(40, 1, config)
    others, _ = fractals.generate(40, 2, config)
    assert images.shape == (40, 3, 32, 32)
    assert images.dtype is torch.uint8
    assert labels.bincount().tolist() == [10] * 4
    assert torch.equal(images, again)
    assert (images != others).float().mean() > 0.9


def test_asking_for_images_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    fractals.generate(4, 0, fractals.FractalConfig(num_classes=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_shape_tells_classes_apart_and_noise_hides_it():
    """The nearest class mean of the shape, without colours: a classifier that knows nothing of this data."""

    def accuracy(noise):
        config = fractals.FractalConfig(num_classes=5, noise=noise, jitter=0.02)
        (train, labels), (test, expected) = (fractals.generate(500, seed, config) for seed in (0, 1))
        features = [_edges(images) for images in (train, test)]
        means = torch.stack([features[0][labels == c].mean(0) for c in range(5)])
        return float((torch.cdist(features[1], means).argmin(1) == expected).float().mean())

    assert accuracy(0.0) > 0.4
    assert accuracy(0.0) > accuracy(1.0) + 0.1


def _edges(images):
    gray = images.float().mean(1)
    across = (gray[:, 1:] - gray[:, :-1]).abs()[:, :, :-1] + (gray[:, :, 1:] - gray[:, :, :-1]).abs()[:, :-1]
    return torch.nn.functional.avg_pool2d(across[:, None], 8, 8).flatten(1)


def test_every_number_is_read_back():
    """An independent reader of German number words: greedy from the left, as the language is."""
    units = {
        word: n
        for n, word in enumerate(
            ["null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
        )
    }
    units |= {"dreizehn": 13, "vierzehn": 14, "fünfzehn": 15, "sechzehn": 16, "siebzehn": 17, "achtzehn": 18}
    units |= {"neunzehn": 19, "eins": 1}
    tens = {"zwanzig": 20, "dreißig": 30, "vierzig": 40, "fünfzig": 50, "sechzig": 60, "siebzig": 70, "achtzig": 80}
    tens["neunzig"] = 90

    def read(word):
        if "tausend" in word:
            thousands, rest = word.split("tausend")
            return 1000 * read(thousands) + (read(rest) if rest else 0)
        if "hundert" in word:
            hundreds, rest = word.split("hundert")
            return 100 * read(hundreds) + (read(rest) if rest else 0)
        if match := re.fullmatch(r"(\w+?)und(\w+zig|dreißig)", word):
            return units[match[1]] + tens[match[2]]
        return units[word] if word in units else tens[word]

    numbers = [*range(1, 2000), *range(2000, 1_000_000, 997)]
    assert [read(german.german_number(n)) for n in numbers] == numbers
    assert len({german.english_number(n) for n in numbers}) == len(numbers)


def test_sentences_are_the_same_from_the_same_seed_and_splits_are_disjoint():
    train = german.generate(300, 3)
    assert train == german.generate(300, 3)
    assert not set(train) & set(german.generate(300, 4, without=set(train)))
    assert all(de.endswith(".") and en.endswith(".") for de, en in train)


def test_parallel_files_must_have_as_many_lines(tmp_path):
    (tmp_path / "train.de").write_text("Ja.\nNein.\n", "utf-8")
    (tmp_path / "train.en").write_text("Yes.\n", "utf-8")
    with pytest.raises(ValueError, match=r"train.de and train.en must have as many lines as each other, got 2 and 1"):
        german.load_parallel(tmp_path, "train")
    (tmp_path / "train.en").write_text("Yes.\nNo.\n", "utf-8")
    assert german.load_parallel(tmp_path, "train") == [("Ja.", "Yes."), ("Nein.", "No.")]
