"""Where and how training runs are launched: for the whole campaign, and for single runs."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError

Target = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""Name of a launcher, a module of `atoll.launch`: `local`, `slurm`, `ray`, `sky`."""
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\r\n]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SlurmConfig(Config):
    """Slurm options; by default the cluster's own."""

    partition: Line | None = None
    """Slurm partition, or several separated by commas."""
    constraint: Line | None = None
    """Features that a node must have."""
    account: Line | None = None
    """Account to charge."""
    qos: Line | None = None
    """Quality of service."""
    gpu_type: Line | None = None
    """GPU type, as in `--gres=gpu:TYPE:N`."""
    hours: float | None = Field(default=None, gt=0)
    """Time limit in hours. A job that reaches it saves a checkpoint and queues again."""
    warn: int = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit, at most half of it, at which a run saves a checkpoint and exits."""
    lines: tuple[Line, ...] = ()
    """More options of sbatch, such as `--exclude=node7`."""
    setup: tuple[Line, ...] = ()
    """Shell lines before the run, such as `module load cuda` or `source venv/bin/activate`."""
    output: Line | None = None
    """Folder for job logs; by default `launch/` in the campaign, or here if that is a URL."""


class RayConfig(Config):
    """Ray options; cores, GPUs and memory are asked for as elsewhere."""

    address: Line | None = None
    """Cluster as `HOST:PORT`; `ray start` takes port 6379. Without it `RAY_ADDRESS`, else the cluster that
    this machine is in."""
    resources: dict[Line, Annotated[float, Field(gt=0)]] = {}
    """Custom resources that a node must have, such as `{island_a: 1}`."""


class SkyConfig(Config):
    """SkyPilot options; by default SkyPilot chooses."""

    accelerators: Line | None = None
    """GPUs of a node, such as `H100:8`."""
    cloud: Line | None = None
    """Cloud, such as `aws`, `gcp` or `kubernetes`."""
    region: Line | None = None
    """Region of the cloud."""
    use_spot: bool = True
    """Use spot instances; a job that loses its node resumes on another."""
    image: Line | None = None
    """Machine image, such as `docker:NAME`."""
    disk: int | None = Field(default=None, ge=1)
    """Disk size in GB."""
    workdir: Line | None = None
    """Local folder of code to copy to the node; it is the working directory there."""
    secrets: tuple[Variable, ...] = ()
    """Environment variables to pass on to the run, such as credentials of the store."""
    setup: tuple[Line, ...] | None = None
    """Shell lines that install Atoll on a new node. By default `pip install .` in `workdir`, or without that
    the installation that launches, sent as a wheel."""


class Placement(Config):
    """Launcher and resources of a run. The batch size does not depend on them."""

    on: Target | None = None
    """Launcher: `local`, `slurm`, `ray`, `sky` or your own; by default that of `--on`."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs per node, with one process each. By default one if this machine has any; none on Slurm and Ray."""
    processes: int | None = Field(default=None, ge=1)
    """Processes per node, for tests on CPUs; by default one per GPU."""
    nodes: int = Field(default=1, ge=1)
    """Number of nodes."""
    cpus: int | None = Field(default=None, ge=1)
    """CPU cores per node; by default `train.threads` for each process."""
    memory_gb: float | None = Field(default=None, gt=0, le=1e6)
    """Main memory per node in GB; by default an estimate, or off this machine the launcher's default."""
    env: dict[Variable, Line] = {}
    """Environment variables of the run."""
    python: Line | None = None
    """Python interpreter with Atoll. By default the current one; `python` on SkyPilot nodes."""
    slurm: SlurmConfig = SlurmConfig()
    """Options for Slurm."""
    ray: RayConfig = RayConfig()
    """Options for Ray."""
    sky: SkyConfig = SkyConfig()
    """Options for SkyPilot."""
    options: dict[Variable, Line] = {}
    """Options for a launcher of your own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Two processes on one GPU would each take the memory that the plan counts for one.
        if self.gpus and self.processes and self.gpus != self.processes:
            fix = "leave processes out: there is one for each GPU"
            raise ConfigError(f"launch: {self.processes} processes for {self.gpus} GPUs", fix)
        return self


class DataPlacement(Placement):
    """Launcher and resources for making the data set."""

    workers: int = Field(default=0, ge=0, le=10_000)
    """Jobs, or tasks of a Slurm array, that make the data set together. 0 makes it on the launching
    machine."""


class LaunchConfig(Placement):
    """How runs are launched: defaults, and overrides for single runs."""

    data: DataPlacement = DataPlacement()
    """Overrides for making and partitioning the data set."""
    islands: dict[int, Placement] = {}
    """Overrides by island number."""
    pretrain: Placement = Placement()
    """Overrides for shared pretraining."""
    router: Placement = Placement()
    """Overrides for the router."""
    monolith: Placement = Placement()
    """Overrides for the monolith."""
    student: Placement = Placement()
    """Overrides for the student."""
    assemble: Placement = Placement()
    """Overrides for assembling, which is one process without a GPU."""

    def of(self, role: str, island: int | None = None) -> Placement:
        """Placement of a run, `data` or `assemble`: what it says itself, over what the campaign says."""
        # Data and assembly are one process on one node each, whatever the runs are spread over.
        spread = {"gpus", "processes", "nodes"} if role in ("assemble", "data") else set[str]()
        shared = self.model_dump(exclude_unset=True, include=set(Placement.model_fields) - spread)
        if spread:
            shared.get("sky", {}).pop("accelerators", None)
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
