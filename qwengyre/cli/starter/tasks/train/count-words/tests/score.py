"""Print the fraction of the expected lines that stand in words.txt where they belong. Reads a file, runs nothing of the workspace."""

import sys

with open(f"{sys.argv[1]}/expected.txt") as file:
    expected = file.read().splitlines()
try:
    with open("words.txt", errors="replace") as file:
        given = file.read(100_000).splitlines()
except OSError:
    given = []
right = sum(line == wanted for line, wanted in zip(given, expected, strict=False))
print(right / max(len(expected), len(given)))
