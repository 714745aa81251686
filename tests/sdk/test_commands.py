import inspect
import time

import pytest
from conftest import eventually
from e2b import CommandExitException, InvalidArgumentException, NotFoundException, TimeoutException
from e2b.exceptions import AuthenticationException


def test_run_returns_streams_and_exit_code(shared):
    result = shared.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_failure_raises_with_both_streams(shared):
    with pytest.raises(CommandExitException) as failure:
        shared.commands.run("echo before; echo why >&2; exit 7")
    assert failure.value.exit_code == 7
    assert failure.value.stdout == "before\n"
    assert failure.value.stderr == "why\n"


def test_callbacks_stream_while_it_runs(shared):
    seen = []
    shared.commands.run(
        "for i in 1 2 3; do echo $i; echo e$i >&2; sleep 0.2; done",
        on_stdout=lambda text: seen.append((time.monotonic(), text)),
        on_stderr=lambda text: seen.append((time.monotonic(), text)),
    )
    text = "".join(part for _, part in seen)
    for expected in ("1\n", "2\n", "3\n", "e1\n", "e3\n"):
        assert expected in text
    assert seen[-1][0] > seen[0][0], "the output came in one piece at the end"


def test_environment_directory_and_user(shared):
    result = shared.commands.run('echo "$GREETING:$(pwd):$(whoami):$HOME"', envs={"GREETING": "hi"}, cwd="/tmp")
    assert result.stdout == "hi:/tmp:user:/home/user\n"
    root = shared.commands.run("whoami; sudo -n whoami", user="root")
    assert root.stdout == "root\nroot\n"
    assert shared.commands.run("sudo -n id -u").stdout == "0\n"
    assert shared.commands.run("pwd").stdout == "/home/user\n"


def test_unknown_user_and_directory(shared):
    with pytest.raises(AuthenticationException):
        shared.commands.run("true", user="nobody-of-this-name")
    with pytest.raises(InvalidArgumentException):
        shared.commands.run("true", cwd="/no/such/folder")


def test_background_command_list_connect_kill(shared):
    handle = shared.commands.run("echo started; sleep 1000", background=True, timeout=0)
    running = {process.pid: process for process in shared.commands.list()}
    assert handle.pid in running
    assert running[handle.pid].cmd == "/bin/bash"
    assert running[handle.pid].args[-1] == "echo started; sleep 1000"
    again = shared.commands.connect(handle.pid)
    assert again.pid == handle.pid
    assert shared.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException) as failure:
        handle.wait()
    assert failure.value.exit_code != 0
    eventually(lambda: handle.pid not in {process.pid for process in shared.commands.list()})
    assert shared.commands.kill(handle.pid) is False


def test_stdin_and_its_end(shared):
    handle = shared.commands.run("cat; echo done", background=True, stdin=True)
    shared.commands.send_stdin(handle.pid, "first\n")
    shared.commands.send_stdin(handle.pid, b"second\n")
    shared.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "first\nsecond\ndone\n"


def test_streamed_stdin(shared):
    if not hasattr(shared.commands, "stream_input"):
        pytest.skip("this SDK has no stream_input")
    handle = shared.commands.run("wc -c", background=True, stdin=True)
    shared.commands.stream_input(handle.pid, (b"x" * 1000 for _ in range(100)))
    shared.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.strip() == "100000"


def test_no_stdin_is_empty(shared):
    assert shared.commands.run("cat | wc -c").stdout.strip() == "0"


def test_deadline_ends_the_command(shared):
    with pytest.raises(TimeoutException):
        shared.commands.run("echo marker-of-deadline; sleep 1000", timeout=1)
    eventually(lambda: not any("marker-of-deadline" in " ".join(p.args) for p in shared.commands.list()))


def test_connect_to_what_is_not_there(shared):
    with pytest.raises(NotFoundException):
        shared.commands.connect(999_999)


def test_disconnect_leaves_it_running(shared):
    handle = shared.commands.run("sleep 1000", background=True, timeout=0)
    handle.disconnect()
    assert handle.pid in {process.pid for process in shared.commands.list()}
    assert shared.commands.kill(handle.pid) is True


def test_large_output_is_whole(shared):
    result = shared.commands.run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert len(result.stdout) == 5_000_000
    assert set(result.stdout) == {"x"}


def test_split_characters_are_put_together(shared):
    result = shared.commands.run("python3 -c \"import sys; sys.stdout.write('ä€😀' * 20000)\"")
    assert result.stdout == "ä€😀" * 20_000


def test_death_by_signal(shared):
    with pytest.raises(CommandExitException) as failure:
        shared.commands.run("kill -9 $$")
    assert failure.value.exit_code == -1


def test_grandchildren_that_hold_the_pipes_do_not_delay_a_kill(shared):
    handle = shared.commands.run("sleep 1000 & sleep 1000", background=True, timeout=0)
    assert shared.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException):
        handle.wait()


def test_many_commands_at_once(shared):
    handles = [shared.commands.run(f"sleep 0.1; echo {i}", background=True) for i in range(20)]
    assert [handle.wait().stdout for handle in handles] == [f"{i}\n" for i in range(20)]


def test_a_handle_streams_when_it_is_waited_for(shared):
    out, err = [], []
    handle = shared.commands.run("echo a; echo b >&2; echo c; exit 3", background=True)
    with pytest.raises(CommandExitException) as failure:
        handle.wait(on_stdout=out.append, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == ("a\nc\n", "b\n")
    assert (failure.value.stdout, failure.value.stderr, failure.value.exit_code) == ("a\nc\n", "b\n", 3)


def test_a_handle_is_iterated(shared):
    handle = shared.commands.run("echo a; echo b >&2", background=True)
    seen = [(out, err, pty) for out, err, pty in handle]
    assert "".join(out for out, _, _ in seen if out) == "a\n"
    assert "".join(err for _, err, _ in seen if err) == "b\n"
    assert all(pty is None for _, _, pty in seen)


def test_connect_streams_what_comes_after(shared):
    first = shared.commands.run("read go; for i in 1 2 3; do echo $i; echo e$i >&2; done; exit 5", background=True, stdin=True)
    second = shared.commands.connect(first.pid, timeout=60)
    shared.commands.send_stdin(first.pid, "go\n")
    out, err = [], []
    with pytest.raises(CommandExitException) as failure:
        second.wait(on_stdout=out.append, on_stderr=err.append)
    assert failure.value.exit_code == 5
    assert ("".join(out), "".join(err)) == ("1\n2\n3\n", "e1\ne2\ne3\n")
    with pytest.raises(CommandExitException) as failure:
        first.wait()
    assert (failure.value.stdout, failure.value.stderr) == ("1\n2\n3\n", "e1\ne2\ne3\n")


def test_connect_to_one_that_just_ended(shared):
    handle = shared.commands.run("exit 6", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as failure:
        shared.commands.connect(handle.pid).wait()
    assert failure.value.exit_code == 6


def test_disconnect_and_connect_again(shared):
    handle = shared.commands.run("read go; echo heard $go", background=True, stdin=True, timeout=0)
    handle.disconnect()
    again = shared.commands.connect(handle.pid)
    shared.commands.send_stdin(again.pid, "you\n")
    assert again.wait().stdout == "heard you\n"


def test_a_handle_kills_and_types(shared):
    sleeper = shared.commands.run("sleep 1000", background=True, timeout=0)
    assert sleeper.kill() is True
    with pytest.raises(CommandExitException):
        sleeper.wait()
    assert sleeper.kill() is False
    typed = shared.commands.run("cat", background=True, stdin=True)
    if hasattr(typed, "send_stdin"):
        typed.send_stdin("typed\n")
        typed.close_stdin()
    else:
        shared.commands.send_stdin(typed.pid, "typed\n")
        shared.commands.close_stdin(typed.pid)
    assert typed.wait().stdout == "typed\n"


def test_output_need_not_be_kept(shared):
    if "retain_output" not in inspect.signature(shared.commands.run).parameters:
        pytest.skip("this SDK keeps all output")
    seen = []
    result = shared.commands.run("echo seen", on_stdout=seen.append, retain_output=False)
    assert (result.stdout, result.stderr, result.exit_code, seen) == (None, None, 0, ["seen\n"])


def test_stdin_of_what_is_not_there(shared):
    with pytest.raises(NotFoundException):
        shared.commands.send_stdin(999_999, "x")
    with pytest.raises(NotFoundException):
        shared.commands.close_stdin(999_999)
