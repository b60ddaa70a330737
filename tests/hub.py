"""A hub on the loopback interface: one repository, which the real client lists, reads by ranges and fills."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from s3 import listening

NAME = "me/model"


@dataclass
class Hub:
    """What it holds.

    Attributes:
        files: content by commit and path.
        branch: the commit that `main` is.
        torn: every so many answers with content end after half of it; 0 for none.
        asked: ranges that were asked for.
        fetched: paths whose content was asked for.
        created: what was asked for when a repository was to be there.
        refuse: parts of paths of requests, and the status they are answered with.
    """

    files: dict[str, dict[str, bytes]]
    branch: str
    torn: int = 0
    asked: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)
    url: str = ""

    @property
    def tree(self) -> dict[str, bytes]:
        """What lies on `main`."""
        return self.files[self.branch]

    def push(self, path: str, body: bytes) -> dict[str, Any]:
        """The answer to a request of a push; what it uploads or deletes has happened then."""
        if path.endswith("/repos/create"):
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/{NAME}", "name": NAME, "id": "1"}
        if "/preupload/" in path:
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": file["path"], **how} for file in json.loads(body)["files"]]}
        for line in body.decode().splitlines() if "/commit/" in path else ():
            key, value = (entry := json.loads(line))["key"], entry["value"]
            if key == "file":
                self.tree[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                del self.tree[value["path"]]
        commit = {"commitOid": self.branch, "commitUrl": f"{self.url}/{NAME}/commit/{self.branch}"}
        return {"success": True, "name": "me", "type": "user", **commit}


def _entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def serve(files: dict[str, dict[str, bytes]], branch: str) -> Iterator[Hub]:
    """Start it, and end it."""
    hub = Hub(files, branch)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            about = re.fullmatch(rf"/api/\w+/{NAME}(?:/(revision|tree|paths-info)/([^/]+))?", path)
            content = re.fullmatch(rf"(?:/datasets)?/{NAME}/resolve/([^/]+)/(.+)", path)
            named = (about and about[2]) or (content and content[1]) or "main"
            commit = hub.branch if named == "main" else named
            held, refused = hub.files.get(commit), [s for part, s in hub.refuse.items() if part in path]
            if refused:
                self.send(refused[0], b'{"error": "you may not do that"}')
            elif about and held is not None:
                tree = [_entry(*item) for item in held.items()]
                if about[1] == "paths-info":
                    wanted = re.findall(r"paths=([^&]*)", body.decode()) or json.loads(body)["paths"]
                    tree = [entry for entry in tree if entry["path"] in map(unquote, wanted)]
                siblings = [{"rfilename": entry["path"]} for entry in tree]
                found = {"id": NAME, "sha": commit, "siblings": siblings, "tags": [], "private": False}
                self.send(200, json.dumps(found if about[1] in (None, "revision") else tree).encode())
            elif content and content[2] in (held or {}):
                hub.fetched += [content[2]] * (self.command == "GET")
                self.content(commit, hub.files[commit][content[2]])
            elif self.command == "POST" or path.endswith("/whoami-v2"):
                self.send(200, json.dumps(hub.push(path, body)).encode())
            else:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

        def content(self, commit: str, data: bytes) -> None:
            size, status = len(data), 200
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if asked:
                hub.asked.append(asked[0])
                first, last = int(asked[1]), min(int(asked[2]), size - 1)
                data, status = data[first : last + 1], 206
                headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            torn = self.command == "GET" and hub.torn and len(hub.asked) % hub.torn == 0
            self.send(status, data, headers, len(data) // 2 if torn else len(data))
            self.close_connection = bool(torn)

        def send(
            self, status: int, data: bytes, headers: dict[str, str] | None = None, sent: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:sent])

        do_GET = do_HEAD = do_POST = lambda self: self.answer()

        def log_message(self, *_: object) -> None:
            pass

    with listening(Handler) as hub.url:
        yield hub
