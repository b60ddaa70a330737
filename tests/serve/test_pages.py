"""Playground and dashboard in a real browser."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.campaign.folder import Campaign
from helpers import assembled, command, train_run
from serve.process import KEY, Server

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
]
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
LAUNCH = {
    "executable_path": CHROMIUM,
    "args": [*QUIET.split(), "--disable-sync", "--disable-component-update"],
}
WATCH = "addEventListener('securitypolicyviolation', e => console.error('policy: ' + e.violatedDirective))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"partition": {"k": 3}, "budget": {"samples": 640}, "train": {"previews": 1}}
    made = assembled(tmp_path_factory.mktemp("shown") / "letters", settings)
    train_run(Campaign.open(made), "monolith")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    one = Server(folder)
    yield one
    assert one.stop() == 0, one.said


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver, driver.chromium.launch(**LAUNCH) as one:
        yield one


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that asks nobody else, says nothing on the console and breaks no policy."""
    width, scheme = getattr(request, "param", (1280, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.add_init_script(WATCH)
    one, said, asked = context.new_page(), list[str](), list[str]()
    one.set_default_timeout(60_000)
    one.on("console", lambda message: said.append(message.text) if message.type != "verbose" else None)
    one.on("pageerror", lambda error: said.append(str(error)))
    one.on("request", lambda request: asked.append(request.url))
    yield one
    # Chromium itself says that an answer was 401 or 503.
    assert [line for line in said if "Failed to load resource" not in line] == []
    places = {re.sub(r"^(\w+://[^/]*).*", r"\1", url) for url in asked if not url.startswith("data:")}
    assert len(places) == 1, places
    assert one.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
    context.close()


def drawn(page: Any, count: int) -> None:
    page.locator(".panel .below .strip").nth(count - 1).wait_for()
    page.get_by_text("Generated in").wait_for()


@pytest.mark.parametrize("page", [(1280, "light"), (360, "dark")], indirect=True)
def test_the_playground_draws_and_says_who_painted(page: Any, server: Server) -> None:
    page.goto(server.address)
    page.locator("input[name=steps][placeholder]").wait_for()
    page.locator("[name=prompt]").fill("1")
    page.get_by_label("Images").fill("2")
    page.get_by_label("Steps").fill("6")
    page.get_by_label("Seed", exact=True).fill("5")
    page.get_by_label("Add a model or routing").fill("top-1")
    page.keyboard.press("Enter")
    page.locator("[name=prompt]").press("Enter")
    drawn(page, 4)
    own, other = page.locator(".panel").all()
    assert other.get_by_role("heading").inner_text() == "top-1"

    # A strategy that does not exist is refused where it is typed, and not drawn.
    page.get_by_label("Add a model or routing").fill("topp-1")
    page.keyboard.press("Enter")
    page.locator("#told", has_text="there is no routing").wait_for()
    assert page.locator("#columns li").count() == 2

    # The strip says what each step was, by keyboard too.
    strip = other.locator(".strip").first
    strip.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    told = other.locator("output").first.inner_text()
    assert re.fullmatch(r"step 4 of 6: expert \d 100%; router: \d \d+%(, \d \d+%)*", told)
    assert strip.get_attribute("aria-valuetext") == told and strip.get_attribute("aria-valuenow") == "4"

    # The same noise without the expert that painted it is another picture; nobody else's changes.
    before = [image.get_attribute("src") for image in page.locator(".panel img").all()]
    expert = other.locator(".experts button").first.inner_text().split(":")[0]
    other.locator(".experts button").first.click()
    page.locator(".panel").nth(2).wait_for()
    drawn(page, 6)
    after = [image.get_attribute("src") for image in page.locator(".panel img").all()]
    assert after[:4] == before and after[4] != before[2]
    third = page.locator(".panel").nth(2)
    assert third.get_by_role("heading").inner_text() == f"top-1 without {expert}"
    assert expert not in {b.inner_text().split(":")[0] for b in third.locator(".experts button").all()}

    # The link holds every setting, and the history is one click.
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.locator("input[name=steps][placeholder]").wait_for()
    assert page.locator("[name=prompt]").input_value() == "1"
    assert page.get_by_label("Steps").input_value() == "6"
    page.get_by_role("button", name="Generate", exact=True).click()
    drawn(page, 6)
    assert [image.get_attribute("src") for image in page.locator(".panel img").all()] == after
    page.get_by_label("Steps").fill("3")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.locator("#history li").nth(1).wait_for()
    # Of the newest the page has the address already, so that its link changes nothing there.
    for number, steps in ((0, "3"), (1, "6")):
        page.get_by_label("Steps").fill("")
        page.locator("#history a").nth(number).click()
        page.locator("#told", has_text="Generated in").wait_for()
        assert page.get_by_label("Steps").input_value() == steps
    assert own.get_by_role("heading").inner_text() != "top-1"


def test_what_is_wrong_is_told_beside_what_is_right(page: Any, server: Server) -> None:
    asked, held, seed = list[Any](), list[Any](), 2**53 + 1  # which no number of JavaScript's is
    page.on("request", lambda request: asked.append(request.post_data_json))
    page.route("**/v1/models", lambda route: held.append(route))  # a click waits for the models
    columns = "by=once+without+0,1&by=top-9&by=monolith&by=%3Cimg+src%3Dx%3E"
    with page.expect_request("**/v1/models"):
        page.goto(f"{server.address}/#prompt=1&n=1&steps=2&seed={seed}&{columns}")
    page.get_by_role("button", name="Generate", exact=True).click()
    held[0].continue_()
    page.locator(".notice.alarm", has_text="top-9").wait_for()
    page.locator(".notice.alarm", has_text="there is no routing '<img src=x>'").wait_for()
    page.locator(".panel", has_text="once").locator(".strip").wait_for()
    assert {body["seed"] for body in asked if body} == {seed}
    page.locator(".experts button").click()  # the last expert cannot be left out
    page.locator("#told", has_text="leave fewer out").wait_for()
    assert not page.locator(".panel", has_text="top-9").locator(".frame").is_visible()
    single = page.locator(".panel").nth(2)
    single.locator("img").wait_for()
    assert single.locator(".strip").count() == 0  # one network has no experts


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    one = Server(folder, "--keys", str(tmp_path / "keys"))
    try:
        page.goto(one.address)
        page.get_by_text("no valid key").wait_for()
        page.get_by_role("button", name="Generate", exact=True).click()
        assert page.locator("#told").inner_text().startswith("no valid key")
        page.get_by_label("Bearer key").fill(KEY)
        page.get_by_role("button", name="Use it").click()
        page.locator("[name=prompt]").fill("1")
        page.get_by_label("Images").fill("1")
        page.get_by_role("button", name="Generate", exact=True).click()
        drawn(page, 1)
        page.goto(f"{one.address}/dashboard")
        page.get_by_text("The clusters").wait_for()
    finally:
        assert one.stop() == 0


@pytest.mark.parametrize("page", [(1280, "light"), (360, "dark")], indirect=True)
def test_the_dashboard_follows_the_islands(page: Any, folder: Path, tmp_path: Path) -> None:
    """A run that fell silent is plain to see, and so is that it came back."""
    campaign = Path(shutil.copytree(folder, tmp_path / "letters"))
    run = campaign / "islands/1"
    log = {path: path.read_bytes() for path in (run / "run/log").glob("*.json")}
    kept = {path: content for path, content in log.items() if json.loads(content)["kind"] == "publish"}
    assert kept
    kept |= {path: path.read_bytes() for path in (run / "expert").iterdir()}
    for path in kept:
        path.unlink()
    for path in (run / "run").rglob("*"):
        os.utime(path, (0, 0))  # its last sign of life
    one = Server(campaign, command="dashboard", ready="dashboard at")
    try:
        page.goto(one.address)
        row = page.locator("tr", has_text="Expert 1")
        row.locator(".tag", has_text="stale").wait_for()
        assert page.get_by_role("alert").first.inner_text().startswith("Expert 1 is stale")
        page.get_by_text("The clusters").wait_for()
        assert page.locator(".previews img").count() >= 3 and page.locator(".sheet img").count() == 3
        for path, content in kept.items():
            path.write_bytes(content)
        row.locator(".tag", has_text="published").wait_for()
        assert page.get_by_role("alert").count() == 0
    finally:
        assert one.stop() == 0, one.said


def test_one_moment_is_one_file(page: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "below/page.html"
    assert command(capsys, "dashboard", folder, "--once", out).code == 0
    page.goto(f"file://{out}")
    assert page.get_by_role("heading", name="The clusters").is_visible()
    assert page.locator("tr", has_text="Router").locator(".tag").inner_text() == "published"
    assert command(capsys, "dashboard", folder, "--once", tmp_path).code == 2
