"""Draws the package's layers from its imports, into CONTRIBUTING.md: python docs/layers.py.

An arrow means "imports". tests/test_house.py has the list of layers and fails if an arrow points up or the drawing is
out of date.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, PAGE = ROOT / "mechanic_plugins", ROOT / "CONTRIBUTING.md"
LAYERS = {
    "rule": {"rule"},
    "kernels": {"kernels"},
    "distributed": {"distributed"},
    "weights": {"lion", "muon", "weights"},
    "optimizer": {"optimizer"},
    "interface": {"__init__", "api", "classes", "optim", "options", "patches", "summary"},
    "plugins": {"accelerate", "deepspeed", "ds_to_universal", "hf", "lightning", "megatron", "transformers"},
    "programs": {"hook", "plot", "run", "runner"},
}
"""From the ground up: a layer imports only from itself, without circles, and from layers earlier in this list."""


def imports_of(path: Path) -> set[str]:
    """The package's own modules and names that a file imports anywhere in its code, relative to the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == PACKAGE.name:
            inside = str(node.module).removeprefix(PACKAGE.name).removeprefix(".")
            found |= {f"{inside}.{alias.name}".removeprefix(".") for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.partition(".") for alias in node.names]
            found |= {name or "__init__" for package, _, name in names if package == PACKAGE.name}
    return found


def layer_of(module: str) -> str:
    """The layer of a module or of a name in one; names of the package itself are the interface's."""
    first = module.partition(".")[0]
    return next((layer for layer, names in LAYERS.items() if first in names), "interface")


def drawing() -> str:
    """A Mermaid flow chart of the layers, without arrows that a longer way says already."""
    arrows: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for path in PACKAGE.rglob("*.py"):
        layer = layer_of(path.relative_to(PACKAGE).with_suffix("").parts[0])
        arrows[layer] |= {layer_of(name) for name in imports_of(path)} - {layer}
    below = {layer: set(targets) for layer, targets in arrows.items()}
    for layer in LAYERS:  # from the ground up, so that the layers below are complete
        below[layer] |= {far for target in arrows[layer] for far in below[target]}
    lines = [
        f"    {layer} --> {target}"
        for layer in reversed(LAYERS)
        for target in reversed(LAYERS)
        if target in arrows[layer] and not any(target in below[other] for other in arrows[layer])
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def with_drawing(page: str) -> str:
    """The page with the drawing of today."""
    return re.sub(r"```mermaid\n.*?\n```", lambda _: drawing(), page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_drawing(PAGE.read_text()))
    sys.exit(0)
