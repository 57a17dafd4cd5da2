#!/bin/sh
printf 'a,7\nb,1000\nc,40.5\nd,-3\n' >/tmp/hidden.csv
names=$(python3 /workspace/report.py /tmp/hidden.csv | awk '{ printf "%s", $2 }')
if [ "$names" = bcad ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
