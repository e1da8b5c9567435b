"""The cache on disk: who may have written what is found there, and what happens when several write at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import ROOT

from epigen.runtime import triton_key, user_cache
from epigen.runtime.user_cache import UserCache


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder that everybody may write to, as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def taken(folder: Path, kind: str) -> Path:
    """A folder as it may lie where ours should: nobody but us must be able to write to it."""
    if kind == "a link":
        other = folder.with_name("elsewhere")
        other.mkdir(mode=0o700)
        folder.symlink_to(other)
    elif kind == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod({"the group's": 0o770, "everybody's": 0o707, "read-only": 0o500, "somebody else's": 0o700}[kind])
    return folder


KINDS = ("a link", "a file", "the group's", "everybody's", "somebody else's")


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a folder look as if another user owned it, which only that user or root could do for real."""
    lstat = Path.lstat

    def apply(folder: Path) -> None:
        def answer(path: Path) -> Any:
            found = lstat(path)
            return SimpleNamespace(st_mode=found.st_mode, st_uid=found.st_uid + 1) if path == folder else found

        monkeypatch.setattr(Path, "lstat", answer)

    return apply


def test_a_folder_of_our_own_is_made_and_used(tmp_path: Path) -> None:
    store = UserCache(tmp_path / "a" / "cache")
    path = store.write("x.py", "one")
    assert path == tmp_path / "a" / "cache" / "x.py" and path.read_text() == "one" and store.read("x.py") == "one"
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    before = path.stat()
    assert store.write("x.py", "one").stat().st_ino == before.st_ino, "the same text is not written again"
    assert store.write("x.py", "two").read_text() == "two" and sorted(f.name for f in path.parent.iterdir()) == ["x.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_others_can_write_to_is_passed_over(tmp_path: Path, shared: Path, kind: str, stranger: Any) -> None:
    cache = taken(tmp_path / "cache", kind)
    if kind == "somebody else's":
        stranger(cache)
    if cache.is_dir():
        (cache / "x.py").write_text("evil")
    store = UserCache(cache)
    assert store.read("x.py") is None
    path = store.write("x.py", "ours")
    assert path == shared / f"epigen-{os.getuid()}" / "x.py" and path.read_text() == "ours"
    if cache.is_dir():
        assert (cache / "x.py").read_text() == "evil"


@pytest.mark.parametrize("kind", KINDS)
def test_so_is_a_folder_that_was_put_into_the_temporary_one(tmp_path: Path, shared: Path, kind: str, stranger: Any) -> None:
    (tmp_path / "file").write_text("")
    squatted = taken(shared / f"epigen-{os.getuid()}", kind)
    if kind == "somebody else's":
        stranger(squatted)
    store = UserCache(tmp_path / "file" / "cache")  # cannot be made
    path = store.write("x.py", "ours")
    assert path.read_text() == "ours" and path.parent.parent == shared and path.parent.name.startswith("epigen-") and path.parent != squatted
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.parent.stat().st_uid == os.getuid()
    assert store.write("y.py", "ours").parent == path.parent


def test_a_triton_that_lies_otherwise_is_asked_as_before(tmp_path: Path) -> None:
    compute = Digest()
    assert triton_key.digest(compute, tmp_path / "nowhere", "3.6.0", UserCache(tmp_path / "cache")) == Digest()() and compute.count == 1


def test_a_link_under_the_files_name_is_replaced_not_followed(tmp_path: Path) -> None:
    store, target = UserCache(tmp_path / "cache"), tmp_path / "target"
    target.write_text("ours")
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "x.py").symlink_to(target)
    assert store.read("x.py") is None
    path = store.write("x.py", "ours")
    assert not path.is_symlink() and path.read_text() == "ours"
    store.write("x.py", "other")
    assert target.read_text() == "ours"


def test_what_lies_in_the_way_does_not_hold_us_up(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    os.mkfifo(cache / "x.py")
    assert UserCache(cache).write("x.py", "ours").read_text() == "ours"
    (cache / "y.py").write_bytes(b"\xff\xfe")
    assert UserCache(cache).read("y.py") is None and UserCache(cache).write("y.py", "ours").read_text() == "ours"


WRITER = """
import sys
from pathlib import Path
from epigen.runtime.user_cache import UserCache
store = UserCache(Path(sys.argv[1]))
for i in range(300):
    path = store.write(f"x{i % 3}.py", sys.argv[2] * 2000)
    text = path.read_text()
    assert len(text) == 2000 and len(set(text)) == 1, "half of a file was seen"
"""


def test_several_writers_see_whole_files_only(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "cache", letter], cwd=ROOT, stderr=subprocess.PIPE) for letter in "abcd"]
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors.decode()
    assert sorted(f.name for f in (tmp_path / "cache").iterdir()) == ["x0.py", "x1.py", "x2.py"]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)

    def full(*_: Any) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="full"):
            user_cache._write(cache / "x.py", "text")
    assert list(cache.iterdir()) == []


# -- Triton's digest of itself


@pytest.fixture
def triton(tmp_path: Path) -> Path:
    folder = tmp_path / "triton"
    for name in ("compiler", "backends/nvidia", "language", "runtime", "_C"):
        (folder / name).mkdir(parents=True)
        (folder / name / "code.py").write_text("1")
    (folder / "_C" / "libtriton.so").write_bytes(b"code")
    return folder


class Digest:
    def __init__(self, version: str = "3.6.0") -> None:
        self.version, self.count = version, 0

    def __call__(self) -> str:
        self.count += 1
        return f"{self.version}{'-'.join(f'{self.count:x}' * 64 for _ in range(3))}"


def test_the_digest_is_computed_once_for_all_processes(tmp_path: Path, triton: Path) -> None:
    compute, store = Digest(), UserCache(tmp_path / "cache")
    first = triton_key.digest(compute, triton, "3.6.0", store)
    assert triton_key.digest(compute, triton, "3.6.0", UserCache(tmp_path / "cache")) == first and compute.count == 1


@pytest.mark.parametrize("change", ["content", "a file", "a file less", "the library", "its version", "the same length and times", "nested"])
def test_whatever_changes_makes_it_anew(tmp_path: Path, triton: Path, change: str) -> None:
    compute, store, version = Digest(), UserCache(tmp_path / "cache"), "3.6.0"
    first = triton_key.digest(compute, triton, version, store)
    code = triton / "compiler" / "code.py"
    match change:
        case "content":
            code.write_text("22")
        case "a file":
            (triton / "language" / "new.py").write_text("1")
        case "a file less":
            code.unlink()
        case "the library":
            (triton / "_C" / "libtriton.so").write_bytes(b"other")
        case "its version":
            version = compute.version = "3.6.1"
        case "the same length and times":
            times = code.stat()
            other = code.with_name("other.py")
            other.write_text("2")
            os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
            other.replace(code)
        case "nested":
            (triton / "backends" / "nvidia" / "code.py").write_text("333")
    assert triton_key.digest(compute, triton, version, store) != first and compute.count == 2


@pytest.mark.parametrize("text", ["", "3.6.0", "3.6.0zz", "import os", "3.5.0" + "a" * 64, "3.6.0" + "a" * 64 + "-", "3.6.0" + "a" * 64 + "\n"])
def test_what_is_no_digest_is_not_taken_for_one(tmp_path: Path, triton: Path, text: str) -> None:
    compute, store = Digest(), UserCache(tmp_path / "cache")
    store.write(f"triton_{triton_key.marks(triton, '3.6.0')}.txt", text)
    assert triton_key.digest(compute, triton, "3.6.0", store) == Digest()() and compute.count == 1


@pytest.mark.triton
def test_tritons_own_digest_is_what_is_remembered(tmp_path: Path) -> None:
    """With the Triton at hand, in two processes: the second does not read all of it, and both name the same cache entries."""
    code = (
        "import sys, triton\n"
        "from pathlib import Path\n"
        "from triton.runtime import cache\n"
        "from epigen.runtime import triton_key\n"
        "from epigen.runtime.user_cache import UserCache\n"
        "original = cache.triton_key\n"
        "triton_key.remember(triton, UserCache(Path(sys.argv[1])))\n"
        "assert cache.triton_key is not original\n"
        "found = cache.triton_key()\n"
        "computed = original.cache_info().currsize\n"
        "assert found == original()\n"
        "print(computed)\n"
        "triton_key.remember(triton, UserCache(Path(sys.argv[1])))\n"
    )
    counts = [subprocess.run([sys.executable, "-c", code, tmp_path / "cache"], cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert counts == ["1\n", "0\n"]
