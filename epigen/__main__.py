"""`python -m epigen`: the command line where no `epigen` is on the path."""

from __future__ import annotations

from epigen.cli import main

if __name__ == "__main__":
    main(prog_name="python -m epigen")
