import asyncio

import pytest
from e2b import AsyncSandbox, CommandExitException, FileType, NotFoundException, PtySize, SandboxState


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
