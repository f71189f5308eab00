"""Every relative link in the project's Markdown leads to a file that exists, and to a
heading in it where it names one; so does every path in code font below one of the
project's folders; and the glossary's types are in the code."""
import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`([\w.\-]+/[a-z0-9_.\-/]*)`")
TYPE = re.compile(r"`([A-Z]\w*[a-z]\w*)`")
GLOSSARY = pathlib.Path("docs/glossary.md")


def anchors(path):
    """The names that headings get, as Git forges derive them."""
    names = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            text = line.lstrip("#").strip().lower()
            names.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return names


def listed(*patterns):
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in said.stdout.split("\n") if name and pathlib.Path(name).exists()]


def unknown_types():
    """Types in the glossary's first column that no source file has."""
    words = set()
    for name in listed("*.rs"):
        words.update(re.findall(r"\w+", pathlib.Path(name).read_text(encoding="utf-8")))
    rows = [line.split("|")[1] for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [name for row in rows for name in TYPE.findall(row) if name not in words]


def main():
    folders = {name.split("/")[0] for name in listed("*/*")}
    wrong = [f"{GLOSSARY}: {name}: no such type" for name in unknown_types()]
    checked = 0
    for name in listed("*.md"):
        page = pathlib.Path(name)
        # Code blocks hold examples, not links.
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for link in LINK.findall(text):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (page.parent / file) if file else page
            checked += 1
            if not target.exists():
                wrong.append(f"{page}: {link}: no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                wrong.append(f"{page}: {link}: no such heading")
        for path in PATH.findall(text):
            checked += 1
            if path.split("/")[0] in folders and not pathlib.Path(path).exists():
                wrong.append(f"{page}: {path}: no such path")
    print("\n".join(wrong + [f"docs-check: {checked} links and paths, {len(wrong)} broken"]))
    sys.exit(1 if wrong else 0)


main()
