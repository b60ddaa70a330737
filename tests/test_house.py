"""The rules of the house that no linter knows: docs say them, these tests hold them."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "atoll"
FILES = sorted(SOURCE.rglob("*.py"))
CHILD = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# In two parts, so that this file does not name what it looks for.
HOSTS = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "registry.npm" + "js",
    "deb." + "debian",
    "download.py" + "torch",
]


# The packages that lie around the core, with their commands.
AROUND = {
    "measure": ("measure/",),
    "report": ("report/",),
    "export": ("export/",),
    "serve": ("serve/", "cli/serve.py"),
    "curate": ("curate/", "cli/aesthetics.py", "cli/concepts.py"),
}
CEILINGS: dict[str, float] = {
    # Lines. What was signed for: core 18,300, measure 3,700, report 1,450, export 1,430, serve 1,330,
    # curate 2,550, tests 20,000, benchmarks 3,600.
    "core": 25_039,
    "measure": 4_055,
    "report": 1_689,
    "export": 1_745,
    "serve": 1_504,
    "curate": 2_683,
    "tests": 34_083,
    "benchmarks": 5_367,
    "longest file": 462,  # under 500: what one file alone imports is a part of it
    "tour": 4_788,
    # Crossings. Signed for: 1, 0, 120, 50.
    "collections that name two roles": 1,
    "questions whether something is an ensemble": 0,
    "private helpers with one caller": 88,
    "files with one importer or none": 42,
    # Shares of all lines: docstrings, and what is not a comment. Signed for: 0.15 and 0.975.
    "docstrings": 0.123,
    "no comment": 0.971,
}
"""What may only fall: each stands one notch above what is there, so that it bites."""
ROLES = {"expert", "router", "monolith", "pretrain", "student", "islands", "ensemble"}


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, env=CHILD, capture_output=True, text=True, check=False)


def test_imports_only_go_down():
    result = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo")
    assert result.returncode == 0, result.stdout + result.stderr


def lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def sizes() -> dict[str, float]:
    lengths = {name(path): len(path.read_text().splitlines()) for path in FILES}
    found: dict[str, float] = {
        part: sum(length for file, length in lengths.items() if file.startswith(files))
        for part, files in AROUND.items()
    }
    core = sum(lengths.values()) - sum(found.values())
    outside = {folder: lines(folder) for folder in ("tests", "benchmarks")}
    return {"core": core, **found, **outside, "longest file": max(lengths.values())}


def crossings() -> dict[str, float]:
    """How often a reader has to go elsewhere, and how much of what is read is no code."""
    texts = {path: path.read_text() for path in FILES}
    uses = Counter(re.findall(r"\w+", "\n".join(texts.values())))
    modules = {
        ".".join(("atoll", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in FILES
        if path.name != "__init__.py"
    }
    importers: dict[str, set[Path]] = {module: set() for module in modules}
    roles = asked = helpers = docstrings = 0
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                items = node.keys if isinstance(node, ast.Dict) else node.elts
                roles += len({item.value for item in items if isinstance(item, ast.Constant)} & ROLES) > 1
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked += bool(re.search(r"\b(Ensemble|RoutedField|SingleField)\b", ast.unparse(node.args[1])))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                private = node.name.startswith("_") and not node.name.startswith("__")
                helpers += private and uses[node.name] == 2
            for module in _imported(node):
                if module in modules:
                    importers[module] |= {path} - {modules[module]}
            for item in node.body if isinstance(getattr(node, "body", None), list) else []:
                if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                    docstrings += (item.end_lineno or 0) - item.lineno + 1
    every = [line.strip() for text in texts.values() for line in text.splitlines()]
    comments = sum(line.startswith("#") for line in every)
    return {
        "collections that name two roles": roles,
        "questions whether something is an ensemble": asked,
        "private helpers with one caller": helpers,
        "files with one importer or none": sum(len(users) < 2 for users in importers.values()),
        "docstrings": docstrings / len(every),
        "no comment": 1 - comments / len(every),
    }


def test_the_house_stays_small(capsys: pytest.CaptureFixture[str]):
    """Sizes and crossings are features. `-s` prints them."""
    found = sizes() | crossings()
    with capsys.disabled():
        forms = {part: f"{number:,.4g}" if number < 1 else f"{number:,}" for part, number in found.items()}
        print("", ", ".join(f"{part} {form}" for part, form in forms.items()))
    assert {part: number for part, number in found.items() if number > CEILINGS[part]} == {}
    assert found.keys() == CEILINGS.keys() - {"tour"}


def test_one_module_loads_a_network():
    """A second one would verify weights in its own way, or not at all. Encoders and scorers are others."""
    loading = re.compile(r"\.load_state_dict\(|\bbuild_network\(|\bload_file\(")
    files = [path for path in FILES if not name(path).startswith(("encoders/", "curate/", "store/"))]
    assert [name(path) for path in files if loading.search(path.read_text())] == ["model/expert.py"]


def test_the_tour_names_files_that_an_afternoon_is_enough_for():
    """The method is 22 files; the wish is 4,100 lines."""
    tour = re.findall(r"^\d+\. `(\S+\.py)`: ", (ROOT / "docs/tour.md").read_text(), re.MULTILINE)
    assert len(tour) == len(set(tour)) == 22
    assert sum(len((SOURCE / file).read_text().splitlines()) for file in tour) <= CEILINGS["tour"]


def test_init_files_are_empty_but_the_public_list():
    full = [name(path) for path in FILES if path.name == "__init__.py" and path.read_text().strip()]
    assert full == ["__init__.py"]


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


# Stages can be taken out.

REMOVABLE = ["measure", "export", "report", "serve", "curate", "launch.sky", "launch.slurm", "launch.ray"]
TOP = ("__init__.py", "api.py", "cli/")
"""They name stages, and import them when they are asked for."""
ABOVE = {"report": "serve"}
"""A stage that lies on another one, and goes with it."""


@pytest.mark.parametrize("part", REMOVABLE)
def test_nothing_but_the_top_imports_a_stage_that_can_be_taken_out(part: str):
    """Lazy imports count: whatever else imports it would fail in the middle of its work."""
    inside = SOURCE.joinpath(*part.split("."))
    users = [
        name(path)
        for path in FILES
        if path.parent != inside and inside not in path.parents and path != inside.with_suffix(".py")
        if name(path).split("/")[0] != ABOVE.get(part)
        for node in ast.walk(ast.parse(path.read_text()))
        for module in _imported(node)
        if f"{module}.".startswith(f"atoll.{part}.")
    ]
    assert [user for user in users if not user.startswith(TOP)] == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def test_without_stages_a_campaign_still_trains_and_samples(tmp_path: Path):
    from helpers import partitioned

    tree = tmp_path / "src" / "atoll"
    shutil.copytree(SOURCE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    for part in REMOVABLE:
        below = tree.joinpath(*part.split("."))
        shutil.rmtree(below) if below.is_dir() else below.with_suffix(".py").unlink()
    changes = {"budget": {"samples": 64}, "monolith": False, "sampling": {"steps": 2}}
    folder = Path(partitioned(tmp_path / "c", changes).store.location)
    code = f"""
import sys
from atoll.cli import main as cli
assert cli.__file__.startswith({str(tmp_path)!r})
for argv in (["train", "expert", "C", "--expert", "0"], ["train", "expert", "C", "--expert", "1"],
             ["train", "router", "C"], ["launch", "C", "--on", "local"], ["sample", "C", "1", "--out", "P"]):
    named = {{"C": {str(folder)!r}, "P": {str(tmp_path / "p.png")!r}}}
    cli.atoll.main([named.get(part, part) for part in argv], standalone_mode=False)
for argv in (["report", {str(folder)!r}], ["launch", {str(folder)!r}, "--on", "sky"]):
    assert cli.run_command(lambda: cli.atoll.main(argv, standalone_mode=False)) == 2
"""
    child = {**CHILD, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=child, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "p.png").exists()
    assert "this Atoll is without atoll.report" in result.stderr
    assert "there is no launcher 'sky'" in result.stderr


# Nothing that can run code when it is read.


def unsafe(source: str) -> Iterator[str]:
    """What in this source writes or reads pickles, or runs code that came with weights."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in PICKLERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLERS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _unsafe_call(call: ast.Call) -> Iterator[str]:
    function = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if function == "torch.save":
        yield function
    if function == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if function.startswith("yaml.") and function.endswith(("load", "load_all")) and "safe" not in function:
        yield function
    for option in ("allow_pickle", "trust_remote_code"):
        if options.get(option, "False") != "False":
            yield option


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_that_is_read_can_run_code(path: Path):
    assert list(unsafe(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import dump",
        "torch.save(x, f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "numpy.load(f, allow_pickle=True)",
        "yaml.load(f, Loader=yaml.Loader)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_code_that_would_run_what_it_reads_is_found(source: str):
    assert list(unsafe(source))


@pytest.mark.parametrize("source", ["torch.load(f, weights_only=True)", "yaml.safe_load(f)", "numpy.load(f)"])
def test_code_that_only_reads_is_not_found(source: str):
    assert list(unsafe(source)) == []


# Docstrings of methods; ruff asks for the others.


def undocumented(sources: list[str]) -> list[str]:
    """Public methods of public classes without a docstring, unless a base class of ours documents them."""
    classes: dict[str, list[ast.ClassDef]] = {}  # two files may have one of the same name
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return [
        f"{owner}.{method}"
        for owner, nodes in classes.items()
        for method in dict.fromkeys(name for node in nodes for name in _methods(node))
        if not owner.startswith("_")
        and not method.startswith("_")
        and not _documented(owner, method, classes)
    ]


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def _documented(owner: str, method: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    nodes = classes.get(owner, [])
    own = [_methods(node)[method] for node in nodes if method in _methods(node)]
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for node in nodes for base in node.bases]
    return any(ast.get_docstring(function) is not None for function in own) or any(
        _documented(base, method, classes) for base in bases if base != owner
    )


def test_public_methods_have_docstrings():
    assert undocumented([path.read_text() for path in FILES]) == []


def test_a_method_without_a_docstring_is_found_unless_it_overrides_one():
    base = 'class A:\n    def f(self):\n        "What it does."\n'
    child = "class B(A):\n    def f(self): ...\n    def g(self): ...\n"
    assert undocumented([base, child]) == ["B.g"]


# The outside.


def test_every_public_name_is_there_and_listed():
    import atoll

    assert set(atoll._PUBLIC) < set(dir(atoll))
    for public, module in atoll._PUBLIC.items():
        assert getattr(atoll, public) is getattr(importlib.import_module(module), public)


def test_a_name_that_is_not_public_is_an_attribute_error():
    import atoll

    with pytest.raises(AttributeError, match="no attribute 'Island'"):
        _ = atoll.Island


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, atoll; print(*sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert run(sys.executable, "-c", code).stdout.strip() == ""


HEAVY = {"torch", "numpy", "diffusers", "transformers", "pyarrow", "PIL", "faiss"}


def test_settings_and_what_looks_at_a_campaign_import_nothing_heavy():
    """A second of the processor at every wrong setting, `new` and `status`, otherwise."""
    modules = "base.table campaign.settings.campaign campaign.folder campaign.status recipes.catalogue"
    imports = ", ".join(f"atoll.{module}" for module in modules.split())
    result = run(sys.executable, "-c", f"import sys, {imports}; print({HEAVY} & set(sys.modules))")
    assert result.stdout == "set()\n", result.stdout + result.stderr


def test_networks_and_encoders_come_without_the_compiler():
    """It takes longer to import than torch; who imports it later gets all of it, and the same classes."""
    code = """
import sys
from types import SimpleNamespace
from atoll.encoders import text
from atoll.model import sampler
from atoll.networks.families import family

mine = [family(name).network_class() for name in ("dit", "pixart")]
text._tower(SimpleNamespace(model_type="bert"))
sampler.times(4)
import torch
from atoll.base.condition import Condition
from atoll.networks.cost import footprint
from atoll.networks.settings import DataShape, NetworkConfig
shape = DataShape(channels=1, size=8, classes=2)
dit, small = family("dit"), NetworkConfig(family="dit", depth=1, heads=1, head_width=8)
footprint(lambda: dit.build(small, shape), dit.predict, shape, True)
left_out = {"torch._dynamo", "diffusers.models.transformers", "diffusers.loaders", "diffusers.quantizers"}
left_out |= {"transformers.models", "scipy.optimize", "scipy.stats"}
print(left_out & set(sys.modules))
import torch._dynamo
from diffusers.models.transformers import DiTTransformer2DModel, PixArtTransformer2DModel
print([DiTTransformer2DModel, PixArtTransformer2DModel] == mine, torch._dynamo.is_compiling())
from diffusers.models.modeling_utils import DiffusersAutoQuantizer as late
from diffusers.quantizers import DiffusersAutoQuantizer
print(late is not DiffusersAutoQuantizer, late.from_config == DiffusersAutoQuantizer.from_config)
network = dit.build(small, shape)
network.compile(backend="eager")
given = torch.rand(2, 1, 8, 8), torch.rand(2), Condition(labels=torch.tensor([0, 1]))
print(dit.predict(network, *given).shape, torch.nn.Linear(2, 2, device="meta").weight.is_meta)
"""
    result = run(sys.executable, "-c", code)
    expected = "set()\nTrue False\nTrue True\ntorch.Size([2, 1, 8, 8]) True\n"
    assert result.stdout == expected, result.stdout + result.stderr


@pytest.mark.slow
def test_commands_that_only_look_import_little(tmp_path: Path):
    """Each heavy import is a second at every call; how many seconds is no test's business."""
    from helpers import SMALL, assembled

    folder = str(assembled(tmp_path / "c", SMALL))
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["atoll"]
    module, function = script.split(":")

    def heavy(code: int, *argv: str) -> set[str]:
        start = f"""
import atexit, sys
from {module} import {function}
atexit.register(lambda: print("imported", *sorted({HEAVY} & set(sys.modules))))
{function}()
"""
        result = run(sys.executable, "-c", start, *argv)
        assert result.returncode == code, result.stdout + result.stderr
        return set(result.stdout.splitlines()[-1].split()) - {"imported"}

    assert heavy(0, "--help") == heavy(0, "recipes") == heavy(0, "status", folder) == set()
    assert heavy(2, "new", str(tmp_path / "no"), "--set", "seed=x") == set()  # as `new`, but for the writing
    assert "torch" in heavy(0, "launch", folder)  # the monolith is left to train
    for finished in ("partition",), ("launch",), ("assemble",), ("data", "prepare"), ("train", "router"):
        assert heavy(0, *finished, folder) == set(), finished
    refused = ("launch", "no"), ("evaluate", folder, "--metrics", "frechett"), ("train", "expert", folder)
    refused += (("sample", folder, "--routing", "top"), ("plan", folder, "--set", "sed=1"))
    for command in refused:
        assert heavy(2, *command) == set(), command
    assert heavy(0, "report", folder) & {"torch", "diffusers", "transformers", "faiss"} == set()


def test_shapes_are_checked_while_tests_run():
    import torch

    from atoll.flow.schedule import expand

    with pytest.raises(jaxtyping.TypeCheckError):
        expand(torch.rand(2), torch.rand(3, 1, 2, 2))


def test_no_registry_is_named():
    top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".png"]
    below = [path for folder in ("src", "tests", "docs", ".ci") for path in (ROOT / folder).rglob("*")]
    files = [path for path in [*top, *below] if path.is_file() and "__pycache__" not in path.parts]
    texts = {path: path.read_text(errors="ignore") for path in files}
    assert [(path.name, host) for path, text in texts.items() for host in HOSTS if host in text] == []


def test_every_dependency_is_imported():
    """A package that nothing imports only costs an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"pillow": "PIL", "pyyaml": "yaml", "faiss-cpu": "faiss", "huggingface-hub": "huggingface_hub"}
    names = [requirement.split(">")[0].strip() for requirement in project["dependencies"]]
    imported = {
        module.split(".")[0]
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        for module in _imported(node)
    }
    assert [name for name in names if modules.get(name, name) not in imported] == []
