"""A workspace, a checkpoint, and two forks that go separate ways.

    python quickstart.py      with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN
"""

from coppice import Coppice


def propose(n: int) -> str:
    """The command that fork n tries."""
    return ["sort", "sort -n"][n]  # a real model goes here


with Coppice() as client, client.create("base") as ws:
    ws.files.write("/root/numbers", "10\n9\n100\n")
    before = ws.checkpoint()  # the whole machine: memory, disk and devices

    with before.fork(2) as forks:  # two machines that go on from there; they end with this block
        for n, fork in enumerate(forks):
            command = propose(n)
            fork.run(f"{command} numbers > sorted", cwd="/root", check=True)
            sorted_numbers = fork.files.read_text("/root/sorted").split()
            right = sorted_numbers == ["9", "10", "100"]
            print(f"{command}: {' '.join(sorted_numbers)} ({'right' if right else 'wrong'})")
            if right:
                best = fork.checkpoint(annotations={"score": 1.0})

    print(f"the workspace itself has no such file: {not ws.files.exists('/root/sorted')}")
    ws.restore(best)  # roll it back, or here forward, to any checkpoint of the tree
    print(f"now it has: {' '.join(ws.files.read_text('/root/sorted').split())}")
