#!/usr/bin/env python3
"""Builds and runs the unit tests: `unit.py CARGO ARGUMENT...` instead of `cargo test ARGUMENT...`.

Cargo runs one test program after the other. Some of them wait most of their time, for bounds of
sockets and for an etcd or a batch system to start; those run in a lane of their own beside the
others. What each prints comes in one piece. All are run, also after a failure, and lines that
begin with "skipped: " are repeated at the end."""
import json
import os
import subprocess
import sys
import threading

# Package and target of the programs that wait.
WAITING = {("weft-web", "serve"), ("weft-store", "contract"), ("weft-cluster", "membership"),
           ("weft-cluster", "work"), ("weft-batch", "contract"),
           ("weft-node", "launch"), ("weft-switch", "processes"),
           ("weft-gateway", "connections"), ("weft-gateway", "idle")}
PRINTING = threading.Lock()


def build(cargo, arguments):
    command = [cargo, "test", *arguments, "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, stdout=subprocess.PIPE)
    if built.returncode:
        sys.exit(built.returncode)
    programs = []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable") \
                and message["profile"]["test"]:
            folder = os.path.dirname(message["manifest_path"])
            programs.append((folder, message["target"]["name"], message["executable"]))
    return sorted(programs)


def run_lane(programs, skipped, failed):
    for folder, target, executable in programs:
        ran = subprocess.run([executable], cwd=folder, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env={**os.environ, "CARGO_MANIFEST_DIR": folder})
        text = ran.stdout.decode(errors="replace")
        name = f"{os.path.relpath(folder)}: {target}"
        with PRINTING:
            print(f"\n     Running {name} ({os.path.relpath(executable)})\n{text}", flush=True)
            skipped.extend(line for line in text.splitlines() if line.startswith("skipped: "))
            if ran.returncode:
                failed.append(f"{name}: exit {ran.returncode}")


def package(folder):
    with open(os.path.join(folder, "Cargo.toml")) as manifest:
        return next(line for line in manifest if line.startswith("name")).split('"')[1]


def main():
    cargo, *arguments = sys.argv[1:]
    lanes = ([], [])
    for program in build(cargo, arguments):
        lanes[(package(program[0]), program[1]) in WAITING].append(program)
    skipped, failed = [], []
    threads = [threading.Thread(target=run_lane, args=(lane, skipped, failed)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if subprocess.run([cargo, "test", *arguments, "--doc"]).returncode:
        failed.append("examples in the documentation")
    for line in skipped:
        print(line)
    for line in failed:
        print(f"unit: FAILED: {line}")
    sys.exit(1 if failed else 0)


main()
