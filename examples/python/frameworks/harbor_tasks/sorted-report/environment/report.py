import csv
import sys

with open(sys.argv[1], newline="") as f:
    rows = sorted(csv.reader(f), key=lambda row: row[1], reverse=True)
for name, amount in rows:
    print(f"{amount:>6} {name}")
