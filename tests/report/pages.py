"""Reading a page back, as a browser would, with nothing but the standard library."""

import base64
import io
import os
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from atoll.report.page import write_report
from report.campaigns import Builder

VOID = {"meta", "img", "br", "hr", "input", "link"}
ADDRESSES = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "background", "cite"}
INLINE = {"a", "b", "bdi", "br", "code", "small", "span", "strong", "text"}
RECORDS = Path(__file__).with_name("records")


class Page(HTMLParser):
    """Elements, texts by tag, lines as a reader sees them, and tags that are not closed where they belong."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.seen: list[str] = []
        self.html = html
        self.feed(html)
        self.close()
        self.wrong += self.open

    @classmethod
    def of(cls, builder: Builder) -> "Page":
        """The report of a campaign, written and read back."""
        return cls(Path(write_report(builder.store)).read_text())

    def handle_starttag(self, tag, attrs):
        own = {name: value or "" for name, value in attrs}
        self.elements.append((tag, own))
        self.seen.append(" | " if tag in ("td", "th") else "" if tag in INLINE else "\n")
        marks = [own[name] for name in ("aria-label", "title", "alt") if own.get(name)]
        marks += [own["class"]] if {"cell", "framed"} & set(own.get("class", "").split()) else []
        self.seen += [f"[{'; '.join(marks)}] "] if marks else []
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        self.seen.append("" if tag in (*INLINE, "td", "th") else "\n")
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.seen.append(" ".join(f".{data}.".split())[1:-1] if "style" not in self.open else "")
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def with_class(self, name: str) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.elements if name in attributes.get("class", "").split()]

    def text(self) -> str:
        return " ".join(self.texts["body"][0].split())

    def outside(self) -> list[str]:
        """Addresses that are neither data nor a place in this page."""
        found = [v for _, attributes in self.elements for a, v in attributes.items() if a in ADDRESSES]
        styles = [*self.texts.get("style", []), *(a["style"] for _, a in self.elements if "style" in a)]
        found += [style for style in styles if "url(" in style or "@import" in style]
        return [value for value in found if not value.startswith(("data:image/png;base64,", "#"))]

    def pictures(self) -> list[Image.Image]:
        pictures = []
        for attributes in self.all("img"):
            picture = Image.open(io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2])))
            picture.load()
            pictures.append(picture)
        return pictures

    def is_as_recorded(self, name: str) -> None:
        """A reader sees `records/NAME.txt`, marks and tooltips too; with `RECORD=1` it is written anew."""
        assert self.wrong == self.outside() == []
        assert all(attributes["alt"].strip() for attributes in self.all("img"))
        lines = ("".join(self.seen)).split("\n")
        text = "\n".join(line for raw in lines if (line := " ".join(raw.split()).removeprefix("| "))) + "\n"
        path = RECORDS / f"{name}.txt"
        if os.environ.get("RECORD"):
            path.write_text(text)
        assert text.splitlines() == path.read_text().splitlines()
