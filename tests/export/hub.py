"""A model hub of one process: enough of the HTTP interface to push a folder and to fetch files from it."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Files of one repository, in memory, and the names of those that were asked for.

    `refuse` gives paths of requests and the status they are answered with.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.refuse: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Requests of huggingface_hub."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), {"Content-Type": "application/json"}, status)

    def send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refused(self) -> bool:
        status = next((code for part, code in self.server.refuse.items() if part in self.path), None)
        if status is not None:
            self.answer({"error": "you may not do that"}, status)
        return status is not None

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        if self.refused():
            return None
        if path.endswith("/whoami-v2"):
            return self.answer({"name": "me", "type": "user"})
        if "/resolve/" in path:
            name = path.split("/resolve/")[1].partition("/")[2]
            if name not in files:
                return self.send(b"", {"X-Error-Code": "EntryNotFound"}, 404)
            if self.command == "GET":
                self.server.fetched.append(name)
            return self.send(files[name], {"ETag": f'"{tag(files[name])}"', "X-Repo-Commit": COMMIT})
        if "/tree/" in path:
            return self.answer(
                [{"type": "file", "path": n, "size": len(d), "oid": tag(d)} for n, d in files.items()]
            )
        if "/revision/" in path or path.startswith("/api/models/"):
            about = {"id": "me/model", "sha": COMMIT, "private": False, "tags": []}
            return self.answer({**about, "siblings": [{"rfilename": name} for name in files]})
        return self.answer({"error": path}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refused():
            return
        answer: dict[str, Any] = {"success": True}
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": name, **how} for name in names]}
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "deletedFile":
                    del self.server.files[entry["value"]["path"]]
            answer |= {"commitOid": COMMIT, "commitUrl": f"{self.server.url}/me/model/commit/{COMMIT}"}
        elif self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body))
            answer = {"url": f"{self.server.url}/me/model", "name": "me/model", "id": "1"}
        self.answer(answer)


def tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
