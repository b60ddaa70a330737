"""The rules of the house that no linter knows: docs say them, these tests hold them."""

import ast
import importlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
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


AROUND = ("measure/", "export/", "report/")
CURATE = ("curate/", "cli/aesthetics.py", "cli/concepts.py")
SERVE = ("serve/", "cli/serve.py")
# Ceilings that may only fall. What is aimed at: core 12,500, around 6,500, tests 16,000; curate 2,200,
# serve 1,200.
CORE_LINES, AROUND_LINES, CURATE_LINES, SERVE_LINES, TEST_LINES = 24_943, 8_569, 3_250, 1_850, 29_627
TOUR_LINES = 4_700


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, env=CHILD, capture_output=True, text=True, check=False)


def test_imports_only_go_down():
    script = Path(sys.executable).with_name("lint-imports")
    result = run(str(script), "--no-cache", "--no-logo")
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_and_the_house_stay_small(capsys: pytest.CaptureFixture[str]):
    """Sizes are a feature: files, the core and what is around it, tests. `-s` prints them."""
    lengths = {name(path): len(path.read_text().splitlines()) for path in FILES}
    around, curate, serve = (
        sum(lines for file, lines in lengths.items() if file.startswith(group))
        for group in (AROUND, CURATE, SERVE)
    )
    core = sum(lengths.values()) - around - curate - serve
    tests = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    with capsys.disabled():
        sizes = {"core": core, "around": around, "curate": curate, "serve": serve, "tests": tests}
        print("", ", ".join(f"{part} {lines:,}" for part, lines in sizes.items()), "lines", end=" ")
    assert {file: lines for file, lines in lengths.items() if lines > 450} == {}
    assert core <= CORE_LINES
    assert around <= AROUND_LINES
    assert curate <= CURATE_LINES
    assert serve <= SERVE_LINES
    assert tests <= TEST_LINES


def test_the_tour_names_files_that_an_afternoon_is_enough_for():
    """The method is 23 files; the wish is 4,100 lines."""
    tour = re.findall(r"^\d+\. `(\S+\.py)`: \w", (ROOT / "docs/tour.md").read_text(), re.MULTILINE)
    assert len(tour) == len(set(tour)) == 23
    assert sum(len((SOURCE / file).read_text().splitlines()) for file in tour) <= TOUR_LINES


def test_init_files_are_empty_but_the_public_list():
    full = [name(path) for path in FILES if path.name == "__init__.py" and path.read_text().strip()]
    assert full == ["__init__.py"]


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


# Stages can be taken out.

REMOVABLE = ["measure", "export", "report", "serve", "curate", "launch.sky", "launch.slurm"]
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
        return [f"{node.module}.{alias.name}" for alias in node.names]
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
    classes = {
        node.name: node
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    return [
        f"{owner}.{method}"
        for owner, node in classes.items()
        for method in _methods(node)
        if not owner.startswith("_")
        and not method.startswith("_")
        and not _documented(owner, method, classes)
    ]


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def _documented(owner: str, method: str, classes: dict[str, ast.ClassDef]) -> bool:
    node = classes.get(owner)
    if node is None:
        return False
    own = _methods(node).get(method)
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
    return (own is not None and ast.get_docstring(own) is not None) or any(
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
    modules = "campaign.settings.campaign", "campaign.folder", "campaign.status_text", "recipes.catalogue"
    code = (
        f"import sys, {', '.join(f'atoll.{module}' for module in modules)}; print({HEAVY} & set(sys.modules))"
    )
    result = run(sys.executable, "-c", code)
    assert result.stdout == "set()\n", result.stdout + result.stderr


def spent(code: int, *argv: str) -> float:
    """Seconds of the processor, not of the clock: other tests run beside it. The least of five."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = run(sys.executable, "-c", start, *argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == code, result.stdout + result.stderr
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["atoll"]
    module, function = script.split(":")
    start = f"from {module} import {function}; {function}()"
    return min(once() for _ in range(5))


@pytest.mark.slow
def test_commands_that_only_look_are_quick(tmp_path: Path):
    from helpers import partitioned

    folder = partitioned(tmp_path / "c").store.location
    assert spent(0, "--help") < 0.5
    assert spent(0, "recipes") < 0.5
    assert spent(0, "status", folder) < 1.5
    assert spent(0, "report", folder) < 1.5
    assert spent(2, "new", str(tmp_path / "no"), "--set", "seed=x") < 1.5  # as `new`, but for the writing


def test_shapes_are_checked_while_tests_run():
    import torch

    from atoll.flow.schedule import expand

    with pytest.raises(jaxtyping.TypeCheckError):
        expand(torch.rand(2), torch.rand(3, 1, 2, 2))


def test_no_registry_is_named():
    top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".png"]
    below = [path for folder in ("src", "tests", "docs", ".ci") for path in (ROOT / folder).rglob("*")]
    texts = {path: path.read_text(errors="ignore") for path in [*top, *below] if path.is_file()}
    named = [(path.name, host) for path, text in texts.items() for host in HOSTS if host in text]
    assert named == []


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


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
