"""One colour per expert, the same everywhere, told apart with any kind of colour vision.

The first four stay apart best. Colours were searched for in OKLab under simulated protan-, deuteran- and
tritanopia (Machado et al. 2009); numbers and names always stand beside them, so colour is never alone.
"""

LIGHT = ("#0a6fb0", "#e3a62b", "#9c3015", "#3fbfb9", "#5f3467", "#8b93f0", "#cf8089", "#86762f")
"""On a light page."""
DARK = ("#3f95dc", "#f7cb68", "#c9593b", "#4feadd", "#9a5fa8", "#b4bcfa", "#ef919b", "#a39a2f")
"""The same hues on a dark page."""


def expert_class(number: int) -> str:
    """CSS class that sets `--c` to an expert's colour."""
    return f"e{number}"


def expert_colour(number: int, dark: bool = False) -> str:
    """Hex colour of an expert. After the eighth they come again, darker on light and lighter on dark."""
    base = (DARK if dark else LIGHT)[number % len(LIGHT)]
    away = 255 if dark else 0
    share = 1 - 0.65 ** (number // len(LIGHT))
    channels = (int(base[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (away - c) * share):02x}" for c in channels)


def variables(count: int, dark: bool = False) -> str:
    """CSS declarations `--e0` ... of all experts."""
    return " ".join(f"--e{number}: {expert_colour(number, dark)};" for number in range(count))


def classes(count: int) -> str:
    """CSS rules `.e0` ... of all experts."""
    return " ".join(f".e{number} {{ --c: var(--e{number}) }}" for number in range(count))
