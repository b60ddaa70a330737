"""A real S3 endpoint on the loopback interface: moto in a process of its own, and a forgetful proxy."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
SERVER = """
import json, sys, urllib.request
import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
client = lambda name: boto3.client(
    name, endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
)
client("s3").create_bucket(Bucket="bucket")
keys = {}
if sys.argv[1] == "auth":  # users that may do everything, and read only
    iam = client("iam")
    for user, actions in {"writer": ["s3:*"], "reader": ["s3:Get*", "s3:List*"]}.items():
        iam.create_user(UserName=user)
        allow = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
        iam.put_user_policy(UserName=user, PolicyName="p", PolicyDocument=policy)
        key = iam.create_access_key(UserName=user)["AccessKey"]
        keys[user] = [key["AccessKeyId"], key["SecretAccessKey"]]
    text = {"Content-Type": "text/plain"}
    request = urllib.request.Request(url + "/moto-api/reset-auth", b"0", text, method="POST")
    urllib.request.urlopen(request).read()
print(json.dumps({"url": url, "keys": keys}), flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class S3:
    """An endpoint, and the keys of its users."""

    url: str
    keys: dict[str, list[str]]

    def environment(self, user: str = "") -> dict[str, str]:
        """What a command needs to reach it."""
        identity, secret = self.keys.get(user, ["test", "test"])
        keys = {"AWS_ACCESS_KEY_ID": identity, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", **keys}


@contextmanager
def serve(auth: bool = False) -> Iterator[S3]:
    """Start moto with one empty bucket, and end it."""
    argv = [sys.executable, "-c", SERVER, "auth" if auth else "open"]
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true"}
    process = subprocess.Popen(argv, env=env, text=True, **how)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "moto did not start"
        yield S3(**json.loads(line))
    finally:
        process.kill()
        process.communicate()


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to `endpoint`; subclasses say what goes wrong."""

    protocol_version = "HTTP/1.1"
    endpoint = ""
    dropped: tuple[str, ...] = ("connection",)

    def forward(self) -> None:
        self.answer(*self.ask(self.rfile.read(int(self.headers.get("Content-Length", 0)))))

    def ask(self, body: bytes) -> tuple[int, Any, bytes]:
        headers = {k: v for k, v in self.headers.items() if k.lower() not in self.dropped}
        with closing(HTTPConnection(self.endpoint.removeprefix("http://"), timeout=30)) as behind:
            behind.request(self.command, self.path, body, headers)
            answer = behind.getresponse()
            return answer.status, answer.headers, answer.read()

    def answer(self, status: int, headers: Any, content: bytes, half: bool = False) -> None:
        self.send_response(status)
        own = ("connection", "transfer-encoding", "server", "date", "content-length")
        for name, value in headers.items():
            if name.lower() not in own:
                self.send_header(name, value)
        length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if half else content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = lambda self: self.forward()

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that is killed leaves its connection open."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL at which a handler answers, on the loopback interface."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def proxied(handler: type[Proxy]) -> Iterator[S3]:
    """The endpoint behind a proxy."""
    with listening(handler) as url:
        yield S3(url, {})


@contextmanager
def forgetful(s3: S3) -> Iterator[S3]:
    """The endpoint behind a proxy that drops If-None-Match, like a store without conditional writes."""

    class Forgetful(Proxy):
        endpoint, dropped = s3.url, ("connection", "if-none-match")

    with proxied(Forgetful) as behind:
        yield behind
