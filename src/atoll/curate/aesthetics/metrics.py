"""How scores agree with people's: errors, correlations and levels, as defined and as published."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

F64 = NDArray[np.float64]


def agreement(scores: F64, right: F64, levels: int = 5) -> dict[str, float]:
    """Of scores in [0, 1] `(R,)` with right ones: errors, correlations, and precision by level.

    `published MSE` and `published MAE` are what HumanAesExpert's code calls so: the roots of the two. PLCC,
    SRCC and KRCC are Pearson's, Spearman's and Kendall's correlations, NaN where all scores are the same.
    Accuracy, precision, recall and F1 are of levels of equal width; the latter three are means over the
    levels that occur among either, 0 for one that is never met.
    """
    errors = scores - right
    mse, mae = float((errors**2).mean()), float(np.abs(errors).mean())
    found = {"MSE": mse, "MAE": mae}
    found |= {"published MSE": math.sqrt(mse + 1e-8), "published MAE": math.sqrt(mae + 1e-8)}
    apart = len(scores) > 1 and np.ptp(scores) > 0 and np.ptp(right) > 0
    for name, of in (("PLCC", stats.pearsonr), ("SRCC", stats.spearmanr), ("KRCC", stats.kendalltau)):
        found[name] = float(of(scores, right).statistic) if apart else math.nan
    said, true = (np.clip(np.floor(one * levels), 0, levels - 1) for one in (scores, right))
    hits = {level: float(((said == level) & (true == level)).sum()) for level in {*said, *true}}
    precisions = [hit / max(1.0, float((said == level).sum())) for level, hit in hits.items()]
    recalls = [hit / max(1.0, float((true == level).sum())) for level, hit in hits.items()]
    both = zip(precisions, recalls, strict=True)
    return found | {
        "accuracy": float((said == true).mean()),
        "precision": float(np.mean(precisions)),
        "recall": float(np.mean(recalls)),
        "F1": float(np.mean([2 * p * r / (p + r) if p + r else 0.0 for p, r in both])),
    }
