"""Builds two commits and runs latency benchmarks of both in alternation, then prints the
ratio of each figure, with its spread over the rounds.

    ab BASE [HEAD]     two commits; HEAD is the checked-out one unless told otherwise

WEFT_AB_ROUNDS (5) is the number of rounds, WEFT_AB_BENCHMARKS (latency,
vm-nodes-latency) what runs. Worktrees and builds stay in target/ab, so that a second
comparison with the same commit builds nothing.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROUNDS = int(os.environ.get("WEFT_AB_ROUNDS", "5"))
BENCHMARKS = os.environ.get("WEFT_AB_BENCHMARKS", "latency,vm-nodes-latency").split(",")
TOP = pathlib.Path.cwd()
PLACE = TOP / "target" / "ab"


def run(*command, **options):
    return subprocess.run([str(word) for word in command], check=True, **options)


def revision(name):
    said = run("git", "rev-parse", "--short=12", "--verify", f"{name}^{{commit}}", stdout=subprocess.PIPE, text=True)
    return said.stdout.strip()


def built(commit):
    """The folder with the optimised binaries of a commit."""
    tree, target = PLACE / commit, PLACE / f"{commit}-target"
    if not tree.exists():
        run("git", "worktree", "add", "--detach", tree, commit)
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target))
    binaries = ["weft-cli", "weft-bench"]
    if (tree / "monitor").exists():
        binaries.append("weft-monitor")
    for packages in [["weft-runtime"], binaries]:
        flags = [word for package in packages for word in ("-p", package)]
        run("cargo", "build", "--release", *flags, cwd=tree, env=environment)
    return target / "release"


def figures(value, name=""):
    """Every list of numbers beneath `value`, with the path to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{name} {key}".strip())
    elif isinstance(value, list) and value and all(isinstance(inner, list) for inner in value):
        for number, inner in enumerate(value):
            yield from figures(inner, f"{name} {number}")
    elif isinstance(value, list) and value and all(isinstance(number, (int, float)) for number in value):
        yield name, value


def measure(binaries, judge, benchmark):
    """One run: the median of each figure. Both commits are judged by one `weft-bench`."""
    results, page = PLACE / "results", PLACE / "page.md"
    results.mkdir(parents=True, exist_ok=True)
    page.write_text((TOP / "bench" / "RESULTS.md").read_text())
    run(
        judge / "weft-bench", "--weft", binaries / "weft", "--results", results, "--page", page, "--repeat", 1, benchmark,
        stdout=subprocess.DEVNULL,
    )
    samples = json.loads((results / f"{benchmark}.json").read_text())["samples"]
    return {f"{benchmark}: {name}": statistics.median(numbers) for name, numbers in figures(samples)}


def main():
    if len(sys.argv) not in (2, 3) or not sys.argv[1]:
        sys.exit(__doc__)
    base, head = revision(sys.argv[1]), revision(sys.argv[2] if len(sys.argv) == 3 else "HEAD")
    folders = {commit: built(commit) for commit in (base, head)}
    ratios, levels = {}, {}
    for number in range(ROUNDS):
        # The one that goes first finds a colder machine: they take turns.
        order = [base, head] if number % 2 == 0 else [head, base]
        for benchmark in BENCHMARKS:
            found = {commit: measure(folders[commit], folders[head], benchmark) for commit in order}
            for name, value in found[head].items():
                before = found[base].get(name)
                if before is not None and before > 0 and value > 0:
                    ratios.setdefault(name, []).append(value / before)
                    levels.setdefault(name, []).append(before)
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
    width = max(map(len, ratios), default=0)
    print(f"\n{head} / {base}, {ROUNDS} rounds in alternation: above 1 is slower where the figure is a time\n")
    for name, values in ratios.items():
        middle = statistics.median(values)
        clear = "  all rounds agree" if len(values) > 2 and not min(values) <= 1 <= max(values) else ""
        print(
            f"{name:{width}}  {statistics.median(levels[name]):10.2f}  "
            f"{middle:5.2f} ({min(values):.2f} to {max(values):.2f}){clear}"
        )


if __name__ == "__main__":
    main()
