"""The algorithm and what it needs to know: settings, the tuner, schedules, bases. No distribution, no kernels."""
