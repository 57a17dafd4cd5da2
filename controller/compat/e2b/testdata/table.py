"""Writes the table of docs/COMPATIBILITY.md between its two marks, from the outcomes of client.py."""

import json
import pathlib
import sys

rows = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
page = pathlib.Path(sys.argv[2])
begin, end = "<!-- table: begin -->\n", "<!-- table: end -->\n"
head, rest = page.read_text().split(begin)
_, tail = rest.split(end)
table = "| method | outcome | note |\n|---|---|---|\n"
for row in rows:
    note = row["note"].replace("|", "\\|").replace("\n", " ")
    table += f"| `{row['method']}` | {row['verdict']} | {note} |\n"
page.write_text(head + begin + table + end + tail)
