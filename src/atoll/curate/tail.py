"""Rare concepts and common ones like them, drawn by every model with the same noise, and who gets them right.

After Let It Wag! (Udandarao et al. 2024, arXiv 2404.04125), for generators: the judge is the nearest real
picture in a feature space that trained nothing.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.console import Progress, say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File
from atoll.campaign.finding import Finding
from atoll.campaign.folder import Campaign
from atoll.curate.aesthetics.scorer import HEADS, Scorer
from atoll.curate.aesthetics.stages import MEAN
from atoll.curate.audit import COUNTS, vocabulary_of
from atoll.curate.counts import ConceptCounts, hits_of
from atoll.curate.text_hits import COLUMN as TEXT
from atoll.data.dataset import DataSet
from atoll.encoders.extractors import extractor
from atoll.encoders.vision import VisionEncoder
from atoll.model.model import Model

F64 = NDArray[np.float64]
Judged = tuple[str, int, float | None, float, float, float | None]
"""Of a picture: who drew it, place of its concept, rows of those that drew it, hit, rank, looks."""
RESULTS = "reports/concepts/tail.csv"
REAL = "real pictures, each left out in turn"
KINDS = ("tail", "head")
FARTHEST = -2.0
"""Less than any cosine."""
COLUMNS = ("model", "kind", "concept", "rows", "best expert", "routed", "hit", "rank", "looks")


class TailPrompts(File):
    """`prompts.json`: what is drawn, and for which concept."""

    FORMAT, PLACE, ERROR = "atoll/tail-prompts", "reports/concepts/prompts.json", DataError
    REMEDY = "run 'atoll concepts tail' again"

    vocabulary: str
    """Digest of the vocabulary."""
    templates: tuple[str, ...]
    """Of prompts, with `{}` for the concept."""
    pairs: tuple[tuple[int, int], ...]
    """Numbers of a rare concept and of a common one like it."""


def tail_stage(campaign: Campaign, n: int, least: int = 1, templates: Sequence[str] = ("{}",)) -> TailPrompts:
    """Choose rare concepts and common ones like them, by the counts of captions.

    Args:
        campaign: audited.
        n: how many rare ones.
        least: training rows that a rare one has.
        templates: of prompts.

    Raises:
        ConfigError: a template without `{}`.
        DataError: no counts, or too few concepts.
    """
    if wrong := [text for text in templates if text.count("{}") != 1]:
        raise ConfigError(f"the template {wrong[0]!r} has no place for a concept", "write {} once")
    counts = counts_of(campaign)
    table = counts.table("text")
    totals, home = table.sum(1), table.argmax(1)
    rising = [int(number) for number in np.argsort(totals, kind="stable") if totals[number] >= least]
    if len(rising) < 4 * n:
        what = f"{len(rising):,} concepts are in {least} training rows"
        raise DataError(what, f"ask for at most {len(rising) // 4}, or for less with --least")
    rare, free = rising[:n], rising[-max(2 * n, len(rising) // 10) :]
    pairs = []
    for number in rare:
        name = counts.concepts[number]

        def unlike(other: int, name: str = name, number: int = number) -> tuple[bool, bool, int]:
            words = counts.concepts[other]
            apart = abs(len(words) - len(name))
            return len(words.split()) != len(name.split()), bool(home[other] != home[number]), apart

        best = min(free, key=unlike)
        free.remove(best)
        pairs.append((number, best))
    prompts = TailPrompts(vocabulary=counts.vocabulary, templates=tuple(templates), pairs=tuple(pairs))
    campaign.store.put_json(TailPrompts.PLACE, prompts.to_json())
    for place, kind in enumerate(KINDS):
        numbers = [pair[place] for pair in pairs]
        shown = ", ".join(counts.concepts[number] for number in numbers[:6])
        low, high = totals[numbers].min(), totals[numbers].max()
        say(f"{kind}: {n} concepts in {low:,} to {high:,} training rows: {shown}, ...")
    say(f"wrote {campaign.store.name(TailPrompts.PLACE)}")
    return prompts


def counts_of(campaign: Campaign) -> ConceptCounts:
    """The campaign's counts; `DataError` before they are there."""
    if not campaign.store.exists(COUNTS):
        raise DataError(f"{campaign.store.location} has no counts", "run 'atoll concepts audit' first")
    return ConceptCounts.read(campaign.store, COUNTS)


@dataclass(frozen=True)
class Bank:
    """Real pictures of the concepts.

    Attributes:
        features: of unit length `(M, D)`.
        holds: whether a picture's caption has a concept `(M, C)`, concepts by their place in the benchmark.
    """

    features: Tensor
    holds: Tensor

    def judged(self, features: Tensor, own: Tensor, apart: Tensor | None = None) -> tuple[F64, F64]:
        """Whether the nearest picture has the own concept, and the share of other concepts that are farther.

        Rivals are the concepts of the same kind: every second place.

        Args:
            features: of pictures to judge `(P, D)`.
            own: place of the concept of each `(P,)`.
            apart: of each the entry of the bank that does not count `(P,)`.
        """
        near = torch.nn.functional.normalize(features, dim=1) @ self.features.T
        if apart is not None:
            near[torch.arange(len(near)), apart] = FARTHEST
        best = torch.full((len(near), self.holds.shape[1]), FARTHEST)
        for place in range(self.holds.shape[1]):
            best[:, place] = near[:, self.holds[:, place]].amax(1)
        best = best.masked_fill(own[:, None] % 2 != torch.arange(best.shape[1]) % 2, FARTHEST)
        right = best.gather(1, own[:, None])
        others = best.shape[1] // 2 - 1
        farther = ((best < right) & (best > FARTHEST)).sum(1) / max(1, others)
        return (best.amax(1) <= right[:, 0]).double().numpy(), farther.double().numpy()


def bank(
    dataset: DataSet, hits: Any, pairs: Sequence[tuple[int, int]], encoder: VisionEncoder, most: int
) -> Bank:
    """Real pictures of the concepts of both kinds, of each pair as many; at most `most` of one concept."""
    rows_of: dict[int, list[int]] = {number: [] for pair in pairs for number in pair}
    rows = np.arange(len(dataset), dtype=np.int64)
    values, mask = hits.read_ragged(rows)
    places = np.repeat(rows, mask.sum(1).numpy())
    flat = values[mask].numpy()
    wanted = np.isin(flat, list(rows_of))
    for row, number in zip(places[wanted].tolist(), flat[wanted].tolist(), strict=True):
        rows_of[number].append(row)
    chosen: set[int] = set()
    for pair in pairs:
        count = min(most, *(len(rows_of[number]) for number in pair))
        for number in pair:
            spread = np.linspace(0, len(rows_of[number]) - 1, count).round().astype(int)
            chosen |= {rows_of[number][place] for place in spread}
    kept = sorted(chosen)
    features = encoder.encode([dataset.image(row) for row in kept])
    of = [set(rows) for rows in rows_of.values()]
    holds = torch.tensor([[row in rows for rows in of] for row in kept])
    return Bank(torch.nn.functional.normalize(features, dim=1), holds)


@dataclass(frozen=True)
class Judging:
    """How models are drawn and judged.

    Attributes:
        models: `monolith`, `student`, `ensemble`, or `ensemble:` and a routing strategy.
        extractor: of the feature space, and its size in pixels.
        each: pictures of a prompt.
        most: real pictures of a concept.
        generation: changes of the campaign's `sampling`.
        scorer: folder of an aesthetic scorer, if looks are scored too.
    """

    models: Sequence[str]
    extractor: tuple[str, int | None]
    each: int = 4
    most: int = 8
    generation: dict[str, Any] = field(default_factory=dict)
    scorer: str | None = None


def evaluate_stage(campaign: Campaign, judging: Judging) -> list[dict[str, Any]]:
    """Draw the prompts by every model with the same noise, judge them, and write a row for each concept.

    Returns:
        the rows of `tail.csv`: by model and concept its training rows, those that its best expert has and
        those that the experts which drew it have, how often the nearest real picture has the concept, and
        the share of other concepts that are farther; mean score of looks, if it was asked for.

    Raises:
        DataError: no prompts, or those of another vocabulary.
        ConfigError: a model that is not conditioned on text.
    """
    counts, dataset, vocabulary = counts_of(campaign), campaign.dataset(), vocabulary_of(campaign)
    if not campaign.store.exists(TailPrompts.PLACE):
        raise DataError(f"{campaign.store.location} has no prompts", TailPrompts.REMEDY)
    prompts = TailPrompts.read(campaign.store, TailPrompts.PLACE)
    hits = hits_of(dataset, TEXT, vocabulary)
    if hits is None or not prompts.vocabulary == counts.vocabulary == vocabulary.hash:
        raise DataError("prompts, counts and captions are of other concepts", "index, audit and choose again")
    encoder = extractor(*judging.extractor, device=str(own_device()))
    real = bank(dataset, hits, prompts.pairs, encoder, judging.most)
    concepts, table = [number for pair in prompts.pairs for number in pair], counts.table("text")
    rows = [*_real(real)]
    scorer = Scorer.load(judging.scorer, str(own_device()))[0] if judging.scorer else None
    for name in judging.models:
        kind, _, routing = name.partition(":")
        settings = campaign.config.sampling.with_(**judging.generation, routing=routing or None)
        model = Model.load(
            campaign.store, kind, settings.residency, own_device(), settings, campaign.config.encoders
        )
        if model.card.condition != "text":
            raise ConfigError(f"{name} is not conditioned on text", "concepts are asked for by prompts")
        texts = [t.format(counts.concepts[number]) for number in concepts for t in prompts.templates]
        of_text = np.repeat(np.arange(len(concepts)), len(prompts.templates) * judging.each)
        progress = Progress(f"pictures of {name}", len(of_text), unit="pictures")
        for drawn in model.generate(model.conditions(texts, each=judging.each), settings):
            pictures = model.pictures(drawn.latents, drawn.rows)
            own = torch.from_numpy(of_text[drawn.rows])
            hit, rank = real.judged(encoder.encode(pictures), own)
            looks = scorer.scores(pictures)[:, HEADS.index(MEAN)].tolist() if scorer else [None] * len(own)
            frequent = table[[concepts[place] for place in own]]
            routed: Any = [None] * len(own)
            if drawn.trace is not None:
                routed = (drawn.trace.stacked().mean(0).numpy() * frequent).sum(1).tolist()
            rows += zip([name] * len(own), own.tolist(), routed, hit, rank, looks, strict=True)
            progress(len(rows) % len(of_text) or len(of_text))
    found = _by_concept(rows, concepts, counts)
    campaign.store.put(RESULTS, _csv(found))
    _tell(campaign, found, judging)
    return found


def _real(real: Bank) -> Iterator[Judged]:
    """The real pictures of the bank, each judged by the others, for every concept that it has."""
    entry, own = real.holds.nonzero(as_tuple=True)
    alone = real.holds.sum(0)[own] < 2  # nothing would be left to find
    entry, own = entry[~alone], own[~alone]
    hit, rank = real.judged(real.features[entry], own, entry)
    none = [None] * len(own)
    yield from zip([REAL] * len(own), own.tolist(), none, hit, rank, none, strict=True)


def _by_concept(
    rows: Sequence[Judged], concepts: Sequence[int], counts: ConceptCounts
) -> list[dict[str, Any]]:
    """Means over the pictures of each model and concept."""
    groups: dict[tuple[str, int], list[Judged]] = {}
    for row in rows:
        groups.setdefault((row[0], row[1]), []).append(row)
    table, found = counts.table("text"), []
    for (model, place), members in groups.items():
        of = table[concepts[place]]
        means = [None if None in one else float(np.mean(one)) for one in list(zip(*members, strict=True))[2:]]
        about = (model, KINDS[place % 2], counts.concepts[concepts[place]], int(of.sum()), int(of.max()))
        found.append(dict(zip(COLUMNS, (*about, *means), strict=True)))
    return found


def _csv(found: Sequence[dict[str, Any]]) -> bytes:
    lines = io.StringIO()
    writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return lines.getvalue().encode()


def _tell(campaign: Campaign, found: Sequence[dict[str, Any]], judging: Judging) -> None:
    """A row for each model, with intervals of a bootstrap over concepts."""
    values = ("hit", "rank", *(["looks"] if judging.scorer else []))
    columns = ["model", *(f"{value}, {kind}" for value in values for kind in KINDS)]
    rows: list[list[str | int | float | None]] = []
    for model in dict.fromkeys(one["model"] for one in found):
        cells: list[str | int | float | None] = [model]
        for value in values:
            for kind in KINDS:
                of = [x[value] for x in found if x["model"] == model and x["kind"] == kind]
                cells.append(_mean(np.array([one for one in of if one is not None])))
        rows.append(cells)
        say(f"{model}: " + "; ".join(f"{n} {c}" for n, c in zip(columns[1:], cells[1:], strict=True)))
    text = (
        "Prompts of rare concepts and of common ones like them. Hit: the nearest real picture, by"
        f" {judging.extractor[0]}, has the concept; rank: the share of other concepts of the kind whose"
        " nearest picture is farther. 95 % intervals over concepts. Real pictures are judged by the others"
        " (atoll concepts evaluate)."
    )
    Finding(title="Rare concepts and common ones", text=text, columns=columns, rows=rows).write(
        campaign.store, "tail"
    )
    say(f"wrote {campaign.store.name(RESULTS)}")


def _mean(values: F64) -> str | None:
    """A mean with its interval by a bootstrap."""
    if not len(values):
        return None
    draws = np.random.default_rng(0).choice(values, (1000, len(values))).mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"
