"""A real Python script: dicts, regular expressions, json, sorting, big integers,
a subprocess, and a temporary file. Prints a function of its arguments alone.

    work.py TEXT [ITEMS]
"""
import collections
import hashlib
import json
import re
import subprocess
import sys
import tempfile


def count_words(path):
    counts = collections.Counter()
    pattern = re.compile(r"\b[a-z]*(?:tion|ry|ft)\b")
    with open(path, encoding="ascii") as text:
        for line in text:
            counts.update(pattern.findall(line))
    return counts


def sorted_list(items):
    state, values = 12345, []
    for _ in range(items):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        values.append(state >> 20)
    values.sort()
    assert all(a <= b for a, b in zip(values, values[1:]))
    return values


def main():
    path = sys.argv[1]
    items = int(sys.argv[2]) if len(sys.argv) > 2 else 300_000

    counts = count_words(path)
    print(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10])

    values = sorted_list(items)
    print(hashlib.sha256(repr(values).encode()).hexdigest())

    document = {str(value): {"n": i, "tags": [value % 7, value % 11]} for i, value in enumerate(values)}
    text = json.dumps(document, sort_keys=True)
    again = json.loads(text)
    print(len(text), again == document)

    with tempfile.NamedTemporaryFile("w", suffix=".txt") as scratch:
        scratch.write("\n".join(str(value) for value in values[:2000]))
        scratch.flush()
        lines = subprocess.run(["wc", "-l", scratch.name], capture_output=True, check=True)
        print(lines.stdout.split()[0].decode())
        shell = subprocess.run(f"head -n 5 {scratch.name} | tac", shell=True, capture_output=True, check=True)
        print(shell.stdout.decode().split())

    print(pow(3, 40000) % 1000000007, len(str(2**14000)))
    failed = subprocess.run(["sh", "-c", "exit 7"])
    print("exit", failed.returncode)
    try:
        document["missing"]
    except KeyError as error:
        print("caught", error)


main()
