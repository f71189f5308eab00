"""The project's text is plain technical English: a check of the patterns that a
machine can find, in Markdown, doc comments, comments, messages and help texts.

    check-prose.py           fails when a folder has more findings than it may have
    check-prose.py PATH...   lists the findings in these files or folders
    check-prose.py --lower   writes the counts to .ci/prose-counts, where they fell

.ci/prose-counts has how many findings each folder still may have. A count only
goes down. A folder that is not listed may have none.
"""
import collections
import pathlib
import re
import subprocess
import sys

COUNTS = pathlib.Path(".ci/prose-counts")
# The words of a licence and of quoted output are not ours.
LEFT_OUT = re.compile(r"^(LICENSE|target/|docs/images/)|\.svg$|^\.ci/check-prose\.py$|^docs/glossary\.md$")

# What is wrong, what to write instead, an example that must be found and one that
# must not.
RULES = [
    (r"(?<!there )\b(?:is|are|was|were|be) none\b(?! of)", "say what is absent: `no X exists`, `X is invalid`",
     "its answer is none: 3", "there are none left; none of them has one"),
    (r"\b(?:is|are|was|were) to (?:be|have|do|go|come|give|say|see|know|wait|last|follow)\b", "`must be`, `will be`, `should be`",
     "the page is to be sent", "the first thing is to send it; it is due to be sent"),
    (r"(?<!sorted )(?<!ordered )(?<!up )(?<!found )(?<!refer )(?<!files )(?<!order )(?<!keyed )\bby name\b", "say who names what: `the error names the node`",
     "the loss ends the program, by name", "a list sorted by name"),
    (r"\blikewise\b", "`also`, `in the same way`, or the sentence again", "Bob likewise", "in the same way"),
    (r"\bwho(?:so)?ever\b|\bwhomever\b", "the field's noun: `the caller`, `the thread that`", "whoever frees it", "the thread that frees it"),
    (r"\bwho (?:is|are) (?:no|not)\b", "the field's noun", "for who is no vCPU", "for callers that are not vCPUs"),
    (r"\b(?:for|to|by|from|of|with|at|than|as) who\b", "the field's noun: `callers that`", "read by who has it", "read by the node that has it"),
    (r"(?:^|[.;:] )Who (?!is\b|are\b|has\b|owns\b|may\b|can\b|does\b)", "the field's noun: `A thread that`",
     "It ends. Who waits is woken.", "The thread that waits is woken."),
    (r"\bfor want of\b", "`without`, `for lack of`", "ends for want of memory", "ends without memory"),
    (r"\bso many\b(?! \w+ that| that| times more)", "`n`, or the quantity's name", "takes so many bytes", "so many frames that it blocks"),
    (r"\bas ever\b", "`as before`, `as usual`", "works as ever", "as everybody"),
    (r"(?:^|[.;:] )Of which\b", "join the sentences, or repeat the noun", "Two pages. Of which one is dirty.", "pages, one of which is dirty"),
    (r"\b(?:he|his|him|himself)\b", "a thread, a node or a peer is `it`", "the thread and his lock", "the thread and its lock"),
    (r"\bas above\.", "repeat the argument, or name where it is", "SAFETY: as above.", "as in the table above: three"),
    (r"\bnot to be (?:understood|had|reached|found|seen|told)\b", "`cannot be`", "the answer is not to be understood", "the answer cannot be parsed"),
    (r"\bthat (?:is|are) none\b", "`invalid`", "an order that is none", "an invalid order"),
]
RULES = [(re.compile(pattern), advice, wrong, right) for pattern, advice, wrong, right in RULES]

# A doc comment of at most three words that says no more than the name.
EMPTY_WORDS = 3
EMPTY = "says nothing that the name does not: say shape, unit, or why"
FILL = frozenset(
    "the a an it its this that these those they them which what how where when who whom whether is are was were does do "
    "has have see there here sets set gives give made makes one ones own of to in by and all so done new gets get "
    "each as for be".split()
)

RUST = re.compile(
    r"""(?P<comment>//[^\n]*)|(?P<block>/\*.*?\*/)|(?P<raw>b?r(?P<hash>\#*)".*?"(?P=hash))"""
    r"""|(?P<string>b?c?"(?:\\.|[^"\\])*")|(?P<char>b?'(?:\\.[^']*|[^'\\\n])')""",
    re.S,
)
C = re.compile(r"""(?P<comment>//[^\n]*)|(?P<block>/\*.*?\*/)|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<char>'(?:\\.|[^'\\\n])+')""", re.S)
ITEM = re.compile(
    r"(?:pub(?:\([a-z:]+\))? )?(?:const |async |unsafe |extern \"C\" )*(?:fn|struct|enum|trait|type|const|static|mod|union)? ?(?:mut )?([A-Za-z_][A-Za-z0-9_]*)"
)
NAME_PARTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def same(word, part):
    """Whether both are forms of one word: `answers`, `answer`."""
    length = max(3, min(len(word), len(part)) - 2)
    return word[:length] == part[:length]


def is_empty(text, item):
    """Whether a doc comment repeats the name of its item."""
    words = re.findall(r"[A-Za-z0-9_'-]+", text.lower())
    if not words or len(words) > EMPTY_WORDS or "[" in text:
        return False
    parts = [part.lower() for part in NAME_PARTS.findall(item)]
    return all(word in FILL or any(same(word, part) for part in parts) for word in words)


def paragraphs_markdown(text):
    """Line and text of each paragraph, table row and list item, without code."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def joined(lines):
    """Comments on consecutive lines are one text."""
    start, last, parts = 0, -1, []
    for number, line in lines:
        if parts and number != last + 1:
            yield start, " ".join(parts)
            parts = []
        if not parts:
            start = number
        parts.append(line)
        last = number
    if parts:
        yield start, " ".join(parts)


def paragraphs_code(text, tokens, strings):
    comments = []
    line, seen = 1, 0
    for match in tokens.finditer(text):
        line += text.count("\n", seen, match.start())
        seen = match.start()
        kind = match.lastgroup if match.lastgroup != "hash" else "raw"
        token = match[0]
        if kind == "comment":
            comments.append((line, token.lstrip("/!").strip()))
        elif kind == "block":
            yield line, re.sub(r"\s*\n\s*\*?\s*", " ", token.strip("/* "))
        elif kind in ("string", "raw") and strings and token.count(" ") > 1:
            yield line, re.sub(r"\s*\\\n\s*|\n\s*", " ", token.strip('br#"'))
    yield from joined(comments)


def empty_docs(text):
    """Doc comments of one line that say nothing."""
    lines = text.split("\n")
    for index, line in enumerate(lines[:-1]):
        doc = line.strip()
        if not doc.startswith("/// ") or (index and lines[index - 1].strip().startswith("///")):
            continue
        after = index + 1
        while after < len(lines) and lines[after].strip().startswith("#["):
            after += 1
        item = ITEM.match(lines[after].strip()) if after < len(lines) else None
        # A text without a full stop is a help text of the command line.
        if item and doc.endswith(".") and is_empty(doc[4:], item[1]):
            yield index + 1, doc[4:], item[1]


def findings(path):
    text = path.read_text(encoding="utf-8", errors="replace")
    suffix = path.suffix
    if suffix == ".md":
        pieces = paragraphs_markdown(text)
    elif suffix == ".rs":
        pieces = paragraphs_code(text, RUST, strings=True)
    elif suffix in (".c", ".h", ".cpp", ".S"):
        pieces = paragraphs_code(text, C, strings=False)
    else:
        hashed = ((n, line.strip().lstrip("# ")) for n, line in enumerate(text.split("\n"), 1) if line.strip().startswith("#"))
        pieces = joined(hashed)
    for line, piece in pieces:
        prose = re.sub(r"`[^`]*`", "`x`", piece)
        for pattern, advice, _, _ in RULES:
            for match in pattern.finditer(prose):
                around = prose[max(0, match.start() - 40):match.end() + 30].strip()
                yield line, f"“{match[0].strip()}” in “…{around}…”: {advice}"
    if suffix == ".rs":
        for line, doc, item in empty_docs(text):
            yield line, f"“{doc}” on `{item}`: {EMPTY}"


def prove():
    """Every rule finds what it should, and leaves its correction alone."""
    for pattern, _, wrong, right in RULES:
        assert pattern.search(wrong), f"not found: {wrong}"
        assert not pattern.search(right), f"found: {right}"
    assert is_empty("Sets it.", "set_limit") and is_empty("The answer.", "Answer") and is_empty("Which.", "index")
    assert not is_empty("Bytes.", "length") and not is_empty("Never zero.", "count")


def folder(name):
    """What a count is kept for: a page of docs/ by itself, else the top folder."""
    top, _, rest = name.partition("/")
    return name if top == "docs" or not rest else top


def listed(arguments):
    command = ["git", "ls-files", "-co", "--exclude-standard", "--"] + arguments
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in names:
        path = pathlib.Path(name)
        known = path.suffix in (".md", ".rs", ".c", ".h", ".cpp", ".S", ".sh", ".py") or name in ("Makefile", ".ci/setup", ".ci/fuzz", "guest/build")
        if name and known and not LEFT_OUT.search(name) and path.exists():
            yield name, path


def main():
    prove()
    arguments = sys.argv[1:]
    lower = arguments == ["--lower"]
    found = collections.defaultdict(list)
    for name, path in listed([] if lower else arguments):
        for line, what in findings(path):
            found[folder(name)].append(f"{name}:{line}: {what}")
    if arguments and not lower:
        everything = [finding for group in found.values() for finding in group]
        print("\n".join(everything + [f"{len(everything)} findings"]))
        sys.exit(1 if everything else 0)

    allowed = {}
    for line in COUNTS.read_text().splitlines():
        if line and not line.startswith("#"):
            name, count = line.rsplit(" ", 1)
            allowed[name] = int(count)
    over = {name: group for name, group in found.items() if len(group) > allowed.get(name, 0)}
    for name, group in sorted(over.items()):
        print("\n".join(group))
        print(f"prose: {name}: {len(group)} findings, at most {allowed.get(name, 0)} allowed ({COUNTS})")
    left = sum(len(group) for group in found.values())
    if lower:
        note = [line for line in COUNTS.read_text().splitlines() if line.startswith("#")]
        counts = {name: min(count, len(found.get(name, []))) for name, count in allowed.items()}
        COUNTS.write_text("\n".join(note + [f"{name} {count}" for name, count in sorted(counts.items()) if count]) + "\n")
    fell = sum(len(found.get(name, [])) < count for name, count in allowed.items())
    hint = f"; {fell} counts may be lowered (--lower)" if fell and not lower else ""
    print(f"prose: {left} findings left, {len(over)} folders over their count{hint}")
    sys.exit(1 if over else 0)


main()
