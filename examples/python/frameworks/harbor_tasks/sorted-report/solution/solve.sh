#!/bin/sh
set -eu
sed -i 's/row: row\[1\]/row: float(row[1])/' /workspace/report.py
python3 /workspace/report.py /workspace/sales.csv
