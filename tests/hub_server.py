"""The Hub in memory behind a local socket, for child processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fake_hub import FakeHub
from huggingface_hub.utils import httpx


@contextmanager
def serve(hub: FakeHub) -> Iterator[str]:
    """Serve a Hub on a local port for child processes, whose HF_ENDPOINT is the address this gives."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(self.chunks())
            host = f"http://{self.headers['Host']}"
            request = httpx.Request(self.command, host + self.path, headers=dict(self.headers), content=body)
            with lock:
                response = hub(request)
            content = response.read()
            self.send_response(response.status_code)
            for key, value in response.headers.items():
                if key.lower() not in ("content-length", "transfer-encoding"):
                    self.send_header(key, value)
            self.send_header("Content-Length", response.headers.get("Content-Length") or str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        do_GET = do_POST = do_PUT = do_HEAD = answer

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: object) -> None:
            pass  # a client that was killed

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
