"""Where studies are kept: what is refused and how, what a damaged file costs, several tuners that open a new database, and what is never shown."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import random
import socket
import sqlite3
import stat
import traceback
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from click.testing import CliRunner
from golden import Golden
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import OperationalError
from threads import in_threads
from tuner_process import SPACE, MadeUp, outcome_of, run

from bench.record import DATA
from epigen import cli
from epigen.choose.space import parameters
from epigen.codegen.spec import KernelConfig
from epigen.errors import TuneError
from epigen.tuning import journal, storage
from epigen.tuning.storage import open_storage
from epigen.tuning.study import Claim, Study
from epigen.tuning.task import Outcome
from epigen.tuning.tpe import Point, Tpe

SWEEP = DATA / "sweep_skinny.json"
CONFIGS = list(itertools.islice(SPACE.every(), 0, 400, 37))


def point_of(config: KernelConfig) -> Point:
    values = parameters(config)
    return Point(values, {name: optuna.distributions.IntDistribution(0, 20) for name in values})


def studied(path: object, configs: list[KernelConfig]) -> Mapping[KernelConfig, Outcome]:
    """Measures these in the study "one" of a storage, and learns what others found: all that a search does with a storage."""
    opened = open_storage(str(path))
    try:
        with Study(opened, "one", beat_s=1000.0, accept=SPACE.legal) as study:
            before = dict(study.outcomes)
            Tpe(0).propose(study.study, {}, SPACE.point)
            for config in configs:
                claim = study.claim(config, point_of(config), 1000)
                if isinstance(claim, Claim):
                    study.record(claim, outcome_of(config))
            study.refresh()
            return before
    finally:
        opened.close()


# -- what is refused


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "^'nonsense' .*postgresql"),
        ("", "^'' "),
        ("post gres://me:secret@x/y", r"@ .*%40, : .*%3A .*/ .*%2F$"),
        ("me:secret@x.journal", "what was given"),
        ("journal://me:secret@host/x", "^'journal://…'"),
        ("journal://", "'journal://'"),
        ("redis://localhost", "redis://localhost"),
        ("postgresql+psycopg://me:secret@127.0.0.1:1/x", r"postgresql\+psycopg://127.0.0.1 .*refused"),
        ("postgresql+psycopg://me:secret@127.0.0.1:1/x.journal", r"postgresql\+psycopg://127.0.0.1 .*refused"),
        ("postgresql+psycopg://me@127.0.0.1:port/x", r"^'postgresql\+psycopg://…'"),
        ("postgresql+psycopg://me:{secret}@127.0.0.1:1/x", "refused"),
        ("mysql+pymysql://me:secret@127.0.0.1:1/x", r"mysql\+pymysql://127.0.0.1 .*'pymysql'\n.*pip install"),
        ("journal:///proc/nowhere/study.journal", "journal:///proc/nowhere/study.journal"),
        ("/dev/null/study.journal", "/dev/null/study.journal"),
        ("~nobody-has-this-name/study.journal", r"home|No such file|denied"),
        ("bad\0name.journal", "no storage"),
    ],
)
def test_a_storage_that_cannot_be_used_is_refused_in_words(url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TuneError, match=words) as caught:
        open_storage(url)
    assert len(str(caught.value).splitlines()) <= 2 and "secret" not in str(caught.value) and not list(tmp_path.iterdir())


def test_a_memory_of_sqlites_is_memory() -> None:
    for url in ("sqlite://", "sqlite:///", "sqlite:///:memory:"):
        assert not open_storage(url).lasting


# -- SQLite's files


def _other_program(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("create table moz_places (id integer)")
    other.close()


def _another_optuna(path: Path) -> None:
    open_storage(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as there:
        there.execute("update alembic_version set version_num = 'v99.0.0.a'")
    there.close()


SQLITE: list[tuple[Callable[[Path], object], str]] = [
    (Path.mkdir, "this is a folder, and a file is wanted"),
    (lambda path: path.write_bytes(b"no database at all, but of some length\n" * 99), "file is not a database"),
    (lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 500), "file is not a database|malformed"),
    (_other_program, r"it holds tables of another program \(moz_places\): name a new file"),
    (_another_optuna, "no longer compatible with the table schema|Can't locate revision"),
    (lambda path: path.symlink_to(path.parent / "nowhere" / "x.db"), "unable to open database file"),
]


@pytest.mark.parametrize(("make", "said"), SQLITE, ids=["folder", "text", "garbage", "another program", "another Optuna", "a link to nowhere"])
def test_an_sqlite_file_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    path = tmp_path / "x.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(TuneError, match=rf"^the storage sqlite:///{path} cannot be used: .*({said})"):
        open_storage(f"sqlite:///{path}")
    assert before is None or path.read_bytes() == before


def test_an_sqlite_file_without_its_folder(tmp_path: Path, golden: Golden) -> None:
    with golden.raises(TuneError):
        open_storage(f"sqlite:///{tmp_path}/nowhere/x.db")


def test_an_empty_sqlite_file_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "x.db").touch()
    studied(f"sqlite:///{tmp_path}/x.db", CONFIGS[:2])
    assert set(studied(f"sqlite:///{tmp_path}/x.db", [])) == set(CONFIGS[:2])


def test_an_sqlite_file_that_may_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    open_storage(f"sqlite:///{path}").close()
    with pytest.raises(TuneError, match="readonly"):
        studied(f"sqlite:///file:{path}?mode=ro&uri=true", CONFIGS[:1])


def test_an_sqlite_file_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.db"
    open_storage(f"sqlite:///{path}").close()
    monkeypatch.setattr(storage, "_engine", lambda _: {"connect_args": {"timeout": 0.01}})
    holder = sqlite3.connect(path)
    holder.execute("begin exclusive")
    try:
        with pytest.raises(TuneError, match="locked"):
            studied(f"sqlite:///{path}", CONFIGS[:1])
    finally:
        holder.close()


def test_rows_that_somebody_has_spoilt_are_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    studied(f"sqlite:///{path}", CONFIGS[:2])
    with sqlite3.connect(path) as there:
        there.execute('update trial_params set distribution_json = \'{"name": "Nothing"}\'')
    there.close()
    with pytest.raises(TuneError, match=f"{path} failed: ValueError"):
        studied(f"sqlite:///{path}", CONFIGS[:2])


# -- several tuners open a new one


def together(urls: list[str]) -> list[str]:
    """What as many threads say that open them at the same moment."""
    said: list[str] = []

    def one(number: int) -> None:
        open_storage(urls[number]).close()
        said.append("opened")

    failures = in_threads(len(urls), one)
    return said + [repr(error) for error in failures]


def test_several_open_one_new_sqlite_file(tmp_path: Path) -> None:
    for i in range(2):
        assert together([f"sqlite:///{tmp_path}/{i}.db"] * 3) == ["opened"] * 3
    studied(f"sqlite:///{tmp_path}/0.db", CONFIGS[:2])
    assert set(studied(f"sqlite:///{tmp_path}/0.db", [])) == set(CONFIGS[:2])


def test_several_open_one_new_journal(tmp_path: Path) -> None:
    assert together([f"{tmp_path}/x.journal"] * 4) == ["opened"] * 4


@pytest.mark.slow
def test_several_open_one_new_database_of_a_server(server: str) -> None:
    import psycopg  # where there are GPUs there may be none

    with psycopg.connect(server.replace("+psycopg", ""), autocommit=True) as admin:
        for i in range(2):
            admin.execute(f"create database new_{i}")  # type: ignore[arg-type]
            assert together([server.replace("/postgres", f"/new_{i}")] * 3) == ["opened"] * 3


@pytest.mark.parametrize("said", ["table studies already exists", "no such column: studies.x"])
def test_what_another_tuner_has_just_made_is_looked_at_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str) -> None:
    """However often: each time the other one has come further. What is no such thing is tried once."""
    tries = []

    def opening(*_: object, **__: object) -> object:
        tries.append(1)
        if len(tries) < 20:
            raise OperationalError("create table studies", {}, sqlite3.OperationalError(said))
        return optuna.storages.InMemoryStorage()

    monkeypatch.setattr(storage, "RDBStorage", opening)
    monkeypatch.setattr(storage, "_PAUSE_S", 0.0)
    if "exists" in said:
        open_storage(f"sqlite:///{tmp_path}/x.db")
        assert len(tries) == 21  # the last one twice: without a pool, and with one
    else:
        with pytest.raises(TuneError, match="no such column"):
            open_storage(f"sqlite:///{tmp_path}/x.db")
        assert len(tries) == 1


# -- journals


@pytest.mark.parametrize("content", [b"no journal\n", b"[]\n", b'{"a": 1}\n', b"\x00\xff\n", b"half a line of something else", b"[" * 100_000 + b"\n"])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.journal"
    path.write_bytes(content)
    with pytest.raises(TuneError, match=rf"{path} .*line 1"):
        studied(path, CONFIGS[:1])
    assert path.read_bytes() == content


def test_an_empty_file_is_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / "x.journal").touch()
    assert not studied(tmp_path / "x.journal", CONFIGS[:2])
    assert set(studied(tmp_path / "x.journal", [])) == set(CONFIGS[:2])


def test_what_is_no_file_is_no_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.journal")
    (tmp_path / "device.journal").symlink_to("/dev/zero")
    (tmp_path / "folder.journal").mkdir()
    for name, said in (("pipe", "is no regular file"), ("device", "is no regular file"), ("folder", "Is a directory")):
        with pytest.raises(TuneError, match=rf"{tmp_path}/{name}.journal.*{said}|{said}.*{tmp_path}/{name}.journal"):
            open_storage(f"{tmp_path}/{name}.journal")


def test_a_journal_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(journal, "_LONGEST", 1000)
    path = tmp_path / "x.journal"
    path.write_bytes(b'{"op_code"' * 1000)
    with golden.raises(TuneError):
        studied(path, CONFIGS[:1])


@pytest.mark.skipif(not os.geteuid(), reason="root may write everything")
def test_a_journal_that_may_not_be_written(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "x.journal"
    path.touch()
    path.chmod(stat.S_IRUSR)
    with golden.raises(TuneError):
        open_storage(str(path))


def test_a_journal_that_a_kill_left_in_mid_line_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    run(MadeUp(), 8, str(path))
    data = path.read_bytes()
    for cut in (1, 2, 40, len(data.splitlines()[-1])):
        path.write_bytes(data + data.splitlines()[-1][:cut])
        runner = MadeUp()
        assert len(run(runner, 10, str(path)).outcomes) == 10
        assert len(runner.measured) == 2


def test_the_journal_is_optunas_own_format(tmp_path: Path) -> None:
    path = f"{tmp_path}/study.journal"
    found = run(MadeUp(), 6, path)
    theirs = optuna.storages.JournalStorage(JournalFileBackend(path))
    study = optuna.load_study(study_name="one", storage=theirs)
    assert len(study.trials) == 6
    assert math.exp(study.best_value) == pytest.approx(found.outcome.median_us, rel=0.01)  # what is as good within the noise may win
    optuna.create_study(study_name="two", storage=theirs)  # and what they write is read
    assert len(run(MadeUp(), 3, path, "two").outcomes) == 3
    assert set(optuna.get_all_study_names(theirs)) == {"one", "two"}


def test_all_that_optuna_writes_is_sound(tmp_path: Path) -> None:
    """None of its lines is taken for damaged: a study of every kind of parameter, attribute and end."""
    path = tmp_path / "x.journal"
    theirs = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    study = optuna.create_study(study_name="one", storage=theirs, sampler=optuna.samplers.RandomSampler(0))

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_float("x", 1e-3, 1.0, log=True)
        trial.suggest_categorical("c", [None, "a", 2.5, True])
        trial.report(1.0, 3)
        trial.set_user_attr("note", {"a": [1]})
        if trial.number == 2:
            raise optuna.TrialPruned
        return float(trial.suggest_int("n", 1, 9, step=2)) if trial.number else math.inf

    study.optimize(objective, n_trials=4)
    study.enqueue_trial({"x": 0.5})
    study.ask()
    study.add_trial(optuna.trial.create_trial(value=1.0, intermediate_values={1: 2.0}))
    study.set_user_attr("who", "me")
    optuna.create_study(study_name="two", storage=theirs, directions=["minimize", "maximize"])
    optuna.delete_study(study_name="two", storage=theirs)
    lines = path.read_bytes().splitlines(keepends=True)
    assert {json.loads(line)["op_code"] for line in lines} >= {0, 1, 2, 4, 5, 6, 7, 8}
    assert [journal._parsed(line) for line in lines] == [json.loads(line) for line in lines]


def whole(path: Path) -> tuple[list[bytes], Mapping[KernelConfig, Outcome]]:
    """The lines of a journal of eight trials by two tuners, and what they found."""
    studied(path, CONFIGS[:4])
    studied(path, CONFIGS[4:8])
    return path.read_bytes().splitlines(keepends=True), studied(path, [])


def _bytes_changed(line: bytes, rng: random.Random) -> bytes:
    at, spoilt = rng.randrange(len(line)), bytearray(line)
    match rng.randrange(4):
        case 0:
            spoilt[at] ^= 1 << rng.randrange(8)
        case 1:
            del spoilt[at : at + rng.randrange(1, 40)]
        case 2:
            spoilt[at:at] = rng.choice([b"0", b'"', b"{", b"null", b"9" * 30, b"\n", b"-", b"1e999", b"[[", b"\0" * 9, b"NaN", b'","a":{"b":"'])
        case _:
            spoilt[at:] = b""
    return bytes(spoilt)


def _field_changed(line: bytes, rng: random.Random) -> bytes:
    log = json.loads(line)
    where, names = log, []
    while isinstance(where, dict) and where and (not names or rng.random() < 0.6):
        names.append((where, rng.choice(list(where))))
        where = where[names[-1][1]]
    holder, name = names[-1]
    if rng.random() < 0.2:
        del holder[name]
    else:
        holder[name] = rng.choice([None, True, -1, 0, 5, 99, 10**40, 0.5, math.nan, -math.inf, "", "x", [], [1], {}, {"a": 1}, {"a": 1, "b": {}}])
    return json.dumps(log, separators=(",", ":")).encode() + b"\n"


@pytest.mark.parametrize("change", [_bytes_changed, _field_changed])
def test_a_damaged_journal_costs_its_damaged_line_or_is_refused_by_name(tmp_path: Path, change: Callable[[bytes, random.Random], bytes]) -> None:
    """Whatever becomes of one line, no outcome comes to belong to another trial's config, and what is refused is refused in words."""
    lines, known = whole(tmp_path / "whole.journal")
    assert len(known) == 8
    rng, ends = random.Random(20), Counter[str]()
    for number in range(150):
        path = tmp_path / f"{number}.journal"
        at = rng.randrange(len(lines))
        path.write_bytes(b"".join([*lines[:at], change(lines[at], rng), *lines[at + 1 :]]))
        try:
            found = studied(path, CONFIGS[:1])
        except TuneError as error:
            by_name = str(path) in str(error) and "remove it" in str(error)
            ends["refused" if by_name else str(error)] += 1
            continue
        differing = [config for config, outcome in found.items() if known.get(config) != outcome]
        assert len(differing) <= 1 and set(found) <= set(known) | set(differing), lines[at]
        ends[f"{len(known) - len(found)} trials lost" if len(known) > len(found) else "nothing lost"] += 1
        path.unlink()
    all_lost = ends.pop(f"{len(known)} trials lost", 0)  # the study has another name
    assert set(ends) == {"refused", "1 trials lost", "nothing lost"} and all_lost < 10 and ends["refused"] < 100 and min(ends.values()) > 20, ends


def test_a_trial_whose_beginning_is_damaged_keeps_its_place(tmp_path: Path) -> None:
    lines, known = whole(tmp_path / "whole.journal")
    begun = [i for i, line in enumerate(lines) if json.loads(line)["op_code"] == 4]
    path = tmp_path / "x.journal"
    path.write_bytes(b"".join([*lines[: begun[2]], lines[begun[2]].replace(b'"params"', b'"porams'), *lines[begun[2] + 1 :]]))
    found = studied(path, [])
    assert found == {config: outcome for config, outcome in known.items() if config != CONFIGS[2]}


def test_what_tells_of_two_lines_at_once_is_refused(tmp_path: Path) -> None:
    """The end of the first is gone: to pass over it would give each later trial another one's place."""
    lines, _ = whole(tmp_path / "whole.journal")
    begun = [i for i, line in enumerate(lines) if json.loads(line)["op_code"] == 4]
    path = tmp_path / "x.journal"
    path.write_bytes(b"".join([*lines[: begun[2]], lines[begun[2]].replace(b"\n", b"\x0b"), *lines[begun[2] + 1 :]]))
    with pytest.raises(TuneError, match=f"line {begun[2] + 1}"):
        studied(path, [])


def test_the_command_tells_of_a_damaged_journal(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    path.write_text('{"op_code":0,"worker_id":"a","study_name":7,"directions":[1]}\n')
    done = CliRunner().invoke(cli.main, ["tune", "--replay", str(SWEEP), "--trials", "2", "--storage", str(path)], prog_name="epigen")
    assert done.exit_code == 1 and done.stderr.startswith(f"error: {path} is no journal of Optuna's, or is damaged in line 1: remove it")


# -- passwords


TEMPLATES = [
    "postgresql+psycopg://me:{0}@127.0.0.1:{port}/x",
    "postgresql+psycopg://me:{0}@127.0.0.1:{port}/x?application_name=tuner",
    "postgresql+psycopg://127.0.0.1:{port}/x?user=me&password={0}",
    "postgresql+psycopg://127.0.0.1:{port}/x?passwd={0}",
    "postgresql+psycopg://127.0.0.1:{port}/x?{0}=1",
    "postgresql+psycopg://me/{0}@127.0.0.1:{port}/x",
    "postgresql+psycopg://me:a@{0}@127.0.0.1:{port}/x",
    "postgresql+psycopg://me:{0}",
    "postgresql://me:{0}@127.0.0.1:{port}/x",
    "mysql+pymysql://me:{0}@127.0.0.1/x",
    "mysql+pymysql://me@127.0.0.1/x?passwd={0}",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3D{0}%3B",
    "redis://localhost?password={0}",
    "redis://:{0}@localhost",
    "post gres://me:hun/{0}@x/y",
    "post gres://me:a@{0}@x/y",
    "me:{0}@host/x",
    "me:{0}@host/x.journal",
    "journal://me:{0}@host/x.journal",
    "sqlite://me:{0}@host/x.db",
    "sqlite:///me:{0}@host/x.db",
    "sqlite:////nowhere/x.db?password={0}",
    "sqlite+pysqlcipher://:{0}@/x.db",
    "{0}://me:{0}@x",
    "?password={0}",
]


def passwords(rng: random.Random) -> Iterator[str]:
    """As somebody may type them, quoted or not."""
    letters = "abcXYZ0189" * 3 + "@:/?#&=%;+ {}[]$!~'\"\\ü"
    for _ in range(8):
        text = "hunter" + "".join(rng.choice(letters) for _ in range(rng.randrange(1, 12))) + "hunter"
        yield text
        yield urllib.parse.quote(text, safe="")


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_password_is_ever_shown(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in a message or a label, nor in a traceback or a log. Each begins and ends with the same word, so that a part shows too."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        rng = random.Random(template)
        for password in passwords(rng):
            url = template.replace("{0}", password).replace("{port}", str(taken.getsockname()[1]))
            try:
                opened = open_storage(url)
            except TuneError as error:
                said = "".join(traceback.format_exception(error)) + str(error)
            else:
                said = opened.label
                opened.close()
            # a traceback quotes lines of sources, and this test's has the word in it
            shown = [line for line in (said + caplog.text).splitlines() if "hunter" in line and "test_storage" not in line]
            assert not shown, f"{url}: {shown}"


def test_what_fails_later_shows_no_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden) -> None:
    """An error of a driver's that repeats what it was given."""

    def failing(*_: object, **__: object) -> object:
        raise OperationalError("select 1", {}, sqlite3.OperationalError("connection to 'me:hunter2@host' failed"))

    opened = storage.Storage(
        "postgresql://host", open_storage(None).backend(""), secrets=storage._secrets(sqlalchemy.make_url("postgresql://me:hunter2@host/x"))
    )
    monkeypatch.setattr(opened._backend, "get_all_studies", failing)
    with pytest.raises(TuneError) as caught, opened.in_words():
        opened.backend("").get_all_studies()
    assert "hunter2" not in "".join(traceback.format_exception(caught.value)[-1:]) and caught.value.__suppress_context__
    golden(str(caught.value))
    assert not list(tmp_path.iterdir())


def test_the_command_shows_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("post gres://me:hunter2@x/y", "postgresql+psycopg://127.0.0.1:1/x?password=hunter2", "postgresql+psycopg://me:a@hunter2@127.0.0.1/x"):
        for more in ([], ["--json"]):
            done: Any = CliRunner().invoke(cli.main, ["tune", "--replay", str(SWEEP), "--trials", "2", "--storage", url, *more], prog_name="epigen")
            assert done.exit_code == 1 and "hunter2" not in done.output and len(done.stderr.splitlines()) <= 2
