from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from lightning_memsave.demo.data import load_cifar10, load_digits_32

RECORD_BYTES = 3073
TRAIN_NAMES = ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"]
TEST_NAME = "test_batch.bin"


@pytest.fixture(scope="module")
def digits():
    return load_digits_32(0)


def reference_digits():
    """Half-pixel bilinear interpolation, one axis after the other, in numpy."""
    source = load_digits()
    positions = (np.arange(32) + 0.5) / 4 - 0.5  # numpy.interp holds the edge values outside
    images = source.images / 16.0
    for axis in (1, 2):
        images = np.apply_along_axis(lambda line: np.interp(positions, np.arange(8), line), axis, images)
    return images, source.target


def test_digits_have_the_documented_sizes(digits):
    train, test = digits
    assert [tuple(t.shape) for t in train.tensors] == [(1437, 3, 32, 32), (1437,)]
    assert [tuple(t.shape) for t in test.tensors] == [(360, 3, 32, 32), (360,)]
    assert train.tensors[0].dtype is test.tensors[0].dtype is torch.float32
    assert train.tensors[1].dtype is test.tensors[1].dtype is torch.int64


def test_digits_are_split_by_class(digits):
    train, test = (np.bincount(part.tensors[1].numpy(), minlength=10) for part in digits)
    total = np.bincount(load_digits().target)
    assert (train + test == total).all()
    assert np.abs(test - total * 360 / 1797).max() < 1


def test_digits_are_the_scans_each_once_with_its_label(digits):
    images = torch.cat([part.tensors[0] for part in digits]).double()
    labels = torch.cat([part.tensors[1] for part in digits])
    source, target = reference_digits()
    expected = torch.from_numpy((source - source.mean()) / source.std())
    found = torch.cdist(images[:, 0].flatten(1), expected.flatten(1)).argmin(dim=1)
    assert sorted(found.tolist()) == list(range(1797))
    for channel in range(3):
        torch.testing.assert_close(images[:, channel], expected[found], rtol=0, atol=1e-3)
    assert (labels.numpy() == target[found.numpy()]).all()


def test_digits_are_normalised(digits):
    images = torch.cat([part.tensors[0] for part in digits]).double()
    assert abs(images.mean()) < 1e-4
    assert abs(images.std() - 1) < 1e-4


def test_same_seed_same_split_other_seed_another(digits):
    again, other = load_digits_32(0), load_digits_32(1)
    for part, same in zip(digits, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(part.tensors, same.tensors, strict=True))
    assert not torch.equal(digits[0].tensors[0], other[0].tensors[0])
    assert not torch.equal(digits[1].tensors[1], other[1].tensors[1])


def write_cifar10(folder: Path, records_per_file=3):
    """Random records in the standard layout; returns train and test records."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in (*TRAIN_NAMES, TEST_NAME):
        labels = rng.integers(0, 10, (records_per_file, 1), dtype=np.uint8)
        records = np.concatenate([labels, rng.integers(0, 256, (records_per_file, 3072), dtype=np.uint8)], axis=1)
        (folder / name).write_bytes(records.tobytes())
        written.append(records)
    return np.concatenate(written[:5]), written[5]


def pixels_of(records):
    """Row-major planes: red, green, blue."""
    out = np.empty((len(records), 3, 32, 32), dtype=np.uint8)
    for channel in range(3):
        for y in range(32):
            start = 1 + 1024 * channel + 32 * y
            out[:, channel, y, :] = records[:, start : start + 32]
    return out


@pytest.mark.parametrize("child", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read_pixel_by_pixel(tmp_path, child):
    records = write_cifar10(tmp_path / child)
    pixels = [pixels_of(part) for part in records]
    mean = (pixels[0] / 255.0).mean(axis=(0, 2, 3), keepdims=True)
    std = (pixels[0] / 255.0).std(axis=(0, 2, 3), keepdims=True, ddof=1)
    for part, part_records, part_pixels in zip(load_cifar10(tmp_path), records, pixels, strict=True):
        images, labels = part.tensors
        assert images.dtype is torch.float32
        restored = (images.double().numpy() * std + mean) * 255.0
        assert np.abs(restored - part_pixels).max() < 1e-2
        assert (restored.round().astype(np.uint8) == part_pixels).all()
        assert labels.dtype is torch.int64
        assert (labels.numpy() == part_records[:, 0]).all()


def test_cifar10_train_images_are_normalised_by_channel(tmp_path):
    write_cifar10(tmp_path, records_per_file=4)
    images = load_cifar10(tmp_path)[0].tensors[0].double()
    assert images.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("name", [*TRAIN_NAMES, TEST_NAME])
def test_missing_file_is_named(tmp_path, name):
    write_cifar10(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("name", ["data_batch_4.bin", TEST_NAME])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes"),
        (bytes(RECORD_BYTES - 1), "3072 bytes"),
        (bytes(2 * RECORD_BYTES + 1), "6147 bytes"),
        (bytes(RECORD_BYTES) + b"\x0a" + bytes(RECORD_BYTES - 1), "label above 9"),
        (b"\xff" * RECORD_BYTES, "label above 9"),
    ],
    ids=["empty", "short", "one byte over", "label 10", "label 255"],
)
def test_damaged_file_is_named(tmp_path, name, content, complaint):
    write_cifar10(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_cifar10(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_label_nine_is_fine(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / TEST_NAME).write_bytes(b"\x09" + bytes(RECORD_BYTES - 1))
    assert load_cifar10(tmp_path)[1].tensors[1].tolist() == [9]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("not a folder")])
def test_no_folder_says_what_it_needs(tmp_path, make):
    folder = tmp_path / "data"
    make(folder)
    with pytest.raises(ValueError, match="missing") as caught:
        load_cifar10(folder)
    for name in (str(folder), *TRAIN_NAMES, TEST_NAME):
        assert name in str(caught.value)
