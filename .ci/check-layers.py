"""The architecture that docs/design.md draws is the one that Cargo builds:

- its table names every crate, and what each of them uses;
- a crate uses only crates above it in that table;
- no crate holds a fifth of the code or more;
- the modules of a crate import each other in no circle, apart from those that
  layers-known.txt lists with a reason. A module and those inside it may import
  each other."""
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
KNOWN = ROOT / ".ci/layers-known.txt"
DESIGN = ROOT / "docs/design.md"
# They stand beside the table: what tests and measures Weft.
BESIDE = {"tests", "tests/support", "bench", "fuzz"}
LARGEST = 1 / 5


def without_tests(text):
    """The text without modules and items under `#[cfg(test)]`, and without comments."""
    text = re.sub(r"//[^\n]*", "", text)
    out, at = [], 0
    for found in re.finditer(r"#\[cfg\(test\)\]", text):
        if found.start() < at:
            continue
        out.append(text[at : found.start()])
        brace = re.compile(r"[;{]").search(text, found.end())
        if brace is None:
            return "".join(out)
        at = brace.end()
        if brace.group() == "{":
            depth = 1
            while depth and at < len(text):
                depth += {"{": 1, "}": -1}.get(text[at], 0)
                at += 1
    out.append(text[at:])
    return "".join(out)


def leaves(tree):
    """The paths of a `use` tree, each with the name that it gets."""
    tree = tree.strip()
    braced = re.fullmatch(r"(.*?)\{(.*)\}", tree, re.S)
    if not braced:
        path, _, alias = tree.partition(" as ")
        parts = [part.strip() for part in path.split("::") if part.strip()]
        return [(parts, (alias or parts[-1]).strip())] if parts else []
    prefix = [part.strip() for part in braced[1].split("::") if part.strip()]
    found, depth, piece = [], 0, ""
    for character in braced[2] + ",":
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            for path, name in leaves(piece):
                if path == ["self"]:
                    path, name = [], prefix[-1]
                found.append((prefix + path, name))
            piece = ""
        else:
            piece += character
    return found


class Crate:
    """The modules of a crate, and who imports whom."""

    def __init__(self, folder):
        self.sources = {}
        root = folder / "src"
        for file in sorted(root.rglob("*.rs")):
            parts = list(file.relative_to(root).with_suffix("").parts)
            if parts[-1] in ("mod", "lib", "main"):
                parts.pop()
            if any(part == "tests" or part.endswith("_tests") for part in parts):
                continue
            text = without_tests(file.read_text())
            self.sources[tuple(parts)] = self.sources.get(tuple(parts), "") + text
        for module in list(self.sources):
            if any(self.is_test(module[: end + 1]) for end in range(len(module))):
                del self.sources[module]
        self.lines = sum(
            sum(1 for line in text.split("\n") if line.strip()) for text in self.sources.values()
        )
        self.uses = {module: self.uses_of(module) for module in self.sources}
        self.edges = {module: self.edges_of(module) for module in self.sources}

    def is_test(self, module):
        """Whether its parent declares it for tests only."""
        parent = self.sources.get(module[:-1], "")
        return not re.search(rf"\bmod {module[-1]}\b", parent)

    def absolute(self, module, path):
        """A path as seen in a module, from the root of the crate; None outside."""
        if path[0] == "crate":
            return path[1:]
        if path[0] in ("self", "super"):
            here = list(module)
            while path and path[0] in ("self", "super"):
                if path[0] == "super":
                    if not here:
                        return None
                    here.pop()
                path = path[1:]
            return here + path
        if module + (path[0],) in self.sources:
            return list(module) + path
        return None

    def uses_of(self, module):
        names = {}
        for tree in re.findall(r"\buse\s+([^;]+);", self.sources[module]):
            for path, name in leaves(tree):
                path = self.absolute(module, path)
                if path is not None:
                    names.setdefault(name, []).append(tuple(path))
        return names

    def holder(self, path, seen=()):
        """The module that a path leads into, through what others export again."""
        module = ()
        for end in range(len(path), -1, -1):
            if tuple(path[:end]) in self.sources:
                module = tuple(path[:end])
                break
        rest = path[len(module) :]
        if rest and (module, rest[0]) not in seen:
            for further in self.uses.get(module, {}).get(rest[0], []):
                if tuple(further) != tuple(path):
                    return self.holder(tuple(further) + tuple(rest[1:]), (*seen, (module, rest[0])))
        return module

    def edges_of(self, module):
        targets = set()
        paths = [path for found in self.uses[module].values() for path in found]
        for path in re.findall(r"\b(?:crate|super|self)(?:::\w+)+", self.sources[module]):
            path = self.absolute(module, path.split("::"))
            if path is not None:
                paths.append(tuple(path))
        for path in paths:
            target = self.holder(path)
            shorter = min(len(target), len(module))
            if target[:shorter] != module[:shorter]:
                targets.add(target)
        return targets

    def circles(self):
        """Sets of modules each of which reaches the others (Tarjan)."""
        number, low, stack, found = {}, {}, [], []

        def visit(module):
            number[module] = low[module] = len(number)
            stack.append(module)
            for target in sorted(self.edges[module]):
                if target not in number:
                    visit(target)
                    low[module] = min(low[module], low[target])
                elif target in stack:
                    low[module] = min(low[module], number[target])
            if low[module] == number[module]:
                circle = set()
                while module not in circle:
                    circle.add(stack.pop())
                if len(circle) > 1:
                    found.append(circle)

        for module in sorted(self.sources):
            if module not in number:
                visit(module)
        return found


def cargo():
    """Each crate's folder, and the folders of those that it uses, tests aside."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--offline"]
    packages = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)["packages"]
    folders = {
        package["name"]: str(pathlib.Path(package["manifest_path"]).parent.relative_to(ROOT))
        for package in packages
    }
    return {
        folders[package["name"]]: {
            folders[used["name"]]
            for used in package["dependencies"]
            if used["kind"] is None and used["name"] in folders
        }
        for package in packages
    }


def check_table(built, wrong):
    rows = re.findall(r"^\| `([\w/-]+)` \| .* \|([^|\n]*)\|$", DESIGN.read_text(), re.M)
    drawn = {crate: set(re.findall(r"`([\w/-]+)`", uses)) for crate, uses in rows}
    above = set()
    for crate, uses in drawn.items():
        if crate not in built:
            wrong.append(f"docs/design.md: there is no crate {crate}")
            continue
        for used in sorted(built[crate] - uses):
            wrong.append(f"docs/design.md: {crate} uses {used}, and the table does not say so")
        for used in sorted(uses - built[crate]):
            wrong.append(f"docs/design.md: {crate} does not use {used}, as the table says")
        for used in sorted(uses - above):
            wrong.append(f"docs/design.md: {crate} uses {used}, which is not above it")
        above.add(crate)
    for crate in sorted(set(built) - set(drawn) - BESIDE):
        wrong.append(f"docs/design.md: crate {crate} is not in the table")


def check_sizes(crates, wrong):
    total = sum(crate.lines for crate in crates.values())
    for name, crate in sorted(crates.items(), key=lambda pair: -pair[1].lines):
        if crate.lines >= total * LARGEST:
            wrong.append(f"{name}: {crate.lines} of {total} lines: a fifth is too much for one crate")
    return total


def check_circles(crates, wrong):
    known = {}
    for line in KNOWN.read_text().split("\n"):
        if line.strip() and not line.startswith("#"):
            names, _, reason = line.partition(" # ")
            crate, *modules = names.split()
            known[crate, frozenset(modules)] = reason
            if not reason.strip():
                wrong.append(f"{KNOWN.name}: {names}: no reason is given")
    met = set()
    for name, crate in crates.items():
        for circle in crate.circles():
            modules = frozenset("::".join(module) for module in circle)
            entry = next((key for key in known if key[0] == name and modules <= key[1]), None)
            if entry is None:
                inside = [
                    f"{'::'.join(module)} -> {'::'.join(target)}"
                    for module in sorted(circle)
                    for target in sorted(crate.edges[module] & circle)
                ]
                wrong.append(f"{name}: modules import each other in a circle: {', '.join(inside)}")
                continue
            met.add(entry)
            if modules != entry[1]:
                over = " ".join(sorted(entry[1] - modules))
                print(f"{KNOWN.name}: {name}: may be taken off the circle: {over}")
    for crate, modules in sorted(known.keys() - met, key=str):
        print(f"{KNOWN.name}: {crate}: no such circle any more: {' '.join(sorted(modules))}")
    return len(known)


def main():
    wrong = []
    built = cargo()
    check_table(built, wrong)
    crates = {name: Crate(ROOT / name) for name in built if name not in BESIDE}
    total = check_sizes(crates, wrong)
    circles = check_circles(crates, wrong)
    said = f"layers: {len(crates)} crates, {total} lines, {circles} known circles, {len(wrong)} wrong"
    print("\n".join([*wrong, said]))
    sys.exit(1 if wrong else 0)


main()
