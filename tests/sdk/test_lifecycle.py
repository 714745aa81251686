import os
import threading
import uuid
from datetime import datetime, timezone

import pytest
from conftest import eventually
from e2b import NotFoundException, Sandbox, SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, SandboxNotFoundException, TimeoutException

COUNTER = """
import hashlib, os, sys, time
held = os.urandom(1 << 20) * 16
log = open("/tmp/counter", "w")
count = 0
while True:
    count += 1
    log.write(f"{count} {os.getpid()} {hashlib.sha256(held).hexdigest()}\\n"); log.flush()
    time.sleep(0.05)
"""


def last_line(sandbox):
    if not sandbox.files.exists("/tmp/counter"):
        return None
    # The last line may be half written.
    lines = sandbox.files.read("/tmp/counter").split("\n")[:-1]
    return lines[-1].split() if lines else None


def test_info_list_and_timeout(sandbox):
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.state == SandboxState.RUNNING
    assert info.cpu_count >= 1 and info.memory_mb >= 64
    sandbox.set_timeout(1000)
    left = (sandbox.get_info().end_at - datetime.now(timezone.utc)).total_seconds()
    assert 900 < left <= 1001
    assert sandbox.is_running()


def test_list_filters_and_pages():
    mark = uuid.uuid4().hex
    made = [Sandbox.create(timeout=120, metadata={"mark": mark, "n ä/&=": f"{i} ä/&="}) for i in range(3)]
    try:
        pages, paginator = [], Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2)
        while paginator.has_next:
            pages.append([item.sandbox_id for item in paginator.next_items()])
        assert [len(page) for page in pages] == [2, 1]
        assert {i for page in pages for i in page} == {sandbox.sandbox_id for sandbox in made}
        strange = Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "n ä/&=": "1 ä/&="})).next_items()
        assert [item.sandbox_id for item in strange] == [made[1].sandbox_id]
        made[0].pause()
        paused = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])).next_items()
        assert [item.sandbox_id for item in paused] == [made[0].sandbox_id]
    finally:
        for sandbox in made:
            sandbox.kill()


def test_environment_of_the_sandbox():
    sandbox = Sandbox.create(timeout=120, envs={"OF_SANDBOX": "yes", "BOTH": "sandbox"})
    try:
        result = sandbox.commands.run('echo "$OF_SANDBOX $BOTH"', envs={"BOTH": "command"})
        assert result.stdout == "yes command\n"
    finally:
        sandbox.kill()


def test_pause_and_connect_keep_memory_and_processes(sandbox):
    sandbox.files.write("count.py", COUNTER)
    process = sandbox.commands.run("python3 count.py", background=True, timeout=0)
    before = eventually(lambda: last_line(sandbox))
    assert sandbox.pause()
    assert not sandbox.pause(), "a second pause must say that it was paused"
    assert sandbox.get_info().state == SandboxState.PAUSED
    assert not sandbox.is_running()
    again = Sandbox.connect(sandbox.sandbox_id, timeout=300)
    assert again.sandbox_id == sandbox.sandbox_id
    at_wake = last_line(again)
    assert (at_wake[1], at_wake[2]) == (before[1], before[2])
    eventually(lambda: int(last_line(again)[0]) > int(at_wake[0]))
    assert process.pid in {entry.pid for entry in again.commands.list()}
    # The object made before the pause goes on to work: its access token was kept.
    assert sandbox.commands.run("echo same").stdout == "same\n"


def test_a_stream_goes_on_over_pause_and_resume(sandbox):
    handle = sandbox.commands.run("for i in $(seq 1 60); do echo $i; sleep 0.1; done", background=True, timeout=0)
    result = {}
    reader = threading.Thread(target=lambda: result.update(done=handle.wait()))
    reader.start()
    eventually(lambda: len(sandbox.commands.list()) >= 1)
    Sandbox.pause(sandbox.sandbox_id)
    Sandbox.connect(sandbox.sandbox_id, timeout=300)
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert result["done"].stdout.split() == [str(i) for i in range(1, 61)]


def test_snapshots(sandbox):
    sandbox.files.write("state.txt", "first")
    snapshot = sandbox.create_snapshot()
    sandbox.files.write("state.txt", "second")
    assert sandbox.is_running()
    listed, paginator = [], sandbox.list_snapshots()
    while paginator.has_next:
        listed += [item.snapshot_id for item in paginator.next_items()]
    assert snapshot.snapshot_id in listed
    copy = Sandbox.create(snapshot.snapshot_id, timeout=120)
    try:
        assert copy.sandbox_id != sandbox.sandbox_id
        assert copy.files.read("state.txt") == "first"
        assert sandbox.files.read("state.txt") == "second"
    finally:
        copy.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
    with pytest.raises((NotFoundException, SandboxException)):
        Sandbox.create(snapshot.snapshot_id)


def test_named_snapshot(sandbox):
    name = f"named-{uuid.uuid4().hex[:8]}"
    sandbox.files.write("which.txt", "one")
    first = sandbox.create_snapshot(name=name)
    assert any(name in given for given in first.names)
    sandbox.files.write("which.txt", "two")
    sandbox.create_snapshot(name=name)
    copy = Sandbox.create(name, timeout=120)
    try:
        assert copy.files.read("which.txt") == "two"
    finally:
        copy.kill()


def test_fork(sandbox):
    sandbox.files.write("count.py", COUNTER)
    sandbox.commands.run("python3 count.py", background=True, timeout=0)
    before = eventually(lambda: last_line(sandbox))
    forks = sandbox.fork(timeout=120, count=3)
    try:
        assert all(isinstance(fork, Sandbox) for fork in forks), forks
        for index, fork in enumerate(forks):
            fork.files.write("mine.txt", str(index))
        assert [fork.files.read("mine.txt") for fork in forks] == ["0", "1", "2"]
        assert not sandbox.files.exists("mine.txt")
        for fork in forks:
            at = last_line(fork)
            assert (at[1], at[2]) == (before[1], before[2])
            eventually(lambda: int(last_line(fork)[0]) > int(at[0]))
        everyone = [sandbox, *forks]
        for probe in ("hostname", "cat /etc/machine-id", "head -c 16 /dev/urandom | xxd -p || true", "python3 -c 'import uuid; print(uuid.uuid4())'"):
            answers = [one.commands.run(probe).stdout for one in everyone]
            assert len(set(answers)) == len(everyone) or "xxd" in probe, (probe, answers)
    finally:
        for fork in forks:
            if isinstance(fork, Sandbox):
                fork.kill()


def test_kill_is_final(sandbox):
    other = Sandbox.create(timeout=60)
    assert other.kill() is True
    assert other.kill() is False
    assert not other.is_running()
    with pytest.raises((SandboxNotFoundException, NotFoundException)):
        Sandbox.connect(other.sandbox_id)
    with pytest.raises(TimeoutException):
        other.commands.run("true")


def test_timeout_kills_or_pauses():
    killed = Sandbox.create(timeout=3)
    eventually(lambda: not killed.is_running(), seconds=30)
    with pytest.raises((SandboxNotFoundException, NotFoundException)):
        killed.get_info()
    paused = Sandbox.create(timeout=3, lifecycle={"on_timeout": "pause"})
    paused.files.write("kept.txt", "kept")
    eventually(lambda: paused.get_info().state == SandboxState.PAUSED, seconds=30)
    again = Sandbox.connect(paused.sandbox_id, timeout=60)
    assert again.files.read("kept.txt") == "kept"
    again.kill()


def test_metrics(sandbox):
    metrics = eventually(lambda: sandbox.get_metrics())
    newest = metrics[-1]
    assert newest.cpu_count >= 1
    assert 0 < newest.mem_used <= newest.mem_total
    assert 0 < newest.disk_used <= newest.disk_total


def test_idempotent_create():
    import inspect

    if "idempotency_key" not in inspect.signature(Sandbox.create).parameters:
        pytest.skip("this SDK sends no idempotency key")
    key = uuid.uuid4().hex
    made = []
    threads = [threading.Thread(target=lambda: made.append(Sandbox.create(timeout=60, idempotency_key=key))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert made[0].sandbox_id == made[1].sandbox_id
    made[0].kill()


def test_ports_are_reached_through_the_daemon(sandbox):
    import urllib.error
    import urllib.request

    sandbox.files.write("/home/user/www/index.html", "served from inside")
    sandbox.commands.run("python3 -m http.server 8123 --bind 127.0.0.1 -d www", background=True, timeout=0)

    def get(port):
        request = urllib.request.Request(
            os.environ["E2B_SANDBOX_URL"],
            headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    eventually(lambda: get(8123)[0] == 200)
    assert get(8123) == (200, "served from inside")
    status, body = get(8124)
    assert status == 502 and "port is not open" in body


def test_wrong_key_and_unknown_template():
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises((NotFoundException, SandboxException)):
        Sandbox.create("no-such-template")
