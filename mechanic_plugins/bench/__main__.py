"""Runs the benchmark: see `mechanic_plugins.bench`."""

import sys

from mechanic_plugins.bench import main

if __name__ == "__main__":
    sys.exit(main())
