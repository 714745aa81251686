"""What may be reached from inside, and how that is changed while the sandbox runs."""

import http.server
import os
import socket
import threading
import urllib.error
import urllib.request

import pytest
from conftest import eventually
from e2b import Sandbox, SandboxException

BODY = b"from the host"


def own_address():
    """An address of this host that is not loopback; nothing is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostbyname(socket.gethostname())


@pytest.fixture(scope="module")
def outside():
    """An HTTP server of this host, as address and port."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer((own_address(), 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address
    server.shutdown()
    thread.join()
    server.server_close()


def reach(sandbox, address):
    host, port = address
    return sandbox.commands.run(f"curl -s --max-time 20 http://{host}:{port}/ || true").stdout.encode()


def test_rules_change_while_it_runs(sandbox, outside):
    host = outside[0]
    assert reach(sandbox, outside) != BODY, "the host's own addresses are not to be reached unless allowed"
    sandbox.update_network({"allow_out": [host]})
    assert reach(sandbox, outside) == BODY
    assert sandbox.get_info().network["allow_out"] == [host]
    sandbox.update_network({"allow_out": [f"{host}/32"], "deny_out": lambda ctx: [ctx.all_traffic]})
    assert reach(sandbox, outside) == BODY, "what is allowed beats what is denied"
    sandbox.update_network({"allow_internet_access": False})
    assert reach(sandbox, outside) != BODY, "an update replaces everything"
    assert sandbox.get_info().network["allow_out"] == []


def test_rules_from_the_start_hold_over_a_pause(outside):
    made = Sandbox.create(timeout=120, network={"allow_out": [outside[0]], "deny_out": ["0.0.0.0/0"]})
    try:
        assert reach(made, outside) == BODY
        made.pause()
        made = Sandbox.connect(made.sandbox_id, timeout=120)
        assert reach(made, outside) == BODY
        assert made.get_info().network["deny_out"] == ["0.0.0.0/0"]
    finally:
        made.kill()


def ask(sandbox, port, **headers):
    """Status and body of a port, asked for from outside."""
    named = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(os.environ["E2B_SANDBOX_URL"], headers=named)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def serve_host_header(sandbox):
    """A service on port 8000 that answers with the Host it was told."""
    sandbox.files.write(
        "serve.py",
        "import http.server\n"
        "class Answer(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers(); self.wfile.write(self.headers['Host'].encode())\n"
        "http.server.HTTPServer(('127.0.0.1', 8000), Answer).serve_forever()\n",
    )
    sandbox.commands.run("python3 serve.py", background=True, timeout=0)


def test_ports_that_are_not_public_want_their_token():
    made = Sandbox.create(timeout=120, network={"allow_public_traffic": False})
    try:
        serve_host_header(made)
        token = made.traffic_access_token
        assert token
        eventually(lambda: ask(made, 8000, e2b_traffic_access_token=token)[0] == 200)
        assert ask(made, 8000)[0] == 403
        assert ask(made, 8000, e2b_traffic_access_token="wrong")[0] == 403
        assert made.get_info().network["allow_public_traffic"] is False
        made.pause()
        again = Sandbox.connect(made.sandbox_id, timeout=120)
        assert again.traffic_access_token == token
        assert ask(again, 8000)[0] == 403
        assert ask(again, 8000, e2b_traffic_access_token=token)[0] == 200
        [fork] = again.fork(timeout=60)
        assert fork.traffic_access_token not in (None, token)
        assert ask(fork, 8000, e2b_traffic_access_token=token)[0] == 403
        assert ask(fork, 8000, e2b_traffic_access_token=fork.traffic_access_token)[0] == 200
        fork.kill()
    finally:
        made.kill()


def test_services_are_told_the_masked_host():
    with pytest.raises(SandboxException):
        Sandbox.create(timeout=60, network={"mask_request_host": "no host"})
    made = Sandbox.create(timeout=120, network={"mask_request_host": "${PORT}-mine.example.com"})
    try:
        assert made.traffic_access_token is None
        serve_host_header(made)
        eventually(lambda: ask(made, 8000)[0] == 200)
        assert ask(made, 8000) == (200, "8000-mine.example.com")
        assert made.get_info().network["mask_request_host"] == "${PORT}-mine.example.com"
    finally:
        made.kill()
