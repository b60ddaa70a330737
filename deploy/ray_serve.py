"""Replicas of one server on a Ray cluster, each with a GPU of its own.

    MODEL=/srv/atoll/model ATOLL_KEYS=... serve run deploy.ray_serve:replicas

Both have to be in the environment of every node (`env_vars` of a runtime environment). Ray places the
replicas, restarts those whose process dies and spreads requests; each is what `atoll serve` is.
"""

import os

from fastapi import FastAPI
from ray import serve

from atoll.serve.app import read_keys
from atoll.serve.server import open_app
from atoll.serve.settings import ServeSettings


def app() -> FastAPI:
    """What a replica answers with; it begins to load the models at once."""
    served, engine = open_app(os.environ["MODEL"], ServeSettings(), read_keys(None))
    engine.start()
    return served


replicas = serve.deployment(
    num_replicas=int(os.environ.get("REPLICAS", "2")),
    max_ongoing_requests=256,  # the engine has bounds of its own, and batches what it has
    ray_actor_options={"num_gpus": float(os.environ.get("GPUS", "1"))},
)(serve.ingress(app)()).bind()
