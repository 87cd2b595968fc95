"""The documentation tells the truth: every code block runs, every link leads somewhere.

- `python`: all blocks of a page run in order in one process, like cells of a notebook, in an empty folder, with world size 1.
- `json`: is a valid configuration.
- `bash`: runs in a folder that has the repository's examples, with this environment's commands first on the path.

A block that cannot run here (it needs several hosts, or minutes) says which test shows the same thing, on the line before it:

    <!-- covered by tests/distributed/test_demo.py::test_stages_agree -->
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COVERED = re.compile(r"<!-- covered by (\S+?)::(\w+) -->\n+$")
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
KNOWN = {"python", "json", "bash", "text", ""}


@dataclass(frozen=True)
class Block:
    """A fenced code block and where it stands."""

    page: Path
    line: int
    language: str
    code: str
    covered_by: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found: list[Block] = []
    for match in FENCE.finditer(text):
        covered = COVERED.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(page, line, match[1], match[2], (covered[1], covered[2]) if covered else None))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks_in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and block.covered_by is None]


def name(thing: object) -> str:
    return str(thing.relative_to(ROOT)) if isinstance(thing, Path) else str(thing)


def environment() -> dict[str, str]:
    """This environment's, without what a surrounding launcher may have set."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    binaries = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{binaries}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def run(command: list[str], folder: Path) -> None:
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def test_there_is_documentation() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}
    assert len(blocks_in("python")) >= 5


@pytest.mark.parametrize(
    "page", [page if page.name == "README.md" else pytest.param(page, marks=pytest.mark.slow) for page in PAGES], ids=name
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    blocks = [block for block in blocks_in("python") if block.page == page]
    if not blocks:
        return
    # Empty lines bring each block to its own line number, so that a traceback points into the page.
    cells = [("\n" * (block.line - 1) + block.code) for block in blocks]
    for cell in cells:
        compile(cell, name(page), "exec")
    script = tmp_path / "page.py"
    script.write_text(
        f"space = {{'__name__': '__main__'}}\nfor cell in {cells!r}:\n    exec(compile(cell, {name(page)!r}, 'exec'), space)\n"
    )
    run([sys.executable, str(script)], tmp_path)


@pytest.mark.parametrize("block", blocks_in("json"), ids=name)
def test_json_blocks_are_configurations(block: Block) -> None:
    assert load_config(block.code, world_size=2).train_batch_size >= 2


@pytest.mark.parametrize("block", blocks_in("bash"), ids=name)
def test_bash_blocks_run(block: Block, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run(["bash", "-euo", "pipefail", "-c", block.code], tmp_path)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.covered_by], ids=name)
def test_covered_blocks_have_their_test(block: Block) -> None:
    assert block.covered_by is not None
    file, function = block.covered_by
    tree = ast.parse((ROOT / file).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(block.code for block in blocks_of(page) if block.language == "bash")
    lines = [*re.findall(r"^make (.+)$", code, re.MULTILINE), *re.findall(r"`make ([^`]+)`", page.read_text())]
    named = {word for line in lines for word in re.sub(r'\w+=("[^"]*"|\S+)', "", line).split()}
    assert named <= targets, f"no such target: {named - targets}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    text = page.read_text()
    assert text.count("\n```") % 2 == 0, "a code block is not closed"
    assert {block.language for block in blocks_of(page)} <= KNOWN


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for match in LINK.finditer(prose):
        target = next(group for group in match.groups() if group)
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        destination = (page.parent / file).resolve() if file else page
        assert destination.exists(), f"{name(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors_of(destination), f"{name(page)} links to {target}, which has no such heading"


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, made as code hosts make them."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}
