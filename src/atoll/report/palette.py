"""One colour per expert, the same everywhere, told apart with any kind of colour vision.

The first four stay apart best. Colours were searched for in OKLab under simulated protan-, deuteran- and
tritanopia (Machado et al. 2009); numbers and names always stand beside them, so colour is never alone.
"""

from collections.abc import Iterable

from atoll.campaign.roles import RUNS, SINGLE

LIGHT = ("#0a6fb0", "#e3a62b", "#9c3015", "#3fbfb9", "#5f3467", "#8b93f0", "#cf8089", "#86762f")
"""On a light page."""
DARK = ("#3f95dc", "#f7cb68", "#c9593b", "#4feadd", "#9a5fa8", "#b4bcfa", "#ef919b", "#a39a2f")
"""The same hues on a dark page."""
ROUTED = ("selected", "mixture", "own", "router")
"""CSS classes of the colours of routings, in order."""


def model_name(name: str) -> str:
    """As the page calls a model: a single network by its title, a routing as it is."""
    return RUNS[name].title if name in SINGLE else name


def expert_colour(number: int, dark: bool = False) -> str:
    """Hex colour of an expert. After the eighth they come again, darker on light and lighter on dark."""
    base = (DARK if dark else LIGHT)[number % len(LIGHT)]
    # Each round covers the same part of what is left to black or white, so no two rounds are ever equal.
    away, share = 255 if dark else 0, 1 - 0.65 ** (number // len(LIGHT))
    channels = (int(base[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (away - c) * share):02x}" for c in channels)


def stylesheet(count: int) -> str:
    """CSS: `--e0` ... of all experts on light and dark pages, and a class `e0` ... for each."""
    light, dark = (
        " ".join(f"--e{number}: {expert_colour(number, dark)};" for number in range(count))
        for dark in (False, True)
    )
    classes = " ".join(f".e{number} {{ --c: var(--e{number}) }}" for number in range(count))
    of_dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ {light} }}\n{of_dark}\n{classes}\n"


def model_styles(names: Iterable[str]) -> dict[str, str]:
    """CSS class of every model: a single network's is its name, routings take theirs in turn."""
    routings = [name for name in dict.fromkeys(names) if name not in SINGLE]
    return {name: name for name in SINGLE} | {n: ROUTED[i % len(ROUTED)] for i, n in enumerate(routings)}
