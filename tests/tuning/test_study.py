"""Studies that tuners share, and that a later run goes on from: in memory, in a journal file, in a real PostgreSQL server."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import optuna
import postgres_server
import pytest
import sqlalchemy
import tuner_process
from golden import Golden
from optuna.trial import FrozenTrial, TrialState
from tuner_process import BASELINE, CONFIGS, SPACE, MadeUp, outcome_of, prior, run

from bench.record import DATA
from epigen import settings
from epigen.choose.space import parameters
from epigen.codegen.spec import KernelConfig
from epigen.errors import EpigenError, TuneError
from epigen.tuning import journal
from epigen.tuning import search as search_module
from epigen.tuning.interrupt import noticed, unbroken
from epigen.tuning.search import Progress, assist
from epigen.tuning.storage import Storage, open_storage
from epigen.tuning.study import Claim, Study
from epigen.tuning.task import Baseline, Comparison, Outcome
from epigen.tuning.tpe import Point, Tpe


def point_of(config: KernelConfig) -> Point:
    values = parameters(config)
    return Point(values, {name: optuna.distributions.IntDistribution(0, 20) for name in values})


def claim(study: Study, config: KernelConfig, most: int = 100) -> Claim:
    found = study.claim(config, point_of(config), most)
    assert isinstance(found, Claim)
    return found


HANGS_S = 250.0
"""What nothing takes that is not hanging, however slow or busy the machine is."""


def until(met: Callable[[], object]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + HANGS_S
    while not met():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.01)


class Clock:
    """One that stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(reader: Study, of: Study) -> object:
    return reader.study.user_attrs[f"tuner {of.tuner}"]


@pytest.fixture(params=["journal", "folder", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage that other processes can open. On the server, one a worker of pytest, every test has a study of its own."""
    if request.param == "postgres":
        return str(request.getfixturevalue("server"))
    return f"{tmp_path}/study.journal" if request.param == "journal" else f"journal://{tmp_path}/studies/"


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    opened = open_storage(url)
    yield opened
    opened.close()


# -- journals


def test_a_journal_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few lines a trial are appended, and none is read twice; bench.front has it in seconds."""
    read: list[bytes] = []
    parsed = journal._parsed
    monkeypatch.setattr(journal, "_parsed", lambda line: (read.append(line), parsed(line))[1])
    path = tmp_path / "study.journal"
    run(MadeUp(), 48, str(path))
    lines = path.read_bytes().splitlines(keepends=True)
    assert 48 * 2 < len(lines) < 48 * 5
    assert read == lines[: len(read)]


def test_a_journal_of_an_older_version_is_gone_on_from(tmp_path: Path) -> None:
    """Written when proposals had a study of their own (2026-11, Optuna 5.0.0): 8 trials, and one that its tuner left under way."""
    path = shutil.copy(DATA / "study.journal", tmp_path)
    storage = open_storage(path)
    with Study(storage, "one", beat_s=1e6) as study:
        (left,) = study.under_way.values()
        assert study.outcomes == {c: outcome_of(c) for c in study.outcomes} and len(study.outcomes) == 8 and study.others() == {left.number}
        states = Counter(t.state for t in study.study.get_trials())
        assert states == {TrialState.COMPLETE: sum(o.kind == "ok" for o in study.outcomes.values()), TrialState.RUNNING: 1}
        old = {*study.outcomes}
    with Study(storage, "one", beat_s=1e6, dead_s=-1.0) as study:  # to whom it is dead at the first look
        assert not study.under_way and {*study.outcomes} == old
    runner = MadeUp()
    assert len(run(runner, 20, storage).outcomes) == 20 and len(runner.measured) == 12 and not old & {*runner.measured}


# -- what a sampler sees


def test_a_proposal_takes_what_others_have_under_way_as_tried(storage: Storage, name: str) -> None:
    """Trials under way are shown to the sampler, whoever measures them; those that failed, that were let go, or that are another's in vain are not."""
    with Study(storage, name) as one, Study(storage, name) as two:
        timed, failed, pending = claim(one, CONFIGS[0]), claim(one, CONFIGS[1]), claim(two, CONFIGS[2])
        assert two.claim(CONFIGS[0], point_of(CONFIGS[0]), 100) == "repeat"
        one.record(timed, Outcome("slower", 7.0, 0.5, 9))
        one.record(failed, Outcome("crashed"))
        one.refresh()
        seen = {t.number: (t.state, t.value, t.params) for t in one.study.get_trials()}
        assert seen == {
            timed.number: (TrialState.COMPLETE, math.log(7.0), parameters(CONFIGS[0])), pending.number: (TrialState.RUNNING, None, parameters(CONFIGS[2])),
        }  # fmt: skip
        own = claim(one, CONFIGS[3])
        assert {t.number for t in one.study.get_trials()} == {*seen, own.number}
        two.release()
        one.refresh()
        assert {t.number for t in one.study.get_trials()} == {timed.number, own.number}


def test_a_proposal_keeps_away_from_what_is_under_way(name: str) -> None:
    """TPE proposes what turned out well less often while others measure six of its kind."""
    space = optuna.distributions.IntDistribution(0, 3)
    storage = open_storage(None)

    def proposed() -> int:
        one.refresh()
        found = [Tpe(seed).propose(one.study, {}, lambda suggest: CONFIGS[suggest("x", 0, 3)])[1].parameters["x"] for seed in range(40)]
        return found.count(0)

    with Study(storage, name) as one, Study(storage, name) as two:
        held = one.claim(CONFIGS[0], Point({"x": 0}, {"x": space}), 100)
        assert isinstance(held, Claim)
        one.record(held, Outcome("ok", 5.0, 0.5, 9))
        alone = proposed()
        for config in CONFIGS[1:7]:
            assert isinstance(two.claim(config, Point({"x": 0}, {"x": space}), 100), Claim)
        assert proposed() < alone / 2


def test_a_proposal_reads_nothing_of_the_storage(tmp_path: Path) -> None:
    """What is known was read with the last claim: a server is not asked once a dimension."""
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    asked: list[object] = []
    with Study(storage, "one", beat_s=1e6) as study:
        for config in CONFIGS[:4]:
            study.record(claim(study, config), outcome_of(config))
        study.refresh()
        engine = storage.backend("one").engine  # type: ignore[attr-defined]
        sqlalchemy.event.listen(engine, "before_cursor_execute", lambda *given: asked.append(given))
        Tpe(0).propose(study.study, {}, SPACE.point)
        assert not asked
        study.refresh()
        assert asked
    storage.close()


def test_a_database_is_asked_for_what_may_have_changed_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = FrozenTrial.__init__
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    with Study(storage, "one", beat_s=1e6) as study:
        for config in CONFIGS[:6]:
            study.record(claim(study, config), outcome_of(config))
        study.refresh()
        read: list[int] = []
        monkeypatch.setattr(FrozenTrial, "__init__", lambda made, **given: (read.append(given["number"]), init(made, **given))[1])
        study.refresh()
        assert not read
        held = claim(study, CONFIGS[6])
        assert {*read} - {-1} == {held.number}  # -1: the claim before it has a number
    storage.close()


# -- claims


def test_of_two_claims_the_first_holds(storage: Storage, name: str) -> None:
    with Study(storage, name) as one, Study(storage, name) as two:
        held = claim(one, CONFIGS[0])
        assert two.claim(CONFIGS[0], point_of(CONFIGS[0]), 100) == "repeat"
        assert two.known(CONFIGS[0]) and two.others() == {held.number} and two.tuners() == 2
        one.record(held, Outcome("ok", 5.0, 0.5, 9))
        two.refresh()
        assert two.outcomes == {CONFIGS[0]: Outcome("ok", 5.0, 0.5, 9)} and not two.others()
        one.refresh()
        for study in (one, two):
            (trial,) = study.study.get_trials()
            assert trial.params == parameters(CONFIGS[0]) and trial.value == math.log(5.0)


def test_claims_end_at_the_number_wanted(storage: Storage, name: str) -> None:
    with Study(storage, name) as one, Study(storage, name) as two:
        first, _ = claim(one, CONFIGS[0], 2), claim(two, CONFIGS[1], 2)
        assert one.claim(CONFIGS[2], point_of(CONFIGS[2]), 2) == "full"
        one.record(first, Outcome("crashed", detail="x" * 1000))
        assert two.claim(CONFIGS[2], point_of(CONFIGS[2]), 2) == "full"
        assert two.outcomes[CONFIGS[0]].kind == "crashed" and len(two.outcomes[CONFIGS[0]].detail) == 300
        two.release()
        assert claim(one, CONFIGS[2], 2).config == CONFIGS[2]


def test_what_a_dead_tuner_had_under_way_is_given_up(storage: Storage, name: str) -> None:
    """One whose beat stopped; what it finds all the same counts for itself alone."""
    clock = Clock()
    with Study(storage, name, beat_s=1e6) as dead, Study(storage, name, dead_s=20.0, clock=clock) as alive:
        lost = claim(dead, CONFIGS[0])
        for seconds, held in ((0, True), (19, True), (2, False)):
            clock.now += seconds
            alive.refresh()
            assert alive.others() == ({lost.number} if held else set())
        again = claim(alive, CONFIGS[0])
        dead.record(lost, Outcome("ok", 1.0, 0.0, 1))
        assert dead.outcomes[CONFIGS[0]].median_us == 1.0
        alive.record(again, Outcome("ok", 2.0, 0.0, 1))
        with Study(storage, name) as third:
            assert third.outcomes == {CONFIGS[0]: Outcome("ok", 2.0, 0.0, 1)}


@pytest.mark.slow
def test_a_tuner_that_is_alive_keeps_its_claims(storage: Storage, name: str) -> None:
    """However slow it is: its beat has changed before each of the looks, which are 19 seconds apart by the other's clock."""
    clock = Clock()
    with Study(storage, name, beat_s=0.01) as slow, Study(storage, name, dead_s=20.0, clock=clock) as other:
        held = claim(slow, CONFIGS[0])
        for _ in range(4):
            before = beat(other, slow)
            until(lambda before=before: beat(other, slow) != before)
            clock.now += 19
            other.refresh()
            assert other.others() == {held.number}


def test_trials_of_anybody_else_are_left_alone(tmp_path: Path) -> None:
    """A study that was not epigen's, or was damaged, costs nothing but those trials."""
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    study = optuna.create_study(storage=storage.backend("one"), study_name="one")
    study.add_trial(optuna.trial.create_trial(value=1.0))
    study.ask()
    for values in ({}, {"claim": 3}, {"claim": {"schedule": "__import__"}}, {"claim": {"tuner": "x"}}):
        study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=values))
    good = {"claim": {"tuner": "x", "schedule": CONFIGS[0].schedule, **dict(CONFIGS[0].values)}}
    for outcome in (3, {}, {"kind": "ok"}, {"kind": "best"}, {"kind": "ok", "median_us": "nan", "spread_us": 0, "samples": 1, "detail": ""}):
        study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL, user_attrs={**good, "outcome": outcome}))
    runner = MadeUp()
    assert len(run(runner, 6, storage).outcomes) == len(runner.measured) == 6
    storage.close()


def test_ctrl_c_waits_for_the_end_of_a_step() -> None:
    done = []

    def steps(presses: int) -> None:
        with unbroken():
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            done.append(presses)

    for presses in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            steps(presses)
    assert done == [1]  # the second press breaks it
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_noticed_where_python_loses_it() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    class Losing(MadeUp):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            if len(self.measured) == 4:
                Finalized()
            return super().measure(config, limit_us)

    with noticed() as interrupted:
        Finalized()
        assert interrupted.is_set()
    found = run(Losing(), 20, None)
    assert not found.complete and found.measured == 4


def test_ctrl_c_between_a_measurement_and_its_record_loses_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised at the worst moment: the trial is counted, and not yet in the study."""
    record = Study.record

    def pressed(study: Study, claim: Claim, outcome: Outcome) -> None:
        if len(study.outcomes) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        record(study, claim, outcome)

    monkeypatch.setattr(Study, "record", pressed)
    found = run(MadeUp(), 20, None)
    assert not found.complete and found.measured == len(found.outcomes) == 4


# -- a second run


@pytest.mark.slow
def test_a_second_run_measures_only_what_is_missing(url: str, name: str) -> None:
    first, second, third = MadeUp(), MadeUp(), MadeUp()
    found = run(first, 24, url, name)
    assert found.measured == len(first.measured) == 24
    more = run(second, 30, url, name)
    assert more.measured == len(second.measured) == 6 and len(more.outcomes) == 30
    assert not set(first.measured) & set(second.measured)
    assert {c: more.outcomes[c] for c in first.measured} == {c: outcome_of(c) for c in first.measured}
    assert set(more.counts) >= {"ok", "wrong"}  # failures are remembered too
    again = run(third, 30, url, name)
    assert again.measured == 0 and not third.measured and again.complete and again.baseline == BASELINE
    assert again.winner == more.winner and len(third.compared) == 1 and again.winner in third.compared[0]


@pytest.mark.slow
@pytest.mark.parametrize("url", ["journal", "postgres"], indirect=True)
def test_a_second_run_repeats_nothing_of_an_interrupted_one(url: str, name: str) -> None:
    class Interrupted(MadeUp):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            if len(self.measured) == 7:
                raise KeyboardInterrupt
            return super().measure(config, limit_us)

    first, second = Interrupted(), MadeUp()
    found = run(first, 20, url, name)
    assert not found.complete and found.measured == 7 and found.outcome.kind == "ok"
    assert found.baseline == BASELINE and first.compared == [()]  # the run-off is left out, and the first baseline serves
    opened = open_storage(url)
    with Study(opened, name) as third:
        assert not third.others()  # it let go of the rest of its batch, so nobody waits for it
    opened.close()
    assert len(run(second, 20, url, name).outcomes) == 20
    assert len(second.measured) == 13 and not set(first.measured) & set(second.measured)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(6))
def test_ctrl_c_at_any_moment_keeps_what_was_found(tmp_path: Path, seed: int) -> None:
    path = f"{tmp_path}/study.journal"
    runner = MadeUp(seconds=0.002)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seed * 0.037, signal.pthread_kill, (main, signal.SIGINT))

    def report(progress: Progress) -> None:
        if not progress.trials:
            timer.start()

    try:
        found = run(runner, len(CONFIGS), path, report=report)  # more than there is time for
        assert not found.complete
        kept = found.outcomes
    except TuneError:  # before the first right answer
        kept = {}
    timer.join()
    assert len(kept) >= len(runner.measured) - 1
    second = MadeUp()
    wanted = len(kept) + 5
    assert len(run(second, wanted, path).outcomes) == wanted
    assert not set(kept) & set(second.measured)


def test_an_event_stops_it_like_ctrl_c() -> None:
    stop = threading.Event()

    def report(progress: Progress) -> None:
        if progress.trials == 5:
            stop.set()

    storage = open_storage(None)
    first, second = MadeUp(), MadeUp()
    found = run(first, 20, storage, report=report, stop=stop)
    assert not found.complete and found.measured == len(first.measured) == 5 and found.baseline == BASELINE
    assert run(second, 20, storage).measured == 15


# -- progress and the baseline


def test_progress_tells_how_far_it_is() -> None:
    storage, told = open_storage(None), list[Progress]()
    run(MadeUp(), 5, storage)
    run(MadeUp(), 9, storage, report=told.append, budget_s=1e6)
    assert [p.trials for p in told] == [5, 6, 7, 8, 9]
    assert all(p.wanted == 9 and p.baseline == BASELINE and p.budget_s == 1e6 and sum(p.counts.values()) == p.trials for p in told)
    assert told[0].left_s is None and told[-1].left_s == 0.0
    assert all(p.left_s == p.seconds / (p.trials - 5) * (9 - p.trials) for p in told[1:-1])


def test_what_is_left_follows_the_pace_within_the_budget() -> None:
    progress = partial(Progress, wanted=50, best=None, best_us=0.0, baseline=None, counts=Counter())
    assert progress(trials=10, seconds=20.0).left_s == 80.0
    assert progress(trials=10, seconds=20.0, before=5).left_s == 160.0
    assert progress(trials=10, seconds=20.0, budget_s=30.0).left_s == 10.0
    assert progress(trials=10, seconds=40.0, budget_s=30.0).left_s == 0.0
    assert progress(trials=0, seconds=40.0).left_s is None


def test_the_search_goes_on_where_the_first_baseline_is_lost() -> None:
    class Failed(MadeUp):
        def compare(self, configs: Sequence[KernelConfig]) -> Comparison:
            if not configs:
                raise EpigenError("the worker ended with signal 9")
            return super().compare(configs)

    told: list[Progress] = []
    found = run(Failed(), 4, None, report=told.append)
    assert found.complete and found.baseline == BASELINE and {p.baseline for p in told} == {None}


def test_interrupted_during_the_first_baseline(golden: Golden) -> None:
    class Interrupted(MadeUp):
        def compare(self, configs: Sequence[KernelConfig]) -> Comparison:  # noqa: ARG002  # it never gets so far
            raise KeyboardInterrupt

    with golden.raises(TuneError):
        run(Interrupted(), 4, None)
    storage = open_storage(None)
    run(MadeUp(), 4, storage)
    found = run(Interrupted(), 4, storage)  # in the run-off
    assert not found.complete and found.baseline == Baseline(0.0, 0.0) and found.outcome == found.outcomes[found.winner]


# -- several tuners at once


def test_threads_share_a_study_in_memory() -> None:
    all_begun = threading.Barrier(3)

    class Meeting(MadeUp):
        def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
            if not self.measured:
                all_begun.wait(HANGS_S)
            return super().measure(config, limit_us)

    storage = open_storage(None)
    runners = [Meeting() for _ in range(3)]
    counts: list[int] = []

    def help_with(runner: MadeUp) -> None:
        counts.append(assist(SPACE, runner, prior=prior(), trials=60, storage=storage, name="one"))

    threads = [threading.Thread(target=help_with, args=(r,)) for r in runners[1:]]
    for thread in threads:
        thread.start()
    found = run(runners[0], 60, storage)
    for thread in threads:
        thread.join()
    measured = [c for r in runners for c in r.measured]
    assert len(measured) == len(set(measured)) == len(found.outcomes) == 60
    assert found.measured == len(runners[0].measured) and sorted(counts) == sorted(len(r.measured) for r in runners[1:])
    assert all(r.measured for r in runners) and found.complete
    assert [r.compared for r in runners[1:]] == [[], []]  # the leader alone concludes
    least = min(o.median_us for o in found.outcomes.values() if o.kind == "ok")
    assert found.outcome.median_us <= 1.02 * least


def test_the_leader_waits_for_what_others_have_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its budget is spent, and the best config is being measured elsewhere."""
    monkeypatch.setattr(search_module, "_OTHERS_S", HANGS_S)
    storage = open_storage(None)
    best = min(CONFIGS, key=lambda c: outcome_of(c).median_us or math.inf)
    with Study(storage, "one") as other:
        held = claim(other, best)
        told: list[Progress] = []

        def report(progress: Progress) -> None:
            told.append(progress)
            if progress.trials == 1:
                threading.Timer(0.3, other.record, (held, outcome_of(best))).start()

        found = run(MadeUp(), 30, storage, report=report, budget_s=0.0)
    assert found.complete and found.winner == best and found.measured == 1


def test_tuners_of_one_seed_part_in_what_they_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of their first trial; the first of a study goes by the seed alone."""
    seeds: list[int] = []
    monkeypatch.setattr(Tpe, "reseed", lambda _, seed: seeds.append(seed))
    storage = open_storage(None)
    for wanted in (10, 20, 25):
        run(MadeUp(), wanted, storage, seed=3)
    assert seeds == [13, 23]


def test_a_lone_search_is_the_same_for_a_seed() -> None:
    runners = [MadeUp() for _ in range(3)]
    for runner, seed in zip(runners, (3, 3, 4), strict=True):
        run(runner, 60, None, seed=seed)  # the first 40 of these are the same for any
    assert runners[0].measured == runners[1].measured != runners[2].measured


def start(url: str, name: str, trials: int, *logs: Path, hang: int = 0, dead_s: float = math.inf) -> subprocess.Popen[str]:
    """A tuner of its own, told to begin by a line. logs: its own, then those of others whose first trials it awaits in its own first one."""
    command = [sys.executable, tuner_process.__file__, url, name, str(trials), str(hang), str(dead_s), *map(str, logs)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings.child_environment(interpret=False))


def begin(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> dict[str, object]:
    text, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0
    return json.loads(text)


def logged(what: str, *logs: Path) -> list[str]:
    lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
    return [line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")]


@pytest.mark.slow
@pytest.mark.parametrize("url", ["journal", "postgres"], indirect=True)
def test_two_processes_share_trials_and_repeat_none(url: str, name: str, tmp_path: Path) -> None:
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    processes = [start(url, name, 30, *order) for order in (logs, logs[::-1])]
    begin(*processes)
    answers = [answer(p) for p in processes]
    done = logged("begin", *logs)
    assert len(done) == len(set(done)) == 30
    assert [a["measured"] for a in answers] == [len(logged("done", log)) for log in logs] and all(logged("done", log) for log in logs)
    assert {a["trials"] for a in answers} == {30} and answers[0]["winner"] == answers[1]["winner"]


@pytest.mark.slow
@pytest.mark.parametrize("url", ["journal", "postgres"], indirect=True)
def test_a_tuner_that_is_killed_in_mid_trial_leaves_the_study_usable(url: str, name: str, tmp_path: Path) -> None:
    log, other = tmp_path / "killed.log", tmp_path / "other.log"
    killed = start(url, name, 16, log, hang=5)
    begin(killed)
    until(lambda: len(logged("begin", log)) == 5)
    killed.kill()
    killed.communicate()
    second = start(url, name, 16, other, dead_s=1.0)
    begin(second)
    found = answer(second)
    assert found["trials"] == 16 and found["measured"] == 12 and found["complete"]
    done = logged("done", log, other)
    assert len(done) == len(set(done)) == 16
    assert len(logged("begin", log, other)) == 17  # the one in which it was killed is begun again


def test_a_process_that_is_interrupted_says_what_it_found(tmp_path: Path) -> None:
    url, logs = f"{tmp_path}/study.journal", (tmp_path / "one.log", tmp_path / "two.log")
    first = start(url, "one", 10_000, logs[0])
    begin(first)
    until(lambda: len(logged("done", logs[0])) >= 8)
    os.kill(first.pid, signal.SIGINT)
    found = answer(first)
    assert not found["complete"] and found["winner"] and found["trials"] == found["measured"]
    wanted = int(str(found["trials"])) + 4
    second = start(url, "one", wanted, logs[1])
    begin(second)
    assert answer(second)["measured"] == 4


@pytest.mark.slow
def test_a_server_that_goes_away_is_told_in_words() -> None:
    with contextlib.ExitStack() as stack:
        try:
            storage = open_storage(stack.enter_context(postgres_server.server()))
        except postgres_server.NoServerError as error:
            pytest.skip(str(error))

        class Away(MadeUp):
            def measure(self, config: KernelConfig, limit_us: float) -> Outcome:
                if len(self.measured) == 3:
                    stack.close()
                return super().measure(config, limit_us)

        with pytest.raises(TuneError, match=r"127\.0\.0\.1 failed") as caught:
            run(Away(), 9, storage)
        assert len(str(caught.value).splitlines()) == 1
        storage.close()
