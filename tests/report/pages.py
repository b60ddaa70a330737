"""Reading a page back, as a browser would, with nothing but the standard library."""

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from atoll.report.page import write_report
from report.campaigns import Builder

VOID = {"meta", "img", "br", "hr", "input", "link"}
ADDRESSES = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "background", "cite"}


class Page(HTMLParser):
    """Elements, texts by tag, and whether every tag is closed where it belongs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.html = html
        self.feed(html)
        self.close()
        self.wrong += self.open

    @classmethod
    def of(cls, builder: Builder) -> "Page":
        """The report of a campaign, written and read back."""
        return cls(Path(write_report(builder.store)).read_text())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.wrong.append(tag)

    def handle_data(self, data):
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
