"""A finished folder on the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from atoll.base.errors import ConfigError, StoreError, first_line
from atoll.model.folder import MANIFEST, MODEL_INDEX, OTHERS
from atoll.model.foreign import HUB_NAME
from atoll.store.signatures import SIGNATURE

LOGIN = "run 'hf auth login', or set HF_TOKEN to a token that may write"
REMEDIES: dict[Any, str] = {
    "LocalTokenNotFoundError": LOGIN,
    "OfflineModeIsEnabled": "unset HF_HUB_OFFLINE",
    "ConnectError": "check the network, and run the same command again",
    401: LOGIN,
    403: "use a token that may write there, or a name of your own",
}
"""What to do, by the error's name or the hub's status."""


def check_account(name: str) -> None:
    """Refuse a wrong name, and a wrong or missing token, before a folder is written for the hub."""
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name of the hub", "write --push OWNER/NAME")
    with _told(name):
        HfApi().whoami()


def push_folder(folder: Path, name: str, private: bool | None = None, **options: Any) -> Any:
    """Upload a folder and return the commit, whose `repo_url` is the model's page; `StoreError` if it fails.

    Args:
        name: OWNER/NAME, or NAME alone for the token's owner.
        private: whether a new repository is private; None for the owner's default.
        options: of huggingface_hub's `upload_folder`, such as `token` and `commit_message`.
    """
    with _told(name):
        api = HfApi(token=options.pop("token", None))
        name = api.create_repo(name, private=private, exist_ok=True).repo_id
        # What an earlier export had would lie beside what no longer names it, encoders against their licence.
        parts = {*OTHERS, *(part.name for part in folder.iterdir() if part.is_dir())}
        stale = [f"{name}/*" for name in sorted({*parts, "experts", "router", "transformer", "expert-*"})]
        stale += [MODEL_INDEX, MANIFEST, f"*{SIGNATURE}"]
        options = {"commit_message": "Upload AtollPipeline", "delete_patterns": stale, **options}
        return api.upload_folder(repo_id=name, folder_path=folder, **options)


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of several packages
        status = getattr(getattr(error, "response", None), "status_code", None)
        fix = REMEDIES.get(type(error).__name__) or REMEDIES.get(status, "run the same command again")
        reason = first_line(error)[:300].rstrip(".")
        raise StoreError(f"the push to {name} failed: {reason}", fix) from None
