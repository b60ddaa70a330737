"""Rare concepts and common ones like them, drawn by every model with the same noise, and who gets them right.

After Let It Wag! (Udandarao et al. 2024, arXiv 2404.04125), for generators: the judge is the nearest real
picture in a feature space that trained nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.base.config import Config
from atoll.base.console import Progress, say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File
from atoll.base.table import Table, text
from atoll.base.text import many
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import ReportTable
from atoll.campaign.sample import campaign_model
from atoll.curate.aesthetics.scale import HEADS, MEAN
from atoll.curate.aesthetics.scorer import Scorer
from atoll.curate.audit import F64, ConceptCounts, written
from atoll.curate.concepts import Vocabulary, caption_hits
from atoll.data.dataset import DataSet
from atoll.encoders.vision import VisionEncoder, extractor

RESULTS = "reports/concepts/tail.csv"
REAL = "real pictures, each left out in turn"
KINDS = ("tail", "head")
FARTHEST = -2.0
"""Less than any cosine."""


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
    """Choose `n` rare concepts, of `least` training rows or more, and common ones like them."""
    if wrong := [template for template in templates if template.count("{}") != 1]:
        raise ConfigError(f"the template {wrong[0]!r} has no place for a concept", "write {} once")
    counts = written(campaign, ConceptCounts)
    table = counts.table("text")  # prompts are texts, so a concept is as rare as it is in captions
    totals, home = table.sum(1), table.argmax(1)
    rising = [int(number) for number in np.argsort(totals, kind="stable") if totals[number] >= least]
    if counts.vocabulary != written(campaign, Vocabulary).hash:
        raise DataError("the vocabulary has changed since the audit", "run 'atoll concepts audit' again")
    if len(rising) < 4 * n:
        there, most = many(len(rising), "concept"), len(rising) // 4
        what = f"{there} in {least} training rows or more, and {n} rare ones take {4 * n}"
        more = "index more concepts (atoll concepts index --least 1, then audit)"
        raise DataError(what, f"lower --least, or {f'--n to {most}' if most > 1 else more}")
    rare, free = rising[:n], rising[-max(2 * n, len(rising) // 10) :]
    pairs = []

    # Alike in words, then in the expert that has most of it, then in length: what is left is frequency.
    def unlike(number: int, other: int) -> tuple[bool, bool, int]:
        name, words = counts.concepts[number], counts.concepts[other]
        length = abs(len(words) - len(name))
        return len(words.split()) != len(name.split()), bool(home[other] != home[number]), length

    for number in rare:
        best = min(free, key=partial(unlike, number))
        free.remove(best)
        pairs.append((number, best))
    prompts = TailPrompts(vocabulary=counts.vocabulary, templates=tuple(templates), pairs=tuple(pairs))
    campaign.store.put_json(TailPrompts.PLACE, prompts.to_json())
    for kind, numbers in zip(KINDS, map(list, zip(*pairs, strict=True)), strict=True):
        shown = ", ".join(counts.concepts[number] for number in numbers[:6])
        low, high = totals[numbers].min(), totals[numbers].max()
        say(f"{kind}: {n} concepts in {low:,} to {high:,} training rows: {shown}, ...")
    say(f"wrote {campaign.store.name(TailPrompts.PLACE)}")
    return prompts


@dataclass(frozen=True)
class RealPictures:
    """Real pictures of the concepts, by which others are judged."""

    features: Tensor
    """Of unit length `(M, D)`."""
    holds: Tensor
    """Whether a picture's caption has a concept `(M, C)`, rare and common ones in turn."""

    def judge(self, features: Tensor, own: Tensor, left_out: Tensor | None = None) -> tuple[F64, F64]:
        """Whether the nearest picture has the own concept, and the share of other concepts that are farther.

        Args:
            features: of pictures to judge `(P, D)`.
            own: column of `holds` of the concept of each `(P,)`.
            left_out: for each, the real picture that does not count `(P,)`.
        """
        near = torch.nn.functional.normalize(features, dim=1) @ self.features.T
        if left_out is not None:
            near[torch.arange(len(near)), left_out] = FARTHEST
        best = torch.stack([near[:, having].amax(1) for having in self.holds.T], dim=1)
        # Rivals are the concepts of the same kind only: rare ones look less alike, and would win for that.
        best = best.masked_fill(own[:, None] % 2 != torch.arange(best.shape[1]) % 2, FARTHEST)
        right = best.gather(1, own[:, None])
        farther = ((best < right) & (best > FARTHEST)).sum(1) / max(1, best.shape[1] // 2 - 1)
        return (best.amax(1) <= right[:, 0]).double().numpy(), farther.double().numpy()


def real_pictures(
    dataset: DataSet, hits: Any, pairs: Sequence[tuple[int, int]], encoder: VisionEncoder, most: int
) -> RealPictures:
    """Real pictures of both concepts of each pair: of each as many, and at most `most`."""
    counted = np.flatnonzero(dataset.weights > 0)  # a duplicate would find its twin, whatever the judge sees
    values, mask = hits.read_ragged(counted, packed=True)
    rows = np.repeat(counted, mask.sum(1).numpy())
    rows_of = {number: rows[values.numpy() == number] for pair in pairs for number in pair}
    if not all(map(len, rows_of.values())):
        fix = "run 'atoll concepts audit' and 'atoll concepts tail' again"
        raise DataError("a concept of the prompts is in no caption that counts by now", fix)
    chosen: set[int] = set()
    for pair in pairs:
        # As many of both, since more pictures of the common one would win by their number.
        count = min(most, *(len(rows_of[number]) for number in pair))
        for number in pair:
            spaced = np.linspace(0, len(rows_of[number]) - 1, count).round().astype(int)
            chosen |= {*rows_of[number][spaced].tolist()}
    features = encoder.encode([dataset.image(row) for row in sorted(chosen)])
    holds = torch.from_numpy(np.stack([np.isin(sorted(chosen), own) for own in rows_of.values()], axis=1))
    return RealPictures(torch.nn.functional.normalize(features, dim=1), holds)


class TailRow(Config):
    """Of a model and a concept, the means over the pictures."""

    model: str
    """Model, or the real pictures."""
    kind: str
    """tail or head."""
    concept: str
    """Its name."""
    rows: int
    """Training rows that have it in their caption."""
    best_expert: int
    """Those that its best expert has."""
    routed: float | None
    """Those that the experts have which drew it, by their weights."""
    hit: float
    """How often the nearest real picture has the concept."""
    rank: float
    """Share of the other concepts of the kind whose nearest picture is farther."""
    looks: float | None
    """Mean score of looks."""


def evaluate_stage(
    campaign: Campaign,
    models: Sequence[str],
    space: tuple[str, int | None],
    each: int = 4,
    most: int = 8,
    generation: Mapping[str, Any] | None = None,
    scorer: str | None = None,
) -> list[TailRow]:
    """Draw the prompts by every model, judge the pictures in a feature `space`, and write the table.

    `DataError` without prompts or for those of another vocabulary, `ConfigError` for a model without text.
    """
    counts, dataset = written(campaign, ConceptCounts), campaign.dataset()
    vocabulary, prompts = written(campaign, Vocabulary), written(campaign, TailPrompts)
    if not prompts.vocabulary == counts.vocabulary == vocabulary.hash:
        raise DataError("prompts, counts and captions are of other concepts", "index, audit and choose again")
    encoder = extractor(*space, device=str(own_device()))
    real = real_pictures(dataset, caption_hits(dataset, vocabulary), prompts.pairs, encoder, most)
    concepts, table = [number for pair in prompts.pairs for number in pair], counts.table("text")
    groups: dict[tuple[str, int], list[tuple[float | None, ...]]] = {}
    """Of a model and the number of its concept the pictures' `routed`, `hit`, `rank` and `looks`."""

    def add(model: str, own: Tensor, *columns: Sequence[float | None] | F64) -> None:
        for concept, *values in zip(own.tolist(), *columns, strict=True):
            groups.setdefault((model, concept), []).append(tuple(values))

    # The real pictures of the bank first, each judged by the others.
    entry, own = real.holds.nonzero(as_tuple=True)
    several = real.holds.sum(0)[own] > 1  # a concept's only picture would have nothing left to find
    entry, own = entry[several], own[several]
    none = [None] * len(own)
    add(REAL, own, none, *real.judge(real.features[entry], own, entry), none)

    # Then the models'.
    looking = Scorer.load(scorer, str(own_device()))[0] if scorer else None
    for name in models:
        kind, _, routing = name.partition(":")
        model = campaign_model(campaign, kind, own_device())
        settings = model.generation.with_(**(generation or {}), routing=routing or None)
        if model.card.condition != "text":
            raise ConfigError(f"{name} is not conditioned on text", "concepts are asked for by prompts")
        texts = [t.replace("{}", counts.concepts[number]) for number in concepts for t in prompts.templates]
        of_text = np.repeat(np.arange(len(concepts)), len(prompts.templates) * each)
        progress, done = Progress(f"pictures of {name}", len(of_text), unit="pictures"), 0
        for drawn in model.generate(model.conditions(texts, each=each), settings):
            pictures = model.pictures(drawn.latents, drawn.rows)
            own = torch.from_numpy(of_text[drawn.rows])
            routed: list[float | None] = [None] * len(own)
            if drawn.trace is not None:
                frequent = table[[concepts[number] for number in own]]
                routed = (drawn.trace.stacked().mean(0).numpy() * frequent).sum(1).tolist()
            looks = looking.scores(pictures)[:, HEADS.index(MEAN)].tolist() if looking else [None] * len(own)
            add(name, own, routed, *real.judge(encoder.encode(pictures), own), looks)
            progress(done := done + len(own))

    rows = []
    for (name, place), judged in groups.items():
        having = table[concepts[place]]
        means = (None if None in values else float(np.mean(values)) for values in zip(*judged, strict=True))
        numbers: dict[str, Any] = dict(zip(("routed", "hit", "rank", "looks"), means, strict=True))
        numbers |= {"rows": int(having.sum()), "best_expert": int(having.max())}
        concept = counts.concepts[concepts[place]]
        rows.append(TailRow(model=name, kind=KINDS[place % 2], concept=concept, **numbers))
    campaign.store.put(RESULTS, Table.of(TailRow, rows).to_csv())

    # Means over the concepts of each kind, for people.
    columns = [(value, kind) for value in ("hit", "rank", *(["looks"] * bool(scorer))) for kind in KINDS]
    heads = ["model", *(f"{value}, {kind}" for value, kind in columns)]
    lines: list[list[Any]] = []
    for name in dict.fromkeys(row.model for row in rows):
        of = {kind: [row for row in rows if (row.model, row.kind) == (name, kind)] for kind in KINDS}
        cells = ([v for row in of[kind] if (v := getattr(row, value)) is not None] for value, kind in columns)
        lines.append([name, *(_mean(np.array(values)) if values else None for values in cells)])
    say("\n".join(text(Table.plain(heads, lines))))
    about = (
        "Prompts of rare concepts and of common ones like them. Hit: the nearest real picture, by"
        f" {space[0]}, has the concept; rank: the share of other concepts of the kind whose"
        " nearest picture is farther. 95 % intervals over concepts. Real pictures are judged by the others"
        " (atoll concepts evaluate)."
    )
    report = ReportTable(title="Rare concepts and common ones", text=about, columns=heads, rows=lines)
    report.write(campaign.store, "tail")
    say(f"wrote {campaign.store.name(RESULTS)}")
    return rows


def _mean(values: F64) -> str:
    """A mean, of several values with the 95 % interval of a bootstrap."""
    draws = np.random.default_rng(0).choice(values, (1000, len(values))).mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"{values.mean():.3f}" + (f" ({low:.3f} to {high:.3f})" if len(values) > 1 else "")
