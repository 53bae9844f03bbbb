"""A model hub of our own for tests: what huggingface_hub's real client asks of one repository."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40


class HubServer(ThreadingHTTPServer):
    """The repository `me/runs`; `damaging` is a file that it keeps wrong, and `private` can be False."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.commits: list[list[str]] = []
        self.damaging = ""
        self.private = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def entry(self, path: str) -> dict[str, Any]:
        """A file as the hub lists it: large ones by their SHA-256, others by git's SHA-1."""
        content = self.files[path]
        size = len(content)
        known = {"type": "file", "path": path, "size": size}
        known["oid"] = hashlib.sha1(b"blob %d\0" % size + content).hexdigest()
        if path.endswith(".pt"):
            sha = hashlib.sha256(content).hexdigest()
            known |= {"oid": "of the pointer", "lfs": {"size": size, "oid": sha, "pointerSize": 100}}
        return known

    def commit(self, operations: list[dict[str, Any]]) -> None:
        self.commits.append([operation["value"].get("path", "") for operation in operations[1:]])
        for operation in operations:
            kind, value = operation["key"], operation["value"]
            if kind == "file":
                content = base64.b64decode(value["content"])
                lost = value["path"] == self.damaging
                self.files[value["path"]] = b"?" * len(content) if lost else content
            elif kind == "deletedFile":
                del self.files[value["path"]]
            elif kind == "deletedFolder":
                folder = value["path"].rstrip("/") + "/"
                self.files = {p: c for p, c in self.files.items() if not p.startswith(folder)}


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_POST(self) -> None:
        hub, path = self.server, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/repos/create":
            hub.made.append(json.loads(body))
            self._answer({"url": f"{hub.address}/me/runs"})
        elif path == "/api/models/me/runs/preupload/main":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            self._answer({"files": modes})
        elif path == "/api/models/me/runs/paths-info/main":
            paths = parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
            self._answer([hub.entry(path) for path in paths if path in hub.files])
        elif path == "/api/models/me/runs/commit/main":
            hub.commit([json.loads(line) for line in body.splitlines()])
            self._answer({"commitUrl": f"{hub.address}/me/runs/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self._answer({}, 404)

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        _, listed, folder = path.partition("/api/models/me/runs/tree/main/")
        _, _, name = path.partition("/me/runs/resolve/main/")
        found = [hub.entry(file) for file in hub.files if file.startswith(f"{folder}/")]
        if path == "/api/models/me/runs":
            self._answer({"id": "me/runs", "private": hub.private})
        elif listed and found:
            self._answer(found)
        elif name in hub.files:
            self._answer(hub.files[name], ETag=f'"{hub.entry(name)["oid"]}"', X_Repo_Commit=COMMIT)
        else:
            self._answer({}, 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def log_message(self, *words: object) -> None:
        return

    def _answer(self, content: Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {**headers, "Content_Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running hub."""
    with HubServer() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()
