"""Rollouts for training: groups of episodes that begin in the same state, with rewards and advantages, as JSON lines.

    python rl_rollouts.py     with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN

The state is prepared once and recorded as a checkpoint. Each episode runs in a fork of it, all of them at the same time, so
setup costs nothing per episode and the episodes of a group differ only in what the policy did (as GRPO wants it).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from typing import Any

from coppice import AsyncCheckpoint, AsyncCoppice, AsyncWorkspace

GROUP = 4
STEPS = 3
FILE = "rollouts.jsonl"

LOG = "".join(f"{n:03} {'ERROR' if n % 7 == 3 else 'INFO'} code={n * n % 11}\n" for n in range(100))

TASKS = {
    "Write the number of ERROR lines of /root/log into /root/answer.": "14",
    "Write the code of the last ERROR line of /root/log into /root/answer.": "3",
}

COMMANDS = [
    "head -3 log",
    "grep -c ERROR log > answer",
    "grep ERROR log | tail -1 | sed 's/.*=//' > answer",
    "wc -l < log > answer",
]


def policy(dice: random.Random, prompt: str, steps: list[dict[str, Any]]) -> str:
    """The next command, from the task and what has happened so far."""
    return dice.choice(COMMANDS)  # a real model goes here


async def reward(ws: AsyncWorkspace, want: str) -> float:
    """What the episode is worth. The program runs in the machine, after the policy has had its last step."""
    answer = await ws.run("cat answer", cwd="/root")
    return 1.0 if answer.stdout.strip() == want else 0.1 if answer.ok else 0.0


async def episode(ws: AsyncWorkspace, prompt: str, want: str, seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    steps: list[dict[str, Any]] = []
    for _ in range(STEPS):
        command = policy(dice, prompt, steps)
        result = await ws.run(command, cwd="/root", timeout=30)
        steps.append({"command": command, "output": result.stdout[-2000:], "exit_code": result.exit_code})
    return {"prompt": prompt, "seed": seed, "steps": steps, "reward": await reward(ws, want)}


async def group(start: AsyncCheckpoint, number: int, prompt: str, want: str) -> list[dict[str, Any]]:
    async with await start.fork(GROUP) as forks:
        episodes = await asyncio.gather(*(episode(ws, prompt, want, number * GROUP + n) for n, ws in enumerate(forks)))
    rewards = [e["reward"] for e in episodes]
    mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
    for e in episodes:
        e["advantage"] = (e["reward"] - mean) / spread if spread else 0.0
    return list(episodes)


async def main() -> None:
    async with AsyncCoppice() as client:
        async with await client.create("base") as ws:
            await ws.files.write("/root/log", LOG)
            start = await ws.checkpoint()
        groups = await asyncio.gather(*(group(start, n, *task) for n, task in enumerate(TASKS.items())))
    with open(FILE, "w", encoding="utf-8") as f:
        for episodes in groups:
            for e in episodes:
                f.write(json.dumps({"checkpoint": start.id, **e}) + "\n")
            print(f"{episodes[0]['prompt']}  rewards {[e['reward'] for e in episodes]}")
    print(f"{sum(map(len, groups))} episodes in {FILE}")


asyncio.run(main())
