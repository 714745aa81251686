"""Holds 200 MiB with a known hash, counts, and keeps a file open: what must be there after the sandbox slept."""

import hashlib
import http.server
import json
import os
import socket
import sys
import threading
import time

held = bytearray(hashlib.shake_256(b"dormouse").digest(200 << 20))
kept_open = open(sys.argv[1], "rb")
kept_open.read(17)
count = 0


def counting():
    global count
    while True:
        count += 1
        time.sleep(0.01)


class State(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        state = {
            "pid": os.getpid(),
            "count": count,
            "offset": kept_open.tell(),
            "hostname": socket.gethostname(),
            "random": os.urandom(16).hex(),
        }
        if self.path == "/whole":
            state["sha256"] = hashlib.sha256(held).hexdigest()
        body = json.dumps(state).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


threading.Thread(target=counting, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", 8001), State).serve_forever()
