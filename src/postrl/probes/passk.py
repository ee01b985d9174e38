"""pass@k: the chance that at least one of k samples solves a problem, and how sure we are of its mean."""

import numpy as np
from jaxtyping import Float, Int

from postrl.errors import UserError


def pass_at_k(n: Int[np.ndarray, "N"], c: Int[np.ndarray, "N"], k: int) -> Float[np.ndarray, "N"]:
    """Unbiased pass@k of N problems, each with n samples of which c are correct.

        pass@k = 1 − C(n−c, k) / C(n, k) = 1 − Π_{j<k} (n−c−j) / (n−j)

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1. The product of
    factors in [0, 1] neither overflows nor loses digits. Raises UserError if k is below 1 or above some n: fewer
    samples than k say nothing about pass@k without bias.
    """
    if k < 1 or (n.size and k > n.min()):
        raise UserError(f"k={k} must lie between 1 and the number of samples per problem ({n.min() if n.size else 0})")
    if ((c < 0) | (c > n)).any():
        raise ValueError("the number of correct samples must lie between 0 and the number of samples")
    fail = np.ones(n.shape, dtype=np.float64)
    for j in range(k):
        fail *= np.maximum(n - c - j, 0) / (n - j)
    return 1 - fail


def bootstrap_interval(
    values: Float[np.ndarray, "N"], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over N problems (resampled problems, not samples of one problem).

    It tells how far the mean would move with other problems of the same kind; (nan, nan) without problems.
    """
    if not values.size:
        return float("nan"), float("nan")
    rng = np.random.default_rng([seed, values.size])
    counts = rng.multinomial(values.size, np.full(values.size, 1 / values.size), size=resamples)
    means = counts @ values / values.size
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
