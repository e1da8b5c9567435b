"""An import that Ctrl-C ends halfway is made anew by the next one, as of any module."""

from __future__ import annotations

import forked
from checkout import ROOT

from epigen import settings

CODE = """
import collections, gc, sys, torch

def purge():
    for name in [n for n in sys.modules if n in ("epigen", "epigen.nn", "epigen.api") or n.startswith("epigen.training")]:
        del sys.modules[name]

def run():
    import epigen
    layer = epigen.linear(torch.ones(2, 3), torch.ones(4, 3, requires_grad=True), epilogue="relu(mm)")
    assert layer.tolist() == [[3.0] * 4] * 2 and epigen.compile("relu(mm)")(torch.ones(2, 3), torch.ones(3, 4)).tolist() == layer.tolist()
    layer.sum().backward()
    epigen.nn, epigen.fuse

def interrupted(file, stop):
    # stop: before which of a module's lines, as they are run. Returns how many there were.
    count = 0
    def lines(frame, event, _):
        nonlocal count
        if event == "line":
            count += 1
            if count == stop:
                raise KeyboardInterrupt
        return lines
    def calls(frame, event, _):
        name = frame.f_code.co_filename
        return lines if frame.f_code.co_name == "<module>" and name.endswith(file) else None
    sys.settrace(calls)
    try:
        run()
    except KeyboardInterrupt as error:
        kept.append(error)  # as an interactive interpreter does, and with it all that the module had made so far
    finally:
        sys.settrace(None)
    return count

kept, done = [], 0
run()
for file in FILES:
    purge()
    last = interrupted(file, 0)
    assert last > 3, file
    for stop in range(1, last + 1, 3) if file == FILES[0] else (last,):
        purge()
        assert interrupted(file, stop) == stop and len(kept) == done + 1, (file, stop)
        run()
        done += 1
        if done % 2:
            kept.clear()  # both: what was left behind is still there, and is gone
            gc.collect()
            done = 0
            run()
print("interrupted")
"""
FILES = ("epigen/training/library.py", "epigen/__init__.py", "epigen/api.py", "epigen/training/plan.py")


def test_an_interrupted_import_is_made_anew() -> None:
    """At every third line of what registers with torch, which takes no name twice, and at the last of some other modules."""
    run = forked.python("-c", CODE.replace("FILES", repr(FILES)), cwd=ROOT, env=settings.child_environment(interpret=True))
    assert run.stdout.strip() == "interrupted", run.stderr[-3000:]
