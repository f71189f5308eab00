"""Every dependency comes from a registry and has a licence that deny.toml allows."""
import json
import re
import subprocess
import sys
import tomllib

MANIFESTS = ["Cargo.toml", "models/Cargo.toml"]


def satisfied(expression, allowed):
    """Whether an SPDX expression can be met with the allowed licences."""
    # Before SPDX, crates wrote a slash for OR.
    tokens = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))

    def term():
        token = tokens.pop(0)
        if token == "(":
            value = disjunction()
            tokens.pop(0)
            return value
        if tokens[:1] == ["WITH"]:
            token = " ".join([token, tokens.pop(0), tokens.pop(0)])
        return token in allowed

    def conjunction():
        value = term()
        while tokens[:1] == ["AND"]:
            tokens.pop(0)
            value = term() and value
        return value

    def disjunction():
        value = conjunction()
        while tokens[:1] == ["OR"]:
            tokens.pop(0)
            value = conjunction() or value
        return value

    return disjunction()


def self_check():
    allowed = {"MIT", "ISC"}
    for expression, right in [
        ("MIT", True),
        ("GPL-3.0", False),
        ("GPL-3.0 OR MIT", True),
        ("MIT AND GPL-3.0", False),
        ("MIT/Apache-2.0", True),
        ("(GPL-3.0 OR MIT) AND ISC", True),
        ("(GPL-3.0 OR Zlib) AND ISC", False),
        ("Apache-2.0 WITH LLVM-exception OR MIT", True),
        ("MIT WITH an-exception", False),
    ]:
        assert satisfied(expression, allowed) == right, expression


def main():
    self_check()
    with open("deny.toml", "rb") as file:
        allowed = set(tomllib.load(file)["licenses"]["allow"])
    wrong, checked = [], set()
    for manifest in MANIFESTS:
        command = ["cargo", "metadata", "--format-version", "1", "--manifest-path", manifest]
        command += ["--all-features", "--filter-platform", "x86_64-unknown-linux-gnu"]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        metadata = json.loads(said.stdout)
        used = {node["id"] for node in metadata["resolve"]["nodes"]}
        for package in metadata["packages"]:
            if package["id"] not in used or package["id"] in checked:
                continue
            checked.add(package["id"])
            name = f"{package['name']} {package['version']}"
            source = package["source"]
            if source is not None and not source.startswith("registry+"):
                wrong.append(f"{name}: comes from {source}, not from a registry")
            licence = package["license"]
            if licence is None or not satisfied(licence, allowed):
                wrong.append(f"{name}: licence {licence}: add it to deny.toml if Weft may use it, or replace the crate")
    print("\n".join(wrong + [f"check-licences: {len(checked)} packages, {len(wrong)} refused"]))
    sys.exit(1 if wrong else 0)


main()
