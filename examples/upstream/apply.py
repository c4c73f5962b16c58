"""Writes what pull requests to other projects would add into a checkout of them.

    git clone https://github.com/huggingface/transformers
    python examples/upstream/apply.py transformers transformers && git -C transformers diff
    cd transformers && pytest tests/trainer/test_trainer_optimizers.py

- transformers: the optimizer name `mechanic_adamw`.
- pytorch_optimizer: `load_optimizer("mechanic_lion")`, for each of its names. Tests: tests/test_load_modules.py.
- sd-scripts: the effective learning rate in its logs. Tests: tests/test_optimizer.py.

Each addition goes below a line of the current source. If any of these lines is missing or not unique, nothing is
written. Running it again changes nothing.
"""

import argparse
from pathlib import Path
from typing import NamedTuple


class Addition(NamedTuple):
    """Text to insert below a line, or `skip` lines further down; at the end if `below` is empty."""

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

TRANSFORMERS = [
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


LOAD = '''

def load_mechanic_optimizer(optimizer: str) -> OPTIMIZER:
    """Load an optimizer around which Mechanic learns the scale of the learning rate."""
    from mechanic_plugins import mechanize  # noqa: PLC0415

    return mechanize(load_optimizer(optimizer.removeprefix('mechanic_')))
'''

LOADED = """\
    if optimizer_name.startswith('mechanic_'):
        if HAS_MECHANIC:
            return load_mechanic_optimizer(optimizer_name)
        raise ImportError(f'mechanic-plugins required for the optimizer {optimizer_name}')
"""

LOAD_TEST = """

@pytest.mark.parametrize('name', ['adamw', 'lion', 'adan'])
def test_load_mechanic_optimizer(name):
    pytest.importorskip('mechanic_plugins')

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = load_optimizer(f'mechanic_{name}')([parameter])
    for _ in range(100):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()

    assert isinstance(optimizer.base, load_optimizer(name))
    assert parameter.abs().max() < 0.5
"""

LOADERS = "pytorch_optimizer/optimizer/__init__.py"
LOAD_TESTS = "tests/test_load_modules.py"
LOAD_DOCS = "::: pytorch_optimizer.load_mechanic_optimizer\n    :docstring:\n    :members:\n\n"

PYTORCH_OPTIMIZER = [
    Addition(LOADERS, "HAS_BNB: bool", "HAS_MECHANIC: bool = find_spec('mechanic_plugins') is not None\n"),
    Addition(LOADERS, "def load_ao_optimizer(", LOAD, skip=11),
    Addition(LOADERS, "            'usage: https://github.com/pytorch/ao", LOADED, skip=1),
    Addition("pytorch_optimizer/__init__.py", "    load_bnb_optimizer,", "    load_mechanic_optimizer,\n"),
    Addition("docs/optimizer.md", "::: pytorch_optimizer.load_bnb_optimizer", LOAD_DOCS, skip=3),
    Addition(LOAD_TESTS, "import pytest", "import torch\n"),
    Addition(LOAD_TESTS, "", LOAD_TEST),
]

LOG = """

def append_effective_lr_to_logs(logs, lr_scheduler, lr_index, name):
    # optimizers that learn a scale of the learning rate (mechanic_plugins) tell the one in force
    optimizer = getattr(lr_scheduler, "optimizers", [None])[-1]
    effective_lrs = getattr(getattr(optimizer, "optimizer", optimizer), "effective_lrs", None)
    if effective_lrs is not None:
        logs["lr/effective/" + name] = effective_lrs[lr_index]
"""

LOG_TEST = """

def test_effective_lr_is_logged():
    optim = pytest.importorskip("mechanic_plugins.optim")
    accelerator = Accelerator(cpu=True)
    param = Parameter(torch.tensor([1.5, 1.5]))
    optimizer = optim.AdamW([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    for _ in range(5):
        optimizer.zero_grad()
        accelerator.backward(param.square().sum())
        optimizer.step()
        scheduler.step()
    logs = {}
    append_lr_to_logs_with_names(logs, scheduler, "mechanic_plugins.optim.AdamW", ["unet"])
    assert logs["lr/unet"] == 1.0
    assert 0.0 < logs["lr/effective/unet"] < 1.0
"""

LOG_TESTS = "tests/test_optimizer.py"
LOG_CALL = "train_util.append_effective_lr_to_logs(logs, lr_scheduler, i, lr_desc)\n"

SD_SCRIPTS = [
    Addition(
        "library/train_util.py", "    append_lr_to_logs_with_names(logs, lr_scheduler, optimizer_type, names)", LOG
    ),
    Addition(
        "library/train_util.py",
        '        logs["lr/" + name] = float(lrs[lr_index])',
        "        append_effective_lr_to_logs(logs, lr_scheduler, lr_index, name)\n",
    ),
    Addition("train_network.py", '            logs[f"lr/{lr_desc}"] = lr', f"            {LOG_CALL}"),
    Addition(
        LOG_TESTS,
        "from library.train_util import get_optimizer",
        "from library.train_util import append_lr_to_logs_with_names\n",
    ),
    Addition(LOG_TESTS, "from train_network import", "import pytest\nfrom accelerate import Accelerator\n"),
    Addition(LOG_TESTS, "", LOG_TEST),
]

PROJECTS = {"transformers": TRANSFORMERS, "pytorch_optimizer": PYTORCH_OPTIMIZER, "sd-scripts": SD_SCRIPTS}


def added(text: str, addition: Addition) -> str:
    """The file's text with the addition.

    Raises:
        ValueError: The line does not occur exactly once.
    """
    if addition.text in text:
        return text
    if not addition.below:
        return text + addition.text
    lines = text.splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if line.startswith(addition.below)]
    if len(found) != 1:
        raise ValueError(f"{addition.path} has {len(found)} lines that start with {addition.below!r}, not one.")
    place = found[0] + 1 + addition.skip
    return "".join([*lines[:place], addition.text, *lines[place:]])


def apply(project: str, checkout: Path) -> None:
    """Writes all additions or none."""
    texts: dict[Path, str] = {}
    for addition in PROJECTS[project]:
        path = checkout / addition.path
        texts[path] = added(texts.get(path) or path.read_text(), addition)
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("checkout", type=Path)
    arguments = parser.parse_args()
    apply(arguments.project, arguments.checkout)
