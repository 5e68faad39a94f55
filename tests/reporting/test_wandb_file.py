"""Logs of W&B's, record by record: whole ones, cut off ones and damaged ones."""

from __future__ import annotations

import json
import time

import pytest

from lightning_memsave.reporting.foreign_files import DamagedFileError
from lightning_memsave.reporting.runs import read_runs
from lightning_memsave.reporting.wandb_file import read_log
from tests.reporting.test_runs import entry
from tests.reporting.test_wandb_run import log_of
from tests.reporting.wandb_file import BLOCK_BYTES, FRAGMENT, HEADER, read_wandb


def record(kind, part, values, nested=False):
    """One record of W&B's with items of that part."""
    from wandb.proto.wandb_internal_pb2 import Record

    made = Record()
    for name, value in values.items():
        item = getattr(getattr(made, kind), part).add()
        if nested:
            item.nested_key.extend(name.split("."))
        else:
            item.key = name
        if part != "remove":
            item.value_json = json.dumps(value)
    return made.SerializeToString()


def written(path, *records):
    path.write_bytes(log_of(*((1, each) for each in records)))
    return path


def test_history_configuration_and_summary_are_read_as_they_were_logged(tmp_path):
    path = written(
        tmp_path / "run-abc.wandb",
        entry(run={"run_id": "abc", "display_name": "brave-sun-1"}),
        record("config", "update", {"lr": 0.1, "net": {"depth": 16}, "_wandb": {"cli_version": "0"}}),
        record("history", "item", {"loss": 0.5, "_step": 0}),
        record("history", "item", {"a.b": 1, "loss": None}, nested=True),
        record("config", "update", {"lr": 0.2}),
        record("summary", "update", {"loss": 0.5, "best": [1, 2]}),
        record("summary", "remove", {"best": None}),
        record("summary", "update", {"loss": 0.25}),
    )
    log = read_log(path)
    assert log.name == "brave-sun-1"
    assert log.config == {"lr": 0.2, "net": {"depth": 16}}
    assert log.history == [{"loss": 0.5, "_step": 0}, {"a.b": 1, "loss": None}]
    assert log.summary == {"loss": 0.25}
    other = read_wandb(path)
    assert (other.name, other.history, other.summary) == (log.name, log.history, log.summary)


def test_a_run_without_a_name_has_its_id(tmp_path):
    assert read_log(written(tmp_path / "run-abc.wandb", entry(run={"run_id": "abc"}))).name == "abc"


def test_of_a_log_that_was_cut_off_anywhere_the_whole_records_are_read(tmp_path):
    rows = [{"loss": step / 7, "text": "x" * step} for step in range(4)]
    records = [record("history", "item", row) for row in rows]
    content, ends = log_of(), []
    for each in records:
        content += log_of((1, each))[HEADER.size :]
        ends.append(len(content))
    path = tmp_path / "run-abc.wandb"
    for length in range(HEADER.size, len(content) + 1):
        path.write_bytes(content[:length])
        assert read_log(path).history == rows[: sum(end <= length for end in ends)]


def test_a_byte_that_has_changed_is_damage(tmp_path):
    content = log_of((1, record("history", "item", {"loss": 0.5})), (1, entry(run={"run_id": "abc"})))
    path = tmp_path / "run-abc.wandb"
    for place in range(HEADER.size + FRAGMENT.size, HEADER.size + FRAGMENT.size + 10):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedFileError, match="damaged before byte"):
            read_log(path)


@pytest.mark.parametrize("content", [b"", b":W&B", b":W&C\xe1\xbe\x00 and more", b"step,loss\n0,1\n"])
def test_another_file_has_no_header(tmp_path, content):
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="no header"):
        read_log(path)


def test_a_record_whose_end_is_missing_gives_way_to_the_next(tmp_path):
    first, second = (record("history", "item", {"loss": loss}) for loss in (0.5, 0.25))
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(log_of((2, first[:4]), (3, first[4:6]), (2, second[:3]), (4, second[3:])))
    assert read_log(path).history == [{"loss": 0.25}]


def test_records_across_blocks_are_joined(tmp_path):
    """The log's own arithmetic, with a first record that leaves three bytes of its block."""
    from wandb.proto.wandb_internal_pb2 import Record

    def row(key, text):
        record = Record()
        item = record.history.item.add()
        item.key, item.value_json = key, text
        return record.SerializeToString()

    padding = BLOCK_BYTES - HEADER.size - FRAGMENT.size - 3 - len(row("loss", json.dumps("")))
    first = row("loss", json.dumps("a" * padding))
    first = row("loss", json.dumps("a" * (padding - (len(first) - (BLOCK_BYTES - HEADER.size - FRAGMENT.size - 3)))))
    second = row("accuracy", "0.25")
    content = log_of((1, first))
    assert BLOCK_BYTES - len(content) == 3
    content += bytes(3) + log_of((2, second[:2]), (3, second[2:5]), (4, second[5:]))[HEADER.size :]
    (tmp_path / "run-1.wandb").write_bytes(content)
    (run,) = read_runs([tmp_path])
    assert run.metrics == {"accuracy": 0.25}


def test_a_record_of_many_fragments_takes_the_time_of_its_bytes(tmp_path):
    """Joined one by one, 3,000 fragments would be copied 1,500 times each."""
    record = entry(history={"text": "x" * 100_000_000})
    size = 32 * 1024 - 7
    parts = [record[i : i + size] for i in range(0, len(record), size)]
    kinds = [2, *[3] * (len(parts) - 2), 4]
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(log_of(*zip(kinds, parts, strict=True)))
    start = time.process_time()
    (row,) = read_log(path).history
    assert len(row["text"]) == 100_000_000
    assert time.process_time() - start < 60
