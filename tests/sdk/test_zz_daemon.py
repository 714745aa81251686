"""kill -9 of the daemon under a client: the last of the tests, for the daemon that it ends is not its own."""

import os
import signal
import subprocess
import urllib.error
import urllib.request

import pytest
from conftest import eventually
from e2b import Sandbox

COUNTER = """
import os, time
count = 0
while True:
    count += 1
    with open("count.new", "w") as file:
        file.write(f"{count} {os.getpid()}")
    os.rename("count.new", "count")
    time.sleep(0.05)
"""


def healthy():
    try:
        with urllib.request.urlopen(f"{os.environ['E2B_API_URL']}/health") as answer:
            return answer.status < 300
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.fixture
def next_daemon():
    """Ends the daemon without mercy, when called, and starts another one in its place."""
    started = []

    def replace():
        os.kill(int(os.environ["DORMOUSE_PID"]), signal.SIGKILL)
        eventually(lambda: not healthy())
        address = os.environ["E2B_API_URL"].removeprefix("http://")
        data_dir = os.environ["DORMOUSE_DATA_DIR"]
        log = open(os.path.join(data_dir, "serve.log"), "a")
        command = [os.environ["DORMOUSE_BIN"], "serve", "--listen", address, "--data-dir", data_dir]
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        eventually(healthy, seconds=120)

    yield replace
    for daemon in started:
        daemon.terminate()
        daemon.wait(timeout=120)


def test_sandboxes_outlive_the_daemon(next_daemon):
    running, paused = Sandbox.create(timeout=600), Sandbox.create(timeout=600)
    running.files.write("count.py", COUNTER)
    handle = running.commands.run("python3 count.py", background=True, timeout=0)
    eventually(lambda: running.files.exists("count"), seconds=60)
    paused.files.write("kept.txt", "kept")
    paused.pause()
    count, pid = running.files.read("count").split()
    next_daemon()
    now, same = running.files.read("count").split()
    assert same == pid and int(now) >= int(count)
    eventually(lambda: int(running.files.read("count").split()[0]) > int(now))
    assert handle.pid in {process.pid for process in running.commands.list()}
    again = Sandbox.connect(paused.sandbox_id, timeout=600)
    assert again.files.read("kept.txt") == "kept"
    [fork] = running.fork(timeout=600)
    assert fork.files.read("count").split()[1] == pid
    assert running.pause()
    for sandbox in (running, again, fork):
        assert sandbox.kill() is True
