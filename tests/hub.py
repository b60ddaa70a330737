"""A hub on the loopback interface: one repository, which the real client lists and reads by ranges."""

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

NAME = "someone/pictures"


@dataclass
class Hub:
    """What it holds.

    Attributes:
        files: content by commit and path.
        branch: the commit that `main` is.
        torn: every so many answers with content end after half of it; 0 for none.
        asked: ranges that were asked for.
    """

    files: dict[str, dict[str, bytes]]
    branch: str
    torn: int = 0
    asked: list[str] = field(default_factory=list)
    url: str = ""


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
            about = re.fullmatch(rf"/api/datasets/{NAME}/(revision|tree|paths-info)/([^/]+)(.*)", path)
            content = re.fullmatch(rf"/datasets/{NAME}/resolve/([^/]+)/(.+)", path)
            commit = hub.branch if about and about[2] == "main" else about[2] if about else ""
            if about and commit in hub.files and not about[3]:  # there are no folders
                tree = [_entry(*item) for item in hub.files[commit].items()]
                if about[1] == "paths-info":
                    wanted = re.findall(r"paths=([^&]*)", body.decode()) or json.loads(body)["paths"]
                    tree = [entry for entry in tree if entry["path"] in map(unquote, wanted)]
                siblings = [{"rfilename": entry["path"]} for entry in tree]
                found = {"id": NAME, "sha": commit, "siblings": siblings, "tags": []}
                self.send(200, json.dumps(found if about[1] == "revision" else tree).encode())
            elif content and content[2] in hub.files.get(content[1], {}):
                self.content(content[1], hub.files[content[1]][content[2]])
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
