"""The examples of the documentation on two ranks: they see one dataset, and what they call stage 3 is sharded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.launch_support import run

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRITE_DOWN = """
import json, os
report = engine.memory_report() if engine.zero_optimization_stage() == 3 else {}
found = {
    "data": [float(tensor.double().sum()) for tensor in loader.dataset.tensors] if loader is not None else [],
    "share": report["parameters_resting"] / report["unsharded_parameters"],
}
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""


def script_of(page: str, folder: Path, blocks: slice) -> Path:
    """The first blocks of a page, and what writes down what they made."""
    path = folder / "page.py"
    path.write_text("\n".join([*BLOCK.findall((ROOT / page).read_text())[blocks], WRITE_DOWN]))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("page", "blocks"), [("README.md", 1), ("docs/quickstart.md", 1), ("docs/guide.md", 2)])
def test_examples_on_two_ranks(page: str, blocks: int, tmp_path: Path) -> None:
    done = run("--nproc", "2", script_of(page, tmp_path, slice(blocks)), "TOKEN", cwd=tmp_path)
    assert done.code == 0, done.err
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert one["data"] == other["data"], "the ranks drew different datasets"
    assert one["share"] < 0.7
    assert other["share"] < 0.7


@pytest.mark.slow
def test_the_whole_guide_runs_on_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "guide.py"
    path.write_text("\n".join(BLOCK.findall((ROOT / "docs/guide.md").read_text())))
    done = run("--nproc", "2", path, "TOKEN", cwd=tmp_path)
    assert done.code == 0, done.err
