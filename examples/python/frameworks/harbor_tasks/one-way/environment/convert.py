"""Converts notes.dat to UTF-8, once."""

import os
import sys

os.chdir(os.path.dirname(os.path.abspath(__file__)))
with open("notes.dat", "rb") as f:
    text = f.read().decode(sys.argv[1], errors="replace")
with open("notes.txt", "w", encoding="utf-8") as f:
    f.write(text)
os.remove("notes.dat")
