"""Which shard of a parameter this rank holds, and how local sums are reduced to global ones."""
