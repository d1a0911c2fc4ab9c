"""The memo of digests: remembered across processes, disposable, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from latentcache.precache import workspace as memo_module
from latentcache.precache.workspace import FLUSH_ROWS, Memo


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


def test_rows_are_written_in_groups_without_a_flush(tmp_path: Path) -> None:
    memo = Memo(tmp_path / "memo")
    for number in range(FLUSH_ROWS + 1):
        memo[str(number)] = "x"
    assert len(Memo(tmp_path / "memo", read_only=True)) == FLUSH_ROWS


def test_reread_sees_what_others_wrote(tmp_path: Path) -> None:
    first, second = Memo(tmp_path / "memo"), Memo(tmp_path / "memo")
    first["shared"] = "news"
    first.flush()
    assert "shared" not in second
    assert second.reread(["shared", "missing"]) == {"shared": "news"}


def test_reading_only_writes_nothing(tmp_path: Path) -> None:
    memo = Memo(tmp_path / "none", read_only=True)
    memo["name"] = "kept in memory"
    memo.close()
    assert memo["name"] == "kept in memory" and not (tmp_path / "none").exists()


def test_a_damaged_memo_is_thrown_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memo = Memo(tmp_path / "memo")
    memo["name"] = "value"
    memo.close()
    (tmp_path / "memo" / "cache.db").write_bytes(b"nonsense" * 100)
    assert "name" not in Memo(tmp_path / "memo", read_only=True)
    assert (tmp_path / "memo" / "cache.db").read_bytes().startswith(b"nonsense"), "a reader leaves it alone"
    assert "name" not in Memo(tmp_path / "memo")
    assert "removed" in caplog.text


def test_a_damaged_memo_behind_a_link_is_let_go(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "cache.db").write_bytes(b"nonsense" * 100)
    (tmp_path / "memo").symlink_to(outside)
    memo = Memo(tmp_path / "memo")
    memo["name"] = "value"
    memo.close()
    assert not (tmp_path / "memo").is_symlink() and Memo(tmp_path / "memo")["name"] == "value"
    assert (outside / "cache.db").read_bytes() == b"nonsense" * 100


def test_what_another_process_put_in_place_of_a_damaged_memo_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memo").mkdir()
    (tmp_path / "memo" / "cache.db").write_bytes(b"nonsense" * 100)
    real, others = memo_module.locked, []

    def late(*args: object, **kwargs: object) -> object:
        monkeypatch.undo()
        others.append(Memo(tmp_path / "memo"))
        others[0]["name"] = "value"
        others[0].flush()
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(memo_module, "locked", late)
    assert Memo(tmp_path / "memo")["name"] == "value"
    assert [path.name for path in tmp_path.glob("memo*")] in (["memo", "memo.lock"], ["memo.lock", "memo"])
