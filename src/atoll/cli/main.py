"""The commands. Each is thin: it opens a campaign, calls one stage, and imports what it needs only then."""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from atoll.base.console import say, show_messages
from atoll.base.errors import INTERRUPTED, AtollError, ConfigError, PeerFailed, first_line
from atoll.base.preemption import ends_with_run, exit_process
from atoll.base.text import printable
from atoll.campaign.roles import BESIDE, RUNS, SINGLE
from atoll.cli.aesthetics import aesthetics
from atoll.cli.common import CAMPAIGN, LOCAL, SETS, LocalPath, drawing, open_campaign, sharded, with_options
from atoll.cli.concepts import concepts, filter_rows
from atoll.cli.data import data
from atoll.cli.serve import dashboard, serve

ASIDE = 3.0
"""Seconds that a process holds back an error that another one of its run tells; torchrun then ends it."""
MOST = 580
"""Characters of a line of error: an option may hold any number of them."""
MODEL = click.Choice(["ensemble", *BESIDE])


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
)
@click.version_option(package_name="atoll")
def atoll() -> None:
    """Train one diffusion model on isolated islands of compute, and sample them as one."""
    show_messages()


@atoll.command()
@click.option("--dir", "folder", default="campaigns/quickstart", help="Folder of the campaign.")
@SETS
def quickstart(folder: str, sets: tuple[str, ...]) -> None:
    """The whole way on embedded data: minutes on two CPU cores, ends with a page to look at."""
    from atoll.recipes.quickstart import run

    run(folder, sets, lambda argv: atoll.main(argv, standalone_mode=False))


@atoll.command()
@click.argument("folder", metavar="DIR")
@click.option("--recipe", help="Ready-made campaign to start from, by default cpu; see 'atoll recipes'.")
@click.option("--from", "origin", metavar="CAMPAIGN", help="Go on from it, by default high-resolution.")
@SETS
def new(folder: str, recipe: str | None, origin: str | None, sets: tuple[str, ...]) -> None:
    """Write DIR/campaign.yaml from a recipe, to edit; perhaps one that goes on from a finished campaign."""
    from atoll.campaign.folder import new as write
    from atoll.recipes.catalogue import text

    say(f"wrote {write(folder, text(recipe or ('high-resolution' if origin else 'cpu')), sets, origin)}")


@atoll.command()
@click.argument("campaign", required=False)
def config(campaign: str | None) -> None:
    """Print all settings of a campaign with their meaning; without CAMPAIGN, the defaults."""
    from atoll.campaign.folder import settings

    say(settings(campaign))


@atoll.command()
def recipes() -> None:
    """List the ready-made campaigns."""
    from atoll.recipes import catalogue

    for name in catalogue.names():
        say(f"{name:<18} {catalogue.title(name)}")


@atoll.command()
@CAMPAIGN
@click.option("--assign", metavar="DATASET", help="Give the rows of another data set to the same clusters.")
@click.option("--opt-out", type=LOCAL, metavar="FILE", help="Take rows out, by id or SHA-256, one a line.")
@click.option("--retrain", is_flag=True, help="With --opt-out: remove what was trained on these rows.")
@SETS
def partition(
    campaign: str, assign: str | None, opt_out: Path | None, retrain: bool, sets: tuple[str, ...]
) -> None:
    """Cut the data set into clusters and write the islands' data sets; or change who is in them."""
    opened = open_campaign(campaign, sets)
    if (retrain and opt_out is None) or (assign is not None and opt_out is not None):
        raise AtollError("--retrain goes with --opt-out, and --opt-out without --assign", "give one")
    if assign is not None:
        from atoll.campaign.after_partition import assign_new_rows

        assign_new_rows(opened, assign)
    elif opt_out is not None:
        from atoll.campaign.after_partition import opt_out_stage

        opt_out_stage(opened, opt_out, retrain)
    else:
        from atoll.campaign.runs import partition_finished

        if not partition_finished(opened):
            from atoll.campaign.partition import make_islands

            make_islands(opened)


@atoll.command()
@CAMPAIGN
@click.option("--gpu", default="h100", help="Kind of GPU, a name of the table.")
@click.option("--gpus", type=click.IntRange(1, 100_000), default=1, help="GPUs of one island.")
@click.option("--table", metavar="FILE", help="YAML that adds GPUs to the table or changes their numbers.")
@click.option("--rows", type=click.IntRange(min=1), help="Training rows, where there is no data set yet.")
@click.option("--serve", is_flag=True, help="Size a server of what is trained, by drawing on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: bytes, seconds, US dollars.")
@SETS
def plan(campaign: str, serve: bool, as_json: bool, sets: tuple[str, ...], **wanted: Any) -> None:
    """Operations, memory, time, cost and bytes of every run, before any GPU is spent."""
    # Sizing a server loads the model and draws, where a plan only counts: only it needs `serve` at all.
    if serve:
        told, default = click.get_current_context().get_parameter_source, click.core.ParameterSource.DEFAULT
        if ignored := [name for name in wanted if told(name) != default]:
            raise ConfigError("--serve measures this machine", f"leave --{ignored[0]} out")
        from atoll.cli.serve import size_up

        return size_up(campaign, sets, as_json)
    opened = open_campaign(campaign, sets)
    from atoll.campaign.data_spec import data_spec
    from atoll.campaign.gpus import load_gpus
    from atoll.campaign.plan import lines, make_plan, must_fit

    kinds, data_set = load_gpus(wanted["table"]), data_spec(opened, wanted["rows"])
    outlook = make_plan(opened.config, data_set, kinds, wanted["gpu"], wanted["gpus"])
    say(json.dumps(outlook.to_json(), indent=2) if as_json else "\n".join(lines(outlook)))
    must_fit(outlook, kinds)


@atoll.command()
@click.argument("what", type=click.Choice(list(RUNS)))
@CAMPAIGN
@click.option("--expert", type=int, default=None, help="Number of the expert, which is that of its cluster.")
@click.option("--wait", is_flag=True, help="Wait while another living process holds the run.")
@SETS
def train(what: str, campaign: str, expert: int | None, wait: bool, sets: tuple[str, ...]) -> None:
    """Train one network; the same command again goes on where it stopped."""
    from atoll.campaign.publication import trained_already
    from atoll.campaign.runs import run_to_train

    opened = open_campaign(campaign, sets)
    run = run_to_train(opened, what, expert)
    # Pretraining that is finished may still have weights to hand over.
    if what == "pretrain" or not trained_already(opened, run):
        from atoll.train.run import train_run

        train_run(opened, what, expert, wait=wait)


@atoll.command()
@CAMPAIGN
@click.argument("checkpoint")
@click.option("--expert", "island", type=int, required=True, help="Number of the expert that it becomes.")
@click.option(
    "--prediction",
    type=click.Choice(["v", "eps", "x0", "score"]),
    help="What it predicts; by default what its scheduler_config.json says.",
)
@click.option("--schedule", metavar="NAME", help="Noise schedule, such as ddpm-linear; by default likewise.")
def adopt(campaign: str, **options: Any) -> None:
    """Make a published diffusers checkpoint (folder or hub name) the expert of an island, as it is."""
    opened = open_campaign(campaign)
    from atoll.campaign.adopt import adopt as adopt_checkpoint

    adopt_checkpoint(opened, noise=options.pop("schedule"), **options)


@atoll.command()
@CAMPAIGN
@click.option("--on", metavar="LAUNCHER", help="local, slurm, ray, sky or yours; by default launch.on.")
@click.option("--dry-run", is_flag=True, help="Print what would run, and do nothing.")
@click.option("--out", type=LOCAL, default=Path("launch"), help="Folder for SkyPilot's files.")
@click.option("--address", metavar="HOST:PORT", help="Ray cluster; by default launch.ray.address.")
@SETS
def launch(campaign: str, address: str | None, sets: tuple[str, ...], **how: Any) -> None:
    """Do whatever is left: data, partition, all training runs as separate jobs, assembly."""
    from atoll.launch.submit import launch_campaign

    launch_campaign(open_campaign(campaign, with_options(sets, "launch.ray.", address=address)), **how)


@atoll.command()
@CAMPAIGN
@click.option("--watch", is_flag=True, help="Look again and again, until all runs are published or Ctrl-C.")
@click.option("--every", type=click.IntRange(min=1), default=10, help="Seconds between looks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: bytes, seconds; one line for each look.")
def status(campaign: str, watch: bool, every: float, as_json: bool) -> None:
    """How every run stands, from anywhere; ends with 1 if one has failed or fallen silent."""
    from atoll.campaign import status as stage

    opened = open_campaign(campaign)
    shown = stage.watch(opened, every, as_json) if watch else stage.show(opened, as_json)
    # So that a script or a timer can act on it without reading the table.
    if shown is not None and shown.bad:
        sys.exit(1)


@atoll.command()
@CAMPAIGN
@click.option("--quarantine", metavar="K,K,...", default="", help="Leave these experts out, this time.")
@click.option("--trusted", metavar="KEY", multiple=True, help="Take only what this (PEM) signed; repeatable.")
@SETS
def assemble(campaign: str, quarantine: str, trusted: tuple[str, ...], sets: tuple[str, ...]) -> None:
    """Write ensemble/ from what is published, complete or partial."""
    from atoll.campaign.assemble import assemble as put_together

    left_out = _numbers(quarantine, "--quarantine") if quarantine else ()
    put_together(open_campaign(campaign, sets), left_out, trusted or None)


@atoll.command()
@CAMPAIGN
@click.argument("prompts", nargs=-1)
@click.option("--prompts", "listed", type=LOCAL, metavar="FILE", help="Further prompts, one a line.")
@click.option(
    "--out",
    type=LocalPath(),
    multiple=True,
    default=["samples.png"],
    help="A sheet (.png, .jpg, .webp), or a folder such as images/ for a PNG of each image; may be repeated.",
)
@click.option("--model", "name", type=MODEL, default="ensemble", help="What to sample.")
@drawing
@click.option("--count", type=click.IntRange(1, 4096), default=4, help="Pictures of each prompt.")
@click.option("--seed", type=int, help="Of noise and routing; by default sampling.seed.")
@click.option("--size", metavar="WxH", help="Width x height in pixels; by default sampling.size.")
@click.option("--device", help="cpu, cuda or cuda:N; by default the GPU, if there is one.")
@SETS
def sample(
    campaign: str, prompts: tuple[str, ...], listed: Path | None, sets: tuple[str, ...], **generation: Any
) -> None:
    """Sample pictures of PROMPTS, which are texts or class labels.

    Options are short for settings: --steps 20 for --set sampling.steps=20. Others take --set alone.
    """
    from atoll.base.safe_parse import read_text

    request = {option: generation.pop(option) for option in ("out", "name", "count", "device")}
    if listed is not None:
        prompts += tuple(filter(None, map(str.strip, read_text(listed).splitlines())))
    opened = open_campaign(campaign, with_options(sets, "sampling.", **generation))
    from atoll.campaign.sample import sample_campaign

    sample_campaign(opened, prompts, **request, **generation)


@atoll.command("compare")
@click.argument("campaigns", metavar="CAMPAIGN...", nargs=-1, required=True)
@click.option("--out", default=".", help="Where reports/seeds.json of several goes.")
@SETS
@sharded
def compare_(campaigns: tuple[str, ...], out: str, sets: tuple[str, ...], part: Any) -> None:
    """Measure monolith, student, and the ensemble under every strategy.

    Several CAMPAIGNs that differ in their seed are measured one by one, then held side by side: median and
    range of every number, and the mean with its 95 % interval.
    """
    opened = [open_campaign(campaign, sets) for campaign in campaigns]
    from atoll.measure.comparison import compare
    from atoll.measure.seeds import compare_seeds
    from atoll.store.store import Store

    if len(opened) == 1:
        compare(opened[0], part)
    else:
        compare_seeds(opened, Store.open(out, create=True), part)


@atoll.command()
@click.argument("campaign", metavar="[CAMPAIGN]", required=False)
@click.option("--model", help="ensemble, monolith, student or pretrain.  [default: ensemble]")
@click.option("--images", type=LOCAL, help="A folder of pictures, in a model's place.")
@click.option(
    "--reference",
    metavar="WHAT",
    help="Campaign, data set, folder of images or saved statistics; by default the campaign's own data.",
)
@click.option(
    "--split",
    type=click.Choice(["heldout", "test", "train", "all"]),
    help="Rows of the reference; by default held-out ones, under conditions test those.",
)
@click.option("--metrics", help="Names with commas between; by default evaluate.metrics of the campaign.")
@click.option("--extractor", help="Network whose features are compared; by default evaluate.extractor.")
@click.option("--samples", type=click.IntRange(min=2), help="Pictures to draw; by default evaluate.samples.")
@drawing
@click.option("--seed", type=int, help="Of noise and routing; by default the campaign's.")
@click.option("--out", default=".", help="Where reports/ goes without a campaign.")
@click.option("--list", "listed", is_flag=True, help="Only show the campaign's results so far.")
@SETS
@sharded
def evaluate(campaign: str | None, listed: bool, part: Any, **options: Any) -> None:
    """Measure one model of CAMPAIGN, or a folder of pictures, and write reports/evaluate/."""
    from atoll.measure import request

    if listed:
        if campaign is None:
            raise AtollError("--list needs a campaign", "name it")
        return say(request.show_all(open_campaign(campaign).store))
    arguments, sets = request.requested(options)
    opened = open_campaign(campaign, sets) if campaign is not None else None
    config = request.alone(sets) if opened is None else opened.config.evaluate
    request.check_metrics(config.metrics)
    from atoll.measure.points import evaluate as measure

    measure(opened, config, part=part, **arguments)


@atoll.command()
@CAMPAIGN
@SETS
@sharded
def diagnose(campaign: str, sets: tuple[str, ...], part: Any) -> None:
    """Why the ensemble is good or bad: router, experts by cluster and time, usage, copied pictures."""
    opened = open_campaign(campaign, sets)
    from atoll.measure.diagnosis import stage

    stage.diagnose(opened, part)


@atoll.command()
@CAMPAIGN
def report(campaign: str) -> None:
    """Write reports/index.html, one self-contained page, and reports/summary.json."""
    from atoll.report.page import write_report
    from atoll.store.store import Store

    say(f"wrote {write_report(Store.open(campaign))}")


@atoll.command()
@CAMPAIGN
@click.option("--to", type=LOCAL, required=True, help="Folder to write.")
@click.option("--model", type=click.Choice(["ensemble", *SINGLE]), default="ensemble", help="What to export.")
@click.option("--experts", metavar="K,K,...", help="Numbers of the experts; by default all assembled ones.")
@click.option(
    "--encoders",
    type=click.Choice(["auto", "copy", "name"]),
    default="auto",
    help="Take text encoder and VAE along, or only their names; auto goes by licence and size.",
)
@click.option("--lora", type=click.IntRange(1), metavar="RANK", help="The experts as LoRA files, alone.")
@click.option("--picture/--no-picture", default=True, help="Sample one for the model card.")
@click.option("--licence", metavar="NAME", help="Licence of the weights, for the model card.")
@click.option("--sign", "key", type=LOCAL, help="Private key (PEM) to sign the folder with, or 'sigstore'.")
@click.option("--push", metavar="OWNER/NAME", help="Upload the folder to the Hugging Face hub as well.")
@click.option("--private", is_flag=True, help="With --push: make a new repository private, not public.")
def export(campaign: str, to: Path, experts: str | None, private: bool, **options: Any) -> None:
    """Write a folder that AtollPipeline loads anywhere; monolith and student as diffusers' own pipeline."""
    from atoll.export.ensemble import ExportRequest
    from atoll.export.lora import export_model
    from atoll.export.push import check_account, push_folder

    request = ExportRequest(to, "auto" if experts is None else _numbers(experts, "--experts"), **options)
    if request.push:
        check_account(request.push)
    root = export_model(open_campaign(campaign), request)
    if request.push:
        say(f"pushed to {push_folder(root, request.push, private or None).repo_url}")


for group in (aesthetics, concepts, data, dashboard, serve):
    atoll.add_command(group)
data.add_command(filter_rows)


def main() -> None:
    """Entry point: user mistakes are one line and exit code 2."""
    ends_with_run()
    # Without `exit_process` a thread still inside torch may abort the process as Python shuts down.
    exit_process(run_command(lambda: atoll.main(standalone_mode=False)))


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise AtollError(f"{option} {text[:60]!r} is no list of numbers", f"write for example {option} 0,2")
    return [int(part) for part in parts]


def run_command(run: Callable[[], Any]) -> int:
    """Run a command and tell its errors; the exit code."""
    try:
        run()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except AtollError as error:
        # Of several ranks the first tells it, and who was only dragged along stays silent: torchrun ends the
        # others before their time is up.
        if not error.alone:
            time.sleep(ASIDE * ((os.environ.get("LOCAL_RANK", "0") != "0") + isinstance(error, PeerFailed)))
        code = int(getattr(error, "exit_code", 2))
        word = "interrupted" if code == INTERRUPTED else "error"
        click.echo(printable(f"{word}: {error}"[:MOST]), err=True)
        return code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        lacks = isinstance(error, click.MissingParameter) and error.ctx
        more = f" See {lacks.command_path} -h" if lacks else ""
        click.echo(printable(f"error: {' '.join(error.format_message().split())}{more}"[:MOST]), err=True)
        return 2
    # Packages around the core may be left out of an installation: what uses them says so in a line.
    except ModuleNotFoundError as error:
        name = error.name or ""
        fix = "install all of it" if name.startswith("atoll.") else f"pip install {name.partition('.')[0]}"
        click.echo(f"error: this Atoll is without {error.name}: {fix}", err=True)
        return 2
    # 130 is what a shell expects of a process that Ctrl-C ended.
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; run the same command again to go on", err=True)
        return 130
    except Exception as error:
        # The traceback goes to a file; where none can be written, it is printed.
        try:
            number, written = tempfile.mkstemp(".traceback", "atoll-")
            with open(number, "w", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        except OSError:
            traceback.print_exc()
            written = "above"
        click.echo(printable(f"error: {_unexpected(error)} (traceback: {written})"), err=True)
        return 1
    return 0


def _unexpected(error: Exception) -> str:
    reason = f"{type(error).__name__}: {first_line(error)[:300]}"
    if "MemoryError" in reason or "can't allocate memory" in reason:  # Python's, torch's of a GPU and a CPU
        return f"{reason}: train.parallel.micro_batch, sampling.residency.experts or fewer images take less"
    if isinstance(error, RecursionError):
        return "something is nested too deeply: look at the last file that was read"
    if isinstance(error, OSError):
        return f"{reason}: check the path, its permissions and the free space"
    return f"{reason}: please report it with the traceback"
