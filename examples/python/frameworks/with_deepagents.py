"""A deep agent (LangGraph) repairs a program in a workspace. The machine was recorded before, and can be rolled back.

    pip install 'coppice[deepagents]'
    python with_deepagents.py     with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from coppice import Coppice
from coppice.adapters.deepagents import CoppiceBackend

PROGRAM = "def double(n):\n    return n + n + 1\n"
TEST = "cd /workspace && python3 -c 'from double import double; assert double(21) == 42; print(\"right\")'"


class Scripted(GenericFakeChatModel):
    """Says what the script says, whatever it is asked."""

    def bind_tools(
        self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool], **_: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        return self


def call(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call-{name}", "type": "tool_call"}])


SCRIPT = [
    call("read_file", file_path="/workspace/double.py"),
    call("edit_file", file_path="/workspace/double.py", old_string="n + n + 1", new_string="2 * n"),
    call("execute", command=TEST),
    AIMessage("It is repaired."),
]

with Coppice() as client, client.create("base") as ws:
    ws.files.write("/workspace/double.py", PROGRAM)
    backend = CoppiceBackend(ws)
    before = backend.checkpoint()
    model = Scripted(messages=iter(SCRIPT))  # a real model goes here: model="anthropic:…"
    agent = create_deep_agent(model=model, backend=backend)
    answer = agent.invoke({"messages": [{"role": "user", "content": "Repair /workspace/double.py."}]})
    for message in answer["messages"]:
        print(f"{message.type}: {str(message.content).strip() or [c['name'] for c in message.tool_calls]}")
    after = backend.checkpoint()
    print("changed: " + ", ".join(f.path for f in before.diff(after).files if f.path.endswith(".py")))
    backend.restore(before)  # as if the agent had never been there
    print(f"rolled back: {ws.files.read_text('/workspace/double.py') == PROGRAM}")
