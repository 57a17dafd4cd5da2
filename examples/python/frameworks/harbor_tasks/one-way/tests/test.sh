#!/bin/sh
# The list of sums and the program are those of the tests, not those in the machine.
mkdir /tmp/check
cp /tests/check.py /tests/lines.sha256 /workspace/notes.txt /tmp/check
python3 /tmp/check/check.py >/logs/verifier/reward.txt
