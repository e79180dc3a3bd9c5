"""Split a shell script into words and operators, without running anything of it.

A word is a list of parts, so that the values of variables can be put in later; each word knows its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from piper_ir.ground.errors import JobError

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_OPERATORS = ("&&", "||", ";;", "\n", ";", "&", "|", "(", ")", "<", ">")


@dataclass(frozen=True)
class WordPart:
    """Hold a piece of a word.

    Attributes:
        text: the letters; of a variable, the text between the braces; of a command, the command.
        kind: "text", "variable" or "command": a substitution by a command or arithmetic.
        quoted: whether it stood between double or single quotes.
    """

    text: str
    kind: str = "text"
    quoted: bool = False


@dataclass
class Word:
    """Hold a word of the script; an operator has one part and `operator`."""

    line: int
    parts: list[WordPart] = field(default_factory=list)
    operator: bool = False

    @property
    def text(self) -> str:
        """Return the word as its letters, with variables by their names."""
        return "".join(part.text for part in self.parts)


class Lexer:
    """Split one text."""

    def __init__(self, text: str, source: str, line: int = 1) -> None:
        self.text, self.source, self.line = text, source, line
        self.at = 0
        self.words: list[Word] = []
        self.word: Word | None = None

    def all(self) -> list[Word]:
        """Return all words and operators of the text; raise JobError for a quote or bracket that never ends."""
        while self.at < len(self.text):
            self._next()
        self._end()
        return self.words

    def _next(self) -> None:
        letter = self.text[self.at]
        if letter == "\\":
            self._escaped()
        elif letter in "'\"":
            self._quoted(letter)
        elif letter in "$`":
            self._add(self._expansion(quoted=False))
        elif letter == "#" and self.word is None:
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        elif letter in " \t\r":
            self._end()
            self.at += 1
        elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), ""):
            self._operator(operator)
        else:
            self._add(WordPart(letter))
            self.at += 1

    def _escaped(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\n":
            self.line += 1
            self._end()
        else:
            self._add(WordPart(following, quoted=True))
        self.at += 2

    def _operator(self, operator: str) -> None:
        if operator == "(" and self.word is not None and self.word.text.endswith("="):
            self._add(WordPart("("))
            self.at += 1
            self._end()
            return
        if operator in "<>" and self.word is not None and self.word.text.isdigit():
            self.word = None  # the number of a stream, as in 2>file
        self._end()
        self.words.append(Word(self.line, [WordPart(operator)], operator=True))
        self.line += operator == "\n"
        self.at += len(operator)

    def _quoted(self, quote: str) -> None:
        start = self.line
        self.at += 1
        self._add(WordPart("", quoted=True))
        while self.at < len(self.text) and self.text[self.at] != quote:
            letter = self.text[self.at]
            if quote == '"' and letter in "$`":
                self._add(self._expansion(quoted=True))
                continue
            if quote == '"' and letter == "\\":
                self.at += 1
                letter = self.text[self.at : self.at + 1]
                if letter == "\n":
                    self.line += 1
                    letter = " "
            elif letter == "\n":
                self.line += 1
            self._add(WordPart(letter, quoted=True))
            self.at += 1
        if self.at >= len(self.text):
            raise JobError(f"{self.source}:{start}: a quote {quote} begins here and never ends")
        self.at += 1

    def _expansion(self, *, quoted: bool) -> WordPart:
        """Return the part that a dollar or a backquote begins, and go behind it."""
        if self.text[self.at] == "`":
            return self._between("`", "`", "command", quoted)
        if self.text.startswith("$(", self.at):
            return self._between("$(", ")", "command", quoted)
        if self.text.startswith("${", self.at):
            return self._between("${", "}", "variable", quoted)
        match = _NAME.match(self.text, self.at + 1)
        self.at += 1
        if match is None:
            return WordPart("$", quoted=quoted)
        self.at = match.end()
        return WordPart(match[0], "variable", quoted)

    def _between(self, start: str, end: str, kind: str, quoted: bool) -> WordPart:
        """Return the text between brackets, which may hold brackets of the same kind."""
        line, begin, depth = self.line, self.at + len(start), 1
        self.at = begin
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == end:
                depth -= 1
                if not depth:
                    break
            elif letter == start[-1]:
                depth += 1
            self.line += letter == "\n"
            self.at += 1
        if depth:
            raise JobError(f"{self.source}:{line}: {start} begins here and never ends")
        self.at += 1
        return WordPart(self.text[begin : self.at - 1], kind, quoted)

    def _add(self, part: WordPart) -> None:
        if self.word is None:
            self.word = Word(self.line)
        self.word.parts.append(part)

    def _end(self) -> None:
        if self.word is not None:
            self.words.append(self.word)
        self.word = None
