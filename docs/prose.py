"""Checks the words of the pages: none of a list of phrases, and first sentences that tell readers
what they will be able to do.

    python docs/prose.py    # names each place, with the words to use; fails if there is one

The words to use are those of docs/glossary.md; a term that it does not have is not among them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
# Phrases that no native speaker writes here, and terms that readers do not know.
INSTEAD = {
    r"as ever": "as usual, unchanged",
    r"anew": "again",
    r"but for": "except for",
    r"(?:is|are|was|were) told(?! apart)": "is reported, is shown",
    r"beside": "next to, with, in addition to",
    r"thousand millions?": "billion",
    r"what (?:is|it is|they are) computed in": "compute dtype",
    r"all the same": "nevertheless",
    r"in whatever": "in any",
    r"by hand(?: and)? once": "once",
    r"fares?": "does",
    r"the like": "similar ones",
    r"of old": "earlier",
    r"mend(?:s|ed|ing)?": "fix",
    r"foretells?|foretold": "predict",
    r"minds? it": "takes it into account",
    r"thereby": "so",
}
# Terms of others for words of the glossary.
TERMS = {
    r"micro batch(?:es)?": "micro-batch",
    r"parameter shards?": "shard",
    r"pipeline parallel stages?": "pipeline stage",
    r"gradient checkpointing(?! of)": "activation checkpointing",
    r"chunked loss": "chunked cross-entropy",
    r"device types?": "GPU type",
    r"(?:tensor-parallel )?teams?": "tensor-parallel group",
}
FIRST_WORDS = re.compile(r"\byou(?:rs?)?\b", re.IGNORECASE)
NOT_PROSE = re.compile(
    r"(?ms)^```.*?^```\s*?$|^(?: {4}|\t).*?$|<!--.*?-->|`[^`]*`|\]\([^)]*\)|^\s*[-:|]+\s*$"
)
OF_CODE = {"python", "job", "cli"}  # pages that are mostly made from the code


def pages() -> list[Path]:
    """The pages that are checked: results and changes keep the words of their day."""
    docs = ROOT / "docs"
    parts = sorted((docs / "parts").glob("*.md"))
    made = {docs / f"{name}.md" for name in OF_CODE}
    written = [page for page in sorted(docs.rglob("*.md")) if page not in made]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *dict.fromkeys([*written, *parts])]


def blank(found: re.Match[str]) -> str:
    """As many lines, without words."""
    return re.sub(r"[^\n]", " ", found[0])


def prose(page: Path) -> str:
    """The text of a page without code, each line where it is."""
    return NOT_PROSE.sub(blank, page.read_text(encoding="utf-8"))


def bad_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Each phrase with its line, and the words to use."""
    joined = re.sub(r"\n", " ", text)  # phrases go over ends of lines; places stay
    for pattern, instead in {**INSTEAD, **TERMS}.items():
        words = pattern.replace(" ", r"\s+")
        for found in re.finditer(rf"(?i)\b(?:{words})\b", joined):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def first_sentence(text: str) -> str:
    """The first sentence behind the title; empty if something else comes first."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("<!--")]
    start = next((n for n, line in enumerate(lines) if line.startswith("# ")), -1) + 1
    body = "\n".join(lines[start:]).strip("\n")
    if body[:1] in ("", " ", *"`|#*->"):
        return ""
    paragraph = " ".join(body.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:?])\s", paragraph)[0]


def glossary_terms() -> set[str]:
    """The words of the glossary."""
    bold = re.findall(r"(?m)^\| \*\*(.+?)\*\* \|", GLOSSARY.read_text(encoding="utf-8"))
    return {term.strip() for words in bold for term in words.split(",")}


def problems() -> list[str]:
    """A line for each."""
    found = []
    for page in pages():
        name = page.relative_to(ROOT)
        for line, words, instead in bad_words(prose(page)):
            found.append(f"{name}:{line}: '{words}': say {instead}")
        if page.parent.name != "parts" and page.name not in ("README.md", "CONTRIBUTING.md"):
            sentence = first_sentence(page.read_text(encoding="utf-8"))
            if not FIRST_WORDS.search(sentence):
                found.append(f"{name}: the first sentence does not say what you can do: {sentence}")
    unknown = set(TERMS.values()) - glossary_terms()
    return [*found, *(f"docs/glossary.md: '{term}' is missing" for term in sorted(unknown))]


def main() -> int:
    found = problems()
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
