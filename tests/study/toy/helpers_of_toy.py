"""A neighbour of the toy study."""

import numpy as np


def noise(seed: int, count: int, scale: float) -> np.ndarray:
    """Normal numbers of a seed."""
    return np.random.default_rng([7, seed]).normal(0, scale, count)
