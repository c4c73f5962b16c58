"""Algorithm 1 and what it needs to know: options, the tuner, schedules, bases. No distribution, no kernels."""
