"""Drives a live daemon with the unmodified SDK; the daemon is named by E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY."""

import asyncio
import json
import os
import time

import pytest
from e2b import AsyncSandbox, Sandbox


def pytest_configure(config):
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"):
        if not os.environ.get(name):
            raise pytest.UsageError(f"{name} is not set: these tests need a running daemon (see `dormouse env`)")


def pytest_runtest_logreport(report):
    """A line of JSON for each test, where somebody asks for it: name, outcome, reason, ms."""
    path = os.environ.get("DORMOUSE_TEST_REPORT")
    if not path or (report.when != "call" and report.outcome == "passed"):
        return
    outcome = {"passed": "pass", "failed": "fail", "skipped": "skip"}[report.outcome]
    reason = "" if report.passed else report.longrepr[2] if report.skipped else report.longreprtext[-2000:]
    line = {"name": report.nodeid, "outcome": outcome, "reason": reason, "ms": int(report.duration * 1000)}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def sandbox():
    made = Sandbox.create(timeout=300)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def shared():
    """One sandbox for the tests of a module that leave it as it was."""
    made = Sandbox.create(timeout=900)
    yield made
    made.kill()


@pytest.fixture
def run_async():
    """Runs a coroutine function with a fresh asynchronous sandbox."""

    def runner(body, **options):
        async def whole():
            made = await AsyncSandbox.create(timeout=300, **options)
            try:
                await body(made)
            finally:
                await made.kill()

        asyncio.run(whole())

    return runner


def eventually(check, seconds=20.0):
    """Polls until `check` answers something true; fails with its last answer."""
    end = time.monotonic() + seconds
    while True:
        last = check()
        if last:
            return last
        assert time.monotonic() < end, f"still {last!r} after {seconds} s"
        time.sleep(0.05)
