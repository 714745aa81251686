import hashlib
import inspect
import io

import pytest
from conftest import eventually
from e2b import FileType, InvalidArgumentException, NotFoundException, SandboxException
from e2b.exceptions import AuthenticationException

GIB = 1 << 30
BLOCK = bytes(range(256)) * 4096


def test_write_and_read_every_form(shared):
    files = shared.files
    info = files.write("notes/hello.txt", "hällo")
    assert info.path == "/home/user/notes/hello.txt"
    assert info.name == "hello.txt"
    assert files.read("notes/hello.txt") == "hällo"
    assert bytes(files.read("/home/user/notes/hello.txt", format="bytes")) == "hällo".encode()
    assert b"".join(files.read("notes/hello.txt", format="stream")) == "hällo".encode()
    files.write("notes/hello.txt", "short")
    assert files.read("notes/hello.txt") == "short"
    files.write("bytes.bin", bytes(range(256)))
    assert bytes(files.read("bytes.bin", format="bytes")) == bytes(range(256))
    files.write("stream.bin", io.BytesIO(b"abc" * 100_000))
    assert bytes(files.read("stream.bin", format="bytes")) == b"abc" * 100_000
    files.write("zipped.txt", "zip " * 10_000, gzip=True)
    assert files.read("zipped.txt") == "zip " * 10_000
    files.write("empty", "")
    assert files.read("empty") == ""


def test_write_several(shared):
    infos = shared.files.write_files(
        [{"path": f"many/{i}.txt", "data": str(i)} for i in range(5)]
    )
    assert [info.path for info in infos] == [f"/home/user/many/{i}.txt" for i in range(5)]
    assert [shared.files.read(f"many/{i}.txt") for i in range(5)] == list("01234")


def test_owner_mode_and_other_user(shared):
    shared.files.write("owned.txt", "x")
    entry = shared.files.get_info("owned.txt")
    assert (entry.owner, entry.group, entry.permissions, entry.size) == ("user", "user", "-rw-r--r--", 1)
    shared.files.write("/root/secret.txt", "y", user="root")
    assert shared.files.get_info("/root/secret.txt", user="root").owner == "root"


def test_missing_files_raise_by_type(shared):
    with pytest.raises(NotFoundException):
        shared.files.read("no/such/file")
    with pytest.raises(NotFoundException):
        shared.files.list("/no/such/folder")
    with pytest.raises(NotFoundException):
        shared.files.get_info("nothing-here")
    with pytest.raises(InvalidArgumentException):
        shared.files.read("/home/user")
    with pytest.raises(InvalidArgumentException):
        shared.files.list("/etc/hostname")


def test_list_with_depth(shared):
    for path in ("tree/a.txt", "tree/sub/b.txt", "tree/sub/deep/c.txt"):
        shared.files.write(path, "x")
    names = lambda depth: sorted(entry.path.removeprefix("/home/user/tree/") for entry in shared.files.list("tree", depth=depth))
    assert names(1) == ["a.txt", "sub"]
    assert names(2) == ["a.txt", "sub", "sub/b.txt", "sub/deep"]
    assert names(3) == ["a.txt", "sub", "sub/b.txt", "sub/deep", "sub/deep/c.txt"]
    kinds = {entry.name: entry.type for entry in shared.files.list("tree")}
    assert kinds == {"a.txt": FileType.FILE, "sub": FileType.DIR}
    with pytest.raises(InvalidArgumentException):
        shared.files.list("tree", depth=0)


def test_exists_make_rename_remove(shared):
    files = shared.files
    assert files.exists("folder") is False
    assert files.make_dir("folder/inner") is True
    assert files.make_dir("folder/inner") is False
    assert files.exists("folder/inner") is True
    files.write("folder/one.txt", "1")
    moved = files.rename("folder/one.txt", "folder/inner/two.txt")
    assert moved.path == "/home/user/folder/inner/two.txt"
    assert files.read("folder/inner/two.txt") == "1"
    files.remove("folder")
    assert files.exists("folder") is False
    files.remove("folder")
    with pytest.raises(NotFoundException):
        files.rename("absent", "elsewhere")


def test_write_from_text_files_and_in_one_go(shared):
    files = shared.files
    files.write("text-file.txt", io.StringIO("täxt\n" * 1000))
    assert files.read("text-file.txt") == "täxt\n" * 1000
    files.write_files(
        [
            {"path": "mixed/a.txt", "data": "a"},
            {"path": "mixed/b.bin", "data": b"\x00\xff"},
            {"path": "/home/user/mixed/c ä \"quoted\".txt", "data": io.BytesIO(b"c")},
        ]
    )
    assert files.read("mixed/a.txt") == "a"
    assert bytes(files.read("mixed/b.bin", format="bytes")) == b"\x00\xff"
    assert files.read('mixed/c ä "quoted".txt') == "c"
    assert files.write_files([]) == []
    assert files.read("text-file.txt", gzip=True) == "täxt\n" * 1000


def test_both_ways_to_upload(shared):
    if "use_octet_stream" not in inspect.signature(shared.files.write).parameters:
        pytest.skip("this SDK knows one way")
    for octets in (False, True):
        shared.files.write("either.txt", f"octets {octets}", use_octet_stream=octets)
        assert shared.files.read("either.txt") == f"octets {octets}"


def test_entries_tell_everything(shared):
    shared.files.write("all/of.txt", "four")
    shared.commands.run("chmod 640 all/of.txt && touch -d 2001-02-03T04:05:06Z all/of.txt")
    entry = shared.files.get_info("all/of.txt")
    assert (entry.name, entry.path, entry.type, entry.size) == ("of.txt", "/home/user/all/of.txt", FileType.FILE, 4)
    assert (entry.mode, entry.permissions) == (0o640, "-rw-r-----")
    assert entry.modified_time.isoformat().startswith("2001-02-03T04:05:06")
    folder = shared.files.get_info("all")
    assert (folder.type, folder.permissions[0]) == (FileType.DIR, "d")
    listed = shared.files.list("all")
    assert listed == [entry]
    assert shared.files.list("~/all") == shared.files.list("/home/user/all") == listed


def test_folders_move_whole(shared):
    shared.files.write("from/sub/x.txt", "x")
    moved = shared.files.rename("from", "new/parent/to")
    assert (moved.path, moved.type) == ("/home/user/new/parent/to", FileType.DIR)
    assert shared.files.read("new/parent/to/sub/x.txt") == "x"
    assert not shared.files.exists("from")


def test_other_users_see_what_they_may(shared):
    shared.files.make_dir("/root/kept", user="root")
    assert shared.files.exists("/root/kept", user="root")
    assert [entry.name for entry in shared.files.list("/root/kept", user="root")] == []
    shared.files.rename("/root/kept", "/root/moved", user="root")
    shared.files.remove("/root/moved", user="root")
    with pytest.raises(AuthenticationException):
        shared.files.read("x", user="nobody-of-this-name")
    with pytest.raises(AuthenticationException):
        shared.files.write("x", "x", user="nobody-of-this-name")
    with pytest.raises(AuthenticationException):
        shared.files.list("/", user="nobody-of-this-name")


def test_a_reader_may_stop_in_the_middle(shared):
    shared.commands.run("head -c 50000000 /dev/zero > zeros")
    stream = shared.files.read("zeros", format="stream")
    assert next(iter(stream)).count(b"\0") > 0
    stream.close()
    assert shared.files.get_info("zeros").size == 50_000_000
    shared.files.remove("zeros")


def test_symlinks(shared):
    shared.files.write("target.txt", "t")
    shared.commands.run("ln -sf target.txt link.txt")
    entry = shared.files.get_info("link.txt")
    assert entry.type == FileType.FILE
    assert entry.symlink_target == "/home/user/target.txt"
    assert shared.files.read("link.txt") == "t"


def test_proc_files_are_read_whole(shared):
    assert "MemTotal" in shared.files.read("/proc/meminfo")


def test_metadata(shared):
    shared.files.write("tagged.txt", "x", metadata={"Origin": "test"})
    assert shared.files.get_info("tagged.txt").metadata == {"origin": "test"}
    shared.files.write("tagged.txt", "y")
    assert not shared.files.get_info("tagged.txt").metadata


def test_watch(shared):
    shared.files.make_dir("watched/sub")
    handle = shared.files.watch_dir("watched", recursive=True)
    shared.files.write("watched/new.txt", "x")
    seen = []

    def kinds(count):
        seen.extend((event.name, event.type.value) for event in handle.get_new_events())
        return len(seen) >= count

    eventually(lambda: kinds(3))
    assert seen == [("new.txt", "create"), ("new.txt", "chmod"), ("new.txt", "write")]
    shared.files.write("watched/sub/deep.txt", "x")
    eventually(lambda: kinds(6))
    assert ("sub/deep.txt", "create") in seen
    shared.files.remove("watched/new.txt")
    eventually(lambda: kinds(7))
    assert seen[-1] == ("new.txt", "remove")
    shared.files.make_dir("watched/later")
    eventually(lambda: kinds(8))
    shared.files.write("watched/later/in.txt", "x")
    eventually(lambda: kinds(9) and any(name == "later/in.txt" for name, _ in seen))
    handle.stop()
    with pytest.raises(NotFoundException):
        shared.files.watch_dir("not-there")


def test_watch_tells_entries_and_renames(shared):
    shared.files.make_dir("seen")
    handle = shared.files.watch_dir("seen", include_entry=True, allow_network_mounts=True)
    shared.files.write("seen/a.txt", "x")
    shared.files.rename("seen/a.txt", "seen/b.txt")
    seen = []

    def ended():
        seen.extend(handle.get_new_events())
        return seen and seen[-1].name == "b.txt"

    eventually(ended)
    kinds = [(event.name, event.type.value) for event in seen]
    assert kinds[:3] == [("a.txt", "create"), ("a.txt", "chmod"), ("a.txt", "write")]
    assert ("a.txt", "rename") in kinds and ("b.txt", "create") in kinds
    created = next(event for event in seen if event.type.value == "create")
    assert created.entry is None or created.entry.path == "/home/user/seen/a.txt"
    assert seen[-1].entry.path == "/home/user/seen/b.txt"
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()


def test_signed_urls(shared):
    import urllib.error
    import urllib.request

    shared.files.write("signed.txt", "signed")
    url = shared.download_url("signed.txt", user="user")
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"signed"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url.replace("signature=v1_", "signature=v1_A"))
    assert refused.value.code == 401


def test_upload_urls(shared):
    url = shared.upload_url("uploaded.txt", user="user")
    assert _post(url, b"by form") == 200
    assert shared.files.read("uploaded.txt") == "by form"
    entry = shared.files.get_info("uploaded.txt")
    assert (entry.owner, entry.path) == ("user", "/home/user/uploaded.txt")
    assert _post(url.replace("path=uploaded.txt", "path=elsewhere.txt"), b"x") == 401
    assert not shared.files.exists("elsewhere.txt")
    assert _post(shared.download_url("uploaded.txt", user="user"), b"x") == 401, "a URL to read writes nothing"
    assert shared.files.read("uploaded.txt") == "by form"


def test_signed_urls_expire(shared):
    import urllib.error
    import urllib.request

    shared.files.write("expires.txt", "for a while")
    for user in (None, "user"):
        url = shared.download_url("expires.txt", user=user, use_signature_expiration=60)
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == b"for a while"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(shared.download_url("expires.txt", user=user, use_signature_expiration=-5))
        assert refused.value.code == 401
        assert b"signature is already expired" in refused.value.read()


def _post(url, content):
    import urllib.error
    import urllib.request

    body = (
        b'--mark\r\nContent-Disposition: form-data; name="file"; filename="given.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\n" + content + b"\r\n--mark--\r\n"
    )
    request = urllib.request.Request(url, body, {"Content-Type": "multipart/form-data; boundary=mark"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_gibibyte_up_and_down(shared):
    """Streams of any size in constant memory: what arrives is what was sent."""
    blocks = GIB // len(BLOCK)

    class Source(io.RawIOBase):
        left = GIB

        def readable(self):
            return True

        def readinto(self, buffer):
            size = min(len(buffer), self.left)
            start = (GIB - self.left) % len(BLOCK)
            doubled = BLOCK + BLOCK
            size = min(size, len(BLOCK))
            buffer[:size] = doubled[start : start + size]
            self.left -= size
            return size

    expected = hashlib.sha256()
    for _ in range(blocks):
        expected.update(BLOCK)
    shared.files.write("/var/tmp/big.bin", io.BufferedReader(Source(), 1 << 20), user="root", request_timeout=600)
    inside = shared.commands.run("sha256sum /var/tmp/big.bin", user="root", timeout=300).stdout.split()[0]
    assert inside == expected.hexdigest()
    got, size = hashlib.sha256(), 0
    for chunk in shared.files.read("/var/tmp/big.bin", format="stream", user="root", request_timeout=600):
        got.update(chunk)
        size += len(chunk)
    assert (size, got.hexdigest()) == (GIB, expected.hexdigest())
    shared.files.remove("/var/tmp/big.bin", user="root")
