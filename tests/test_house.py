"""The rules of the house that no linter knows: docs say them, these tests hold them."""

import ast
import importlib
import os
import resource
import statistics
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


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=ROOT, env=CHILD, capture_output=True, text=True, check=False)


def test_imports_only_go_down():
    script = Path(sys.executable).with_name("lint-imports")
    result = run(str(script), "--no-cache", "--no-logo")
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_stay_under_500_lines():
    lengths = {name(path): len(path.read_text().splitlines()) for path in FILES}
    assert {file: lines for file, lines in lengths.items() if lines >= 500} == {}


def test_init_files_are_empty_but_the_public_list():
    full = [name(path) for path in FILES if path.name == "__init__.py" and path.read_text().strip()]
    assert full == ["__init__.py"]


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


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


def test_looking_at_a_campaign_imports_no_models(tmp_path):
    run(sys.executable, "-m", "atoll", "new", str(tmp_path / "c"), "--recipe", "emoji")
    code = f"""
import sys
import atoll.campaign.status_text
from atoll.campaign.folder import Campaign
assert Campaign.open({str(tmp_path / "c")!r}).config.student
print({{'diffusers', 'transformers', 'faiss'}} & set(sys.modules))
"""
    result = run(sys.executable, "-c", code)
    assert result.stdout == "set()\n", result.stdout + result.stderr


def test_help_takes_half_a_second_of_the_processor():
    """Not of the clock: other tests run beside it."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["atoll"]
    module, function = script.split(":")
    argv = [sys.executable, "-c", f"from {module} import {function}; {function}()", "--help"]
    seconds = []
    for _ in range(7):
        before = spent()
        result = run(*argv)
        seconds.append(spent() - before)
        assert result.returncode == 0, result.stderr
        assert "Usage:" in result.stdout
    assert statistics.median(seconds) < 0.5, seconds


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
