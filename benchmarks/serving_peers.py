"""Two other ways to put the pipeline behind HTTP, which `serving.py` measures beside `atoll serve`.

    python benchmarks/serving_peers.py pipeline|litserve FOLDER PORT BATCH

`pipeline` is what most people write: FastAPI, one request at a time. `litserve` is LitServe (`pip install
litserve==0.2.19`), which waits a moment and gives the pipeline all requests that came: those of the same
steps, guidance and strategy are one call. Both draw the very pictures that `atoll serve` draws.
"""

import base64
import io
import sys
import threading
from collections import defaultdict
from typing import Any

import torch
from PIL import Image

from atoll import AtollPipeline

try:
    import litserve
except ImportError:  # only its own part needs it
    litserve = None

WAIT = 0.02
"""Seconds that LitServe collects requests for."""


class Drawing:
    """The pipeline, for requests of the same settings at once."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.pipe = AtollPipeline.from_pretrained(folder)
        self.pipe.set_progress_bar_config(disable=True)

    def __call__(self, requests: list[dict[str, Any]]) -> list[str]:
        """A picture of each request, as PNG in base64."""
        groups = defaultdict[Any, list[int]](list)
        for number, one in enumerate(requests):
            groups[one["steps"], one["guidance"], one["routing"]].append(number)
        drawn: dict[int, str] = {}
        for (steps, guidance, routing), numbers in groups.items():
            images = self.pipe(
                [requests[n]["prompt"] for n in numbers],
                num_inference_steps=steps,
                guidance_scale=guidance,
                routing=routing,
                generator=[torch.Generator().manual_seed(requests[n]["seed"]) for n in numbers],
            ).images
            drawn |= {n: encoded(image) for n, image in zip(numbers, images, strict=True)}
        return [drawn[n] for n in range(len(requests))]


def encoded(image: Image.Image) -> str:
    """As the server of OpenAI's API answers."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def pipeline(folder: str, port: int) -> None:
    """One request after the other."""
    import uvicorn
    from fastapi import FastAPI

    drawing, turn, app = Drawing(folder), threading.Lock(), FastAPI()

    @app.post("/predict")
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        with turn:
            return {"data": [{"b64_json": drawing([request])[0]}]}

    uvicorn.run(app, port=port, log_level="warning")


class Requests(litserve.LitAPI if litserve else object):  # type: ignore[misc]
    """What LitServe's worker does with a batch of them."""

    def __init__(self, folder: str, batch: int) -> None:
        super().__init__(max_batch_size=batch, batch_timeout=WAIT)
        self.folder = folder

    def setup(self, device: str) -> None:
        self.drawing = Drawing(self.folder)

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def predict(self, requests: list[dict[str, Any]]) -> list[str]:
        return self.drawing(requests)

    def encode_response(self, output: str) -> dict[str, Any]:
        return {"data": [{"b64_json": output}]}


if __name__ == "__main__":
    kind, folder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "pipeline":
        pipeline(folder, port)
    else:
        server = litserve.LitServer(Requests(folder, int(sys.argv[4])), accelerator="cpu", timeout=False)
        server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)
