"""Runs the demo: see `mechanic_plugins.demo`."""

from mechanic_plugins.demo import main

if __name__ == "__main__":
    main()
