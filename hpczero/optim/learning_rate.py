"""The learning rate at every step, as a pure function."""

from math import cos, pi, sqrt

from hpczero.spec.schema import Spec


def learning_rate(spec: Spec, step: int) -> float:
    """Return the rate that step `step` (counted from 0) uses.

    Warm-up grows linearly and reaches the full rate with step warmup_steps - 1. The shape after it
    ends at min_lr with the last step; "inverse_sqrt" goes on as the root, and not below min_lr.
    """
    schedule = spec.schedule
    peak = spec.optimizer.lr
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    last = spec.train.steps - 1
    if schedule.name == "constant":
        return peak
    start = schedule.warmup_steps
    if schedule.name == "inverse_sqrt":
        first = max(1, start)
        return max(schedule.min_lr, peak * sqrt(first / max(first, step + 1)))
    if schedule.name == "wsd":
        start = max(start, spec.train.steps - (schedule.decay_steps or -(-spec.train.steps // 5)))
        if step < start:
            return peak
    done = min(1.0, (step - start) / max(1, last - start))
    left = 1.0 - done
    if schedule.name == "cosine":
        left = 0.5 * (1.0 + cos(pi * done))
    elif schedule.name == "polynomial":
        left **= schedule.power
    return schedule.min_lr + (peak - schedule.min_lr) * left
