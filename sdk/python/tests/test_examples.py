"""The examples, as people run them, on real machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import VMs
from coppice import Coppice

pytestmark = pytest.mark.vms

# What each of them prints. The machines decide it: with a machine that forks wrongly, these lines differ.
EXAMPLES: dict[str, str] = {
    "quickstart": r"sort: 10 100 9 \(wrong\)\nsort -n: 9 10 100 \(right\)\n.*: True\nnow it has: 9 10 100\n",
    "best_of_n": r"\* root .*\n(  .*\n){3}\*   proposal 3  value 1\.000 .*\nbest: 1\.00, in checkpoint ckpt_\w+\n(.*\n)+",
    "mcts_repair": r"goal reached after \d+ edits were tried\n\* root (.*\n)+repaired by: .*total of merged.*\nchanged: /root/spans\.py\n",
    "rl_rollouts": r"(Write the .*  rewards \[.*\]\n){2}8 episodes in rollouts\.jsonl\n",
    "web_agent": r"(/add .*\n){2}( tried .*\n){3}kept the way that costs 12\.75\n/order .*\nordered: .*12\.75, 'ordered': True\}\n",
}

TYPESCRIPT: dict[str, str] = {
    "quickstart": r"ws: common\nleft: left\nright: common\n",
    "best_of_n": r"(round \d: \d+ \(score -?\d+\)\n){3}best: \d+, in checkpoint ckpt_\w+\n",
}


def test_all_are_run(examples: Path) -> None:
    assert {p.stem for p in examples.glob("*.py")} == set(EXAMPLES)
    for path in examples.glob("*.py"):
        assert path.read_text().count("a real model goes here") == 1, path
    assert {p.stem for p in (examples.parent / "typescript").glob("*.mjs")} == set(TYPESCRIPT)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(vms: VMs, name: str, examples: Path, tmp_path: Path) -> None:
    env = {**os.environ, "COPPICE_SERVER": vms.url, "COPPICE_TOKEN": vms.token, "PYTHONDONTWRITEBYTECODE": "1"}
    with Coppice(vms.url, vms.token) as c:
        before = {w.id for w in c.workspaces()}
        done = subprocess.run(
            [sys.executable, examples / f"{name}.py"], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(EXAMPLES[name], done.stdout), done.stdout
        assert {w.id for w in c.workspaces()} == before  # it leaves no machine behind
    if name == "rl_rollouts":
        lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
        assert len(lines) == 8 and len({e["checkpoint"] for e in lines}) == 1
        for prompt in {e["prompt"] for e in lines}:
            assert sum(e["advantage"] for e in lines if e["prompt"] == prompt) == pytest.approx(0)
            assert len({e["reward"] for e in lines if e["prompt"] == prompt}) > 1


@pytest.mark.parametrize("name", TYPESCRIPT)
def test_typescript_example(vms: VMs, name: str, examples: Path) -> None:
    installed = os.environ.get("COPPICE_NODE")
    if not installed:
        pytest.skip("COPPICE_NODE is not set: run sdk/python/test on a host with npm, which installs the package there")
    program = shutil.copy(examples.parent / "typescript" / f"{name}.mjs", installed)  # where it finds the package
    env = {**os.environ, "COPPICE_SERVER": vms.url, "COPPICE_TOKEN": vms.token}
    with Coppice(vms.url, vms.token) as c:
        before = {w.id for w in c.workspaces()}
        done = subprocess.run(["node", program], env=env, text=True, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(TYPESCRIPT[name], done.stdout), done.stdout
        assert {w.id for w in c.workspaces()} == before
