"""An evaluation by Inspect: each sample and each epoch is a fork of a machine that was prepared once.

    pip install 'coppice[inspect]'
    python with_inspect_ai.py    with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN
"""

from __future__ import annotations

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import ToolChoice, ToolInfo, bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from coppice.adapters.inspect_ai import CoppiceConfig

SETUP = "mkdir -p /workspace && cd /workspace && seq 100 > numbers && git init -q ."

SAMPLES = [
    Sample("Write the sum of the numbers in /workspace/numbers into /workspace/answer.", target="5050"),
    Sample("Write how many numbers in /workspace/numbers have the digit 7 into /workspace/answer.", target="19"),
]

COMMANDS = {"sum": "awk '{ s += $1 } END { print s }' numbers > answer", "digit": "grep -c 7 numbers > answer"}


def scripted(messages: list[ChatMessage], tools: list[ToolInfo], choice: ToolChoice, config: GenerateConfig) -> ModelOutput:
    """Calls the tool once, and then says that it is done."""
    if messages[-1].role == "tool":
        output = ModelOutput.from_content("mockllm/model", "Done.")
    else:
        command = next(c for word, c in COMMANDS.items() if word in messages[-1].text)
        output = ModelOutput.for_tool_call("mockllm/model", "bash", {"command": f"cd /workspace && {command}"})
    output.usage = ModelUsage()  # otherwise Inspect fetches a tokenizer, and counts
    return output


@scorer(metrics=[accuracy()])
def answer_file() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        answer = (await sandbox().read_file("answer")).strip()
        return Score(value=CORRECT if answer == target.text else INCORRECT, answer=answer)

    return score


model = get_model("mockllm/model", custom_outputs=scripted)  # a real model goes here: get_model("openai/…")
task = Task(
    dataset=SAMPLES,
    solver=[use_tools(bash(timeout=60)), generate()],
    scorer=answer_file(),
    sandbox=SandboxEnvironmentSpec("coppice", CoppiceConfig(setup=SETUP)),
)
if __name__ == "__main__":
    log = eval(task, model=model, epochs=2, display="none")[0]
    if log.status != "success":
        raise SystemExit(str(log.error))
    passed = [s for s in log.samples or [] if s.scores and s.scores["answer_file"].value == CORRECT]
    print(f"{len(passed)} of {len(log.samples or [])} samples passed")
