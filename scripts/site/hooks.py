"""Which files the site has: every Markdown file that git knows, under its own path, so that relative links need no change.

A link to another file of the tree leads to a page that shows the file, and a link to a directory to a page that lists it.
"""

import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PICTURES = {".svg", ".png"}
LANGUAGES = {".go": "go", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".mjs": "javascript", ".ts": "typescript", ".sql": "sql"}
LINK = re.compile(r"(\]\()([^()\s]+)(\))")
CODE = re.compile(r"(^```.*?^```\s*$|`[^`\n]*`)", re.M | re.S)
CELL = re.compile(r"<td>.*?</td>", re.S)
NAME = re.compile(r"(<code>)([\w./-]{20,})(</code>)")
BREAK = re.compile(r"[./](?=\w)|[a-z](?=[A-Z])|_(?=\w)")
LARGEST = 400_000


def on_page_content(html, page, config, files):
    """Lets long names in narrow columns break between their words."""
    return CELL.sub(lambda cell: NAME.sub(lambda code: code[1] + BREAK.sub(r"\g<0><wbr>", code[2]) + code[3], cell[0]), html)


def known():
    """The files of the tree that git knows or would take."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in names.split("\0") if name and (ROOT / name).is_file()]


def on_files(files, config):
    tree = known()
    pages = {name: name for name in tree if name.endswith(".md") and "/testdata/" not in name}
    out = list(files)
    for name in pages:
        out.append(generated(config, name, (ROOT / name).read_text()))
        for target in targets(name, (ROOT / name).read_text()):
            out += shown(config, tree, pages, target)
    unique = {file.src_uri: file for file in reversed(out)}
    return Files(list(unique.values()))


def generated(config, name, text):
    return File.generated(config, name, content=f"---\nsearch: {{boost: {boost(name)}}}\n---\n" + links(name, text))


def boost(name):
    """How far up a search shows a page: first those for users, last decisions and what is not in docs/."""
    if posixpath.basename(name) in {"CONCEPTS.md", "FIRST_STEPS.md", "INSTALL.md"}:
        return 3
    return 1 if posixpath.dirname(name) == "docs" else 0.4


def targets(name, text):
    """The paths of the tree to which a page links."""
    for match in LINK.finditer(CODE.sub("", text)):
        target = match[2].partition("#")[0]
        if target and ":" not in target:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(name), target))


def shown(config, tree, pages, target):
    """The files that show what a link leads to, if it is no page."""
    path = ROOT / target
    if target in pages:
        return []
    if path.is_dir():
        if index(target) in pages:
            return []
        below = [name for name in tree if name.startswith(target + "/")]
        lines = [f"# {target}/", ""]
        for name in below:
            if name in pages:
                lines.append(f"- [{title(name)}]({posixpath.relpath(name, target)})")
            else:
                lines.append(f"- {posixpath.relpath(name, target)}")
        return [File.generated(config, index(target), content=hidden("\n".join(lines)))]
    if path.suffix in PICTURES:
        return [File.generated(config, target, abs_src_path=str(path))]
    text = path.read_text()
    language = LANGUAGES.get(path.suffix, "text") if len(text) < LARGEST else "text"
    text = text.replace("\n````", "\n `````")
    return [File.generated(config, target + ".md", content=hidden(f"# {target}\n\n````{language}\n{text}\n````\n"))]


def hidden(text):
    """A page that a search does not find."""
    return "---\nsearch: {exclude: true}\n---\n" + text


def index(directory):
    readme = posixpath.join(directory, "README.md")
    return readme if (ROOT / readme).is_file() else posixpath.join(directory, "index.md")


def title(name):
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("# "):
            return line[2:]
    return name


def links(name, text):
    """The text with its links to files and directories led to the pages that show them."""

    def lead(match):
        target, mark, place = match[2].partition("#")
        path = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if not target or ":" in target or not path.exists() or path.suffix in PICTURES or path.suffix == ".md":
            return match[0]
        if path.is_dir():
            relative = path.relative_to(ROOT).as_posix()
            target = posixpath.relpath(index(relative), posixpath.dirname(name) or ".")
        else:
            target += ".md"
        return match[1] + target + mark + place + match[3]

    parts = CODE.split(text)
    return "".join(part if n % 2 else LINK.sub(lead, part) for n, part in enumerate(parts))
