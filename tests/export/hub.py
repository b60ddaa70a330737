"""A model hub of one process: enough of the HTTP interface to push a folder and to fetch files from it."""

import base64
import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Files of one repository, in memory, and the names of those that were asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
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

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
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
            answer |= {"commitOid": COMMIT, "commitUrl": f"{self.server.url}/me/model/commit/{COMMIT}"}
        elif self.path.endswith("/repos/create"):
            answer = {"url": f"{self.server.url}/me/model", "name": "me/model", "id": "1"}
        self.answer(answer)


def tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def main() -> None:
    """Push a folder, fetch some of it, and say as JSON what went over the wire. Arguments: folder, cache."""
    hub = Hub()
    # Before the first import of the hub's client, which reads its address once.
    os.environ.update(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_HOME=sys.argv[2], HF_TOKEN="hf_none")
    import torch

    from atoll.export.pipeline import AtollPipeline

    AtollPipeline.from_pretrained(sys.argv[1]).push_to_hub("me/model")
    said: dict[str, Any] = {"pushed": sorted(hub.files)}
    some = AtollPipeline.from_pretrained("me/model", experts=[1])
    said |= {"some": some.experts.present, "first": sorted(hub.fetched)}
    hub.fetched = []
    whole = AtollPipeline.from_pretrained("me/model")
    said["second"] = sorted(hub.fetched)
    hub.shutdown()
    cached = AtollPipeline.from_pretrained("me/model", local_files_only=True)
    call = {"class_labels": [0, 1], "output_type": "latent"}
    pictures = [p(generator=torch.Generator().manual_seed(0), **call).images for p in (whole, cached)]
    print(json.dumps({**said, "same": bool(torch.equal(*pictures))}))


if __name__ == "__main__":
    main()
