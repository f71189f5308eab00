"""Every relative link in the project's Markdown leads to a file that exists,
and to a heading in it where it names one."""
import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(path):
    """The names that headings get, as Git forges derive them."""
    names = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            text = line.lstrip("#").strip().lower()
            names.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return names


def main():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], capture_output=True, text=True, check=True)
    wrong = []
    checked = 0
    for name in listed.stdout.split("\n"):
        page = pathlib.Path(name)
        if not name or not page.exists():
            continue
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
    print("\n".join(wrong + [f"docs-check: {checked} links, {len(wrong)} broken"]))
    sys.exit(1 if wrong else 0)


main()
