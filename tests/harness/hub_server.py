"""A stand-in for the Hub on localhost: one repository."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder as any repository.

    Yields:
        (address, list of the file of each download, filled as they come).
    """
    downloads: list[str] = []
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _json(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _file(self, name: str, *, body: bool) -> None:
            data = files.get(name)
            if data is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                downloads.append(name)
                self.wfile.write(data)

        def do_HEAD(self) -> None:
            self._file(self.path.rpartition("/")[2], body=False)

        def do_GET(self) -> None:
            if "/api/models/" in self.path and "/tree/" in self.path:
                self._json([{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files.items()])
            elif "/api/models/" in self.path:
                siblings = [{"rfilename": name} for name in sorted(files)]
                self._json({"id": "someone/model", "sha": COMMIT, "siblings": siblings})
            else:
                self._file(self.path.partition("?")[0].rpartition("/")[2], body=True)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", downloads
    finally:
        server.shutdown()
        server.server_close()


def use_hub(address: str, cache: Path) -> None:
    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_CACHE = address, str(cache)
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
