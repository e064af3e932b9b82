"""Files written whole, and a cache whose files only their owner may have written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from smkern.atomic import make_folder, read_whole, write_whole
from smkern.errors import ProfileError, TableError
from smkern.profile import cache_file, load_profile, profile_for, save_profile
from smkern.tuning.cells import user_path
from smkern.tuning.select import GEMM_FAMILY

H200 = load_profile("h200")


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "smkern"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file be another user's."""
    own = os.geteuid()
    if own == 0:
        os.chown(path, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "old"


def test_leftovers_of_killed_writers_go_but_no_other_files(tmp_path):
    path = tmp_path / "a.json"
    old, new, other = (tmp_path / f".{name}.part" for name in ("a.json.x", "a.json.y", "b.json.x"))
    for left in (old, new, other):
        left.write_text("half")
        if left is not new:
            os.utime(left, (time.time() - 7200,) * 2)
    write_whole(path, "whole")
    assert {*tmp_path.iterdir()} == {path, new, other}


@pytest.mark.parametrize("mode", [0o622, 0o664, 0o666])
def test_a_file_that_others_may_write_is_refused_in_the_cache_alone(cache, tmp_path, mode):
    for path, is_read in ((cache / "a", False), (tmp_path / "a", True)):
        write_whole(path, "text")
        assert read_whole(path) == b"text"
        path.chmod(mode)
        if is_read:
            assert read_whole(path) == b"text"
        else:
            with pytest.raises(PermissionError, match=f"its mode is {mode:o}.*chmod go-w"):
                read_whole(path)


def test_folders_below_the_cache_are_private_and_others_take_the_umask(cache, tmp_path):
    before = os.umask(0o002)
    try:
        for folder in (cache / "tables" / "h200", tmp_path / "out" / "deep"):
            make_folder(folder)
            make_folder(folder)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {modes.pop(path) for path in (cache, *cache.rglob("*"))} == {0o700}
    assert set(modes.values()) == {0o775}


def test_a_planted_table_is_refused_by_name(cache, monkeypatch):
    path = user_path(H200.info.name)
    write_whole(path, '{"format": "smkern-table", "version": 1, "meta": {"gpu": "NVIDIA H200"}, '
                      '"cells": []}')  # fmt: skip
    assert GEMM_FAMILY.load(H200).cells
    give_away(path, monkeypatch)
    with pytest.raises(TableError, match=r"gemm.json cannot be read.*another user may have"):
        GEMM_FAMILY.load(H200)


def test_a_planted_profile_is_refused_by_name(cache, monkeypatch):
    save_profile(H200)
    path = cache_file(H200.info)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert profile_for(H200.info).source == "measured"
    give_away(path, monkeypatch)
    with pytest.raises(ProfileError, match=r"cannot be read.*another user may have"):
        profile_for(H200.info)
