"""A hook of mkdocs: pages of the repository that lie beside docs/ are pages of the site too.

Their links, and links to them, lead on the site where they lead in the repository. A link to a file that is
no page, such as a program, becomes its text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "reporting.md",
    "examples/emoji/README.md": "examples/emoji.md",
    "examples/emoji/reconstructed.png": "examples/reconstructed.png",
    "examples/emoji/same-noise.png": "examples/same-noise.png",
    "examples/emoji/same-noise-64.png": "examples/same-noise-64.png",
    "examples/icons/README.md": "examples/icons.md",
    "examples/quickstart.ipynb": "examples/quickstart.ipynb",
}
"""Files of the repository by their places on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, uri in BESIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn paths of the repository into places on the site."""
    uri = page.file.src_uri
    place = next((source for source, name in BESIDE.items() if name == uri), f"docs/{uri}")

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        name = BESIDE.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:
            return text.strip("![]") if (ROOT / path).exists() else link[0]
        return f"{text}({posixpath.relpath(name, posixpath.dirname(uri))}{anchor})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)#:\s]+)(#[^)\s]*)?\)", moved, markdown)
