"""What an installation promises: an import without effects, every public name, types, versions that fit together."""

import re
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import easy_context

ROOT = Path(__file__).resolve().parent.parent

PUBLIC_NAMES = {
    "apply_seq_parallel_monkey_patch",
    "apply_unsloth_offloaded_gradient_checkpoint_monkey_patch",
    "init_seq_parallel",
    "prepare_dataloader",
    "prepare_seq_parallel_inputs",
    "remove_seq_parallel_monkey_patch",
    "seq_parallel_loss",
    "seq_parallel_loss_from_hidden",
    "unshard_sequence",
}

IMPORT_AND_LOOK = """
import sys
import torch

threads, defaults = torch.get_num_threads(), (torch.get_default_dtype(), torch.is_grad_enabled())
before = set(sys.modules)
import easy_context

assert (torch.get_num_threads(), (torch.get_default_dtype(), torch.is_grad_enabled())) == (threads, defaults)
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
heavy = {"transformers", "deepspeed", "accelerate", "datasets", "matplotlib"} & (set(sys.modules) - before)
assert not heavy, f"import easy_context also imports {heavy}"
"""

PATCH_FREE = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

def picture():
    return dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(vars(PreTrainedModel))

before = picture()
import easy_context
for name in easy_context.__all__:
    getattr(easy_context, name)
assert picture() == before
"""


@pytest.mark.parametrize("program", [IMPORT_AND_LOOK, PATCH_FREE], ids=["torch untouched", "transformers untouched"])
def test_import_has_no_effects(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_public_names():
    assert set(easy_context.__all__) >= PUBLIC_NAMES
    assert set(dir(easy_context)) >= PUBLIC_NAMES
    assert all(callable(getattr(easy_context, name)) for name in easy_context.__all__)
    assert all(getattr(easy_context, name).__doc__ for name in easy_context.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        easy_context.no_such_name  # noqa: B018


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with what setup.py would install: the package and its metadata."""
    directory = tmp_path_factory.mktemp("built")
    command = ["setup.py", "-q", "egg_info", "-e", directory, "build_py", "-d", directory]
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def distribution(built) -> Distribution:
    return Distribution.at(built / "easy_context.egg-info")


def test_every_module_and_the_types_are_packaged(built):
    def files(root: Path) -> set[Path]:
        return {one.relative_to(root) for one in (root / "easy_context").rglob("*") if one.suffix in (".py", ".typed")}

    assert files(built) == files(ROOT)
    assert Path("easy_context/py.typed") in files(built)


def test_tested_versions_satisfy_the_ranges(distribution):
    lines = map(str.strip, (ROOT / "requirements.txt").read_text().splitlines())
    pins = {one.name: one for one in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    ranges = {one.name: one for one in map(Requirement, distribution.requires)}
    for name in pins.keys() & ranges.keys():
        [pin] = pins[name].specifier
        assert pin.operator == "==" and ranges[name].specifier.contains(pin.version), f"{pins[name]}: {ranges[name]}"
    assert {name for name, one in ranges.items() if one.marker is None} <= pins.keys()


def test_extras(distribution):
    wanted = {"deepspeed", "flash", "lora", "peers", "quickstart", "test"}
    assert set(distribution.metadata.get_all("Provides-Extra")) == wanted
    requirements = [one for one in map(Requirement, distribution.requires) if one.marker]

    def names(extra: str) -> set[str]:
        return {one.name for one in requirements if one.marker.evaluate({"extra": extra})}

    assert names("flash") == {"flash-attn-4"} and names("peers") == {"ring-flash-attn", "yunchang"}
    assert names("test") > names("deepspeed") | names("lora") | names("quickstart")


def test_pre_commit_runs_the_ruff_that_the_tests_run():
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    assert {hook["entry"].split()[1] for hook in repo["hooks"]} == {"check", "format"}
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_path_outside_the_project():
    """Paths of one machine or one user: everything else is relative, from the environment, or a system tool."""
    elsewhere = re.compile(r"(?<![\w.}])/(?:home|root|work|opt|mnt|data|srv|scratch)/\w|\.\./shared")
    hits = []
    for path in tracked_files():
        if path.suffix in {".py", ".sh", ".md", ".yaml", ".json", ".toml", ".txt"} and path != Path(__file__).resolve():
            lines = enumerate(path.read_text().splitlines(), 1)
            hits += [f"{path.relative_to(ROOT)}:{number}: {line}" for number, line in lines if elsewhere.search(line)]
    assert not hits, "\n".join(hits)
