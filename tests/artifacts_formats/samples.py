"""Random inputs that the format and layout tests share."""

import numpy as np


def random_matrix(rng: np.random.Generator, rows: int, columns: int, spread: float = 3.0) -> np.ndarray:
    """Normal values whose rows and columns differ widely in size, with zero rows, groups and exact ties mixed in."""
    x = rng.standard_normal((rows, columns)) * np.exp2(rng.uniform(-spread, spread, (rows, 1)))
    x *= np.exp2(rng.uniform(-spread, spread, (1, columns)))
    x[rng.random((rows, columns)) < 0.1] = 0
    x[rng.integers(rows), :] = 0
    x[:, : columns // 3] = np.round(x[:, : columns // 3] * 4) / 4
    return x.astype(np.float32)
