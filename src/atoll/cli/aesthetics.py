"""Commands that train, apply and evaluate an image-aesthetics scorer."""

from pathlib import Path
from typing import Any

import click

from atoll.base.errors import AtollError
from atoll.base.part import Part
from atoll.cli.common import LOCAL, ON, PART, WORKERS, Finite, open_campaign, work_is_left

DEVICE = click.option("--device", default="cpu", help="Where the backbone runs.")
RANGE = click.option(
    "--range", "bounds", type=(float, float), default=(0.0, 1.0), help="Worst and best score of the labels."
)
ROWS = click.option("--campaign", help="Whose rows the labels name by id, in place of image files.")
LABELS = click.argument("labels", metavar="LABELS", type=LOCAL)


@click.group()
def aesthetics() -> None:
    """Train and apply an image-aesthetics scorer."""


@aesthetics.command("train")
@LABELS
@click.option("--out", required=True, help="Folder of the scorer.")
@click.option("--scale", default="human", help="Dimensions and words: human, or a YAML file.")
@click.option(
    "--backbone",
    default="efficientnet-lite2@128",
    help="Vision encoder, with @ and its size in pixels; or vlm: and an image-text model of transformers.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="By default 60, 1 for image-text models.")
@click.option("--batch", type=click.IntRange(min=1), help="By default 64, 16 for image-text models.")
@click.option("--rate", type=Finite(min=0, min_open=True), help="By default 1e-3, or 1e-4.")
@click.option("--seed", type=int, default=0, help="Of all random numbers.")
@RANGE
@ROWS
@DEVICE
def train(labels: Path, out: str, scale: str, backbone: str, device: str, **given: Any) -> None:
    """Train a scorer on LABELS: parquet, CSV or JSON lines with image (or id) and score, scores or names."""
    from dataclasses import replace

    from atoll.curate.aesthetics.scale import Scale, read_labels
    from atoll.curate.aesthetics.scorer import Scorer, default_training
    from atoll.curate.aesthetics.stages import train_stage

    dimensions = Scale.load(scale)
    known = read_labels(labels, dimensions, given.pop("bounds"), _rows(given.pop("campaign")))
    changes = {name: value for name, value in given.items() if value is not None}
    training = replace(default_training(backbone), **changes)
    train_stage(Scorer(dimensions, backbone, device), known, training, out)


@aesthetics.command("score")
@click.argument("pictures", metavar="CAMPAIGN|FOLDER")
@click.option("--scorer", help="Folder of a trained scorer.")
@click.option("--from", "table", type=LOCAL, help="Scores of a table with id, in place of a scorer's.")
@click.option("--sensitive", multiple=True, help="Score of the table that describes a person.")
@click.option("--out", type=LOCAL, default="scores.parquet", help="Where the scores of a folder go.")
@DEVICE
@WORKERS
@PART
@ON
def score(
    pictures: str,
    scorer: str | None,
    table: Path | None,
    sensitive: tuple[str, ...],
    out: Path,
    device: str,
    workers: int,
    part: Part | None,
    on: str,
) -> None:
    """Score the rows of a campaign's data set, as a column of it, or the pictures of a folder."""
    from atoll.curate.aesthetics.scorer import Scorer
    from atoll.curate.aesthetics.stages import import_stage, score_folder, score_stage

    if (scorer is None) == (table is None):
        raise click.UsageError("give --scorer or --from, one of them")
    if sensitive and table is None:
        raise click.UsageError("--sensitive is for --from: a scorer's scale says which scores are")
    # A folder holds pictures unless a campaign lies in it.
    folder = Path(pictures)
    is_folder = "://" not in pictures and folder.is_dir() and not (folder / "campaign.yaml").exists()
    if (table is not None or is_folder) and (workers > 1 or part is not None or on != "local"):
        fix = "leave out --workers, --part and --on"
        raise AtollError("only rows of a campaign are scored in parts", fix)
    if table is not None:
        import_stage(open_campaign(pictures), table, sensitive)
    elif scorer is not None and is_folder:
        score_folder(Scorer.load(scorer, device)[0], folder, out)
    elif scorer is not None:
        opened = open_campaign(pictures)
        words = ("aesthetics", "score", opened.store.location, "--scorer", scorer, "--device", device)
        if work_is_left(opened, workers, part, on, *words):
            score_stage(opened, scorer, device, part)


@aesthetics.command("evaluate")
@LABELS
@click.option("--scorer", required=True, help="Folder of a trained scorer.")
@click.option("--out", help="Folder or store in which the table is left for the report.")
@RANGE
@ROWS
@DEVICE
def evaluate(
    labels: Path, scorer: str, out: str | None, bounds: tuple[float, float], campaign: str | None, device: str
) -> None:
    """How a scorer agrees with people on LABELS that it has not seen, by head and dimension."""
    from atoll.curate.aesthetics.scale import read_labels
    from atoll.curate.aesthetics.scorer import Scorer
    from atoll.curate.aesthetics.stages import evaluate_stage

    loaded, file = Scorer.load(scorer, device)
    evaluate_stage(loaded, read_labels(labels, file.scale, bounds, _rows(campaign)), file.training, out)


def _rows(campaign: str | None) -> Any:
    return None if campaign is None else open_campaign(campaign).dataset()
