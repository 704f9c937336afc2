//! Training: data, schedules, loop, checkpoints and logs.
