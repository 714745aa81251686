import pytest
from conftest import eventually
from e2b import CommandExitException, NotFoundException, PtySize


def read_until(handle, wanted):
    seen = b""
    for _, _, data in handle:
        seen += data or b""
        if wanted in seen:
            return seen
    raise AssertionError(f"the terminal ended before {wanted!r}: {seen!r}")


def test_terminal_has_size_and_can_be_resized(shared):
    handle = shared.pty.create(PtySize(rows=30, cols=100), timeout=60)
    shared.pty.send_stdin(handle.pid, b"stty size; echo tty=$(tty)\n")
    seen = read_until(handle, b"tty=/dev/pts/")
    assert b"30 100" in seen
    shared.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    shared.pty.send_stdin(handle.pid, b"stty size\n")
    read_until(handle, b"40 120")
    assert shared.pty.kill(handle.pid) is True
    # A signal is sent, not waited for: only when the shell is gone is it not found.
    eventually(lambda: shared.pty.kill(handle.pid) is False)


def test_interrupt_and_exit_status(shared):
    handle = shared.pty.create(PtySize(rows=24, cols=80), timeout=60, envs={"MARK": "here"})
    # What is to be interrupted prints the mark itself: by then the terminal is its own, not the shell's.
    shared.pty.send_stdin(handle.pid, b"sh -c 'echo $MARK-$TERM; exec sleep 1000'\n")
    read_until(handle, b"here-xterm-256color")
    shared.pty.send_stdin(handle.pid, b"\x03")
    shared.pty.send_stdin(handle.pid, b"echo after-$?\n")
    read_until(handle, b"after-130")
    shared.pty.send_stdin(handle.pid, b"exit 3\n")
    try:
        handle.wait()
        raise AssertionError("exit status 3 was lost")
    except CommandExitException as ended:
        assert ended.exit_code == 3


def test_disconnect_and_connect_again(shared):
    handle = shared.pty.create(PtySize(rows=24, cols=80), timeout=0)
    handle.disconnect()
    again = shared.pty.connect(handle.pid) if hasattr(shared.pty, "connect") else None
    if again is not None:
        shared.pty.send_stdin(handle.pid, b"echo back-again\n")
        read_until(again, b"back-again")
    assert shared.pty.kill(handle.pid) is True


def test_directory_user_and_streamed_input(shared):
    handle = shared.pty.create(PtySize(rows=24, cols=80), cwd="/tmp", user="root", timeout=60)
    shared.pty.send_stdin(handle.pid, b"echo at-$PWD-as-$(whoami)\n")
    read_until(handle, b"at-/tmp-as-root")
    if hasattr(shared.pty, "stream_input"):
        shared.pty.stream_input(handle.pid, [b"echo stre", b"amed-$((6 * 7))\n"])
        read_until(handle, b"streamed-42")
    assert handle.kill() is True


def test_wait_hands_out_what_is_printed(shared):
    handle = shared.pty.create(PtySize(rows=24, cols=80), timeout=60)
    shared.pty.send_stdin(handle.pid, b"echo said-$((6 * 7)); exit\n")
    seen = bytearray()
    assert handle.wait(on_pty=seen.extend).exit_code == 0
    assert b"said-42" in seen


def test_terminals_that_are_not_there(shared):
    with pytest.raises(NotFoundException):
        shared.pty.send_stdin(999_999, b"x")
    with pytest.raises(NotFoundException):
        shared.pty.resize(999_999, PtySize(rows=1, cols=1))
    with pytest.raises(NotFoundException):
        shared.pty.connect(999_999)


def test_what_ran_in_a_killed_terminal_is_hung_up(shared):
    handle = shared.pty.create(PtySize(rows=24, cols=80), timeout=0)
    shared.pty.send_stdin(handle.pid, b"sh -c 'echo be\"\"gun; exec sleep 98765'\n")
    read_until(handle, b"begun")
    assert handle.kill() is True
    eventually(lambda: "98765" not in shared.commands.run("ps ax -o args").stdout)
