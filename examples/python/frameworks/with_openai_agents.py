"""An agent of the OpenAI Agents SDK writes a program in a workspace; a second one goes on in a fork of the machine.

    pip install 'coppice[openai-agents]'
    python with_openai_agents.py      with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from agents import Model, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.items import TResponseStreamEvent
from agents.sandbox import SandboxAgent, SandboxRunConfig
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from coppice import AsyncCoppice
from coppice.adapters.openai_agents import CoppiceSandboxClient, CoppiceSandboxClientOptions, workspace_of


class Scripted(Model):
    """Runs the commands of a script, one in each turn, and then says that it is done."""

    def __init__(self, *commands: str) -> None:
        self.commands = list(commands)

    async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
        if not self.commands:
            text = ResponseOutputText(text="Done.", type="output_text", annotations=[])
            message = ResponseOutputMessage(id="message", content=[text], role="assistant", status="completed", type="message")
            return ModelResponse(output=[message], usage=Usage(), response_id=None)
        left = len(self.commands)
        call = ResponseFunctionToolCall(
            name="exec_command", arguments=json.dumps({"cmd": self.commands.pop(0), "login": False}), call_id=f"call-{left}",
            type="function_call",
        )
        return ModelResponse(output=[call], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


WRITE = "echo 'print(6 * 7)' > answer.py"
RUN = "python3 answer.py > answer.txt && cat answer.txt"


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncCoppice() as coppice:
        client = CoppiceSandboxClient(coppice)
        session = await client.create(options=CoppiceSandboxClientOptions(image="base"))
        async with session:
            agent = SandboxAgent(name="writer", model=Scripted(WRITE))  # a real model goes here: model="gpt-…"
            await Runner.run(agent, "Write answer.py.", run_config=RunConfig(sandbox=SandboxRunConfig(session=session)))
            forks = await workspace_of(session).fork(2)
            for n, fork in enumerate(forks):
                branch = await client.attach(fork)
                async with branch:
                    agent = SandboxAgent(name=f"runner {n}", model=Scripted(RUN))
                    done = await Runner.run(agent, "Run it.", run_config=RunConfig(sandbox=SandboxRunConfig(session=branch)))
                    answer = await fork.files.read_text("/workspace/answer.txt")
                    print(f"fork {n}: {answer.strip()} {done.final_output}")
                await client.delete(branch)
            there = await workspace_of(session).files.exists("/workspace/answer.txt")
            print(f"the first workspace has an answer: {there}")
        await client.delete(session)


asyncio.run(main())
