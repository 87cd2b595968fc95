"""A save that is killed at any moment leaves what was there before, and what is called complete is complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Forks, so that one interpreter with torch loaded serves for every kill. Each child saves a checkpoint full of one number and
# kills itself at its n-th step outside of Python: opening, making, renaming or deleting something, or a write in a data file.
KILLS = """
import os, signal, sys
from pathlib import Path
import torch
from shardwise.checkpoint import *
from shardwise.checkpoint import saving

torch.set_num_threads(1)  # a forked child has none of the others

root, keep, exchange = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
KEY, SPEC = Key("weight", "w"), Spec((70_000,), torch.float32)

class Alone:
    def collect(self, problem): return [problem]
    def announce(self, problem): return problem

def save(number, tag, progress=None):
    folder = Folder(root)
    contents = Contents([Part(KEY, SPEC, 0, torch.full((70_000,), float(number)))], specs={KEY: SPEC},
                        facts=Facts(counters={"global_steps": number}), client_state=b"x")
    to = Destination(folder, tag, folder.begin(tag), 0, 1, keep=keep)
    write_checkpoint(contents, to, Alone(), progress)

def found():
    folder = Folder(root)
    folder.recover()
    tag = folder.newest()
    source = NativeSource(folder, tag)
    source.verify()
    values = torch.empty(70_000)
    source.read([Part(KEY, SPEC, 0, values)])
    source.close()
    assert values.unique().tolist() == [float(source.facts.counters["global_steps"])]
    for other in folder.tags():
        NativeSource(folder, other).verify()
    return source.facts.counters["global_steps"]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if exchange == "no":  # a system that cannot swap two names in one step
    from shardwise.checkpoint import folder as module
    module._exchange = lambda one, other: False

save(0, "first")
save(1, "tag-1" if sys.argv[4] == "new" else "same")
last, kills = 1, 0
for number in range(2, 400):
    tag = f"tag-{number}" if sys.argv[4] == "new" else "same"
    pid = os.fork()
    if pid == 0:
        left = number - 1
        def step(*event):
            global left
            if event[0] in WATCHED and str(root) in str(event[1][0] if event[1] else "") or event[0] == "written":
                left -= 1
                if left == 0:
                    die()
        sys.addaudithook(step)
        save(number, tag, lambda done: step("written"))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    now = found()
    assert now in (last, number), (now, last, number)
    last = now
    if keep:  # what a kill has kept from being deleted must not make the next save longer and longer
        Folder(root).prune(keep, Folder(root).newest())
    if status == 0:
        assert now == number
        break
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    kills += 1
else:
    raise SystemExit("never got through")
save(number + 1, "end")
left = sorted(each.name for each in root.iterdir() if each.name.startswith("."))
assert left == [], left
assert found() == number + 1
print("kills", kills, "tags", len(Folder(root).tags()))
"""


@pytest.mark.parametrize(
    ("keep", "exchange", "tags"),
    [
        pytest.param(0, "yes", "new", marks=pytest.mark.slow),
        (2, "yes", "new"),
        (0, "yes", "same"),
        pytest.param(0, "no", "same", marks=pytest.mark.slow),
    ],
    ids=["another tag", "with pruning", "the same tag again", "the same tag, without swapping names"],
)
def test_killed_at_every_step(keep: int, exchange: str, tags: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "run"), str(keep), exchange, tags],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert int(words[1]) >= 15, done.stdout
    if keep:
        assert int(words[3]) == keep
