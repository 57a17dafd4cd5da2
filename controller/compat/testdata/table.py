"""Writes a table of docs/COMPATIBILITY.md between its two marks, from the outcomes of the clients.

Usage: table.py PAGE LAYER NAME=FILE... A name is that of a package with its version, and becomes a column.
"""

import json
import pathlib
import sys

page = pathlib.Path(sys.argv[1])
columns = {}
for pair in sys.argv[3:]:
    name, file = pair.split("=", 1)
    columns[name] = {row["method"]: row for row in map(json.loads, pathlib.Path(file).read_text().splitlines())}
methods = list(dict.fromkeys(m for rows in columns.values() for m in rows))
begin, end = (f"<!-- {sys.argv[2]}: {mark} -->\n" for mark in ("begin", "end"))
head, rest = page.read_text().split(begin)
_, tail = rest.split(end)
table = "| method | " + " | ".join(columns) + " | note |\n|---|" + "---|" * len(columns) + "---|\n"
for method in methods:
    cells, notes = [], []
    for rows in columns.values():
        row = rows.get(method)
        cells.append("-" if row is None or row["verdict"] == "absent" else row["verdict"])
        if row is not None and row["verdict"] != "absent" and row["note"]:
            notes.append(row["note"])
    note = "; ".join(dict.fromkeys(notes)).replace("|", "\\|").replace("\n", " ")
    table += f"| `{method}` | " + " | ".join(cells) + f" | {note} |\n"
page.write_text(head + begin + table + end + tail)
