"""A pytest plugin that runs a public project's test suite with Mechanic around every optimizer.

    python -m pytest -p mechanized --suite torch test/test_optim.py

While a test runs, `torch.optim.Optimizer.__new__` returns `mechanize(optimizer)` in place of the requested optimizer,
so the suite needs no change. Classes stay as they are: only what calling them returns is new. Two kinds are left
plain: wrappers around a mechanized optimizer, and differentiable=True, which is refused (torch's tests try all options
of an optimizer in one test). With the suite "lightning", every Trainer gets the `Mechanic` callback instead, by
Lightning's mechanism for callbacks of other packages.

`expected.toml` says which tests are expected to fail, and why. They run as strict xfails: one that passes fails the
run, and so does an entry that matches no test. It also says which optimizers mechanize() refuses: a test that builds
one is an xfail too, and the run fails if one of them is not refused. `--plain` runs the suite without Mechanic: then
only entries marked `alone` are expected to fail. If an entry names the `error`, no other error is an xfail.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
from torch.optim import Optimizer

from mechanic_plugins import MechanicOptimizer, mechanize

EXPECTED = Path(__file__).with_name("expected.toml")
MORE_STEPS = 200
"""pytorch_optimizer's tests train for five steps at a learning rate chosen for them; Mechanic gets more steps."""
ERROR = pytest.StashKey[str]()
"""A part of the message of a test's expected failure."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", required=True, help="the table of expected.toml to go by")
    parser.addoption("--plain", action="store_true", help="without Mechanic")


@pytest.hookimpl(tryfirst=True)  # before -k removes tests, to look up entries among all
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite, plain = config.getoption("--suite"), config.getoption("--plain")
    for entry in expected(suite):
        for pattern in entry.get("tests", ()):
            found = [item for item in items if matches(pattern, item)]
            if not found:
                raise pytest.UsageError(f"{EXPECTED.name}, {suite}: no test is called {pattern!r} (any more)")
            for item in found:
                if entry.get("never_run"):
                    item.add_marker(pytest.mark.skip(reason=entry["reason"]))
                elif entry.get("alone") or not plain:
                    item.add_marker(pytest.mark.xfail(reason=entry["reason"], strict=True))
                    item.stash[ERROR] = entry.get("error", "")
    if suite == "pytorch_optimizer" and not plain:
        _train_longer(sys.modules["tests.utils"].Trainer)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Patches during setup and teardown too, since fixtures build optimizers."""
    if item.config.getoption("--plain"):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        if item.config.getoption("--suite") == "lightning":
            _add_callback(patch)
        else:
            new = functools.partial(_new_mechanized, suite=item.config.getoption("--suite"))
            patch.setattr(Optimizer, "__new__", new, raising=False)  # a partial is not bound as a method
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which decides what is an xfail
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    is_refused = call.excinfo is not None and call.excinfo.errisinstance(pytest.xfail.Exception)
    is_xfail = call.excinfo is not None and hasattr(report, "wasxfail")
    if is_xfail and not is_refused and item.stash.get(ERROR, "") not in str(call.excinfo.value):
        del report.wasxfail
        report.outcome = "failed"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    accepted = sorted(_accepted & refused(session.config.getoption("--suite")).keys())
    if accepted:
        print(f"\n{EXPECTED.name} says that mechanize() refuses {', '.join(accepted)}, and it does not (any more)")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def expected(suite: str) -> list[dict[str, Any]]:
    """The suite's entries: tests (or bases), reason and other keys."""
    return list(tomllib.loads(EXPECTED.read_text()).get(suite, []))


@functools.cache
def refused(suite: str) -> dict[str, str]:
    """The classes that mechanize() is expected to refuse, with reasons."""
    return {name: entry["reason"] for entry in expected(suite) for name in entry.get("refused", ())}


def matches(pattern: str, item: pytest.Item) -> bool:
    """Whether the item matches. `*` stands for anything; brackets, as in parametrized names, are literal."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), item.name) is not None


_accepted: set[str] = set()
"""Classes that have been mechanized."""
_being_built: list[type[Optimizer]] = []
"""A class whose constructor is running: any optimizers built inside belong to it."""


def _new_mechanized(cls: type[Optimizer], *args: Any, suite: str, **kwargs: Any) -> Optimizer:
    """Builds a mechanized optimizer. Python calls `__init__` on the result only if it is a `cls`."""
    made: Optimizer = object.__new__(cls)
    is_copy = not args and not kwargs  # as called by copy and pickle
    is_around_another = any(isinstance(arg, MechanicOptimizer) for arg in (*args, *kwargs.values()))
    is_ours = issubclass(cls, MechanicOptimizer)
    if is_copy or is_around_another or is_ours or kwargs.get("differentiable") or _being_built:
        return made
    _being_built.append(cls)
    try:
        made.__init__(*args, **kwargs)  # type: ignore[misc]
    finally:
        _being_built.pop()
    try:
        mechanized = mechanize(made)
    except ValueError:
        if reason := refused(suite).get(cls.__name__):
            pytest.xfail(f"{cls.__name__} is refused: {reason}")
        raise
    _accepted.add(cls.__name__)
    return mechanized


def _add_callback(patch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.trainer.connectors import callback_connector

    from mechanic_plugins.lightning import Mechanic

    patch.setattr(callback_connector, "_load_external_callbacks", lambda group: [Mechanic()])


def _train_longer(trainer: Any) -> None:
    for name in ("run", "run_with_closure", "run_wsam_with_closure", "run_sam_style"):
        run = getattr(trainer, name)

        @functools.wraps(run)
        def longer(self: Any, iterations: int = 5, *, run: Any = run, **kwargs: Any) -> None:
            run(self, iterations=iterations + MORE_STEPS, **kwargs)

        setattr(trainer, name, longer)
