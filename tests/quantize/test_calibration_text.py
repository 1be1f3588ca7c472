"""Texts to calibrate on: files of every kind, folders of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingle.errors import ConfigError
from ingle.quantize.calibration_text import read_texts


def write_parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_a_parquet_file_gives_its_text_column_row_by_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", id=[1, 2, 3], text=["one", None, "three"])
    assert list(read_texts(path)) == ["one", "three"]


def test_json_lines_give_strings_and_their_text_or_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(line) for line in ("plain", {"text": "two"}, {"content": "three"})]
    path.write_text("\n\n".join(lines) + "\n")
    assert list(read_texts(path)) == ["plain", "two", "three"]


def test_a_folder_gives_every_known_file_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "c.md").write_text("from markdown")
    (tmp_path / "a.txt").write_text("from text")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    write_parquet(tmp_path / "b.parquet", content=["from parquet"])
    assert list(read_texts(tmp_path)) == ["from text", "from parquet", "from markdown"]


def test_what_holds_no_text_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    wrong = write_parquet(tmp_path / "w.parquet", id=[1], body=["x"])
    with pytest.raises(ConfigError, match="has the columns id, body; wanted is one called text"):
        list(read_texts(wrong))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match=r"broken\.parquet cannot be read as parquet"):
        list(read_texts(tmp_path / "broken.parquet"))
    (tmp_path / "l.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(ConfigError, match=r"l\.jsonl, line 2: no text in it"):
        list(read_texts(tmp_path / "l.jsonl"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.txt cannot be read as UTF-8"):
        list(read_texts(tmp_path / "latin.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no files of"):
        list(read_texts(tmp_path / "empty"))
