"""What `mechanic-run` does to a program it does not change. Standard library only until the program imports torch.

`arguments` reads the command line into a `plan`, which `active` applies to this process and to every python process
started from it (`site/sitecustomize.py`): `replace` mechanizes optimizers as they are built, `watch` sees their steps,
`probe` measures and stops.
"""
