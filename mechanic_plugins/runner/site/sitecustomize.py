"""Python runs this in every process that the runner's program starts: its folder comes first on PYTHONPATH there.

It activates the runner's plan, removes its folder from the path, and then runs the sitecustomize that the process would
have had.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def _activate() -> None:
    values = json.loads(os.environ.get("PYTHON_MECHANIC_RUN", "{}"))
    if os.path.realpath(values.get("prefix", "")) != os.path.realpath(sys.prefix):  # another environment's python
        return
    if importlib.util.find_spec("mechanic_plugins") is None:  # the runner was started from a checkout
        sys.path.append(str(Path(__file__).resolve().parents[3]))
    from mechanic_plugins.runner.active import activate
    from mechanic_plugins.runner.plan import Plan

    activate(Plan.of(values))


def _give_way() -> None:
    ours = Path(__file__).resolve().parent
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ours]
    module = sys.modules.pop("sitecustomize")
    spec = importlib.util.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        sys.modules["sitecustomize"] = module
        return
    theirs = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)


_activate()
_give_way()
