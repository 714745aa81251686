import asyncio
import hashlib
import io
import uuid

import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import AuthenticationException

GIB = 1 << 30
BLOCK = bytes(range(256)) * 4096


def test_commands(run_async):
    async def body(sandbox):
        seen = []
        result = await sandbox.commands.run("echo a; echo b >&2", on_stdout=seen.append, on_stderr=seen.append)
        assert (result.stdout, result.stderr, sorted(seen)) == ("a\n", "b\n", ["a\n", "b\n"])
        with pytest.raises(CommandExitException):
            await sandbox.commands.run("exit 4")
        handle = await sandbox.commands.run("cat", background=True, stdin=True)
        await sandbox.commands.send_stdin(handle.pid, "typed\n")
        await sandbox.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "typed\n"
        sleeper = await sandbox.commands.run("sleep 1000", background=True, timeout=0)
        assert sleeper.pid in {entry.pid for entry in await sandbox.commands.list()}
        assert await sleeper.kill()
        results = await asyncio.gather(*(sandbox.commands.run(f"echo {i}") for i in range(20)))
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(20)]

    run_async(body)


def test_files_and_watch(run_async):
    async def body(sandbox):
        await sandbox.files.make_dir("watched")
        seen, three = [], asyncio.Event()

        def on_event(event):
            seen.append((event.name, event.type.value))
            if len(seen) == 3:
                three.set()

        handle = await sandbox.files.watch_dir("watched", on_event=on_event)
        await sandbox.files.write("watched/new.txt", "x")
        await asyncio.wait_for(three.wait(), 20)
        assert seen == [("new.txt", "create"), ("new.txt", "chmod"), ("new.txt", "write")]
        await handle.stop()
        assert await sandbox.files.read("watched/new.txt") == "x"
        assert [entry.type for entry in await sandbox.files.list("watched")] == [FileType.FILE]
        assert await sandbox.files.exists("watched/new.txt")
        await sandbox.files.remove("watched")
        with pytest.raises(NotFoundException):
            await sandbox.files.read("watched/new.txt")

    run_async(body)


def test_terminal(run_async):
    async def body(sandbox):
        seen, found = bytearray(), asyncio.Event()

        def on_data(data):
            seen.extend(data)
            if b"tty-30 90" in seen:
                found.set()

        handle = await sandbox.pty.create(PtySize(rows=30, cols=90), on_data=on_data, timeout=60)
        await sandbox.pty.send_stdin(handle.pid, b"echo tty-$(stty size)\n")
        await asyncio.wait_for(found.wait(), 20)
        assert await sandbox.pty.kill(handle.pid)

    run_async(body)


def test_pause_connect_fork_snapshot(run_async):
    async def body(sandbox):
        await sandbox.files.write("kept.txt", "kept")
        await sandbox.pause()
        assert (await sandbox.get_info()).state == SandboxState.PAUSED
        again = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=300)
        assert await again.files.read("kept.txt") == "kept"
        forks = await sandbox.fork(timeout=60, count=2)
        assert all(isinstance(fork, AsyncSandbox) for fork in forks), forks
        try:
            texts = await asyncio.gather(*(fork.files.read("kept.txt") for fork in forks))
            assert texts == ["kept", "kept"]
        finally:
            await asyncio.gather(*(fork.kill() for fork in forks))
        snapshot = await sandbox.create_snapshot()
        copy = await AsyncSandbox.create(snapshot.snapshot_id, timeout=60)
        assert await copy.files.read("kept.txt") == "kept"
        await copy.kill()
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
        assert await sandbox.is_running()

    run_async(body)


def test_callbacks_handles_and_connect(run_async):
    async def body(sandbox):
        commands = sandbox.commands
        out, err = [], []

        async def slow(text):
            await asyncio.sleep(0)
            out.append(text)

        handle = await commands.run(
            "read go; echo $go; echo e >&2; exit 5", background=True, stdin=True, on_stdout=slow, on_stderr=err.append
        )
        also = []
        second = await commands.connect(handle.pid, on_stdout=also.append)
        await commands.send_stdin(handle.pid, "went\n")
        for one in (handle, second):
            with pytest.raises(CommandExitException) as failure:
                await one.wait()
            assert (failure.value.exit_code, failure.value.stdout, failure.value.stderr) == (5, "went\n", "e\n")
        assert ("".join(out), "".join(err), "".join(also)) == ("went\n", "e\n", "went\n")
        assert (handle.stdout, handle.stderr, handle.exit_code) == ("went\n", "e\n", 5)
        left = await commands.run("read go; echo still $go", background=True, stdin=True, timeout=0)
        await left.disconnect()
        again = await commands.connect(left.pid)
        await commands.send_stdin(again.pid, "here\n")
        assert (await again.wait()).stdout == "still here\n"
        with pytest.raises(NotFoundException):
            await commands.connect(999_999)
        with pytest.raises(TimeoutException):
            await commands.run("sleep 1000", timeout=1)
        with pytest.raises(AuthenticationException):
            await commands.run("true", user="nobody-of-this-name")
        with pytest.raises(InvalidArgumentException):
            await commands.run("true", cwd="/no/such/folder")
        result = await commands.run('echo "$A $(whoami) $PWD"', envs={"A": "a"}, user="root", cwd="/tmp")
        assert result.stdout == "a root /tmp\n"

    run_async(body)


def test_streamed_input(run_async):
    async def body(sandbox):
        if not hasattr(sandbox.commands, "stream_input"):
            pytest.skip("this SDK has no stream_input")
        handle = await sandbox.commands.run("sha256sum", background=True, stdin=True)
        async with sandbox.commands.stream_input(handle.pid) as typed:
            for _ in range(100):
                await typed.send(b"x" * 1000)
        await handle.close_stdin()
        assert (await handle.wait()).stdout.split()[0] == hashlib.sha256(b"x" * 100_000).hexdigest()
        missing = sandbox.commands.stream_input(999_999)
        with pytest.raises(NotFoundException):
            await missing.close()

    run_async(body)


def test_terminal_again(run_async):
    async def body(sandbox):
        seen = bytearray()

        async def shown(text):
            for _ in range(400):
                if text in seen:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"the terminal did not show {text!r}: {bytes(seen)!r}")

        handle = await sandbox.pty.create(PtySize(rows=30, cols=90), on_data=seen.extend, timeout=60, cwd="/tmp")
        await sandbox.pty.resize(handle.pid, PtySize(rows=31, cols=91))
        await sandbox.pty.send_stdin(handle.pid, b"echo at-$PWD-$(stty size)\n")
        await shown(b"at-/tmp-31 91")
        await handle.disconnect()
        seen.clear()
        again = await sandbox.pty.connect(handle.pid, on_data=seen.extend)
        await sandbox.pty.send_stdin(again.pid, b"echo again-$((6 * 7)); exit 4\n")
        await shown(b"again-42")
        with pytest.raises(CommandExitException) as ended:
            await again.wait()
        assert ended.value.exit_code == 4

    run_async(body)


def test_files_in_every_form(run_async):
    async def body(sandbox):
        files = sandbox.files

        async def pieces():
            for i in range(1000):
                yield b"%d," % i

        await files.write("pieces.txt", pieces()) if _takes_pieces() else await files.write(
            "pieces.txt", b"".join([piece async for piece in pieces()])
        )
        whole = b"".join([b"%d," % i for i in range(1000)])
        assert bytes(await files.read("pieces.txt", format="bytes")) == whole
        assert b"".join([chunk async for chunk in await files.read("pieces.txt", format="stream")]) == whole
        await files.write("zipped.txt", "zip " * 10_000, gzip=True, metadata={"kind": "zipped"})
        assert await files.read("zipped.txt") == "zip " * 10_000
        assert (await files.get_info("zipped.txt")).metadata == {"kind": "zipped"}
        infos = await files.write_files([{"path": f"many/{i}", "data": str(i)} for i in range(3)])
        assert [info.path for info in infos] == [f"/home/user/many/{i}" for i in range(3)]
        assert (await files.rename("many", "moved")).path == "/home/user/moved"
        assert sorted(entry.name for entry in await files.list("moved", depth=2)) == ["0", "1", "2"]
        assert await files.make_dir("moved/new") is True
        assert await files.make_dir("moved/new") is False
        with pytest.raises(InvalidArgumentException):
            await files.read("moved")
        seen, exits = [], []
        handle = await files.watch_dir(
            "moved", on_event=seen.append, on_exit=exits.append, recursive=True, include_entry=True, timeout=0
        )
        await files.make_dir("moved/new/deeper")
        await files.write("moved/new/deeper/x.txt", "x")
        for _ in range(400):
            if any(event.name == "new/deeper/x.txt" and event.type.value == "write" for event in seen):
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError(f"the new folder is not watched: {seen}")
        await handle.stop()
        assert seen[0].name == "new/deeper" and seen[-1].entry.path == "/home/user/moved/new/deeper/x.txt"
        with pytest.raises(NotFoundException):
            await files.watch_dir("absent", on_event=seen.append)

    run_async(body)


def _takes_pieces():
    import e2b

    return "AsyncWriteData" in dir(e2b)


def test_calls_by_id_lists_and_readings(run_async):
    mark = {"mark": uuid.uuid4().hex}

    async def body(sandbox):
        id = sandbox.sandbox_id
        assert await AsyncSandbox.pause(id)
        assert not await AsyncSandbox.pause(id)
        query = SandboxQuery(metadata=mark, state=[SandboxState.PAUSED])
        assert [item.sandbox_id for item in await AsyncSandbox.list(query=query).next_items()] == [id]
        await sandbox.connect(timeout=300)
        await AsyncSandbox.set_timeout(id, 1000)
        info = await AsyncSandbox.get_info(id)
        assert (info.sandbox_id, info.metadata, info.state) == (id, mark, SandboxState.RUNNING)
        [metric] = (await AsyncSandbox.get_metrics(id))[-1:]
        assert 0 < metric.disk_used <= metric.disk_total
        await sandbox.update_network({"deny_out": ["1.1.1.1"]})
        assert (await sandbox.get_info()).network["deny_out"] == ["1.1.1.1"]
        snapshot = await AsyncSandbox.create_snapshot(id, name=f"named-{mark['mark'][:8]}")
        paginator, listed = sandbox.list_snapshots(limit=1), []
        while paginator.has_next:
            listed += [item.snapshot_id for item in await paginator.next_items()]
        assert snapshot.snapshot_id in listed
        assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
        with pytest.raises(SandboxException):
            await sandbox.pause(keep_memory=False)
        with pytest.raises(NotFoundException):
            await AsyncSandbox.connect("nosuchsandbox0000000")
        assert await AsyncSandbox.kill("nosuchsandbox0000000") is False
        async with await AsyncSandbox.create(timeout=60) as other:
            assert (await other.commands.run("echo other")).stdout == "other\n"
        assert not await other.is_running()
        await sandbox.git.init("repository", initial_branch="main")
        assert (await sandbox.git.status("repository")).current_branch == "main"

    run_async(body, metadata=mark)


def test_a_gibibyte_up_and_down(run_async):
    async def body(sandbox):
        expected = hashlib.sha256()
        blocks = GIB // len(BLOCK)
        for _ in range(blocks):
            expected.update(BLOCK)
        await sandbox.files.write("/var/tmp/big.bin", _Source(blocks), user="root", request_timeout=600)
        result = await sandbox.commands.run("sha256sum /var/tmp/big.bin", user="root", timeout=300)
        assert result.stdout.split()[0] == expected.hexdigest()
        got, size = hashlib.sha256(), 0
        async for chunk in await sandbox.files.read("/var/tmp/big.bin", format="stream", user="root", request_timeout=600):
            got.update(chunk)
            size += len(chunk)
        assert (size, got.hexdigest()) == (GIB, expected.hexdigest())

    run_async(body)


class _Source(io.RawIOBase):
    """So many blocks, one after the other, never held as a whole."""

    def __init__(self, blocks):
        self.left, self.rest = blocks, memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        if not self.rest and self.left:
            self.left, self.rest = self.left - 1, memoryview(BLOCK)
        size = min(len(buffer), len(self.rest))
        buffer[:size], self.rest = self.rest[:size], self.rest[size:]
        return size
