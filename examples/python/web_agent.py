"""An agent uses a web application in its workspace, and tries three ways from the same state before it does what cannot be undone.

    python web_agent.py       with a server of `coppice dev`, or with COPPICE_SERVER and COPPICE_TOKEN

The shop keeps carts in its memory alone. A checkpoint records the running process, so each fork has the agent's session with
the full cart: nothing is replayed. Orders are final: an order in one fork leaves the others as they were.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from coppice import Coppice, Workspace

SHOP = r'''
import http.server, json, secrets, urllib.parse
PRICES = {"tea": 10, "cup": 7}
COUPONS = {"SPRING": 0.9, "TEATIME": 0.75}
carts = {}

class Shop(http.server.BaseHTTPRequestHandler):
    def answer(self, status, page):
        body = json.dumps(page).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        form = dict(urllib.parse.parse_qsl(self.rfile.read(int(self.headers.get("content-length", 0))).decode()))
        if self.path == "/login":
            key = secrets.token_hex(8)
            carts[key] = {"items": [], "factor": 1, "ordered": False}
            return self.answer(200, {"session": key, "offers": PRICES})
        cart = carts.get(form.get("session"))
        if cart is None or cart["ordered"]:
            return self.answer(403, {"error": "log in first"})
        if self.path == "/add" and form.get("item") in PRICES:
            cart["items"].append(form["item"])
        elif self.path == "/coupon" and form.get("code") in COUPONS:
            cart["factor"] = COUPONS[form["code"]]
        elif self.path == "/order":
            cart["ordered"] = True
        else:
            return self.answer(400, {"error": "no such thing"})
        price = cart["factor"] * sum(PRICES[i] for i in cart["items"])
        self.answer(200, {"items": cart["items"], "price": price, "ordered": cart["ordered"]})

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Shop).serve_forever()
'''


@dataclass
class Agent:
    """What the agent knows: the pages that it has seen. It goes to each fork as a copy."""

    session: str = ""
    pages: list[dict[str, Any]] = field(default_factory=list)

    def post(self, ws: Workspace, path: str, **form: str) -> dict[str, Any]:
        """Sends a form from within the workspace, so the application needs no open port."""
        command = ["curl", "-sS", "--retry", "30", "--retry-delay", "1", "--retry-connrefused", f"http://127.0.0.1:8000{path}"]
        for name, value in {"session": self.session, **form}.items():
            command += ["--data-urlencode", f"{name}={value}"]
        page: dict[str, Any] = json.loads(ws.run(command, check=True, timeout=120).stdout)
        self.pages.append(page)
        return page


def next_actions(pages: list[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    """What to do after these pages: one action to do, or several to try."""
    script: list[list[tuple[str, dict[str, str]]]] = [  # a real model goes here
        [("/add", {"item": "tea"})],
        [("/add", {"item": "cup"})],
        [("/coupon", {"code": code}) for code in ("SUMMER", "SPRING", "TEATIME")],
        [("/order", {})],
    ]
    return script[len(pages) - 1] if len(pages) <= len(script) else []


with Coppice() as client, client.create("base") as ws:
    ws.files.write("/root/shop.py", SHOP)
    ws.start("python3 /root/shop.py")
    agent = Agent()
    agent.session = agent.post(ws, "/login")["session"]
    while actions := next_actions(agent.pages):
        if len(actions) == 1:
            path, form = actions[0]
            print(path, form, agent.post(ws, path, **form))
            continue
        here = ws.checkpoint()  # with the application's memory
        tried = []
        with here.fork(len(actions)) as forks:
            for fork, (path, form) in zip(forks, actions):
                one = Agent(agent.session, list(agent.pages))
                page = one.post(fork, path, **form)
                print(" tried", path, form, page)
                if "error" not in page:
                    tried.append((page["price"], fork.checkpoint(annotations={"score": -page["price"]}), one))
        price, best, agent = min(tried, key=lambda each: each[0])
        ws.restore(best)  # goes on from the best
        print(f"kept the way that costs {price}")
    print(f"ordered: {agent.pages[-1]}")
