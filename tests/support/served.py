"""pytest as the process of tests that run apart (apart.py): it runs the tests that it is told of, by name, until nobody can tell it of more."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--served", help="file descriptors: where names of tests come from, and where their reports go")


class Nothing(pytest.Item):
    """What comes after every test, so that what a session shares is kept, and nothing else."""

    def runtest(self) -> None:
        raise NotImplementedError


class Served:
    def __init__(self, config: pytest.Config):
        self.config, self.found = config, list[dict[str, Any]]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        names, reports = map(int, self.config.getoption("--served").split(","))
        items = {item.nodeid: item for item in session.items}
        nothing = Nothing.from_parent(session, name="nothing")
        with os.fdopen(names, "rb") as told, os.fdopen(reports, "wb") as answers:
            while told.peek(1):
                item, self.found = items[pickle.load(told)], []
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=nothing)
                pickle.dump(self.found, answers)
                answers.flush()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Served(config))
