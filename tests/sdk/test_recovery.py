"""Forks by the dozen, checkpoints under a write load, rollback: what an agent's failure recovery stands on."""

import json
import os
import urllib.request

from conftest import eventually
from e2b import Sandbox

# Each file beside the sum of what was written, synced before the next one is begun.
WRITER = """
import hashlib, os
def put(path, data):
    with open(path + ".new", "wb") as file:
        file.write(data); file.flush(); os.fsync(file.fileno())
    os.rename(path + ".new", path)
os.makedirs("w", exist_ok=True)
number = 0
while not os.path.exists("end"):
    number += 1
    data = os.urandom(200_000)
    put(f"w/{number}", data)
    put(f"w/{number}.sum", hashlib.sha256(data).hexdigest().encode())
    put("written", str(number).encode())
"""
VERIFY = """
import glob, hashlib
sums = glob.glob("w/*.sum")
for path in sums:
    assert hashlib.sha256(open(path[:-4], "rb").read()).hexdigest() == open(path).read(), path
print(len(sums))
"""


def rollback(sandbox, snapshot):
    """Dormouse's own: the SDK has no such call."""
    request = urllib.request.Request(
        f"{os.environ['DORMOUSE_URL']}/dormouse/v1/sandboxes/{sandbox.sandbox_id}/rollback",
        data=json.dumps({"snapshotID": snapshot}).encode(),
        headers={"X-API-Key": os.environ["DORMOUSE_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


def number_in(sandbox, path):
    return int(sandbox.files.read(path)) if sandbox.files.exists(path) else 0


def test_eight_forks_and_forks_of_a_fork(sandbox):
    sandbox.files.write("who.txt", "source")
    server = sandbox.commands.run("python3 -m http.server 8000 --bind 127.0.0.1", background=True, timeout=0)
    forks = sandbox.fork(timeout=300, count=8)
    grandchildren = []
    try:
        assert all(isinstance(fork, Sandbox) for fork in forks), forks
        assert len({fork.sandbox_id for fork in forks} | {sandbox.sandbox_id}) == 9
        for number, fork in enumerate(forks):
            assert fork.files.read("who.txt") == "source"
            fork.files.write("who.txt", f"fork {number}")
            assert server.pid in {process.pid for process in fork.commands.list()}
        grandchildren = forks[5].fork(timeout=300, count=2)
        assert all(isinstance(fork, Sandbox) for fork in grandchildren), grandchildren
        assert [fork.files.read("who.txt") for fork in grandchildren] == ["fork 5", "fork 5"]
        grandchildren[0].files.write("who.txt", "grandchild")
        assert [fork.files.read("who.txt") for fork in forks] == [f"fork {number}" for number in range(8)]
        assert grandchildren[1].files.read("who.txt") == "fork 5"
        assert sandbox.files.read("who.txt") == "source"
        fetch = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:8000/who.txt\").read().decode())'"
        assert grandchildren[0].commands.run(fetch).stdout == "grandchild\n"
    finally:
        for fork in [*forks, *grandchildren]:
            if isinstance(fork, Sandbox):
                fork.kill()


def test_checkpoints_under_a_write_load_are_whole_after_a_rollback(sandbox):
    sandbox.files.write("writer.py", WRITER)
    sandbox.files.write("verify.py", VERIFY)
    sandbox.commands.run("python3 writer.py", background=True, timeout=0)
    taken = []
    for _ in range(3):
        before = eventually(lambda: number_in(sandbox, "written"), seconds=120)
        taken.append((before, sandbox.create_snapshot().snapshot_id))
        # It was not stopped: it writes on.
        eventually(lambda: number_in(sandbox, "written") > before, seconds=120)
    for before, snapshot in reversed(taken):
        rollback(sandbox, snapshot)
        # The writer goes on from that instant, until it is told to end.
        sandbox.files.write("end", "")
        whole = int(sandbox.commands.run("python3 verify.py", timeout=300).stdout)
        assert whole >= before
        assert number_in(sandbox, "written") >= before, "what was synced before the checkpoint is lost"
