from e2b import CommandExitException, PtySize


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
    assert shared.pty.kill(handle.pid) is False


def test_interrupt_and_exit_status(shared):
    handle = shared.pty.create(PtySize(rows=24, cols=80), timeout=60, envs={"MARK": "here"})
    shared.pty.send_stdin(handle.pid, b"echo $MARK-$TERM; sleep 1000\n")
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
