"""Prints which part of the lines of notes.txt is right."""

import hashlib
import os

os.chdir(os.path.dirname(os.path.abspath(__file__)))
with open("lines.sha256") as f:
    wanted = f.read().split()
try:
    with open("notes.txt", "rb") as f:
        found = [hashlib.sha256(line).hexdigest() for line in f.read().split(b"\n")]
except FileNotFoundError:
    found = []
print(sum(a == b for a, b in zip(wanted, found)) / len(wanted))
