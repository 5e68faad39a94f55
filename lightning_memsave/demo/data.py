"""Real 32x32 images without a download: scikit-learn's bundled scans of digits, or CIFAR-10 when the user has it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST = ("test_batch.bin",)
_RECORD_BYTES = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes


def load_digits_32(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the 1,797 scans of handwritten digits (UCI, bundled with scikit-learn), resized to 3x32x32; 1,437 / 360.

    The split is stratified by class and drawn with `seed`.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device="cpu")[:, None] / 16.0  # [1797, 1, 8, 8] in [0, 1]
    images = F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits.target, device="cpu")
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=digits.target, random_state=seed)
    return TensorDataset(images[train].contiguous(), labels[train]), TensorDataset(
        images[test].contiguous(), labels[test]
    )


def load_cifar10(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return CIFAR-10 from its standard binary version (`data_batch_1.bin` to `data_batch_5.bin`, `test_batch.bin`).

    Raises:
        ValueError: a file is missing, empty, cut short, or holds a label above 9.
    """
    if (folder / "cifar-10-batches-bin").is_dir():
        folder = folder / "cifar-10-batches-bin"
    train, test = _read_files(folder, CIFAR10_TRAIN), _read_files(folder, CIFAR10_TEST)
    mean = train[0].mean(dim=(0, 2, 3), keepdim=True)
    std = train[0].std(dim=(0, 2, 3), keepdim=True)
    return TensorDataset((train[0] - mean) / std, train[1]), TensorDataset((test[0] - mean) / std, test[1])


def _read_files(folder: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    records = torch.cat([_read_records(folder / name) for name in names])
    images = records[:, 1:].reshape(-1, 3, 32, 32).float() / 255.0
    return images, records[:, 0].long()


def _read_records(path: Path) -> Tensor:
    if not path.is_file():
        raise ValueError(
            f"`--data-dir` must hold CIFAR-10's binary version, but {path} is missing. "
            f"It needs {', '.join((*CIFAR10_TRAIN, *CIFAR10_TEST))}."
        )
    content = path.read_bytes()
    if not content or len(content) % _RECORD_BYTES:
        raise ValueError(
            f"{path} must be a whole number of records of {_RECORD_BYTES} bytes, but it has {len(content)} bytes; "
            "it may be cut short. Copy it again."
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _RECORD_BYTES)
    if records[:, 0].max() > 9:
        raise ValueError(f"{path} holds a label above 9, so it is not CIFAR-10's binary version. Check the file.")
    return records
