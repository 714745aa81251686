"""What the SDK's reference documents of `Sandbox` beyond the life cycle: the static forms, listing, readings, hosts."""

import inspect
import os
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from conftest import eventually
from e2b import (
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxNetworkOpts,
    SandboxQuery,
    SandboxState,
)
from e2b.exceptions import SandboxNotFoundException

ABSENT = "nosuchsandbox0000000"


def takes(function, name):
    return name in inspect.signature(function).parameters


def test_every_call_by_id(sandbox):
    id = sandbox.sandbox_id
    Sandbox.set_timeout(id, 1000)
    info = Sandbox.get_info(id)
    assert (info.sandbox_id, info.state) == (id, SandboxState.RUNNING)
    assert 900 < (info.end_at - datetime.now(timezone.utc)).total_seconds() <= 1001
    assert Sandbox.get_metrics(id)[-1].mem_total > 0
    snapshot = Sandbox.create_snapshot(id)
    assert snapshot.snapshot_id in {item.snapshot_id for item in Sandbox.list_snapshots(sandbox_id=id).next_items()}
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    [fork] = Sandbox.fork(id, timeout=60)
    assert fork.sandbox_id != id and fork.is_running()
    assert Sandbox.kill(fork.sandbox_id) is True
    assert Sandbox.kill(fork.sandbox_id) is False
    Sandbox.update_network(id, {"allow_internet_access": False})
    assert Sandbox.get_info(id).allow_internet_access is False
    assert Sandbox.pause(id) is True
    assert Sandbox.pause(id) is False
    again = Sandbox.connect(id, timeout=300)
    assert again.commands.run("echo there").stdout == "there\n"
    assert again.get_info().allow_internet_access is False, "a pause forgot the network's rules"


def test_every_call_on_what_is_not_there():
    assert Sandbox.kill(ABSENT) is False
    assert Sandbox.delete_snapshot(ABSENT) is False
    for call in (
        lambda: Sandbox.connect(ABSENT),
        lambda: Sandbox.get_info(ABSENT),
        lambda: Sandbox.set_timeout(ABSENT, 10),
        lambda: Sandbox.pause(ABSENT),
        lambda: Sandbox.create_snapshot(ABSENT),
        lambda: Sandbox.fork(ABSENT),
        lambda: Sandbox.get_metrics(ABSENT),
        lambda: Sandbox.update_network(ABSENT, {}),
    ):
        with pytest.raises((SandboxNotFoundException, NotFoundException)):
            call()


def test_info_says_what_was_asked():
    metadata = {"task": "17", "who": "ä/&= "}
    made = Sandbox.create(
        timeout=120,
        metadata=metadata,
        lifecycle={"on_timeout": "pause", "auto_resume": True},
        allow_internet_access=False,
    )
    try:
        info = made.get_info()
        assert info.metadata == metadata
        assert info.lifecycle == {"on_timeout": "pause", "auto_resume": True}
        assert info.allow_internet_access is False
        assert info.name == "base"
        assert info.template_id
        assert abs((datetime.now(timezone.utc) - info.started_at).total_seconds()) < 60
        [listed] = Sandbox.list(query=SandboxQuery(metadata=metadata)).next_items()
        assert (listed.sandbox_id, listed.metadata, listed.name) == (info.sandbox_id, metadata, "base")
        assert (listed.started_at, listed.end_at) == (info.started_at, info.end_at)
        assert (listed.cpu_count, listed.memory_mb, listed.envd_version) == (
            info.cpu_count,
            info.memory_mb,
            info.envd_version,
        )
    finally:
        made.kill()


def test_it_ends_with_its_block():
    with Sandbox.create(timeout=120) as made:
        assert made.commands.run("echo in").stdout == "in\n"
    assert not made.is_running()
    with pytest.raises((SandboxNotFoundException, NotFoundException)):
        made.get_info()


def test_list_order_template_start_and_token():
    mark = {"mark": uuid.uuid4().hex}
    made = [Sandbox.create(timeout=120, metadata=mark) for _ in range(3)]
    try:
        oldest_first = [one.sandbox_id for one in made]

        def ids(**asked):
            query = SandboxQuery(metadata=mark, **asked.pop("query", {}))
            return [item.sandbox_id for item in Sandbox.list(query=query, **asked).next_items()]

        assert ids() == oldest_first[::-1]
        if takes(Sandbox.list, "order"):
            assert ids(order="asc") == oldest_first
            assert ids(order="desc") == oldest_first[::-1]
            with pytest.raises(InvalidArgumentException):
                ids(order="sideways")
        fields = SandboxQuery.__dataclass_fields__
        info = made[1].get_info()
        if "started_after" in fields:
            assert ids(query={"started_after": info.started_at}) == oldest_first[:0:-1]
            assert ids(query={"started_after": datetime.now(timezone.utc) + timedelta(hours=1)}) == []
        if "template" in fields:
            assert ids(query={"template": "base"}) == ids(query={"template": info.template_id}) == oldest_first[::-1]
            assert ids(query={"template": "no-such-template"}) == []
        pages = Sandbox.list(query=SandboxQuery(metadata=mark), limit=1)
        first = pages.next_items()
        rest = Sandbox.list(query=SandboxQuery(metadata=mark), limit=100, next_token=pages.next_token)
        assert [item.sandbox_id for item in first + rest.next_items()] == oldest_first[::-1]
        assert not rest.has_next
        with pytest.raises(SandboxException):
            Sandbox.list(next_token="not a token").next_items()
    finally:
        for one in made:
            one.kill()


def test_metrics_over_a_span(sandbox):
    began = datetime.now(timezone.utc)
    used = sandbox.get_metrics()[-1].disk_used
    sandbox.commands.run("head -c 20000000 /dev/urandom > written; sync")
    last = eventually(lambda: next((one for one in sandbox.get_metrics() if one.disk_used >= used + 20_000_000), None))
    assert last.disk_used < last.disk_total
    assert 0 <= last.cpu_used_pct <= 100
    assert last.mem_cache >= 0
    soon, later = datetime.now(timezone.utc) + timedelta(seconds=1), timedelta(hours=1)
    inside = sandbox.get_metrics(start=began - timedelta(seconds=1), end=soon)
    assert inside and all(began - timedelta(seconds=2) <= one.timestamp <= soon for one in inside)
    assert sandbox.get_metrics(start=began - 2 * later, end=began - later) == []
    if takes(Sandbox.get_metrics, "sandbox_id"):
        assert Sandbox.get_metrics(sandbox.sandbox_id, start=began)


def test_hosts(sandbox):
    host = sandbox.get_host(8000)
    assert host.startswith(f"8000-{sandbox.sandbox_id}.")
    assert sandbox.get_info().sandbox_domain == host.split(".", 1)[1]
    assert sandbox.get_mcp_url().startswith(f"https://50005-{sandbox.sandbox_id}.")
    assert sandbox.sandbox_domain == host.split(".", 1)[1]


def test_a_named_host_reaches_its_port(sandbox):
    import http.client
    import urllib.parse

    sandbox.files.write("/home/user/www/index.html", "by name")
    sandbox.commands.run("python3 -m http.server 8000 --bind 127.0.0.1 -d www", background=True, timeout=0)

    def get():
        # The name need not resolve here: the daemon goes by the Host header.
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(os.environ["E2B_API_URL"]).netloc)
        connection.request("GET", "/", headers={"Host": sandbox.get_host(8000)})
        answer = connection.getresponse()
        return answer.status, answer.read()

    eventually(lambda: get()[0] == 200)
    assert get() == (200, b"by name")


def test_connect_to_a_running_one_only_extends(sandbox):
    sandbox.set_timeout(1000)
    Sandbox.connect(sandbox.sandbox_id, timeout=100)
    assert (sandbox.get_info().end_at - datetime.now(timezone.utc)).total_seconds() > 900
    Sandbox.connect(sandbox.sandbox_id, timeout=2000)
    assert (sandbox.get_info().end_at - datetime.now(timezone.utc)).total_seconds() > 1900
    sandbox.connect(timeout=3000)
    assert (sandbox.get_info().end_at - datetime.now(timezone.utc)).total_seconds() > 2900


def test_traffic_wakes_where_that_was_asked():
    made = Sandbox.create(timeout=120, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        made.files.write("kept.txt", "kept")
        assert made.pause()
        assert made.files.read("kept.txt") == "kept"
        assert made.get_info().state == SandboxState.RUNNING
    finally:
        made.kill()


def test_what_is_not_offered_is_refused_and_changes_nothing(sandbox):
    handle = sandbox.commands.run("sleep 1000", background=True, timeout=0)
    with pytest.raises(SandboxException) as refused:
        sandbox.pause(keep_memory=False)
    assert "memory" in str(refused.value)
    if takes(Sandbox.pause, "mode"):
        with pytest.raises(SandboxException):
            sandbox.pause(mode="filesystem")
        with pytest.raises(SandboxException):
            sandbox.create_snapshot(mode="filesystem")
        assert sandbox.create_snapshot(mode="full").snapshot_id
    for options in (
        {"network": {"https_ports": [8000]}},
        {"network": {"egress_proxy": {"address": "proxy.example.com:1080"}}},
        {"network": {"rules": {"example.com": [{"transform": {"headers": {"a": "b"}}}]}}},
        {"volume_mounts": {"/mnt": "some-volume"}},
        {"lifecycle": {"on_timeout": {"action": "pause", "keep_memory": False}}},
    ):
        if not options.get("network", {}).keys() <= SandboxNetworkOpts.__annotations__.keys():
            continue  # An older SDK does not send it.
        with pytest.raises(SandboxException):
            Sandbox.create(timeout=60, **options)
    if takes(Sandbox.connect, "on_resume"):
        assert sandbox.pause()
        with pytest.raises(SandboxException):
            sandbox.connect(on_resume="reboot")
        assert sandbox.get_info().state == SandboxState.PAUSED
        sandbox.connect(timeout=300)
    assert handle.pid in {process.pid for process in sandbox.commands.list()}
    assert handle.kill()


def test_wrong_values_name_their_field(sandbox):
    for call, field in (
        (lambda: Sandbox.create(timeout=-1), "timeout"),
        (lambda: sandbox.set_timeout(-1), "timeout"),
        (lambda: Sandbox.create(envs={"A=B": "x"}, timeout=60), "envVars"),
        (lambda: sandbox.fork(count=1000), "count"),
        (lambda: sandbox.update_network({"deny_out": ["example.com"]}), "deny"),
        (lambda: sandbox.update_network({"allow_out": ["300.1.1.1/99"]}), "allow"),
    ):
        with pytest.raises(SandboxException) as refused:
            call()
        assert field in str(refused.value), refused.value


def test_a_client_with_its_own_settings():
    import e2b

    if not hasattr(e2b, "E2B"):
        pytest.skip("this SDK has no E2B client")
    client = e2b.E2B(api_key=os.environ["E2B_API_KEY"], api_url=os.environ["E2B_API_URL"])
    made = client.Sandbox.create(timeout=60)
    try:
        assert client.Sandbox.get_info(made.sandbox_id).sandbox_id == made.sandbox_id
        assert client.Template.exists("base") is True
        assert client.Template.exists("no-such-template") is False
    finally:
        made.kill()


def test_older_names_still_work():
    made = Sandbox.create(timeout=60)
    try:
        assert made.beta_pause()
        assert Sandbox.connect(made.sandbox_id, timeout=60).is_running()
    finally:
        made.kill()
