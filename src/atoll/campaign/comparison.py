"""The compare stage: load what a campaign published, measure it, write `reports/`."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import digest
from atoll.base.pictures import png
from atoll.base.threads import using_threads
from atoll.base.version import code_version
from atoll.campaign.assemble import MANIFEST, load_ensemble, read_manifest
from atoll.campaign.campaign import Campaign
from atoll.campaign.dense import dense_cards, load_dense
from atoll.campaign.seed import seed_finished
from atoll.data.samples import Samples
from atoll.encoders.vae import autoencoder_of
from atoll.encoders.vision import vision_encoder
from atoll.ensemble.card import Card
from atoll.ensemble.ensemble import Trace
from atoll.ensemble.expert import read_card
from atoll.ensemble.routing import Routing
from atoll.evaluate.compare import SCHEMA, CompareConfig, Conditions, Judge, Models, compare, drawn_conditions
from atoll.networks.families import DataShape

RESULT = "reports/compare.json"


def compare_campaign(campaign: Campaign) -> dict[str, Any]:
    """Measure monolith, student, strategies; a comparison of the same parts and settings is not repeated."""
    store, config = campaign.store, campaign.config.compare
    content, router = read_manifest(store), read_card(store, "ensemble/router")
    config = _possible(config, content["k"], content["experts"])
    dense = dense_cards(campaign, router)
    parts = content["parts"] | {name: card.weights_sha256 for name, card in dense.items()}
    settings = {"config": config.model_dump(), "default": campaign.config.sampling.routing}
    key = digest({"parts": parts, **settings, "seed": campaign.config.seed})
    found: dict[str, Any] = store.get_json(RESULT) if store.exists(RESULT) else {}
    if found.get("key") == key and found.get("schema") == SCHEMA:
        say("compare: finished already")
        if "parts" not in found:  # of an earlier version, whose key is that of these parts all the same
            store.put_json(RESULT, found := {**found, "parts": parts})
        return found
    start = time.monotonic()
    with using_threads(config.threads):
        result = _measure(campaign, config, router, dense)
    result = {
        "schema": SCHEMA,
        "key": key,
        "parts": parts,
        "code": code_version(),
        "seconds": round(time.monotonic() - start, 1),
        **result,
    }
    store.put_json(RESULT, result)
    return result


def _possible(config: CompareConfig, experts: int, present: Sequence[int]) -> CompareConfig:
    """The same without strategies that an ensemble of these experts cannot follow, which is said."""
    kept = []
    for name in config.strategies:
        routing = Routing.named(name)
        if routing.strategy == "oracle" and len(present) < experts:
            say(f"  warning: {name} is left out: the clusters of missing experts have nobody to go to")
        elif routing.strategy == "top-k" and routing.k > experts:
            say(f"  warning: {name} is left out: there are {experts} experts")
        else:
            kept.append(name)
    return config.model_copy(update={"strategies": kept})


def _measure(
    campaign: Campaign, config: CompareConfig, router: Card, dense: dict[str, Card]
) -> dict[str, Any]:
    store, seed = campaign.store, campaign.config.seed
    dataset, made = campaign.clustered()
    experts = [read_card(store, f"ensemble/experts/{n}") for n in store.get_json(MANIFEST)["experts"]]
    ensemble, _ = load_ensemble(store)
    singles = {name: load_dense(campaign, name) for name in dense}
    vae = autoencoder_of(router.latents)
    models = Models(singles, ensemble, vae)

    shape, kind = DataShape(**router.shape), campaign.config.condition
    train = Samples(dataset, dataset.split("train"), kind, shape)
    heldout = Samples(dataset, dataset.split("heldout"), kind, shape)
    if len(heldout) == 0:
        raise DataError("the data set has no held-out rows", "ingest with data.ingest.heldout above 0")
    asked = heldout if config.conditions == "heldout" else train
    conditions = drawn_conditions(asked, made.clusters, config.samples, seed)
    shown = _shown(train, made.clusters, config.prompts, config.shown)
    say(f"compare: {config.samples} pictures each, {config.steps} steps, guidance {config.guidance:g}")
    encoder = vision_encoder(config.extractor, config.extractor_size)
    judge = Judge.make(encoder, dataset, config, seed)

    traces: dict[str, Any] = {}

    def keep(name: str, pictures: list[Image.Image], trace: Trace | None) -> None:
        for number, picture in enumerate(pictures):
            store.put(f"reports/compare/{name}/{number:02d}.png", png(picture))
        if trace is not None:
            traces[name] = np.round(trace.stacked().numpy().astype(float), 4).tolist()

    rows = compare(models, conditions, shown, judge, config, seed, keep)
    for number, index in enumerate(shown.index):
        picture = dataset.image(int(train.rows[index]))
        store.put(f"reports/compare/data/{number:02d}.png", png(picture))
    return {
        "metric": {
            "distance": f"Fréchet distance on {judge.components} principal components of {config.extractor}",
            **encoder.producer(),  # its name, hash and size
            "components": judge.components,
            "reference": "held-out pictures",
            "reference_rows": len(judge.reference),
            "samples": config.samples,
            "conditions": f"of {config.conditions} rows",
            "steps": config.steps,
            "guidance": config.guidance,
            "sampler": "Euler",
            "ema": True,
            "seed": seed,
            "same_features_as_partition": (made.about["encoder"] or {}).get("name") == config.extractor,
            "real_training_pictures": judge.noise_floor(dataset, config.samples, seed),
        },
        "default": str(Routing.named(campaign.config.sampling.routing)),
        "rows": rows,
        "train_flops": {
            "monolith": dense["monolith"].train_flops if "monolith" in dense else None,
            "experts": sum(card.train_flops for card in experts),
            "router": router.train_flops,
            "seed": read_card(store, "seed/expert").train_flops if seed_finished(campaign) else 0.0,
            **({"student": dense["student"].train_flops} if "student" in dense else {}),
        },
        "prompts": shown.captions(),
        "clusters": shown.clusters.tolist(),
        "routing": traces,
    }


def _shown(train: Samples, clusters: Any, prompts: list[str], count: int) -> Conditions:
    """Rows whose captions are shown: those asked for, then training rows spread over the clusters."""
    captions = [str(c) for c in train.dataset.take(train.rows).column("caption").to_pylist()]
    where = {caption: number for number, caption in reversed(list(enumerate(captions)))}
    chosen = []
    for prompt in prompts[:count]:
        if prompt not in where:
            raise ConfigError(
                f"compare.prompts: no training row has the caption {prompt!r}", "choose one that exists"
            )
        chosen.append(where[prompt])
    own = clusters[train.rows]
    order = np.random.default_rng(0).permutation(len(own))
    for turn in range(count - len(chosen)):
        wanted = turn % (int(clusters.max()) + 1)
        chosen.append(
            next(
                (int(i) for i in order if own[i] == wanted and int(i) not in chosen),
                int(order[turn % len(order)]),
            )
        )
    index = np.array(chosen, dtype=np.int64)
    return Conditions(train, index, own[index])
