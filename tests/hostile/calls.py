"""What a stranger's folder is used for beside commands, as functions of `faults.call`."""


def pipeline(folder: str) -> None:
    """Load an export, and draw a picture."""
    from atoll.export.pipeline import AtollPipeline

    AtollPipeline.from_pretrained(folder)("a house", num_inference_steps=1)


def planted(folder: str) -> None:
    """Read without a check: the fuzzer must tell."""
    from pathlib import Path

    raise LookupError(f"{sorted(path.name for path in Path(folder).iterdir())} is believed")
