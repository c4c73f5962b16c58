"""Saving and loading the tuner through state dicts, and converting checkpoints to plain ones."""
