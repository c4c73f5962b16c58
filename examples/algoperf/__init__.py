"""AlgoPerf's runner requires a package."""
