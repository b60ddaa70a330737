"""Words of captions, and which of them tell one cluster from the others."""

import re

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_SMALL_WORDS = (
    "a about above after against along an and any are as at be before behind below between both but "
    "by can could do does down during each either every for from had has have he her hers him his how "
    "i if in into is it its me might mine must my neither no nor not of off on onto or our out over "
    "per shall she should so some such than that the their them then there these they this those "
    "through to toward under until up upon us was we were what when where which while who whom whose "
    "why will with within without would yes you your"
)
NO_NOUNS = frozenset(_SMALL_WORDS.split())
"""English words that the dictionary does not know as other kinds of words."""


def words_of(text: str) -> list[str]:
    """Words of a text: letters and digits in any script, without case, hyphens or a possessive's end."""
    words = WORD.findall(text.casefold())
    return [word[:-2] if word.endswith(("'s", "’s")) else word for word in words]


def telling(table: I64, rows: I64, most: int = 5, least: int = 5) -> list[list[int]]:
    """Of every cluster the concepts that tell it from the others: by the z score of their share in it."""
    prior = rows / max(1, rows.sum())
    totals = table.sum(1, keepdims=True)
    expected = totals * prior
    scores = (table - expected) / np.sqrt(np.maximum(expected * (1 - prior), 1e-9))
    scores[(table < least) | (table <= expected)] = -np.inf
    best = np.argsort(-scores, axis=0, kind="stable")[:most]
    return [[int(n) for n in best[:, k] if scores[n, k] > 0] for k in range(table.shape[1])]
