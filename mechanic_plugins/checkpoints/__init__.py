"""How the tuner travels through state dicts, and how a run leaves Mechanic again."""
