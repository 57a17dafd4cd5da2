"""Drives Coppice through the unmodified arrakis-mcp-server, as a client of the Model Context Protocol. It prints rows as client.py does.

ARRAKIS_URL is the server, and ARRAKIS_MCP the path of arrakis_mcp_server.py.
"""

import asyncio
import json
import os
import sys
import traceback
import uuid

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

RUN = uuid.uuid4().hex[:8]
failed = []


async def check(method, outcome):
    try:
        await outcome
        verdict, note = "works", ""
    except Exception as err:  # the rest is to be seen, too
        verdict, note = "fails", f"{type(err).__name__}: {err}"
        traceback.print_exc()
        failed.append(method)
    print(json.dumps({"method": "MCP: " + method, "verdict": verdict, "note": note}), flush=True)


async def main():
    server = StdioServerParameters(command=sys.executable, args=[os.environ["ARRAKIS_MCP"], "--arrakis-url", os.environ["ARRAKIS_URL"]])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()

        async def call(tool, want, **arguments):
            text = (await session.call_tool(tool, arguments)).content[0].text
            assert want in text and not text.startswith("Error"), text
            return text

        async def refused(tool, **arguments):
            text = (await session.call_tool(tool, arguments)).content[0].text
            assert text.startswith("Error"), text

        async def resource(uri, want):
            text = (await session.read_resource(uri)).contents[0].text
            assert want in text, text

        await session.call_tool("destroy_all_vms", {})
        await check("start_sandbox", call("start_sandbox", '"status": "RUNNING"', name="mcp-vm"))
        await check("run_command", call("run_command", "Command output:\nhello\n", vm_name="mcp-vm", cmd="echo hello"))
        await check("upload_file", call("upload_file", "Successfully", vm_name="mcp-vm", path="f", content="text ü"))
        await check("download_file", call("download_file", "File content:\ntext ü", vm_name="mcp-vm", path="f"))
        await check("snapshot", call("snapshot", "s-" + RUN, vm_name="mcp-vm", snapshot_id="s-" + RUN))
        await check("restore_snapshot", call("restore_snapshot", '"name": "mcp-2"', vm_name="mcp-2", snapshot_id="s-" + RUN))
        await check("update_vm_state", call("update_vm_state", "Successfully", vm_name="mcp-2", status="paused"))
        await check("arrakis://vms", resource("arrakis://vms", '"status": "PAUSED"'))
        await check("arrakis://vm/{vm_name}", resource("arrakis://vm/mcp-vm", '"name": "mcp-vm"'))
        await check("destroy_vm", call("destroy_vm", "Successfully", vm_name="mcp-2"))
        await check("destroy_all_vms", call("destroy_all_vms", "Successfully"))
        await check("an error is text", refused("run_command", vm_name="mcp-vm", cmd="true"))


asyncio.run(main())
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
