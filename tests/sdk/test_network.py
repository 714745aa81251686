"""What may be reached from inside, and how that is changed while the sandbox runs."""

import http.server
import socket
import threading

import pytest
from e2b import Sandbox

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
