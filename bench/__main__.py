"""Runs the scripts behind the claims, each in a process of its own.

    python -m bench                    every claim in order; those that want a GPU are skipped, in words, where there is none
    python -m bench headline           the headline, in under 5 minutes on an H200
    python -m bench NAME ... [-- ARGUMENTS]   these; ARGUMENTS go to each script
    python -m bench compare OLD NEW    what has become slower by more than the noise, of two results or two folders of them
    python -m bench --list             the claims

Exit status: 0, 1 (a script failed, or compare found something), 2 (usage, or nothing to compare).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import compare, record
from bench.command import import_path
from bench.registry import BY_NAME, CLAIMS, Claim
from epigen.errors import near_miss


def gpus() -> int:
    """How many this machine has, as another process reports: one that has looked keeps the driver awake, which would shorten what is measured."""
    asking = "from epigen.runtime.device import THIS_MACHINE; print(len(THIS_MACHINE.indices()))"
    return int(subprocess.run([sys.executable, "-c", asking], stdout=subprocess.PIPE, text=True, check=True, env=os.environ | import_path()).stdout)


def lacking(claim: Claim, there: int) -> str | None:
    """Why a claim cannot be measured here, if so."""
    if there < claim.gpus:
        return f"wants {'a GPU' if claim.gpus == 1 else f'{claim.gpus} GPUs'}, and there is {there or 'none'}"
    missing = [program for program in claim.needs if shutil.which(program) is None]
    return f"wants {', '.join(missing)}, which is not installed" if missing else None


def command(claim: Claim, commit: str | None, out: Path | None, rest: Sequence[str]) -> list[str]:
    recorded = [*(["--out", str(out)] if out else []), *(["--commit", commit] if commit else [])] if claim.recorded else []
    return [sys.executable, "-m", claim.module, *claim.arguments, *recorded, *rest]


def run(claims: Sequence[Claim], there: int, commit: str | None, out: Path | None, rest: Sequence[str]) -> int:
    """Run claims in order, each whatever became of the others. Returns how many failed."""
    results = []
    for claim in claims:
        why = lacking(claim, there)
        if why is None:
            print(f"== {claim.name}: {claim.what}", flush=True)
            status = subprocess.run(command(claim, commit, out, rest), env=os.environ | import_path()).returncode
            results.append((claim, "done" if not status else f"FAILED with status {status}"))
        else:
            results.append((claim, f"skipped: it {why}"))
    print(*(f"{claim.name}: {words}" for claim, words in results), sep="\n")
    return sum(words.startswith("FAILED") for _, words in results)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["compare"]:
        return compare.main(given[1:])
    own, rest = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the claims")
    record.add_options(parser)
    parser.set_defaults(out=None)  # each script knows its folder
    options = parser.parse_args(own)
    if options.list:
        print(*(f"{c.name:<13} {c.what}{'' if c.gpus == 1 else f' (GPUs: {c.gpus})'}" for c in CLAIMS), sep="\n")
        return 0
    for name in options.names:
        if name not in BY_NAME:
            parser.error(f"unknown claim '{name}': {near_miss(name, [*BY_NAME, 'compare']) or 'known are ' + ', '.join(BY_NAME)}")
    chosen = [BY_NAME[n] for n in options.names] or list(CLAIMS)
    there = gpus() if any(c.gpus for c in chosen) else 0
    return 1 if run(chosen, there, options.commit, options.out, rest) else 0


if __name__ == "__main__":
    sys.exit(main())
