"""Students of 1, 2, 4 and 8 steps against one of many and against the ensemble, each at 1 to 25 steps.

    python benchmarks/steps.py FOLDER [--steps 1 2 4 8] [--samples N] [--teacher-steps N] [--share S]
    python benchmarks/steps.py --quick

FOLDER holds the parquet files of `examples/emoji/prepare.py`, or some of them: each is a style, and the
cluster of an expert; what images are conditioned on is the category. Experts and router are trained, then a
student that learns the guided flow of the routed ensemble, and from it students of few steps, side by side,
`--jobs` at a time. All are drawn without guidance, the ensemble with it. Beside the distance stands how far a
picture lies from the ensemble's of 25 steps from the same noise, in levels of 255. `--quick` draws its own
images, and its distances mean nothing.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from emoji import SETTINGS, options_of, partitioned, side_by_side, words_of
from harness import Row, finish, row, run_command

from atoll.campaign.folder import Campaign
from atoll.campaign.runs import Run, RunPlan, runs_of
from atoll.campaign.settings.launch import merged
from atoll.measure.setup import CommonSetup

MANY, GUIDANCE, ROUTING = (SETTINGS["sampling"][name] for name in ("steps", "guidance", "routing"))
SAME = 256
"""Pictures that are held against the ensemble's from the same noise."""
CHANGES = {"monolith": False, "train": {"warmup": 6400}}
STUDENT: dict[str, Any] = {
    "teacher": "routed",
    "routing": ROUTING,
    "guidance": GUIDANCE,
    "batch_share": 4.0,
    "step_share": 0.1,
    "stock": False,
}


def main() -> None:
    """Train what all share, then the students side by side, and measure each at several steps."""
    words = words_of(__doc__, "drawn images and a few optimizer steps", "processes")
    words.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8])
    words.add_argument("--share", type=float, default=STUDENT["step_share"], help="student's steps")
    words.add_argument("--teacher-steps", type=int, default=24, help="of the paths that few steps follow")
    words.add_argument("--device", help="cpu or cuda; by default the GPU, if there is one")
    options = options_of(words, work)
    if options.quick:
        options.steps, options.jobs, options.samples, options.share = options.steps[::2], 2, 960, 1.0
        options.teacher_steps = 8
    with tempfile.TemporaryDirectory() as scratch:
        lines, metric = measured(Path(scratch), options)
    notes = {"metric": metric, "settings": merged(SETTINGS, CHANGES), "student": STUDENT}
    finish("steps", lines, options, notes)


def measured(folder: Path, options: Any) -> tuple[list[Row], str]:
    """The rows of the result, and the judge's name."""
    few = {"train": {"batch": 16}, "compare": {"samples": 40, "fit_rows": 100}} if options.quick else {}
    changes = merged(merged(CHANGES, {"budget": {"samples": options.samples}}), few)
    base, settings = partitioned(folder, options.folder, changes)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    with ThreadPoolExecutor(options.jobs) as pool:
        each = partial(side_by_side, __file__, pool, CUDA_DEVICE_MAX_CONNECTIONS="1", **hidden)
        each([{"folder": str(base), "train": [*run]} for run in runs_of(Campaign.open(base).config)])
        run_command("assemble", base)

        # A student of few steps goes on from that of many, which is also what it is held against.
        counts = [*options.steps, MANY]
        many, init = {**STUDENT, "step_share": options.share}, str(folder / "many/student/expert")
        many |= {"teacher_steps": options.teacher_steps, **({"batch_share": 1.0} if options.quick else {})}
        (first,) = each([{"folder": str(folder / "many"), "base": str(base), "student": many, "at": counts}])
        calls: list[dict[str, Any]] = [{"folder": str(base), "at": counts}]
        for steps in options.steps:
            few = {**many, "steps": steps, "network": {"init": init}}
            to = str(folder / f"few {steps}")
            calls.append({"folder": to, "base": str(base), "student": few, "at": [steps]})
        ensemble, *students = each(calls)
    lines, best = list[Row](), ensemble[str(MANY)]["distance"]
    sides = {"ensemble": ensemble, f"student of {MANY}": first}
    sides |= {f"student of {n}": found for n, found in zip(options.steps, students, strict=True)}
    for name, found in sides.items():
        for steps, values in found.items():
            case = f"{name} at {steps}"
            lines.append(row(case, "distance", values["distance"]))
            lines.append(row(case, "distance / the ensemble's", values["distance"] / best))
            if name != "ensemble" or int(steps) != MANY:
                lines.append(row(case, "same noise, apart", values["apart"], "/255"))
            if "flops" in values:
                lines.append(row(case, "FLOPs / monolith's", values["flops"]))
    return lines, settings["compare"]["extractor"]


# Processes of their own.


def work(
    folder: str,
    base: str | None = None,
    student: Mapping[str, Any] | None = None,
    train: Sequence[Any] = (),
    at: Sequence[int] = (),
) -> dict[int, dict[str, float]]:
    """What a child does: train a run, or a student on the base's experts, and measure it at these steps."""
    if base is not None:
        # Linked, not copied: nothing writes into a file that is there.
        own = shutil.ignore_patterns("campaign.yaml", "reports")
        shutil.copytree(base, folder, copy_function=os.link, ignore=own)
        settings = yaml.safe_load((Path(base) / "campaign.yaml").read_text())
        Path(folder, "campaign.yaml").write_text(yaml.safe_dump({**settings, "student": student}))
        run_command("partition", folder, alone=False)
        train = ["student", None]
    if train:
        number = [] if train[1] is None else ["--expert", str(train[1])]
        run_command("train", train[0], folder, *number, alone=False)
    found, name = dict[int, dict[str, float]](), ROUTING if base is None else "student"
    if not at:
        return found
    setup = CommonSetup(Campaign.open(folder))
    setup.load()
    best = pictures(setup, ROUTING, MANY)
    for steps in at:
        levels = (pictures(setup, name, steps) - best).square().mean().sqrt() * 127.5
        distance = setup.row(name, setup.drawn(name))[0].distance
        assert distance is not None
        found[steps] = {"distance": distance, "apart": float(levels)}
        if base is not None:
            plans = (RunPlan.read(setup.campaign.store, Run(role).plan) for role in ("student", "monolith"))
            spent, whole = (plan.train_flops for plan in plans)
            found[steps]["flops"] = spent / whole
    return found


def pictures(setup: CommonSetup, name: str, steps: int) -> torch.Tensor:
    """Pictures of the first conditions in so many steps, which the setup measures with from then on."""
    setup.override = replace(setup.override, generation=setup.override.generation.with_(steps=steps))
    drawn = setup.drawn(name, samples=min(SAME, setup.config.samples))
    of = drawn.conditions.of_model
    batches = drawn.candidate.model.generate(of, drawn.generation, len(drawn), batch=SAME)
    return torch.cat([batch.latents.float().cpu().clamp(-1, 1) for batch in batches])


if __name__ == "__main__":
    main()
