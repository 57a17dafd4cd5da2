"""Harbor with agents that try several ways from one state: each way is a branch of the machine, and the best one is verified.

    pip install 'coppice[harbor]'
    python with_harbor.py    with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN

The task cannot be undone, and its statement does not say which way is right. One rollout has to guess.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import override

os.environ.setdefault("HARBOR_TELEMETRY", "0")

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.job import Job
from harbor.models.agent.context import AgentContext
from harbor.models.job.config import JobConfig
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig

from coppice.adapters.harbor import CoppiceEnvironment

TASK = Path(__file__).parent / "harbor_tasks" / "one-way"


def proposals(instruction: str, count: int) -> list[str]:
    """What to run. A real model goes here: the `count` commands that it thinks are the best."""
    return [f"python3 /workspace/convert.py {name}" for name in ("utf-8", "cp437", "latin-1", "cp850", "mac-roman")][:count]


async def attempt(environment: BaseEnvironment, command: str) -> float:
    """Carries out a command, and returns how good the result is."""
    done = await environment.exec(command)
    if done.return_code != 0:
        return 0
    return float((await environment.exec("python3 /workspace/check.py")).stdout or 0)


class Single(BaseAgent):
    """One rollout: the first proposal."""

    @staticmethod
    @override
    def name() -> str:
        return "single"

    @override
    def version(self) -> str:
        return "1"

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await attempt(environment, proposals(instruction, 1)[0])


class Branching(Single):
    """Every proposal in a branch of its own. The trial goes on from the best one."""

    @staticmethod
    @override
    def name() -> str:
        return "branching"

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        assert isinstance(environment, CoppiceEnvironment)
        commands = proposals(instruction, 5)
        async with environment.branch(len(commands)) as branches:
            scores = await asyncio.gather(*[attempt(b, c) for b, c in zip(branches, commands, strict=True)])
            await environment.adopt(branches[scores.index(max(scores))])


async def main() -> None:
    with TemporaryDirectory() as jobs:
        config = JobConfig(
            jobs_dir=Path(jobs),
            quiet=True,
            tasks=[TaskConfig(path=TASK)],
            agents=[AgentConfig(import_path=f"with_harbor:{agent.__name__}") for agent in (Single, Branching)],
            environment=EnvironmentConfig(import_path="coppice.adapters.harbor:CoppiceEnvironment"),
        )
        result = await (await Job.create(config)).run()
    for trial in sorted(result.trial_results, key=lambda trial: trial.agent_info.name, reverse=True):
        if trial.exception_info is not None:
            raise SystemExit(trial.exception_info.exception_message)
        rewards = trial.verifier_result.rewards if trial.verifier_result else None
        print(f"{trial.agent_info.name}: {(rewards or {}).get('reward')}")


if __name__ == "__main__":
    asyncio.run(main())
