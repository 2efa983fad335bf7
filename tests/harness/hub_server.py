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
    model = {
        "id": "someone/model",
        "sha": COMMIT,
        "siblings": [{"rfilename": name} for name in sorted(files)],
    }
    tree = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files.items()]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            name = self.path.partition("?")[0].rpartition("/")[2]
            code, body, headers = 200, b"", {}
            if "/api/models/" in self.path:
                body = json.dumps(tree if "/tree/" in self.path else model).encode()
                headers["Content-Type"] = "application/json"
            elif name in files:
                body = files[name]
                headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
                if self.command == "GET":
                    downloads.append(name)
            else:
                code, headers = 404, {"X-Error-Code": "EntryNotFound"}
            self.send_response(code)
            for header in {**headers, "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}.items():
                self.send_header(*header)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", downloads
        finally:
            server.shutdown()


def use_hub(address: str, cache: Path) -> None:
    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_CACHE = address, str(cache)
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
