"""A stand-in for the Hub's upload side on localhost: repositories, LFS objects, commits; and refusals."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What has been uploaded.

    Attributes:
        address: Of the server.
        repositories: Repository to its files by name, once committed.
        objects: LFS objects by SHA-256.
        commits: Messages.
        refuse: What to answer 403 to: "create", "commit", or nothing.
        tokens: Authorization headers that came.
    """

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    refuse: str = ""
    tokens: set[str | None] = field(default_factory=set)

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        """Take up one commit."""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                assert value["encoding"] == "base64"
                self.repositories[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.objects[value["oid"]]
                assert len(data) == value["size"]
                self.repositories[repo][value["path"]] = data
            else:
                raise AssertionError(line)


@contextmanager
def serve() -> Iterator[Hub]:
    """Run the stand-in until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, value: Any, status: int = 200) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status == 403:
                self.send_header("X-Error-Message", "You may not write here")
            self.end_headers()
            self.wfile.write(body)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def do_GET(self) -> None:
            repo = self.path.removeprefix("/api/models/").partition("/revision")[0]
            if repo in hub.repositories:
                self._answer({"id": repo, "sha": COMMIT, "siblings": []})
            else:
                self._answer({"error": "Repository not found"}, 404)

        def do_PUT(self) -> None:
            data = self._body()
            hub.objects[self.path.rpartition("/")[2]] = data
            ok = hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
            self._answer({}, 200 if ok else 400)

        def do_POST(self) -> None:
            body = self._body()
            hub.tokens.add(self.headers.get("Authorization"))
            if self.path == "/api/repos/create":
                self._create(json.loads(body))
            elif self.path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
            elif match := re.fullmatch(r"/api/models/(.+)/preupload/main.*", self.path):
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                        "oid": None,
                    }
                    for file in json.loads(body)["files"]
                ]
                self._answer({"files": files} if match[1] in hub.repositories else {})
            elif self.path.endswith(".git/info/lfs/objects/batch"):
                objects = [
                    {**o, "actions": {"upload": {"href": f"{hub.address}/lfs/{o['oid']}"}}}
                    for o in json.loads(body)["objects"]
                ]
                self._answer({"transfer": "basic", "objects": objects})
            elif match := re.fullmatch(r"/api/models/(.+)/commit/main.*", self.path):
                self._commit(match[1], body)
            else:
                self._answer({"error": f"unknown {self.path}"}, 404)

        def _create(self, asked: dict[str, Any]) -> None:
            repo = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
            if hub.refuse == "create":
                self._answer({"error": "You may not write here"}, 403)
                return
            known = repo in hub.repositories
            hub.repositories.setdefault(repo, {})
            self._answer({"url": f"{hub.address}/{repo}", "id": repo}, 409 if known else 200)

        def _commit(self, repo: str, body: bytes) -> None:
            if hub.refuse == "commit":
                self._answer({"error": "You may not write here"}, 403)
                return
            hub.commit(repo, [json.loads(line) for line in body.splitlines()])
            url = f"{hub.address}/{repo}/commit/{COMMIT}"
            self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
