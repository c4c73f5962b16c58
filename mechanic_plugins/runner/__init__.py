"""What `mechanic-run` does to a program it does not change. Standard library only until the program imports torch.

`arguments` reads the command line into a `plan`, which `active` puts to work in this process and in every python
process started from it (`site/sitecustomize.py`): `replace` mechanizes optimizers as they are built, `probe` measures
and stops, `events` collects what happened in all of them, for the exit status.
"""
