#!/usr/bin/env python3
"""A test bench that keeps its state in memory only.

It imports the library once and then lives on: edits on disk mean nothing to it until a module is loaded again, names that
other modules had bound before stay as they were, and what happened is known only to this process: the journal of loads,
the results of the first run, and how many loads are left. Restarting it loses all of that. Tests run in a forked child.

    bench.py SOCKET LIBRARY-DIRECTORY

    POST /step?load=MODULE&label=TEXT   load a module again (optional), run the tests, answer the observation
    GET  /state                         the observation of the last run

An observation: {passed, total, failed, regressed, journal, loads_left, stale, state, nonce, pid, identity}
"""
import fcntl
import hashlib
import http.server
import importlib
import json
import os
import socket
import socketserver
import struct
import sys
import urllib.parse

MODULES = ("itertoolz", "dicttoolz", "functoolz", "recipes")  # in the order in which they import each other
BINDS = {"recipes": "itertoolz"}  # recipes binds names of itertoolz when it is imported
SUITES = ("test_itertoolz", "test_dicttoolz", "test_functoolz", "test_recipes")
MAX_LOADS = 8


class Bench:
    def __init__(self, library):
        sys.path.insert(0, library)
        sys.dont_write_bytecode = True
        self.library = library
        self.package = importlib.import_module("toolz")
        self.nonce = os.urandom(16).hex()
        self.journal = []
        self.loads_left = MAX_LOADS
        self.sources = {m: self.read(m) for m in MODULES}
        self.bound = {m: self.sources[dep] for m, dep in BINDS.items()}
        self.suites = {}
        for name in SUITES:
            path = os.path.join(library, "toolz", "tests", name + ".py")
            with open(path) as f:
                self.suites[name] = compile(f.read(), path, "exec")
        self.baseline = None
        self.last = self.run()

    def read(self, module):
        with open(os.path.join(self.library, "toolz", module + ".py")) as f:
            return f.read()

    def load(self, module, label):
        if module not in MODULES:
            raise ValueError("there is no module " + module)
        if self.loads_left == 0:
            raise ValueError("this process has done all its loads")
        source = self.read(module)
        loaded = importlib.reload(getattr(self.package, module))
        for name in loaded.__all__:
            setattr(self.package, name, getattr(loaded, name))
        self.sources[module] = source
        if module in BINDS:
            self.bound[module] = self.sources[BINDS[module]]
        self.loads_left -= 1
        self.journal.append(label or module)

    def stale(self):
        return [m for m, dep in BINDS.items() if self.bound[m] != self.sources[dep]]

    def state(self):
        """Names what the tests see: equal states have equal results, whichever way they were reached."""
        h = hashlib.sha256()
        for text in [self.sources[m] for m in MODULES] + [self.bound[m] for m in sorted(BINDS)]:
            h.update(hashlib.sha256(text.encode()).digest())
        return h.hexdigest()[:16]

    def run(self):
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(r)
            with os.fdopen(w, "w") as f:
                json.dump(self.results(), f)
            os._exit(0)
        os.close(w)
        with os.fdopen(r) as f:
            text = f.read()
        os.waitpid(pid, 0)
        results = json.loads(text) if text else {}
        if self.baseline is None:
            self.baseline = results
        failed = sorted(t for t in self.baseline if not results.get(t))
        self.last = {
            "passed": len(self.baseline) - len(failed),
            "total": len(self.baseline),
            "failed": failed,
            "regressed": [t for t in failed if self.baseline[t]],
            "journal": self.journal,
            "loads_left": self.loads_left,
            "stale": self.stale(),
            "state": self.state(),
            "nonce": self.nonce,
            "pid": os.getpid(),
            "identity": identity(),
        }
        return self.last

    def results(self):
        out = {}
        for suite, code in self.suites.items():
            names = {"__name__": suite}
            try:
                exec(code, names)
            except Exception:
                continue
            for test, function in tests(names):
                try:
                    function()
                    out[suite + "." + test] = True
                except Exception:
                    out[suite + "." + test] = False
        return out


def tests(names):
    for name, value in sorted(names.items()):
        if name.startswith("test_") and callable(value):
            yield name, value
        elif name.startswith("Test") and isinstance(value, type):
            for method in sorted(dir(value)):
                if method.startswith("test_"):
                    yield name + "." + method, getattr(value(), method)


def identity():
    """What a fork must not share with its siblings, as a process sees it that is older than the fork."""
    out = {"random": os.urandom(16).hex(), "hostname": socket.gethostname(), "machine_id": "", "mac": "", "ip": ""}
    with open("/etc/machine-id") as f:
        out["machine_id"] = f.read().strip()
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _, name in socket.if_nameindex():
        if name == "lo":
            continue
        request = struct.pack("256s", name.encode())
        try:
            out["mac"] = fcntl.ioctl(s, 0x8927, request)[18:24].hex(":")  # SIOCGIFHWADDR
            out["ip"] = socket.inet_ntoa(fcntl.ioctl(s, 0x8915, request)[20:24])  # SIOCGIFADDR
        except OSError:
            continue
        break
    s.close()
    return out


class Handler(http.server.BaseHTTPRequestHandler):
    bench = None

    def do_GET(self):
        self.answer(200, self.bench.last)

    def do_POST(self):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        try:
            if "load" in query:
                self.bench.load(query["load"], query.get("label"))
            self.answer(200, self.bench.run())
        except Exception as e:
            self.answer(409, {"error": "%s: %s" % (type(e).__name__, e)})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self):
        return "local"

    def log_message(self, *_):
        pass


def main():
    path, library = sys.argv[1:]
    Handler.bench = Bench(library)
    if os.path.exists(path):
        os.unlink(path)
    with socketserver.UnixStreamServer(path + ".new", Handler) as server:
        os.rename(path + ".new", path)  # who finds the socket can connect to it
        server.serve_forever()


if __name__ == "__main__":
    main()
