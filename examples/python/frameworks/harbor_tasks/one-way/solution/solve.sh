#!/bin/sh
set -eu
python3 /workspace/convert.py cp850
python3 /workspace/check.py
