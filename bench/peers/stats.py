"""Statistics of paired measurements. Standard library only."""

import math
import random
import statistics

RESAMPLES, SEED = 2000, 20240


def balanced_order(pairs, seed):
    """For each pair whether A goes first: half of them, in random order."""
    order = [i % 2 == 0 for i in range(pairs)]
    random.Random(seed).shuffle(order)
    return order


def autocorrelation(values):
    """Lag-1 autocorrelation; 0 where it is not defined."""
    mean = statistics.fmean(values)
    spread = sum((v - mean) ** 2 for v in values)
    if len(values) < 3 or spread == 0:
        return 0.0
    return sum((a - mean) * (b - mean) for a, b in zip(values, values[1:])) / spread


def median_with_interval(ratios):
    """Median, its 95 % percentile-bootstrap interval and the least effect that could have been seen.

    Pairs are resampled one by one, or in blocks of ten neighbours when neighbours resemble each other.
    """
    block = 10 if autocorrelation(ratios) > 0.2 and len(ratios) >= 20 else 1
    rng, n, medians = random.Random(SEED), len(ratios), []
    for _ in range(RESAMPLES):
        sample = []
        while len(sample) < n:
            start = rng.randrange(n - block + 1)
            sample.extend(ratios[start : start + block])
        medians.append(statistics.median(sample[:n]))
    medians.sort()
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    error = statistics.pstdev(math.log(m) for m in medians)
    return {
        "median": statistics.median(ratios),
        "ci95": [low, high],
        "mde": math.exp(2.8 * error) - 1,
        "pairs": n,
        "block": block,
    }


def spread(samples):
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(samples), "max": max(samples), "n": len(samples)}
