"""A folder on its way to a hub."""

from pathlib import Path
from typing import Any


def upload(
    folder: Path,
    repo_id: str,
    commit_message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    create_pr: bool = False,
) -> Any:
    """Upload a folder to a repository of the hub, made if missing."""
    from huggingface_hub import create_repo, upload_folder

    name = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    return upload_folder(
        repo_id=name,
        folder_path=folder,
        token=token,
        commit_message=commit_message or "Upload AtollPipeline",
        create_pr=create_pr,
    )
