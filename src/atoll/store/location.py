"""Where a store may lie: a local folder or a URL, and how the object store behind a URL is reached.

Credentials and endpoints come from the environment, as obstore reads them: `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`; or `GOOGLE_*`, or `AZURE_*`.
"""

import os
import posixpath
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore, from_url

from atoll.base.errors import StoreError, first_line
from atoll.base.safe_parse import expanded, resolved

SCHEMES = {
    **dict.fromkeys(("s3", "s3a"), "AWS"),
    "gs": "GOOGLE",
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "adl"), "AZURE"),
}
"""Schemes of object stores, and what their environment variables begin with."""
CLIENT: dict[str, str] = {
    "connect_timeout": "5s",
    "read_timeout": "30s",
    # A whole request, body included: long enough for a large part over a slow line; a stalled one is
    # noticed by read_timeout.
    "timeout": "15m",
}
_CLIENT_KEYS = (*CLIENT, "allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")
PATIENT = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}
"""Retries of work in progress: hours of training outlast a store that is away for a minute."""
IMPATIENT = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
"""Retries of the first contact: a wrong address is told soon."""
_BACKOFF = {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2}
_MEMORY: dict[str, MemoryStore] = {}
_LITERAL = str.maketrans({"#": "%23", "?": "%3F"})  # of names: a URL would end there


def without_secrets(location: str) -> str:
    """The location without a user and password, for messages: `s3://KEY:SECRET@bucket` is `s3://...@bucket`."""
    return location if location.startswith("abfs") else re.sub(r"(?<=://)[^/]*@", "...@", location)


def is_url(location: str | Path) -> bool:
    """Whether a location is a URL and not a local path."""
    return "://" in str(location)


def resolve(base: str, path: str) -> str:
    """A location as seen from another one: relative ones lie below it or, climbing, beside it.

    An absolute path or a URL stays; `StoreError` where a path climbs out of the bucket.
    """
    if is_url(path) or expanded(path).is_absolute():
        return path if is_url(path) else str(resolved(path))
    if not is_url(base):
        return str(resolved(Path(base) / path))
    scheme, _, rest = base.partition("://")
    bucket, _, prefix = rest.partition("/")
    joined = posixpath.normpath(posixpath.join(prefix, path))
    if joined.startswith(".."):
        raise StoreError(f"{path!r} leads out of {scheme}://{bucket}", "give a URL or a path inside it")
    return f"{scheme}://{bucket}" if joined == "." else f"{scheme}://{bucket}/{joined}"


def resolve_own(base: str, path: str) -> str:
    """As `resolve`, of what is written: refuse a path below `base` that runs through a link out of it."""
    found = resolve(base, path)
    if not is_url(found):
        root, named = Path(base).absolute(), os.path.normpath(Path(base).absolute() / expanded(path))
        if Path(named).is_relative_to(root) and not Path(found).is_relative_to(root.resolve()):
            raise StoreError(f"{named} runs through a link that leads to {found}", "name that place itself")
    return found


def local_path(location: str | Path) -> Path | None:
    """The absolute local path of a location; None if it is not on this machine's disk."""
    if not is_url(location):
        path = expanded(location).absolute()
        return resolved(path) if ".." in path.parts else path  # one place has one name, which queues know
    parts = urlsplit(str(location).translate(_LITERAL))
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise StoreError(f"{location} names the host {parts.netloc!r}", "write file:///PATH")
    return Path(unquote(parts.path))


def connect(url: str, retries: dict[str, Any]) -> Any:
    """The obstore store behind a URL that names a bucket; nothing is asked of it yet."""
    scheme, _, rest = url.partition("://")
    shown = without_secrets(url)
    if "@" in rest.partition("/")[0] and not scheme.startswith("abfs"):  # there a container is named so
        fix = "give keys in the environment (AWS_ACCESS_KEY_ID, ...), never in a URL"
        raise StoreError(f"{shown} holds a user or key", fix)
    if scheme == "memory":
        return _MEMORY.setdefault(rest.partition("/")[0], MemoryStore())
    if scheme not in SCHEMES:
        raise StoreError(f"{shown} is of an unknown kind", "give a folder, or s3://, gs:// or az://")
    if not rest.strip("/"):
        raise StoreError(f"{shown} names no bucket", f"write {scheme}://BUCKET/PREFIX")
    # Options given here replace those of the environment as a whole, so the environment's are added.
    from_environment = {key: os.environ.get(f"{SCHEMES[scheme]}_{key.upper()}") for key in _CLIENT_KEYS}
    hurry = {"timeout": "8s"} if retries is IMPATIENT else {}
    options: Any = {**CLIENT, **hurry, **{key: value for key, value in from_environment.items() if value}}
    patience: Any = {**retries, "backoff": _BACKOFF}
    try:
        return from_url(url.translate(_LITERAL), client_options=options, retry_config=patience)
    except (BaseError, ValueError, TypeError) as error:
        fix = "check the URL and the environment variables"
        raise StoreError(f"cannot open {shown}: {first_line(error)}", fix) from None


_KNOWN = (
    ("NoSuchBucket|containerNotFound", "there is no such bucket", "make it, or check the URL"),
    (
        # Without a key obstore asks the metadata service of a cloud's machine, and complains of that.
        r"169\.254\.169\.254|oauth2",
        "there are no credentials",
        "set them in the environment (AWS_ACCESS_KEY_ID, ...)",
    ),
    ("AccessDenied|403 Forbidden|401 Unauthorized", "permission denied", "check the credentials' rights"),
    ("builder error", "its endpoint is plain http", "use https, or allow http with AWS_ALLOW_HTTP=true"),
)


def explain(error: BaseException) -> tuple[str, str] | None:
    """Why a store failed and what to do, where that is known; obstore's own words go on for a page."""
    text = str(error)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) and "os error" not in text:
        text += " AccessDenied"
    for pattern, why, fix in _KNOWN:
        if re.search(pattern, text):
            return why, fix
    if "HTTP error" in text:  # no answer, or half of one
        host = re.search(r"https?://[^/\s]+", text)
        return f"{host[0] if host else 'the endpoint'} does not answer", "check the network and the endpoint"
    return None
