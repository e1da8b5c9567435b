"""Tuning at first use: what a call gets of whose coarse M bucket, problems alike but for M up to the same power of two, the database holds none.

The problem is tuned while the call waits, the winner goes into the user's database, and the call runs it. Never inside a CUDA graph
capture, where nothing may wait: there the plain choice serves, for that call alone.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from epigen.choose.choose import Chooser
from epigen.codegen.spec import Choice, KernelSpec, Provisional
from epigen.db.database import Database
from epigen.db.lookup import coarse_key
from epigen.db.records import Key, short
from epigen.dtypes import FP32
from epigen.errors import EpigenError
from epigen.gpus import Target
from epigen.ir import graph as g
from epigen.ir.graph import Graph
from epigen.lru_cache import LruCache
from epigen.perf import limits
from epigen.shapes import Shape, extents
from epigen.tuning import remembered
from epigen.tuning.task import Task

TRIALS = 48
_SETTLED = 1024


def tune(task: Task, database: Database) -> Choice:
    """The winner of one task, tuned in workers of the task's GPU, and added to the database. Raises TuneError, DatabaseError."""
    import torch

    from epigen.tuning.tune import tune_one

    torch.cuda.synchronize(task.device)  # what the caller has under way would slow the candidates down
    tuned = tune_one(task, database, trials=TRIALS, storage=remembered.default_storage(task))
    assert tuned.result is not None
    if not tuned.result.complete:
        raise KeyboardInterrupt  # the caller's own Ctrl-C, which the search has only put off
    return Choice(tuned.result.winner, f"tuned for {extents(task.shape)} at its first use")


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def current() -> int:
    import torch

    return torch.cuda.current_device()


class FirstUse:
    """What the choosers of a process share: one problem is tuned at a time, and each once.

    tuner: tunes one task. capturing: whether nothing may wait now. device: index of the GPU that the call runs on.
    """

    def __init__(
        self, database: Database, tuner: Callable[[Task, Database], Choice] = tune, capturing: Callable[[], bool] = capturing, device: Callable[[], int] = current,
    ):  # fmt: skip
        self.database, self.tuner, self.capturing, self.device = database, tuner, capturing, device
        self.lock = threading.Lock()
        self.settled: LruCache[Key, tuple[Choice | None]] = LruCache(_SETTLED)
        """What was tuned here, by what stands for a coarse M bucket; of None where that failed. What made room is asked of the database again, and
        a failure of the trials that are remembered."""

    def chooser(self, graph: Graph) -> TuningChooser:
        return TuningChooser(self, Chooser(graph, self.database))


@dataclass(frozen=True, slots=True)
class TuningChooser:
    """Chooses for one program, as `Chooser` does, and tunes the first problem of each coarse M bucket of which the database holds none."""

    shared: FirstUse
    plain: Chooser

    def __call__(self, spec: KernelSpec, shape: Shape, target: Target, refused: str) -> Choice:
        choice = self.plain(spec, shape, target, refused)
        tunable = not refused and 0 not in shape and not limits.one_config(spec, target)
        if tunable and self.plain.bucket(spec, shape, target).tuned:
            return choice
        if self.shared.capturing():
            return Provisional(choice.config, f"{choice.why}; to be tuned at the first call outside of a CUDA graph capture")
        if not tunable:
            return choice
        key = coarse_key(self.plain.bucket(spec, shape, target).problem)
        with self.shared.lock:
            settled = self.shared.settled.get(key)
            if settled is None:
                if self.plain.bucket(spec, shape, target).tuned:  # by another thread or process, meanwhile
                    return self.plain(spec, shape, target, "")
                settled = self.shared.settled.put(key, (self._tuned(spec, shape, target),))
        return settled[0] or choice

    def _tuned(self, spec: KernelSpec, shape: Shape, target: Target) -> Choice | None:
        sig = spec.signature
        named = dict(sig.inputs)
        dense = [n.name for n in self.plain.graph.inputs() if n.op != g.BITS and n.indices]
        inputs = tuple(dtype for name in dense if (dtype := named[name]) is not None)
        where, invariant = self.shared.device(), "m" if sig.invariant else ""
        try:
            task = Task(
                self.plain.graph,
                shape,
                sig.a,
                sig.b,
                inputs or (FP32,),
                sig.layout,
                sig.precision,
                target,
                device=where,
                invariant=invariant,
                groups=sig.grouped,
                sparse=sig.sparse,
            )
            return self.shared.tuner(task, self.shared.database)
        except EpigenError as error:
            what = f"{short(self.plain.graph.text)} at {extents(shape)} {sig.a} {sig.layout}"
            warnings.warn(f"epigen could not tune {what}, which runs untuned: {error}", RuntimeWarning, stacklevel=2)
            return None
