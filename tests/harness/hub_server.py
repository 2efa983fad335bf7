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

        def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _file(self, name: str) -> None:
            data, commit = files.get(name), {"X-Repo-Commit": COMMIT}
            if data is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", **commit})
                return
            if self.command == "GET":
                downloads.append(name)
            self._send(200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', **commit})

        def do_HEAD(self) -> None:
            self._file(self.path.rpartition("/")[2])

        def do_GET(self) -> None:
            if "/api/models/" not in self.path:
                self._file(self.path.partition("?")[0].rpartition("/")[2])
                return
            found: Any = {"id": "someone/model", "sha": COMMIT}
            found["siblings"] = [{"rfilename": name} for name in sorted(files)]
            if "/tree/" in self.path:
                found = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files.items()]
            self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", downloads
    finally:
        server.shutdown()
        server.server_close()


def use_hub(address: str, cache: Path) -> None:
    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_CACHE = address, str(cache)
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
