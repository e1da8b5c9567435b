"""Turns: partitions of all blocks of a launch run one at a time, in an order that a seed draws, and so does what is on its way meanwhile.

How far some of them lag behind is drawn too. A launch in which all wait ends with a Fault that says for what.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from gluon_values import Fault, demand

HERE = threading.local()
"""actor: whose turn it is, in its own thread."""


class InFlight(Protocol):
    """What was issued, and ends when it is waited for."""

    def end(self) -> None: ...


class _Stopped(BaseException):
    """Ends the threads of a launch after a fault."""


@dataclass(eq=False)
class Program:
    """A block: index, of how many; whether it has waited for the end of the kernel before; shared memory in use; places in it that were written by no copy and not fenced since, and by whom; and those that
    a copy is on its way to, or has reached unknown to anybody, for nobody has waited for its barrier since."""

    id: int
    count: int
    warps: int
    waited: bool = False
    shared_bytes: int = 0
    unfenced: dict[int, Actor] = field(default_factory=dict)
    arriving: dict[int, CopyIn] = field(default_factory=dict)


@dataclass(eq=False)
class Actor:
    """A partition. products, stores: issued and not waited for. unseen: stores to global memory that others do not see yet."""

    machine: Machine
    program: Program
    name: str
    warps: int
    weight: float
    ready: Callable[[], bool] = lambda: True
    waits_for: str = ""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: deque[InFlight] = field(default_factory=deque)
    stores: deque[InFlight] = field(default_factory=deque)
    unseen: list[Callable[[], None]] = field(default_factory=list)

    def show(self) -> None:
        """Others see what this one has stored."""
        while self.unseen:
            self.unseen.pop(0)()

    def end(self) -> None:
        demand(not self.products, f"{self.name} ends before its last multiplication does")
        demand(not self.stores, f"{self.name} ends before its last copy has left shared memory")
        self.show()


@dataclass(eq=False)
class CopyIn:
    """A copy into shared memory on its way. barrier: what it tells of its bytes."""

    program: Program
    weight: float
    land: Callable[[], None]
    barrier: object

    def ready(self) -> bool:
        return True


class Machine:
    """Gives the turns of one launch. copies: on their way. late: what is sure to have happened at the end alone. fault: what ended it, if anything did."""

    def __init__(self, seed: object):
        self.random = Random(str(seed))
        self.actors: list[Actor] = []
        self.copies: list[CopyIn] = []
        self.late: list[Callable[[], object]] = []
        self.fault: BaseException | None = None
        self.done = threading.Event()
        self.copy_weight = self.eagerness()

    def eagerness(self) -> float:
        """How often one gets its turn: most lag behind only sometimes, some whenever they can."""
        return self.random.choice((1.0, 1.0, 0.02))

    def run(self, programs: Sequence[Program], function: Callable[..., object], arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        for p in programs:
            self.start(p, f"block {p.id}", p.warps, lambda: function(*arguments, **constants))
        self.pass_on()
        self.done.wait()
        if self.fault is not None:
            raise self.fault
        for store in self.late:
            store()

    def start(self, program: Program, name: str, warps: int, function: Callable[[], object]) -> Actor:
        actor = Actor(self, program, name, warps, self.eagerness())
        self.actors.append(actor)
        threading.Thread(target=self._live, args=(actor, function), name=name, daemon=True).start()
        return actor

    def _live(self, actor: Actor, function: Callable[[], object]) -> None:
        actor.turn.acquire()
        HERE.actor = actor
        try:
            if self.fault is None:
                function()
                actor.end()
                if not any(a.program is actor.program for a in self.actors if a is not actor):
                    demand(not any(c.program is actor.program for c in self.copies), f"{actor.name} ends before a copy into its shared memory does")
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the launch was made
            self.fault = self.fault or error
        self.actors.remove(actor)
        self.pass_on()

    def wait(self, actor: Actor, ready: Callable[[], bool], what: str) -> None:
        if ready() and self.random.random() < 0.5:
            return  # it goes on, which takes far less time than to change threads
        actor.ready, actor.waits_for = ready, what
        self.pass_on()
        actor.turn.acquire()
        if self.fault is not None:
            raise _Stopped

    def pass_on(self) -> None:
        while self.actors:
            if self.fault is not None:
                self.actors[0].turn.release()
                return
            able: list[Any] = [x for x in (*self.actors, *self.copies) if x.ready()]
            if not able:
                self.fault = Fault("deadlock: " + "; ".join(f"{a.name} waits for {a.waits_for}" for a in self.actors))
                continue
            chosen = self.random.choices(able, [x.weight for x in able])[0]
            if isinstance(chosen, Actor):
                chosen.turn.release()
                return
            self.copies.remove(chosen)
            try:
                chosen.land()
            except Fault as fault:
                self.fault = fault
        self.done.set()


def here() -> Actor:
    actor: Actor = HERE.actor
    return actor


def turn(ready: Callable[[], bool] = lambda: True, what: str = "its turn") -> Actor:
    """Let others go first, and go on once it is ready."""
    actor = here()
    actor.machine.wait(actor, ready, what)
    return actor
