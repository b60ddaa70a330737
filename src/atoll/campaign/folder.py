"""A campaign on disk: opening it, freezing its settings, finding its parts."""

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from html import escape
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field

from atoll.base.config import commented, differences, is_loose, set_value, value_at
from atoll.base.console import say
from atoll.base.errors import AtollError, ConfigError, DataError, PartitionError, StoreError
from atoll.base.format import File, code_version
from atoll.base.safe_parse import expanded, read_yaml
from atoll.campaign.runs import Run, RunPlan, experts_of, runs_of
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.campaign.settings.launch import merged
from atoll.data.formats import PartitionFile
from atoll.encoders.registry import EXTRACTORS, JOIN
from atoll.model.checkpoint import Checkpoint
from atoll.store.location import is_url, local_path, resolve
from atoll.store.store import Absent, Conflict, Store

if TYPE_CHECKING:  # they take a second to import, which looking at a campaign does without
    from atoll.data.dataset import DataSet
    from atoll.data.partition import Partition

YAML, FROZEN, STUDENT = "campaign.yaml", "campaign.json", "student/student.json"
_JUDGES = tuple(f"{stage}.extractor" for stage in ("compare", "evaluate", "diagnose"))
NETWORKS = ("data.vae", "data.text_encoder", "data.captioner.model", "partition.encoder", *_JUDGES)
"""Settings that name networks, which may be folders."""


class Frozen(File):
    """`campaign.json`: the settings, fixed when the campaign started."""

    FORMAT, PLACE, ERROR = "atoll/campaign", FROZEN, ConfigError
    REMEDY = "use the version of Atoll that made the campaign, or start a new one"

    code: str = Field(description="Version of Atoll.")
    overrides: list[str] = Field(default=[], description="`--set` assignments that `campaign.yaml` lacks.")
    config: dict[str, Any] = Field(description="Every setting, resolved.")


class FrozenStudent(File):
    """`student.json`: the student's settings, fixed when it was added."""

    FORMAT, PLACE, ERROR = "atoll/student", STUDENT, ConfigError
    REMEDY = Frozen.REMEDY

    code: str = Field(description="Version of Atoll.")
    overrides: list[str] = Field(default=[], description="`--set` assignments of the student's settings.")
    student: dict[str, Any] = Field(description="The settings of the group `student`.")


@dataclass(frozen=True, repr=False)
class Campaign:
    """A campaign folder and its settings."""

    store: Store
    config: CampaignConfig  # the frozen settings once there is a `campaign.json`
    overrides: tuple[str, ...] = ()  # `a.b=value` assignments that `campaign.yaml` does not hold

    @classmethod
    def open(cls, folder: str | Path, sets: Sequence[str] = ()) -> "Campaign":
        """Open a folder or URL with a `campaign.yaml` to start from, or a `campaign.json` to go on from.

        `sets` are `a.b=value` overrides; after the campaign is frozen they must agree with it (else it is a
        `ConfigError`), but for what decides no weights: sampling, tracking and the like.
        """
        store = Store.open(folder)
        frozen = Frozen.read(store, FROZEN) if store.exists(FROZEN) else None
        if store.exists(YAML):
            tree = read_yaml(store.get(YAML), store.name(YAML))
            if not isinstance(tree, dict):
                raise ConfigError(f"{store.name(YAML)} holds no settings", "write 'key: value' lines")
            if store.local is not None and isinstance(keys := tree.get("trusted"), list):
                tree["trusted"] = [placed(str(key), store.local) for key in keys]
            for key in NETWORKS:
                if store.local is not None and isinstance(named := value_at(tree, key), str | list):
                    group, _, name = key.rpartition(".")
                    known = value_at(frozen.config, key) if frozen else None
                    value_at(tree, group)[name] = placed(named, store.local, known)
        elif frozen is not None:
            tree = deepcopy(frozen.config)
        elif store.exists("model_index.json"):
            fix = "load it in Python with AtollPipeline.from_pretrained, or give the campaign's folder"
            raise StoreError(f"{store.location} is a pipeline, not a campaign", fix)
        else:
            raise StoreError(f"{store.location} is not a campaign (no {YAML})", "make one with 'atoll new'")
        # Without it in campaign.yaml a later command would plan, launch and report as if there were none.
        student = FrozenStudent.read(store, STUDENT) if store.exists(STUDENT) else None
        if student is not None and not tree.get("student"):
            tree["student"] = deepcopy(student.student)  # it was added after the start
        # What the campaign was started with counts for every later command, without repeating it.
        started = [assignment for file in (frozen, student) if file for assignment in file.overrides]
        added = [_from_shell(assignment) for assignment in sets]
        for assignment in started:
            set_value(tree, assignment)
        before = deepcopy(tree)
        for assignment in added:
            set_value(tree, assignment)
        try:
            config = CampaignConfig.parse(tree, store.name(YAML))
        except ConfigError:
            # Blame --set only where the file by itself is right: read it again, now that time does not count.
            CampaignConfig.parse(before, store.name(YAML))
            CampaignConfig.parse(tree, "--set")
            raise
        if frozen is not None:
            _must_agree(frozen.config, config.frozen(), store)
        if student is not None:
            wanted = config.model_dump(mode="json", include={"student"})
            _must_agree({"student": student.student}, wanted, store)
        return cls(store, config, (*started, *added))

    def __repr__(self) -> str:
        return f"Campaign({', '.join(f'{name} {value}' for name, value in self._summary.items())})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in self._summary.items()
        )
        return f"<table>{rows}</table>"

    @property
    def _summary(self) -> dict[str, Any]:
        k = self.config.partition.k
        trained = sum(self.store.exists(f"islands/{number}/expert/card.json") for number in range(k))
        stages = {
            "assembled": self.store.exists("ensemble/ensemble.json"),
            f"{trained} of {k} experts trained": trained,
            "partitioned": self.is_partitioned,
            "data set made": self.has_dataset(),
        }
        stage = next((words for words, reached in stages.items() if reached), "new")
        return {"folder": self.store.location, "condition": self.config.condition, "K": k, "stage": stage}

    def freeze(self) -> None:
        """Fix the settings for good, in `campaign.json`; nothing to do if they are."""
        config = self.config.frozen()
        # Those of the student's settings go with its folder: another one may be asked for without them.
        fixed = [a for a in self.overrides if not sets_loose(a) and not a.startswith("student")]
        frozen = Frozen(code=code_version(), overrides=fixed, config=config)
        try:
            # Created, and not put: of two processes that start at once one wins, and the other has to agree.
            self.store.create_json(FROZEN, frozen.to_json())
        except Conflict:
            _must_agree(Frozen.read(self.store, FROZEN).config, config, self.store)

    def freeze_student(self) -> None:
        """Fix the student's settings for good, in `student/student.json`."""
        assert self.config.student is not None
        settings = self.config.student.model_dump(mode="json")
        fixed = [a for a in self.overrides if not sets_loose(a) and a.startswith("student")]
        frozen = FrozenStudent(code=code_version(), overrides=fixed, student=settings)
        with suppress(Conflict):  # somebody did the same at the same time
            self.store.create_json(STUDENT, frozen.to_json())

    @property
    def is_partitioned(self) -> bool:
        """Whether the data set is cut."""
        return self.store.exists(PartitionFile.PLACE)

    def dataset(self) -> "DataSet":
        """The campaign's data set; `DataError` if there is none."""
        from atoll.data.dataset import DataSet

        return DataSet.open(self.data_store())

    def data_store(self) -> Store:
        """Where the campaign's data set is, or is being made; `DataError` if there is nothing."""
        path = self.config.data_path(self.store.location)
        try:
            return Store.open(path)
        except Absent:
            raise DataError(f"there is no data set at {path}", "make it: atoll data ingest") from None

    def clustered(self) -> "tuple[DataSet, Partition]":
        """Data set and partition; `PartitionError` if they do not belong together."""
        import numpy as np

        from atoll.data import partition as partitions

        if not self.is_partitioned:
            raise PartitionError(f"{self.store.location} has no partition", "run 'atoll partition' first")
        dataset, partition = self.dataset(), partitions.load(self.store)
        if partition.about.data != dataset.id_hash:
            what = f"{dataset.store.location} is not the data set of this campaign"
            raise PartitionError(what, "put the right one back")
        # Where the weights are others by now, so are the sizes; what that means is for the stages to say.
        sizes = np.bincount(partition.clusters[dataset.split("train")], minlength=partition.k)
        if partition.weighs_as(dataset) and sizes.tolist() != partition.sizes:
            what = f"{dataset.store.location} was split again after the partition of this campaign"
            raise PartitionError(what, "start a new campaign with it")
        return dataset, partition

    def has_dataset(self, column: str = "") -> bool:
        """Whether there is a finished data set, with a column if one is named."""
        with suppress(DataError):
            return self.data_store().exists(f"columns/{column}/column.json" if column else "manifest.json")
        return False


def new(folder: str | Path, recipe: str, sets: Sequence[str], origin: str | None = None) -> str:
    """Write a `campaign.yaml` from a recipe's text with overrides applied, perhaps as one that goes on from
    `origin`, a finished campaign; its path or URL."""
    tree, going = read_yaml(recipe, "the recipe"), origin and Campaign.open(origin)
    tree = going_on(going, tree) if going else tree
    for assignment in sets:
        set_value(tree, _from_shell(assignment))
    config, own = CampaignConfig.parse(tree, "the new campaign"), local_path(folder)
    if going:
        tree["network"].setdefault("interpolation_scale", interpolation(going, config.data.ingest.size))
    # Refuse sources that are not there, and a campaign or data set that would be ingested with its images.
    named = config.source(str(own or ""))
    for source in [named] if isinstance(named, str) else [each.source for each in (named or {}).values()]:
        if source == "glyphs" or (path := local_path(source)) is None:
            continue
        if not path.exists() and not {*"*?[{"} & {*path.name}:  # of files by a pattern the ingest tells
            fix = "set data.source to a folder of images, a parquet file or glyphs"
            raise ConfigError(f"there is no {path}", fix)
        for place in (own, local_path(config.data_path(str(own or folder)))):
            if place is not None and path.is_dir() and place.resolve().is_relative_to(path.resolve()):
                raise ConfigError(f"{place} lies in the folder of images", "choose a folder outside it")
    if config.origin:
        finished_origin(config, str(own or folder))
    store, above, lines = Store.open(folder, create=True), dict[str, list[str]](), list[str]()
    for line in recipe.splitlines():  # what it says of itself, and of a group
        lines.append(line)
        if not line.startswith("#"):
            above[line.partition(":")[0]], lines = lines[:-1], []
    for line in commented(CampaignConfig, tree):
        lines += [*above.get(line.partition(":")[0], ()), line]
    text = "\n".join((*lines, ""))
    try:
        if store.exists(YAML):
            raise Conflict(YAML)
        store.create(YAML, text.encode())
    except Conflict:
        # A script that runs again asks for what is there.
        if read_yaml(store.get(YAML), store.name(YAML)) != tree:
            what = f"{store.name(YAML)} exists already, with other settings"
            raise ConfigError(what, "go on with it, edit it, or choose another folder") from None
    for line in config.large_states():
        say(line)
    return store.name(YAML)


def going_on(origin: Campaign, recipe: dict[str, Any]) -> dict[str, Any]:
    """Settings of a campaign that goes on from another by a recipe: what that does not say is as there."""
    config, location = origin.config, resolve("", origin.store.location)
    tree = merged({"network": {}}, config.model_dump(mode="json", exclude_unset=True))
    # The islands tell what duplicates were; the scale follows the new size; no other weights are wanted.
    for group, name in (("data", "dedupe"), ("network", "init"), ("network", "interpolation_scale")):
        tree[group].pop(name, None)
    # What follows the times of the experts follows the recipe's.
    time = config.objective.time
    for group, name, same in (
        ("router", "time", config.router.time == time),
        ("sampling", "shift", config.sampling.shift == time.shift),
    ):
        tree.get(group, {}).pop(name, None) if same else None
    data = config.data.model_copy(update={"source": config.source(location)})
    tree["data"] |= data.model_dump(mode="json", include={"source"}, exclude_unset=True)
    if config.student is not None:
        tree["student"]["start"] = "scratch"  # its weights are in `origin`
    tree.setdefault("budget", {})["samples"] = max(1, config.budget.samples // 10)
    return {"origin": location, **merged(tree, {**recipe, "origin": location})}


def finished_origin(config: CampaignConfig, here: str) -> Campaign:
    """The campaign that settings at `here` go on from; `ConfigError` if it is not finished, or another."""
    try:
        origin = Campaign.open(resolve(here, config.origin or ""))
    except AtollError as error:
        raise ConfigError(f"origin: {error.what}", "name a finished campaign: atoll new --from") from None
    location, old = origin.store.location, origin.config
    if any(old.island(number)[0].lora for number in range(old.partition.k)):
        raise ConfigError(f"origin: {location} has LoRA experts", "go on from a campaign of whole experts")
    for name, mine, theirs in (
        ("partition.k", config.partition.k, old.partition.k),
        ("data.source", config.source(here), old.source(location)),
    ):
        if None not in (mine, theirs) and mine != theirs:
            raise ConfigError(f"{name} is {mine!r}, but {location} has {theirs!r}", "put it back")
    drawn = config.student is not None and config.student.origin()[0] != "scratch"
    runs = [run for run in runs_of(config) if run.role != "student" or not drawn]
    if missing := [run.name for run in runs if not run.published(origin.store)]:
        fix = "finish it: atoll launch; or ask for no such run, as by monolith=false, student=null"
        raise ConfigError(f"origin: {location} has not finished {', '.join(missing)}", fix)
    if Run("student") in runs:
        single_network(origin, "student")
    return origin


def single_network(campaign: Campaign, name: str) -> Checkpoint:
    """What a run on all data published; `ConfigError` for a student whose teachers no longer count."""
    network, config = Checkpoint.of_run(campaign.store, name), campaign.config
    taught, lost = network.card.provenance.get("student", {}).get("teachers", {}), list[str]()
    for run in (*experts_of(config.partition.k), Run("router")) if taught else ():
        teacher = Checkpoint(campaign.store, run.network)
        replaced = teacher.published and teacher.card.weights_sha256 != taught.get(run.folder)
        if run.folder in taught and (replaced or run.expert in config.quarantine):
            lost.append(run.name)
    if lost:
        what = f"{name} in {campaign.store.location} learned from {', '.join(lost)}"
        fix = f"remove {name}/run, {name}/init and {name}/expert, then train it anew: atoll train {name}"
        raise ConfigError(f"{what}, in quarantine or replaced since", fix)
    return network


def interpolation(origin: Campaign, size: int) -> float | None:
    """The scale of positions at `data.ingest.size` that keeps the range that another campaign learned."""
    network = origin.config.network
    if network.arguments.keys() & {"sample_size", "pos_embed_max_size", "interpolation_scale"}:
        return None  # positions are counted on the size that these name
    # PixArt's class has a scale of its own: 2 at 1024 px.
    latents = RunPlan.read(origin.store, Run("expert", 0).plan).shape.size
    scale = network.interpolation_scale or (max(latents // 64, 1) if network.family == "pixart" else 1)
    return scale * size / origin.config.data.ingest.size


def settings(folder: str | None) -> str:
    """All settings of a campaign as YAML, each with what it means; the defaults without one."""
    defaults = CampaignConfig.parse({"data": {"path": "data"}}, "the defaults")
    config = Campaign.open(folder).config if folder else defaults
    return "\n".join(commented(CampaignConfig, config.model_dump(mode="json")))


def sets_loose(assignment: str) -> bool:
    """Whether it sets what may change at any time, so that it holds for the command that gives it only."""
    return is_loose(CampaignConfig, assignment.partition("=")[0].strip().split("."))


def _from_shell(assignment: str) -> str:
    """The assignment with an absolute path: on the command line a path means what it means to the shell."""
    key, _, text = assignment.partition("=")
    path: str | list[str] = text
    if key.strip() == "trusted" and isinstance(keys := read_yaml(text, f"--set {key}"), list):
        path = [placed(str(name), Path.cwd()) for name in keys]
    elif key.strip().endswith(("origin", "network.init", *NETWORKS)):
        path = placed(read_yaml(text, f"--set {key}") if text.lstrip().startswith("[") else text, Path.cwd())
    elif text not in ("glyphs", "null", "") and not is_url(text):
        # Of several sources, `{NAME: {source: ...}}`, each is named by itself; a pattern has braces too.
        several = text.lstrip().startswith("{") and ":" in text
        one_of_several = key.startswith("data.source.") and key.endswith(".source")
        is_path = (key in ("data.path", "data.source") or one_of_several) and not several
        path = str(local_path(text)) if is_path else text
    written = yaml.safe_dump(path, width=10**6, default_flow_style=True).splitlines()[0]
    return assignment if path == text else f"{key}={written}"


def placed(named: str | list[Any], beside: Path, known: Any = None) -> str:
    """Names of networks (one, `A + B` or a list) or of a key, those that are there by absolute paths.

    Or as they are `known` since the start, where that ends alike: the campaign may have been moved.
    """
    names = named.split(JOIN) if isinstance(named, str) else [str(name) for name in named]
    tail = tuple(part for part in Path(JOIN.join(names)).parts if part != "..")
    if isinstance(known, str) and Path(known).parts[-len(tail) :] == tail:
        return known
    # What these mean, whatever folders there are.
    words = {"", "none", "null", "scratch", "minilm", *EXTRACTORS}
    there = {n: beside / expanded(n) for n in names if n not in words and exists(beside / expanded(n))}
    return JOIN.join(str(local_path(there[name])) if name in there else name for name in names)


def _must_agree(frozen: dict[str, Any], wanted: dict[str, Any], store: Store) -> None:
    # Equal trees are the rule, and comparing them costs nothing; to name a difference takes a walk.
    for key in [] if frozen == wanted else differences(CampaignConfig, frozen, wanted):
        values = f"{value_at(wanted, key)!r}, but {store.location} was started with {value_at(frozen, key)!r}"
        anew = "remove student/" if key.startswith("student.") else "start a new campaign with 'atoll new'"
        fix = f"put it back, or {anew}"
        if key == "budget.samples":
            # Decay of the rate and half-life of the average are shares of a run: a longer one is another.
            data = resolve(store.location, frozen["data"]["path"])
            fix = f"runs cannot be longer; reuse the data: atoll new DIR --recipe NAME --set data.path={data}"
        raise ConfigError(f"{key} is {values}", fix)
