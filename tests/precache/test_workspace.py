"""The memo of digests: remembered across processes, disposable, and never in the way."""

from __future__ import annotations

import contextlib
import random
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.photo_files import write_photo

from latentcache.config import SourceConfig
from latentcache.config_file import parse_config
from latentcache.dataset import samples
from latentcache.dataset.samples import SampleSource
from latentcache.dataset.sources import open_source
from latentcache.errors import StoreError
from latentcache.identity import digest
from latentcache.precache import memo as memo_module
from latentcache.precache import plan as planner
from latentcache.precache.memo import FLUSH_ROWS, Memo
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.types import Refusal


def test_what_was_remembered_is_there_next_time(tmp_path: Path) -> None:
    memo = Memo(tmp_path / "memo")
    memo["name"] = "value"
    memo["odd \udcff name"] = "kept too"
    assert memo["name"] == "value" and len(memo) == 2 and "other" not in memo
    memo.close()
    again = Memo(tmp_path / "memo")
    assert again["name"] == "value" and again["odd \udcff name"] == "kept too"
    del again["name"]
    assert "name" not in again
    again.close()
    assert "name" not in Memo(tmp_path / "memo")


def test_what_one_process_flushed_another_finds(tmp_path: Path) -> None:
    first, second = Memo(tmp_path / "memo"), Memo(tmp_path / "memo")
    first["shared"] = "news"
    assert "shared" not in second
    first.flush()
    assert second["shared"] == "news" and second.get_many(["shared", "missing"]) == {"shared": "news"}
    for number in range(FLUSH_ROWS):
        first[str(number)] = "x"
    assert len(second) == FLUSH_ROWS + 1, "written without a flush"


def test_reading_only_writes_nothing(tmp_path: Path) -> None:
    with contextlib.closing(Memo(tmp_path / "none", read_only=True)) as memo:
        memo["name"] = "kept in memory"
        memo.flush()
        assert memo["name"] == "kept in memory" and not list(tmp_path.iterdir())
    Memo(tmp_path / "memo").close()
    before = (tmp_path / "memo").read_bytes()
    with contextlib.closing(Memo(tmp_path / "memo", read_only=True)) as memo:
        memo["name"] = "kept in memory"
    assert (tmp_path / "memo").read_bytes() == before


def test_rows_that_nobody_asks_for_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1.0]
    monkeypatch.setattr(memo_module.time, "time", lambda: clock[0] * 86400)
    with contextlib.closing(Memo(tmp_path / "memo")) as memo:
        memo.update({"used": "1", "unused": "2"})
    for clock[0] in (100.0, 200.0, 300.0):
        with contextlib.closing(Memo(tmp_path / "memo")) as memo:
            assert memo["used"] == "1"
    assert set(Memo(tmp_path / "memo")) == {"used"}


def test_a_damaged_memo_is_named_and_removed_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "memo"
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreError, match=r"memo: .* is not a database\. Fix the cause, or remove the file"):
        Memo(path, read_only=True).get_many(["name"])
    with pytest.raises(StoreError, match=r"memo: .* is not a database\. It is removed now: run precache again"):
        Memo(path)
    with contextlib.closing(Memo(path)) as memo:
        memo["name"] = "value"
    assert Memo(path)["name"] == "value"


def test_a_flipped_bit_gives_no_other_text(tmp_path: Path) -> None:
    """Wherever it is in the database: what is read is right or absent, or the memo is named as damaged."""
    texts, path = {f"name {number}": f"text {number} " + "é" * 40 for number in range(20)}, tmp_path / "memo"
    with contextlib.closing(Memo(path)) as memo:
        memo.update(texts)
    whole, dice = path.read_bytes(), random.Random(14)
    used = [at for at, byte in enumerate(whole) if byte]
    num_absent = 0
    for at in dice.sample(used, 400):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
        with contextlib.suppress(StoreError):
            found = Memo(path, read_only=True).get_many(texts)
            assert found.items() <= texts.items(), f"byte {at}"
            num_absent += len(texts) - len(found)
    assert num_absent > 0


def test_another_column_of_a_table_has_other_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memo knows a row's image by the path of the row, which is the same for each column."""
    monkeypatch.setattr(samples, "SETTLED_NS", -1)
    before, after = (write_photo(tmp_path / f"{seed}.png", seed).read_bytes() for seed in (1, 2))
    pq.write_table(pa.table({"before": [before], "after": [after]}), tmp_path / "a.parquet")
    memo = Memo()
    for column, data in (("before", before), ("after", after), ("before", before)):
        source = {"kind": "parquet", "path": tmp_path / "a.parquet", "image_column": column}
        buckets = {"area": 96 * 96, "step": 32}
        dataset = {"name": "table", "source": source, "buckets": buckets, "images": {"min_side": 8}}
        settings = {"datasets": [dataset], "model": {"path": "tiny"}, "encode": {"device": "cpu"}}
        workspace = Workspace(memo=memo)
        run_precache(parse_config(settings), workspace=workspace)
        manifest = workspace.manifests.read("table")
        assert manifest is not None
        assert [row.source for row in manifest.rows.values()] == [digest(data)], column


@pytest.mark.parametrize("kind", ["folder", "webdataset", "parquet"])
def test_a_folder_that_is_replaced_while_it_is_planned_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a dataset behind a link that names its version: going back to the old one changes none of its files."""
    monkeypatch.setattr(samples, "SETTLED_NS", -1)
    digests = []
    for version in ("1", "2"):
        photo = write_photo(tmp_path / version / "a.png", int(version))
        digests.append(digest(photo.read_bytes()))
        with tarfile.open(photo.parent / "a.tar", "w") as tar:
            tar.add(photo, "a.png")
        pq.write_table(pa.table({"image": [photo.read_bytes()]}), photo.parent / "a.parquet")

    def point_to(version: str) -> None:
        (tmp_path / "current").unlink(missing_ok=True)
        (tmp_path / "current").symlink_to(tmp_path / version)

    memo = Memo()

    def planned() -> Refusal | str | None:
        source = {"kind": kind, "path": tmp_path / "current"}
        dataset = {"name": "photos", "source": source, "images": {"min_side": 8}}
        settings = {"datasets": [dataset | {"buckets": {"area": 96 * 96, "step": 32}}], "model": {"path": "tiny"}}
        workspace = Workspace(memo=memo)
        run_precache(parse_config(settings | {"encode": {"device": "cpu"}}), workspace=workspace)
        (row,) = workspace.manifests.read("photos").rows.values()  # type: ignore[union-attr]
        return row.refusal or row.source

    def listed(source: SourceConfig, *arguments: Any, **options: Any) -> SampleSource:
        opened = open_source(source, *arguments, **options)
        items = list(opened.samples())
        monkeypatch.setattr(opened, "samples", lambda: iter(items))
        point_to("2")
        return opened

    point_to("1")
    with monkeypatch.context() as patch:
        patch.setattr(planner, "open_source", listed)
        planned()
    point_to("1")
    assert planned() == digests[0]
