"""What README and docs say can be typed can be typed, and their links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from atoll.cli.main import atoll
from helpers import ROOT

PAGES = [
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for d in ("docs", "examples") for p in (ROOT / d).rglob("*.md")),
]


def commands(page: str) -> list[list[str]]:
    """Every `atoll ...` command of a page, in code spans and code blocks."""
    text = (ROOT / page).read_text()
    found = re.findall(r"^(?:\$ )?(atoll [^\n#|]+)", text, re.M) + re.findall(r"`(atoll [^`\n]+)`", text)
    return [re.findall(r'"[^"]*"|\S+', line)[1:] for line in found]


def test_readme_has_commands() -> None:
    names = {argv[0] for argv in commands("README.md")}
    assert {"quickstart", "new", "launch", "sample", "compare", "report"} <= names


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    for argv in commands(page):
        command: click.Command = atoll
        rest = list(argv)
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(click.Context(command), rest[0])
            assert found is not None, f"{page}: atoll {' '.join(argv)}: there is no command {rest[0]!r}"
            command, rest = found, rest[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        known |= {"--help", "-h", "--version"}
        for option in (part.split("=")[0] for part in rest if part.startswith("--")):
            assert option in known, f"{page}: atoll {' '.join(argv)}: there is no option {option}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md"])
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    text = re.sub(r"```.*?```", "", here.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        file = (here.parent / target).resolve() if target else here
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}#{anchor}"


def test_whoever_cites_cites_the_same() -> None:
    """README and model cards take their BibTeX from one file, whose facts are those of CITATION.cff."""
    text = (ROOT / "src/atoll/model/templates/citation.bib").read_text()
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper, software = text.strip().split("\n\n")
    assert paper in (ROOT / "README.md").read_text()

    def fields(entry: str) -> dict[str, str]:
        return {key: value.strip(" {}") for key, value in re.findall(r"^  (\w+) *= \{(.*)\},?$", entry, re.M)}

    cited: dict[str, Any] = facts["preferred-citation"]
    authors = " and ".join(f"{by['family-names']}, {by['given-names']}" for by in cited["authors"])
    assert fields(paper) == {
        "title": cited["title"],
        "author": authors,
        "booktitle": cited["collection-title"],
        "year": str(cited["year"]),
        "url": cited["url"],
    }
    assert fields(software) == {
        "title": facts["title"],
        "author": facts["authors"][0]["name"],
        **{key: str(facts[key]) for key in ("version", "license")},
    }
