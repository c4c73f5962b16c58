"""The optimizer name `mechanic_adamw` in transformers itself: what a pull request would add, written into a checkout.

    git clone https://github.com/huggingface/transformers
    python examples/upstream/apply.py transformers && git -C transformers diff
    cd transformers && pytest tests/trainer/test_trainer_optimizers.py

Each addition goes below a line that is there today. If one of these lines is missing or no longer unique, nothing is
written. It is idempotent.
"""

import argparse
from pathlib import Path
from typing import NamedTuple


class Addition(NamedTuple):
    """Text to insert below a line, or with `skip`, that many lines further down."""

    path: str
    below: str
    text: str
    skip: int = 0


AVAILABLE = """

@lru_cache
@_make_compile_constant
def is_mechanic_plugins_available() -> bool:
    return _is_package_available("mechanic_plugins")[0]
"""

HANDLER = '''

def _get_mechanic_adamw(ctx: OptimizerContext) -> tuple[Any, dict[str, Any]]:
    """Get AdamW with the scale of its learning rate learned by Mechanic."""
    if not is_mechanic_plugins_available():
        raise ValueError("Please install mechanic-plugins with `pip install mechanic-plugins`")

    from mechanic_plugins.optim import AdamW

    ctx.optimizer_kwargs.update(ctx.adam_kwargs)
    if "scope" in ctx.optim_args:
        ctx.optimizer_kwargs["scope"] = ctx.optim_args["scope"]
    return AdamW, ctx.optimizer_kwargs
'''

DECORATOR = '''

def require_mechanic_plugins(test_case):
    """For a test that needs mechanic-plugins: it is skipped where the package is missing."""
    return unittest.skipUnless(is_mechanic_plugins_available(), "test requires mechanic-plugins")(test_case)
'''

TEST = """
    # ---------------------------------------------------------------------------
    # Mechanic test
    # ---------------------------------------------------------------------------

    @require_mechanic_plugins
    def test_mechanic_adamw(self):
        self._train_with_llama("mechanic_adamw", max_steps=20)
"""

ROW = "| Mechanic | `mechanic-plugins` | `mechanic_adamw` | Learns the scale of the learning rate while training |\n"

SOURCE = "src/transformers/"
TESTS = "tests/trainer/test_trainer_optimizers.py"
IMPORT = "    is_mechanic_plugins_available,\n"

ADDITIONS = [
    Addition(SOURCE + "training_args.py", '    GROKADAMW = "grokadamw"', '    MECHANIC_ADAMW = "mechanic_adamw"\n'),
    Addition(SOURCE + "utils/import_utils.py", '    return _is_package_available("grokadamw")[0]', AVAILABLE),
    Addition(SOURCE + "utils/__init__.py", "    is_matplotlib_available,", IMPORT),
    Addition(SOURCE + "trainer_optimizer.py", "    is_lomo_available,", IMPORT),
    Addition(SOURCE + "trainer_optimizer.py", "    return GrokAdamW, ctx.optimizer_kwargs", HANDLER),
    Addition(
        SOURCE + "trainer_optimizer.py",
        "    OptimizerNames.GROKADAMW: _get_grokadamw,",
        "    OptimizerNames.MECHANIC_ADAMW: _get_mechanic_adamw,\n",
    ),
    Addition(SOURCE + "testing_utils.py", "    is_lomo_available,", IMPORT),
    Addition(SOURCE + "testing_utils.py", "def require_grokadamw(test_case):", DECORATOR, skip=4),
    Addition(TESTS, "    require_lomo,", "    require_mechanic_plugins,\n"),
    Addition(TESTS, "    def test_grokadamw(self):", TEST, skip=1),
    Addition("docs/source/en/optimizers.md", "| LOMO / AdaLomo", ROW),
]


def added(text: str, addition: Addition) -> str:
    """The file's text with it.

    Raises:
        ValueError: The line is not there once.
    """
    if addition.text in text:
        return text
    lines = text.splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if line.startswith(addition.below)]
    if len(found) != 1:
        raise ValueError(f"{addition.path} has {len(found)} lines that start with {addition.below!r}, not one.")
    place = found[0] + 1 + addition.skip
    return "".join([*lines[:place], addition.text, *lines[place:]])


def apply(checkout: Path) -> None:
    """All additions, or none."""
    texts: dict[Path, str] = {}
    for addition in ADDITIONS:
        path = checkout / addition.path
        texts[path] = added(texts.get(path) or path.read_text(), addition)
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write mechanic_adamw into a checkout of transformers.")
    parser.add_argument("checkout", type=Path)
    apply(parser.parse_args().checkout)
