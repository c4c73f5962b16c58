"""AlgoPerf's runner wants a package."""
