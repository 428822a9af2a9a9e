"""The long text in which a needle is hidden, as a list of sentences.

The default needs no download: English prose from what ships with Python, the language reference
(`pydoc_data.topics`) and the docstrings of the standard library, read from its source without importing it.
About 10,000 different sentences, 900,000 characters. A directory of `*.txt` files takes its place.

Sentences are found in the text, never by token ids, so that a needle put between two of them is whole under
every tokenizer.
"""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[^\W_a-z])|(?<=[。！？।॥؟۔።။។])")
LONG_SENTENCE = re.compile(r".{1,400}(?:\s|$)|.{1,400}")
PROSE = re.compile(r"[A-Z][\w ,;:'\"()\-./!?`]{38,400}[.!?]", re.ASCII)
DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.+?)"""', re.MULTILINE | re.DOTALL)
NOT_PROSE = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}


def split_sentences(text: str) -> list[str]:
    """Sentences of `text` in order, white space collapsed; the end of a paragraph ends a sentence too."""
    sentences = []
    for paragraph in PARAGRAPH_BREAK.split(text):
        collapsed = " ".join(paragraph.split())
        begin = 0
        for end in SENTENCE_END.finditer(collapsed):
            sentences.append(collapsed[begin : end.end()].strip())
            begin = end.end()
        sentences.append(collapsed[begin:].strip())
    return [sentence for sentence in sentences if sentence]


def haystack_sentences(directory: str | None = None) -> list[str]:
    """The sentences of `directory`'s `*.txt` files in order of their names, or of the default text.

    A text whose sentences have no end that is known here (logs, lower case, Thai) is cut at spaces: needles stand
    between sentences, and would all be at its start or its end.
    Raises ValueError (`--haystack_dir`) where there is no such directory, or no UTF-8 text in it.
    """
    if directory is None:
        prose = (s for text in _python_texts() for s in split_sentences(text) if PROSE.fullmatch(s))
        return list(dict.fromkeys(prose))
    files = sorted(Path(directory).glob("*.txt"))
    if not files:
        raise ValueError(f"--haystack_dir {directory}: no *.txt files there")
    found = [sentence for file in files for sentence in split_sentences(_read(file))]
    sentences = [part.strip() for sentence in found for part in LONG_SENTENCE.findall(sentence)]
    if not sentences:
        raise ValueError(f"--haystack_dir {directory}: its *.txt files hold no text")
    return sentences


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--haystack_dir: {file} is no UTF-8 text ({error})") from error


def _python_texts() -> Iterator[str]:
    from pydoc_data import topics

    yield from (topics.topics[name] for name in sorted(topics.topics))
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if NOT_PROSE.isdisjoint(file.relative_to(library).parts):
            yield from DOCSTRING.findall(file.read_text(encoding="utf-8", errors="replace"))
