"""Which part of a parameter is on this rank, and how local sums become global ones."""
