"""Where and how training runs are launched: for the whole campaign, and for single runs."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError

Target = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""Name of a launcher, a module of `atoll.launch`: `local`, `slurm`, `sky`."""
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\r\n]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SlurmConfig(Config):
    """What only Slurm asks for; what is not set is the cluster's default."""

    partition: Line | None = None
    """Partition, or several separated by commas."""
    constraint: Line | None = None
    """Features that a node must have."""
    account: Line | None = None
    """Account that pays."""
    qos: Line | None = None
    """Quality of service."""
    gpu_type: Line | None = None
    """Type of the GPUs, as in `--gres=gpu:TYPE:N`."""
    hours: float | None = Field(default=None, gt=0)
    """Time limit, in hours; a job that reaches it saves and queues again."""
    warn: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which a run is told to save and leave."""
    lines: tuple[Line, ...] = ()
    """Further options of sbatch, such as `--exclude=node7`."""
    setup: tuple[Line, ...] = ()
    """Shell lines before the run, such as `module load cuda` or `source venv/bin/activate`."""
    output: Line | None = None
    """Folder for the output of jobs; `launch/` in the campaign, or here if that is at a URL."""


class SkyConfig(Config):
    """What only SkyPilot asks for; what is not set is SkyPilot's choice."""

    accelerators: Line | None = None
    """GPUs of a node, such as `H100:8`."""
    cloud: Line | None = None
    """Cloud, such as `aws`, `gcp` or `kubernetes`."""
    region: Line | None = None
    """Region of the cloud."""
    use_spot: bool = True
    """Whether spot nodes are used; a job that loses its node goes on at another."""
    image: Line | None = None
    """Image of the machine, such as `docker:NAME`."""
    disk: int | None = Field(default=None, ge=1)
    """Size of the disk, in GB."""
    workdir: Line | None = None
    """Local folder with code that is copied to the node and is the working directory there."""
    secrets: tuple[Variable, ...] = ()
    """Variables of the launching shell that the run gets too, such as the store's keys."""
    setup: tuple[Line, ...] | None = None
    """Shell lines that install Atoll on a fresh node; by default `pip install .` in `workdir`."""


class Placement(Config):
    """Target and resources of a run. The batch does not depend on them."""

    on: Target | None = None
    """Where it trains; by default what `--on` says."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs per node, a process each. Not set: one if this machine has any, none of Slurm."""
    processes: int | None = Field(default=None, ge=1)
    """Processes per node; by default one for each GPU. To be set for tests on CPUs."""
    nodes: int = Field(default=1, ge=1)
    """Nodes."""
    cpus: int | None = Field(default=None, ge=1)
    """CPU cores per node; by default the run's threads for each process."""
    memory_gb: float | None = Field(default=None, gt=0, le=1e6)
    """Main memory per node, in GB; by default an estimate here, and the target's default elsewhere."""
    env: dict[Variable, Line] = {}
    """Environment variables of the run."""
    python: Line | None = None
    """Python that has Atoll on the target; by default this one, `python` on SkyPilot's nodes."""
    slurm: SlurmConfig = SlurmConfig()
    """For Slurm."""
    sky: SkyConfig = SkyConfig()
    """For SkyPilot."""
    options: dict[Variable, Line] = {}
    """For a launcher of your own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Two processes on one GPU would each take the memory that the plan counts for one.
        if self.gpus and self.processes and self.gpus != self.processes:
            fix = "leave processes out: there is one for each GPU"
            raise ConfigError(f"launch: {self.processes} processes for {self.gpus} GPUs", fix)
        return self


class DataPlacement(Placement):
    """Where the data set is made."""

    workers: int = Field(default=0, ge=0, le=10_000)
    """Jobs, or tasks of a Slurm array, that make the data set together; with 0 the launching machine does."""


class LaunchConfig(Placement):
    """How runs are launched: defaults, and what single runs do differently. May be changed at any time."""

    data: DataPlacement = DataPlacement()
    """Overrides of the jobs that make the data set and cut it."""
    islands: dict[int, Placement] = {}
    """Overrides by island number."""
    pretrain: Placement = Placement()
    """Overrides of shared pretraining."""
    router: Placement = Placement()
    """Overrides of the router."""
    monolith: Placement = Placement()
    """Overrides of the monolith."""
    student: Placement = Placement()
    """Overrides of the student."""
    assemble: Placement = Placement()
    """Overrides of the assembly, which is one process and asks for no GPU."""

    def of(self, role: str, island: int | None = None) -> Placement:
        """Placement of a run, `data` or `assemble`: what it says itself, over what the campaign says."""
        # Data and assembly are one process on one node each, whatever the runs are spread over.
        spread = {"gpus", "processes", "nodes"} if role in ("assemble", "data") else set[str]()
        shared = self.model_dump(exclude_unset=True, include=set(Placement.model_fields) - spread)
        own = self._own(role, island).model_dump(exclude_unset=True, exclude={"workers"})
        return Placement.parse(merged(shared, own), "launch")

    def target(self, role: str, island: int | None, on: Target | None) -> Target:
        """Where a run trains: what it says itself, else `on`, else what the campaign says, else here."""
        return self._own(role, island).on or on or self.on or "local"

    def _own(self, role: str, island: int | None) -> Placement:
        # A role without settings of its own trains where all do.
        own: Placement = getattr(self, role, Placement())
        return own if island is None else self.islands.get(island, Placement())


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested plain data with some values replaced; groups are merged."""
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result
