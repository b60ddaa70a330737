"""What a stranger's folder is used for beside commands, as functions of `faults.call`."""


def pipeline(folder: str) -> None:
    """Load an export, and draw a picture."""
    from atoll.export.pipeline import AtollPipeline

    AtollPipeline.from_pretrained(folder)("a house", num_inference_steps=1)


def planted(folder: str) -> None:
    """Read without a check: the fuzzer must tell."""
    from pathlib import Path

    raise LookupError(f"{sorted(path.name for path in Path(folder).iterdir())} is believed")


def trusted(folder: str, key: str) -> None:
    """Load an export that somebody signed, as those do who trust a key only."""
    from atoll.export.pipeline import AtollPipeline

    AtollPipeline.from_pretrained(folder, trusted=[key])


def model(folder: str) -> None:
    """Load an export as `atoll.load` does, and draw a picture."""
    import atoll

    atoll.load(folder)(["a house"], 1, steps=1)


def asked(folder: str, body: str) -> None:
    """Ask a server of the campaign for pictures, with the bytes of a file; 4xx is a line, 5xx is not."""
    from pathlib import Path

    from fastapi.testclient import TestClient

    from atoll.base.errors import ConfigError
    from atoll.base.safe_parse import read_bytes
    from atoll.serve.server import ServeSettings, open_app

    app, engine = open_app(folder, ServeSettings())
    engine.start()
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=True) as client:
        while client.get("/ready").status_code != 200 and engine.error is None:
            pass
        headers = {"Content-Type": "application/json"}
        data = read_bytes(Path(body), 2**24)  # a mutation may have made a pipe of it
        answer = client.post("/v1/images/generations", content=data, headers=headers)
    if answer.status_code != 200:
        assert answer.status_code < 500, answer.text
        said = answer.json()["error"]
        raise ConfigError(f"{said['message']} ({said['param']})", f"answered with {answer.status_code}")
