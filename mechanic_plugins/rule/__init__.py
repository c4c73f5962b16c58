"""The algorithm in plain floats: settings, the two rules, and the decision about a step. No optimizer, no tensors."""
