"""`tune="missing"`: what is tuned at first use, when it is not, and that a capture's choice does not stay."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import Golden
from machines import machine
from threads import in_threads

import epigen
from epigen import api
from epigen.choose.choose import Chooser
from epigen.codegen import schedules
from epigen.codegen.lower import lower
from epigen.codegen.spec import Choice, KernelConfig, KernelSpec, Provisional, Signature
from epigen.db.database import Database
from epigen.db.problem import capability, problem_of
from epigen.db.records import Record
from epigen.dtypes import FP16, FP32, INT8, INT32, UINT8
from epigen.errors import CallError, TuneError
from epigen.gpus import DEFAULT_TARGET
from epigen.runtime import kernel as kernel_module
from epigen.runtime import prepared as prepared_module
from epigen.runtime.kernel import Kernel
from epigen.runtime.loader import Loader, triton_version
from epigen.runtime.rendering import renderer
from epigen.tuning import first_use
from epigen.tuning.first_use import FirstUse
from epigen.tuning.task import Task

SHAPE = (256, 512, 128)
TARGET = replace(DEFAULT_TARGET, part="NVIDIA H200")
WINNER = schedules.config("tiled", block_m=32, block_n=64, block_k=64, group_m=2, num_warps=4, num_stages=3)
TEXT = "relu(mm + bias)"
GRAPH = api.graph_of(TEXT)


def spec(inputs: tuple[tuple[str, Any], ...] = (("bias", FP16),), dtype: Any = FP16, text: str = TEXT) -> KernelSpec:
    return lower(api.graph_of(text), Signature(dtype, dtype, inputs, "ieee", 16, 32, "nt"))


SPEC = spec()


def record(config: KernelConfig = WINNER, shape: tuple[int, int, int] = SHAPE, triton: str | None = None) -> Record:
    problem = problem_of(GRAPH, SPEC, shape, TARGET.part, capability(TARGET))
    return Record.make(
        problem, config, median_us=9.0, spread_us=0.1, baseline_us=10.0, trials={"ok": 4}, date="2026-11-05T12:00:00Z",
        triton=triton or triton_version(), torch="2.11.0", epigen="0.1.0",
    )  # fmt: skip


class Tuner:
    """Notes what it is asked to tune, and writes the winner as a search would."""

    def __init__(self, fails: str = "", writes: bool = True, seconds: float = 0.0):
        self.tasks: list[Task] = []
        self.fails, self.writes, self.seconds = fails, writes, seconds

    def __call__(self, task: Task, database: Database) -> Choice:
        self.tasks.append(task)
        time.sleep(self.seconds)
        if self.fails:
            raise TuneError(self.fails)
        if self.writes:
            database.add(record(shape=task.shape))
        return Choice(WINNER, "tuned just now")


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path, seeds=())


class Setting:
    """A chooser with a made-up capture state and GPU."""

    def __init__(self, database: Database, tuner: Tuner):
        self.capturing = False
        self.tuner = tuner
        self.shared = FirstUse(database, tuner, lambda: self.capturing, lambda: 3)
        self.chooser = self.shared.chooser(GRAPH)

    def __call__(self, one: KernelSpec = SPEC, shape: tuple[int, int, int] = SHAPE, refused: str = "") -> Choice:
        return self.chooser(one, shape, TARGET, refused)


# -- the chooser


def test_what_was_tuned_is_kept_within_bounds(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that never come back make room; what failed is not tried again as long as it is known."""
    monkeypatch.setattr(first_use, "_SETTLED", 4)
    choose = Setting(database, Tuner(fails="planted"))
    for n in range(1, 9):
        with pytest.warns(RuntimeWarning, match="planted"):
            choose(shape=(SHAPE[0], 64 * n, SHAPE[2]))
    assert len(choose.shared.settled) == 4
    choose(shape=(SHAPE[0], 64 * 8, SHAPE[2]))
    assert len(choose.tuner.tasks) == 8


def test_what_no_database_holds_exactly_is_tuned_once(database: Database) -> None:
    choose = Setting(database, Tuner())
    assert choose().config == WINNER
    (task,) = choose.tuner.tasks
    assert (task.graph, task.shape, task.a, task.b, task.inputs, task.layout, task.precision, task.target, task.device) == (
        GRAPH, SHAPE, FP16, FP16, (FP16,), "nt", "ieee", TARGET, 3,
    )  # fmt: skip
    again = choose()
    assert again.config == WINNER and again.why.endswith("(exact)")
    assert len(choose.tuner.tasks) == 1


@pytest.mark.parametrize("stored", [record(shape=(256, 512, 256)), record(triton="3.0.0")], ids=["near shape", "other Triton"])
def test_what_is_only_near_is_tuned(database: Database, stored: Record) -> None:
    database.add(stored)
    choose = Setting(database, Tuner())
    choose()
    assert len(choose.tuner.tasks) == 1


def test_batches_of_ever_new_sizes_are_tuned_once_an_octave(database: Database) -> None:
    """The first M that is met is tuned as it is, and serves the others up to the next power of two: here, and in a process that comes after."""
    choose = Setting(database, Tuner())
    sizes = (200, 130, 256, 129, 257, 512, 300, 128, 65)
    found = {m: choose(shape=(m, *SHAPE[1:])) for m in sizes}
    assert [t.shape[0] for t in choose.tuner.tasks] == [200, 257, 128]
    assert {c.config for c in found.values()} == {WINNER}
    assert "borrowed from 200x512x128" in found[130].why and "found for 160x512x128, which stands for M from 129 to 160" in found[130].why
    assert choose(shape=(200, *SHAPE[1:])).why.endswith("(exact)")
    later = Setting(database, Tuner())
    for later.capturing in (False, True):
        assert not any(isinstance(later(shape=(m, *SHAPE[1:])), Provisional) for m in (140, 250, 260, 500, 70))
    assert not later.tuner.tasks


def test_a_winner_that_was_not_written_serves_its_octave(database: Database) -> None:
    choose = Setting(database, Tuner(writes=False))
    for m in (200, 130, 256):
        assert choose(shape=(m, *SHAPE[1:])) == Choice(WINNER, "tuned just now")
    assert len(choose.tuner.tasks) == 1


def test_an_exact_record_is_taken_as_it_is(database: Database) -> None:
    database.add(record())
    choose = Setting(database, Tuner())
    for choose.capturing in (False, True):
        found = choose()
        assert found.config == WINNER and not isinstance(found, Provisional)
    assert not choose.tuner.tasks


def test_a_shipped_record_counts_as_well(tmp_path: Path) -> None:
    Database(tmp_path / "seed", seeds=()).add(record())
    choose = Setting(Database(tmp_path / "own", seeds=[tmp_path / "seed"]), Tuner())
    assert choose().config == WINNER and not choose.tuner.tasks


def test_a_winner_that_was_not_written_serves_all_the_same(database: Database) -> None:
    choose = Setting(database, Tuner(writes=False))
    assert choose() == choose() == Choice(WINNER, "tuned just now")
    assert len(choose.tuner.tasks) == 1


def test_within_a_capture_the_plain_choice_serves_for_that_call_alone(database: Database) -> None:
    choose = Setting(database, Tuner())
    choose.capturing = True
    found = choose()
    plain = Chooser(GRAPH, database)(SPEC, SHAPE, TARGET, "")
    assert isinstance(found, Provisional) and found.config == plain.config and "outside of a CUDA graph capture" in found.why
    assert isinstance(choose(refused="it does not compile"), Provisional)
    assert not choose.tuner.tasks
    choose.capturing = False
    assert choose().config == WINNER and len(choose.tuner.tasks) == 1


def test_where_tuning_fails_the_plain_choice_stays_and_one_warning_says_so(database: Database) -> None:
    choose = Setting(database, Tuner(fails="none of 48 configs gave a right answer in time; 48 ended as crashed: no memory"))
    plain = Chooser(GRAPH, database)(SPEC, SHAPE, TARGET, "")
    with pytest.warns(RuntimeWarning, match=r"epigen could not tune relu\(mm \+ bias\) at 256x512x128 fp16 nt, which runs untuned: none of 48 .* no memory"):
        assert choose() == plain
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose() == plain
    assert len(choose.tuner.tasks) == 1


def test_what_cannot_gain_is_not_tuned(database: Database) -> None:
    choose = Setting(database, Tuner())
    assert choose(refused="it does not compile").config.schedule == "library"
    choose(shape=(0, 512, 128))
    choose(replace(SPEC, signature=replace(SPEC.signature, a=FP32, b=FP32, invariant=True)))  # has one config for all M
    assert not choose.tuner.tasks


def test_an_invariant_program_is_tuned_as_one(database: Database) -> None:
    choose = Setting(database, Tuner(writes=False))
    choose(replace(SPEC, signature=replace(SPEC.signature, invariant=True)))
    choose()
    assert [task.invariant for task in choose.tuner.tasks] == ["m", ""]


def test_the_callers_ctrl_c_ends_the_call_and_the_next_one_tunes(database: Database) -> None:
    class Interrupted(Tuner):
        def __call__(self, task: Task, database: Database) -> Choice:
            if not self.tasks:
                self.tasks.append(task)
                raise KeyboardInterrupt
            return super().__call__(task, database)

    choose = Setting(database, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        choose()
    assert choose().config == WINNER


def test_what_is_tuned_is_what_was_called(database: Database) -> None:
    """Each input's dtype goes into the task, so that the record is the exact one at the next look-up."""
    choose = Setting(database, Tuner(writes=False))
    text = "where(mask, relu(mm * alpha + bias), tile[m,n])"
    graph = api.graph_of(text)
    chooser = choose.shared.chooser(graph)
    for shape, dtype, bias, tile in (((64, 64, 64), FP16, FP32, FP16), ((64, 64, 128), FP16, INT32, INT32), ((64, 64, 192), INT8, FP32, FP32)):
        inputs = {"mask": UINT8, "alpha": None, "bias": bias, "tile": tile}
        mine = spec(tuple((n.name, inputs[n.name]) for n in graph.inputs()), dtype, text)
        chooser(mine, shape, TARGET, "")
        task = choose.tuner.tasks[-1]
        assert task.input_dtypes() == inputs
        assert task.problem == problem_of(graph, mine, shape, TARGET.part, "9.0")


def test_two_threads_at_first_use_tune_once(database: Database) -> None:
    """And two kernels of one program, each with a chooser of its own."""
    tuner = Tuner(seconds=0.2)
    choose = Setting(database, tuner)
    other = "relu(mm + shift[n])"
    choosers = [(choose.chooser, SPEC), (choose.shared.chooser(api.graph_of(other)), spec((("shift", FP16),), FP16, other))] * 3
    found: list[Choice] = []

    def ask(number: int) -> None:
        chooser, mine = choosers[number]
        found.append(chooser(mine, SHAPE, TARGET, ""))

    assert in_threads(len(choosers), ask) == []
    assert len(tuner.tasks) == 1 and [c.config for c in found] == [WINNER] * len(choosers)


# -- the default tuner


def test_the_default_tuner_searches_and_remembers(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.record import DATA
    from epigen.tuning import table, tune
    from epigen.tuning.runner import Replay

    recorded = table.read(DATA / "sweep_skinny.json")
    whole = tune.tune_one
    asked: dict[str, Any] = {}

    def over_the_table(task: Task, database: Database, **options: Any) -> Any:
        asked.update(options)
        return whole(task, database, trials=4, runner=Replay(recorded.rows, recorded.baseline))

    monkeypatch.setattr(tune, "tune_one", over_the_table)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _device: None)
    choice = first_use.tune(recorded.task, database)
    ((_, written),) = database.records()
    assert choice.config == written.kernel_config and choice.why == "tuned for 16x4096x4096 at its first use"
    assert asked["trials"] == 48 and asked["storage"].endswith(".journal")

    def interrupted(*arguments: Any, **options: Any) -> Any:
        tuned = over_the_table(*arguments, **options)
        return replace(tuned, result=replace(tuned.result, complete=False))

    monkeypatch.setattr(tune, "tune_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first_use.tune(recorded.task, database)


# -- the kernel


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
    device = torch.device("cuda", 0)  # type: ignore[assignment]


class Anything:
    """A loaded module with whatever functions it is asked for."""

    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """Calls go through all of a kernel but for the GPU: each one's choice."""
    made: list[Choice] = []

    def run(self: Any, *_: Any) -> list[Any]:
        made.append(self.plan.choice)
        return [None]

    monkeypatch.setattr(prepared_module.Prepared, "run", run)
    monkeypatch.setattr(Loader, "load", lambda _self, _rendered: Anything())
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    return made


def call(kernel: Kernel) -> None:
    m, n, k = SHAPE
    x, w, bias = (torch.empty(size, dtype=torch.float16).as_subclass(OnGpu) for size in ((m, k), (n, k), (n,)))
    kernel(x, w.T, bias=bias)


def made(choose: Setting, **more: Any) -> Kernel:
    return Kernel(GRAPH, renderer(), Chooser(GRAPH, choose.shared.database), at_call=choose.chooser, machine=machine(TARGET), **more)


def test_the_first_call_tunes_and_the_others_are_prepared(database: Database, calls: list[Choice]) -> None:
    choose = Setting(database, Tuner())
    kernel = made(choose)
    call(kernel)
    call(kernel)
    assert len(choose.tuner.tasks) == 1 and calls[0].config == WINNER and calls[0] is calls[1]
    assert kernel.config == WINNER and "tuned just now" in kernel.explain()


def test_a_captured_call_is_not_remembered(database: Database, calls: list[Choice]) -> None:
    choose = Setting(database, Tuner())
    kernel = made(choose)
    choose.capturing = True
    call(kernel)
    call(kernel)
    assert not choose.tuner.tasks and calls[0].config == calls[1].config != WINNER
    choose.capturing = False
    call(kernel)
    choose.capturing = True
    call(kernel)
    assert len(choose.tuner.tasks) == 1 and [c.config for c in calls[2:]] == [WINNER] * 2


def test_asking_what_would_run_tunes_nothing(database: Database, calls: list[Choice]) -> None:
    choose = Setting(database, Tuner())
    kernel = made(choose)
    kernel.plan(SHAPE, target=TARGET)
    assert kernel.config and kernel.source() and kernel.explain()
    assert not choose.tuner.tasks and not calls


def test_the_interpreter_and_the_cpu_tune_nothing(database: Database, calls: list[Choice]) -> None:
    choose = Setting(database, Tuner())
    call(made(choose, backend="interpreter"))
    assert len(calls) == 1 and not choose.tuner.tasks
    x, w, bias = torch.ones(2, 3), torch.ones(3, 4), torch.zeros(4)
    kernel = made(choose)
    kernel._prepare((x, w), {"bias": bias}, {})
    assert not choose.tuner.tasks


def test_warming_for_a_gpu_elsewhere_tunes_nothing(database: Database, calls: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(kernel_module, "warm", lambda *_: None)
    choose = Setting(database, Tuner())
    m, n, k = SHAPE
    x, w, bias = (torch.empty(size, dtype=torch.float16, device="meta") for size in ((m, k), (k, n), (n,)))
    made(choose).warm(x, w, TARGET, bias=bias)
    assert not choose.tuner.tasks


# -- epigen.compile


def test_compile_takes_missing_and_nothing_else(golden: Golden) -> None:
    assert isinstance(epigen.compile(TEXT, tune="missing")._at_call, first_use.TuningChooser)
    assert isinstance(epigen.compile(TEXT)._at_call, Chooser)
    with golden.raises(CallError, "mising"):
        epigen.compile(TEXT, tune="mising")
    with golden.raises(CallError, "always"):
        epigen.compile(TEXT, tune="always")
    with golden.raises(CallError, "True"):
        epigen.compile(TEXT, tune=True)  # type: ignore[arg-type]
    with golden.raises(CallError, "config"):
        epigen.compile(TEXT, tune="missing", config=WINNER)


def test_on_the_cpu_a_kernel_that_would_tune_answers_at_once() -> None:
    y = epigen.compile(TEXT, tune="missing")(torch.ones(2, 3), torch.ones(3, 4), bias=torch.full((4,), -2.0))
    assert torch.equal(y, torch.ones(2, 4))
