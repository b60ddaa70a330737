"""The commands about concepts: what is in the data, and what that buys."""

from typing import Any

import click

from atoll.base.part import Part
from atoll.campaign.roles import BASELINE
from atoll.cli.common import CAMPAIGN, GUIDANCE, LOCAL, STEPS, Finite, open_campaign, sharded


@click.group()
def concepts() -> None:
    """What is in the data, concept by concept and expert by expert, and what that buys."""


@concepts.command("index")
@CAMPAIGN
@click.option(
    "--vocabulary", "path", type=LOCAL, help="Text file, a concept a line; by default the captions' nouns."
)
@click.option("--least", type=click.IntRange(min=1), default=5, help="Captions that such a noun stands in.")
@click.option(
    "--match",
    type=click.Choice(["phrase", "words"]),
    default="phrase",
    help="Whether the words of a concept stand side by side, or anywhere in the caption.",
)
def index(campaign: str, **how: Any) -> None:
    """Find concepts in every caption, in singular and plural."""
    from atoll.curate.audit import index_stage

    index_stage(open_campaign(campaign), **how)


@concepts.command("tag")
@CAMPAIGN
@click.argument("tagger", metavar="labels|linear|clip:NAME|FILE")
@sharded
def tag(campaign: str, tagger: str, part: Part | None) -> None:
    """Find concepts in pictures: class labels, a linear tagger, a CLIP, or a FILE of tags."""
    from atoll.curate.audit import tag_stage

    tag_stage(open_campaign(campaign), tagger, part)


@concepts.command("audit")
@CAMPAIGN
@click.option("--threshold", type=Finite(0, 1), default=0.7, help="Probability from which a tag counts.")
def audit(campaign: str, threshold: float) -> None:
    """Count concepts in the training rows of every expert: tail, evenness, captions that miss the picture."""
    from atoll.curate.audit import audit_stage

    audit_stage(open_campaign(campaign), threshold)


@concepts.command("add")
@click.argument("counts", metavar="COUNTS...", nargs=-1, required=True)
@click.option("--out", default=".", help="Where reports/concepts/ of all together goes.")
def add(counts: tuple[str, ...], out: str) -> None:
    """Add counts of several islands, each counted where its data lie."""
    from atoll.curate.audit import add_stage

    add_stage(counts, out)


@concepts.command("fit")
@click.option("--counts", type=LOCAL, required=True, help="Parquet or CSV: concept and a number.")
@click.option("--results", type=LOCAL, required=True, help="Parquet or CSV: concept and a number.")
@click.option("--count", "count_column", metavar="COLUMN", help="Of the counts; by default the only one.")
@click.option("--result", "result_column", metavar="COLUMN", help="Of the results; by default the only one.")
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Rows that count; also COLUMN!=VALUE.")
@click.option("--out", default=".", help="Where reports/concepts/fit.json goes.")
def fit(count_column: str | None, result_column: str | None, **tables: Any) -> None:
    """How performance goes with frequency: slope, correlations and intervals, and the published figure."""
    from atoll.curate.fit import fit_stage

    fit_stage(columns=(count_column, result_column), **tables)


@concepts.command("rebalance")
@CAMPAIGN
@click.option("--t", type=Finite(min=1), help="Rows from which on a concept counts as frequent.")
@click.option(
    "--target-size", "target", type=click.IntRange(min=1), help="Rows of an epoch, in place of --t."
)
@click.option("--per-expert", is_flag=True, help="Count within each cluster of the campaign's partition.")
@click.option("--other", type=Finite(0, 1), default=1, help="Weight of rows without a concept.")
@click.option("--dry-run", is_flag=True, help="Say what an epoch would have, and write nothing.")
def rebalance(campaign: str, t: float | None, target: int | None, **how: Any) -> None:
    """Weights by which frequent concepts are drawn less often: a column that data.weighted=true uses."""
    from atoll.curate.weigh import rebalance_stage

    if (t is None) == (target is None):
        raise click.UsageError("give --t or --target-size, one of them")
    rebalance_stage(open_campaign(campaign), t or 1.0, target, **how)


@concepts.command("tail")
@CAMPAIGN
@click.option("--n", type=click.IntRange(min=2), default=50, help="Rare concepts, and as many common ones.")
@click.option("--least", type=click.IntRange(min=1), default=2, help="Training rows that a rare one has.")
@click.option("--template", "templates", multiple=True, default=["{}"], help="Prompt; {} is the concept.")
def tail(campaign: str, **how: Any) -> None:
    """Choose rare concepts and common ones like them, to be drawn and judged."""
    from atoll.curate.tail import tail_stage

    tail_stage(open_campaign(campaign), **how)


@concepts.command("evaluate")
@CAMPAIGN
@click.option(
    "--model", "models", multiple=True, default=[BASELINE, "ensemble"], help="Also ensemble:STRATEGY."
)
@click.option("--each", type=click.IntRange(min=1), default=4, help="Pictures of a prompt.")
@click.option("--real", "most", type=click.IntRange(min=2), default=8, help="Real pictures of a concept.")
@GUIDANCE
@STEPS
@click.option("--seed", type=int, default=0, help="Of the noise.")
@click.option("--extractor", help="Feature space of the judge; by default that of atoll compare.")
@click.option("--scorer", help="Folder of an aesthetic scorer, to score looks too.")
def evaluate(campaign: str, extractor: str | None, **how: Any) -> None:
    """Draw rare and common concepts by every model with the same noise, and judge the pictures."""
    from atoll.curate.tail import evaluate_stage

    opened = open_campaign(campaign)
    own = opened.config.compare
    space = (extractor, None) if extractor else (own.extractor, own.extractor_size)
    generation = {name: how.pop(name) for name in ("guidance", "steps", "seed")}
    evaluate_stage(opened, space=space, generation=generation, **how)


@click.command("filter")
@CAMPAIGN
@click.option(
    "--keep",
    multiple=True,
    required=True,
    help="Such as 'score >= q0.5' or 'licence in (MIT, Apache-2.0)'; all must hold.",
)
@click.option("--per-cluster", is_flag=True, help="Take quantiles within each cluster.")
@click.option("--protect", type=LOCAL, help="Text file of concepts whose rows are kept whatever they score.")
@click.option("--allow-sensitive", "sensitive", is_flag=True, help="Allow scores that describe a person.")
@click.option("--times", is_flag=True, help="Multiply the weights that are there, in place of new ones.")
@click.option("--dry-run", is_flag=True, help="Say what would be kept, and write nothing.")
def filter_rows(campaign: str, **how: Any) -> None:
    """Draw only rows that score well or have the right licence, by weights: nothing is removed."""
    from atoll.curate.weigh import filter_stage

    filter_stage(open_campaign(campaign), **how)
