"""Replicas of one server on a Ray cluster, each with a GPU of its own, as many as the load asks for.

    ATOLL_KEYS=... serve run deploy.ray_serve:replicas model=/srv/atoll/model least=2 most=8

The keys have to be in the environment of every node (`env_vars` of a runtime environment), and the model
where every node finds it. Ray places the replicas, replaces those whose process dies and spreads requests;
each is what `atoll serve` is and takes its settings, such as `queue=200`. The address is Ray's.
"""

import time

from fastapi import FastAPI
from pydantic import Field
from ray import serve

from atoll.serve.app import read_keys
from atoll.serve.engine import LOADING, WARMING, Engine
from atoll.serve.server import open_app
from atoll.serve.settings import ServeSettings


class Replicas(ServeSettings):
    """A server's bounds, those of each replica, and how many there are."""

    model: str
    """Folder, campaign or hub name, as of `atoll serve`."""
    least: int = Field(default=2, ge=1)
    most: int = Field(default=2, ge=1)
    gpus: float = Field(default=1.0, ge=0)
    """Of each replica."""
    trusted: tuple[str, ...] = ()
    """Keys or certificates, one of which must have signed the model, as `--trusted` of `atoll serve`."""
    upscale_s: float = Field(default=30.0, ge=0)
    """Seconds of more than `batch` requests for each replica before there are more replicas."""
    downscale_s: float = Field(default=600.0, ge=0)
    """Seconds of less before there are fewer."""


def replicas(asked: Replicas) -> serve.Application:
    """The application that `serve run` and `serve deploy` start."""
    engines = list[Engine]()  # of a replica: one

    def app() -> FastAPI:
        served, engine = open_app(asked.model, asked, read_keys(None), asked.trusted or None)
        engines.append(engine)
        engine.start()
        # A replica counts once it is built, so not before it can draw: requests wait for none that loads.
        while engine.state in (LOADING, WARMING):
            time.sleep(0.05)
        if engine.error is not None:
            raise engine.error
        return served

    class Replica:
        def check_health(self) -> None:
            """Have Ray replace a replica whose engine broke; `atoll serve` would end."""
            if engines[0].error is not None:
                raise engines[0].error

    scale = {
        "min_replicas": asked.least,
        "max_replicas": max(asked.least, asked.most),
        # What is more than a batch waits, and would be in work with another replica.
        "target_ongoing_requests": asked.batch,
        "upscale_delay_s": asked.upscale_s,
        "downscale_delay_s": asked.downscale_s,
        # Seconds over which the load is averaged; the default hides a queue for half a minute.
        "look_back_period_s": 10.0,
        "metrics_interval_s": 2.0,
    }
    deployment = serve.deployment(
        name="atoll",
        autoscaling_config=scale,
        max_ongoing_requests=asked.batch + asked.queue,  # what the engine takes; it refuses more by itself
        graceful_shutdown_timeout_s=asked.drain,
        ray_actor_options={"num_gpus": asked.gpus},
    )
    return deployment(serve.ingress(app)(Replica)).bind()
