"""Where data comes from: `glyphs`, a folder of captioned images, or parquet files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.base.errors import DataError
from atoll.base.plain import expanded
from atoll.data.folder import FolderSource
from atoll.data.glyphs import GlyphSource
from atoll.data.parquet import ParquetSource
from atoll.data.records import Source
from atoll.data.settings import SourceOptions


def open_source(text: str | Path, options: SourceOptions | Mapping[str, Any] | None = None) -> Source:
    """Open a source by what the user wrote.

    Args:
        text: `glyphs`, a folder of images, a parquet file, or a folder of parquet files.
        options: `SourceOptions` (an `IngestConfig` is one), or plain data for them.

    Raises:
        DataError: there is no such source, or it cannot be read as one.
        ConfigError: the options are wrong.
    """
    if not isinstance(options, SourceOptions):
        options = SourceOptions.parse(options or {}, "the options of the source")
    if text == "glyphs":
        if any(options.columns()):
            raise DataError("the source glyphs has no columns", "leave out caption, group, label and id")
        return GlyphSource(options.glyphs)
    if "://" in str(text):
        raise DataError(f"the source {text} is a URL", "copy it to a local folder, and give that")
    path, kinds = expanded(text), "a folder of captioned images, a .parquet file or a folder of them"
    if not str(text) or not path.exists():
        raise DataError(f"there is no source {str(text)!r}", f"give `glyphs`, {kinds}")
    if path.is_file() and path.suffix != ".parquet":
        raise DataError(f"{path} is a file of unknown kind", f"give {kinds}")
    is_parquet = path.is_file() or next(path.rglob("*.parquet"), None) is not None
    return ParquetSource(path, options) if is_parquet else FolderSource(path, options)
