"""Follow a shell script to the line that starts the job, without running anything.

Variables, arrays and arithmetic of them are put in where they are known. The result of a command and an argument of the
script are unknown, and so is a value that depends on a condition which cannot be told. Such words are marked, and the
reader of the options refuses the ones that matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from piper_interop.megatron.scripts.arithmetic import computed
from piper_interop.megatron.scripts.conditions import truth
from piper_interop.megatron.scripts.lexer import Lexer, Word, WordPart
from piper_ir.ground.errors import JobError

ShellValue = str | tuple[str, ...]
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(:?[-=+].*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNKNOWN = re.compile(r"\x00(\d+)\x00")
_LINE = re.compile(r"\x02(\d+)\x02")
_CONDITIONAL = re.compile(r"\x01(\d+)\x01")
_ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_STARTS = ("then", "do", "else", "elif", "if", "while", "until", "{", "!", "time")
_TORCHRUN = re.compile(r"--(nproc|nnodes|node|master|rdzv)")
_PROGRAM = re.compile(r"\S+\.py")
_MARKS = ("--num-layers", "--hidden-size", "--micro-batch-size", "--tensor-model-parallel-size")


@dataclass(frozen=True)
class Token:
    """Hold a word of the job's command.

    Attributes:
        text: the word; unknown parts stand in it as the script writes them.
        line: where it was written, or put in.
        unknown: the part that is unknown, as the script writes it; "" if there is none.
        condition: the line of the condition under which it stands; 0 for none.
    """

    text: str
    line: int
    unknown: str = ""
    condition: int = 0


@dataclass
class JobCommand:
    """Hold the command that starts the job.

    Attributes:
        line: of the command.
        program: the Python file; "" if it is unknown.
        before: the words before the program: the launcher and its options.
        after: the words behind the program.
    """

    line: int
    program: str
    before: list[Token]
    after: list[Token]


def launch(text: str, source: str) -> JobCommand:
    """Return the one command of a script that starts a job, or the options that its variables hold for another script.

    Raises JobError if there is neither, or more than one command.
    """
    script = ShellScript(source)
    script.follow(Lexer(text, source).all())
    launches = [
        run
        for run in script.launches
        if any(token.text.split("=")[0].replace("_", "-") in _MARKS for token in run.after)
    ]
    if not launches:
        launches = [held] if (held := _held(script)) else []
    if not launches:
        raise JobError(
            f"{source}: no command with options such as {', '.join(_MARKS[:3])} behind a .py file, and no variable that "
            "holds such options; give the options as a text, or a file with one option a line"
        )
    if len(launches) > 1:
        lines = ", ".join(str(run.line) for run in launches)
        raise JobError(
            f"{source}: the lines {lines} each start a job; give a script with one of them"
        )
    return launches[0]


@dataclass
class ShellScript:
    """Follow the commands of a script.

    Attributes:
        source: its name, for messages.
        variables: texts, and arrays as tuples, with marks for lines, unknown values and conditions.
        launches: the commands that start a Python file.
        unknowns: the line and the words of each unknown part, by the number in its mark.
        conditions: the lines of the open conditions that cannot be told.
    """

    source: str
    variables: dict[str, ShellValue] = field(default_factory=dict)
    launches: list[JobCommand] = field(default_factory=list)
    unknowns: list[tuple[int, str]] = field(default_factory=list)
    conditions: list[int] = field(default_factory=list)

    def follow(self, words: Sequence[Word]) -> None:
        """Go through the commands of these words in order."""
        at = 0
        while at < len(words):
            word = words[at]
            if word.operator:
                at += 1
            elif word.text in _ENDS and not word.parts[0].quoted:
                at = self._block(words, at)
            elif word.text == "function":
                at = self._function(words, at)
            else:
                at = self._command(words, at)

    def _block(self, words: Sequence[Word], at: int) -> int:
        """Follow a condition, a loop or a group that begins here, and return the place behind it."""
        end, opener = _end_of(words, at), words[at]
        if end is None:
            raise JobError(f"{self.source}:{opener.line}: {opener.text} begins here and never ends")
        if opener.text == "{":
            self.follow(words[at + 1 : end])
        elif opener.text == "if":
            self._branches(words, at, end)
        else:
            self._undecided([words[at + 1 : end]], opener.line)
        return end + 1

    def _function(self, words: Sequence[Word], at: int) -> int:
        """Go past the name of a function, follow its body as conditional, and return the place behind it."""
        line = words[at].line
        while at < len(words) and words[at].text != "{":
            at += 1
        end = _end_of(words, at)
        if end is None:
            raise JobError(f"{self.source}:{line}: a function without a body in braces")
        self._undecided([words[at + 1 : end]], line)
        return end + 1

    def _branches(self, words: Sequence[Word], at: int, end: int) -> None:
        """Follow the branch of an `if` that holds; all of them, as conditional, if nobody can tell."""
        marks = [at, *_at_depth(words, at + 1, end, ("then", "elif", "else")), end]
        bodies: list[Sequence[Word]] = []
        line = words[at].line
        for here, following in pairwise(marks):
            kind, body = words[here].text, words[here + 1 : following]
            if kind in ("if", "elif"):
                holds = self._truth(body)
            elif kind == "else" and not bodies:
                return self.follow(body)
            elif kind == "else" or holds is None:
                bodies.append(body)
            elif holds and not bodies:
                return self.follow(body)
            elif holds:
                bodies.append(body)
                return self._undecided(bodies, line)
        return self._undecided(bodies, line)

    def _truth(self, words: Sequence[Word]) -> bool | None:
        terms = [
            word.text if word.operator else " ".join(self._fields(word))
            for word in words
            if not (word.operator and word.text in "\n;")
        ]
        terms = [_LINE.sub("", term) for term in terms]
        return None if any("\0" in term or "\1" in term for term in terms) else truth(terms)

    def _undecided(self, bodies: Sequence[Sequence[Word]], line: int) -> None:
        """Follow each body by itself, and mark its changes as conditional."""
        before, results = dict(self.variables), []
        for body in bodies:
            self.variables = dict(before)
            self.conditions.append(line)
            self.follow(body)
            self.conditions.pop()
            results.append(self.variables)
        self.variables = dict(before)
        for name in sorted({name for result in results for name in result}):
            changed = [r[name] for r in results if name in r and r[name] != before.get(name)]
            for value in changed:
                self.variables[name] = self._conditional(before.get(name), value, name, line)

    def _conditional(
        self, before: ShellValue | None, after: ShellValue, name: str, line: int
    ) -> ShellValue:
        """Return a variable's value where it may have changed: more words are marked, another value is unknown."""
        mark = f"\1{line}\1"
        now = self.variables.get(name, "")
        if isinstance(before, tuple) and isinstance(after, tuple) and isinstance(now, tuple):
            if after[: len(before)] == before:
                return now + tuple(mark + word for word in after[len(before) :])
        elif isinstance(before, str) and isinstance(after, str) and isinstance(now, str):
            if before.strip() and after.startswith(before):
                return now + "".join(f" {mark}{word}" for word in after[len(before) :].split())
        elif before is None and isinstance(after, tuple) and isinstance(now, tuple | str):
            return (*(now or ()), *(mark + word for word in after))
        return self._unknown(line, f"${name}")

    def _command(self, words: Sequence[Word], at: int) -> int:
        """Follow one command, and return the place behind it."""
        start, fields = words[at].line, list[tuple[str, int]]()
        while at < len(words):
            word = words[at]
            if word.operator:
                if word.text in "<>":
                    while at < len(words) and words[at].text in ("<", ">", "&"):
                        at += 1
                    at += 1
                    continue
                at = self._behind(words, at, fields)
                break
            assigned = None if fields else self._assignment(words, at)
            if assigned is not None:
                at = assigned
            elif not fields and (word.text in _DECLARES or word.text in _STARTS):
                at += 1
            else:
                fields += [(text, word.line) for text in self._fields(word)]
                at += 1
        self._started(start, fields)
        return at

    def _behind(self, words: Sequence[Word], at: int, fields: list[tuple[str, int]]) -> int:
        """Go past the operator behind a command; a function's body and a command behind && or || are conditional."""
        operator = words[at].text
        if operator == "(" and words[at + 1 : at + 2] and words[at + 1].text == ")":
            fields.clear()
            return self._function(words, at)
        if operator not in ("&&", "||") or not fields or fields[0][0] not in ("[", "[[", "test"):
            return at + 1
        holds = truth([text for text, _ in fields])
        end = next(
            (k for k in range(at + 1, len(words)) if words[k].text in ("\n", ";")), len(words)
        )
        if holds is None or any("\0" in text or "\1" in text for text, _ in fields):
            self._undecided([words[at + 1 : end]], words[at].line)
        elif holds == (operator == "&&"):
            self.follow(words[at + 1 : end])
        fields.clear()
        return end

    def _assignment(self, words: Sequence[Word], at: int) -> int | None:
        """Follow `NAME=value`, `NAME=(...)` or `NAME+=...`, and return the place behind it; None for other words."""
        word = words[at]
        match = _ASSIGNED.match("".join(p.text if _plain(p) else "\0" for p in word.parts))
        if match is None:
            return None
        name, more = match[1], bool(match[2])
        rest = Word(word.line, word.parts[match.end() :])
        if rest.text == "(" and _plain(rest.parts[0]):
            items: list[str] = []
            at += 1
            while at < len(words) and words[at].text != ")":
                items += [] if words[at].operator else self._items(words[at])
                at += 1
            old = self.variables.get(name, ()) if more else ()
            self.variables[name] = ((old,) if isinstance(old, str) else old) + tuple(items)
        else:
            value = " ".join(self._fields(rest, split=False))
            old = self.variables.get(name, "") if more else ""
            self.variables[name] = (old if isinstance(old, str) else " ".join(old)) + value
        return at + 1

    def _items(self, word: Word) -> list[str]:
        """Return the words that one becomes in an array, each with a mark for its line."""
        fields = self._fields(word)
        return [text if _LINE.match(text) else f"\2{word.line}\2{text}" for text in fields]

    def _started(self, line: int, fields: list[tuple[str, int]]) -> None:
        """Note a command if it starts a Python file; follow the text behind `-c`."""
        for before, (text, where) in zip([("", 0), *fields], fields, strict=False):
            if before[0] == "-c" and "\0" not in text:
                return self.follow(Lexer(text, self.source, where).all())
        program = next((k for k, (text, _) in enumerate(fields) if _PROGRAM.fullmatch(text)), None)
        marked = next(
            (k for k, (text, _) in enumerate(fields) if _LINE.sub("", text) in _MARKS), None
        )
        if program is None and marked is None:
            return
        if self.conditions:
            raise JobError(
                f"{self.source}:{line}: the job starts under the condition in line {self.conditions[-1]}, which cannot be "
                "told here; give the options as a text, or a script without that condition"
            )
        tokens = [self.token(text, where) for text, where in fields]
        first = (
            program
            if program is not None
            else next(k for k, t in enumerate(tokens) if t.text.startswith("--"))
        )
        name = tokens[first].text if program is not None else ""
        after = tokens[first + 1 :] if program is not None else tokens[first:]
        self.launches.append(JobCommand(line, name, tokens[:first], after))

    def token(self, text: str, line: int) -> Token:
        """Return a word of the script without the marks in it."""
        condition, written = _CONDITIONAL.search(text), _LINE.search(text)
        text = _LINE.sub("", _CONDITIONAL.sub("", text))
        line = int(written[1]) if written else line
        unknown = _UNKNOWN.search(text)
        line = self.unknowns[int(unknown[1])][0] if unknown else line
        return Token(
            _UNKNOWN.sub(lambda match: self.unknowns[int(match[1])][1], text),
            line,
            self.unknowns[int(unknown[1])][1] if unknown else "",
            int(condition[1]) if condition else 0,
        )

    def _fields(self, word: Word, *, split: bool = True) -> list[str]:
        """Return the words that a word becomes when its variables are put in."""
        fields, kept = [""], False
        for part in word.parts:
            if part.kind == "text":
                fields[-1] += part.text
                kept = kept or part.quoted
                continue
            value = self._value(part, word.line)
            kept = kept and not isinstance(value, tuple)
            texts = (value,) if isinstance(value, str) else value
            if not split or (part.quoted and part.text.endswith("[*]")):
                pieces = [" ".join(texts)]
            else:
                pieces = list(texts) if part.quoted else " ".join(texts).split()
            if pieces:
                fields[-1] += pieces[0]
                fields += pieces[1:]
        return [text for text in fields if text or kept]

    def _value(self, part: WordPart, line: int) -> ShellValue:
        """Return the value of a variable; a mark if it is unknown."""
        shown = f"$({part.text})" if part.kind == "command" else f"${{{part.text}}}"
        if part.kind == "command" and part.text.startswith("(") and part.text.endswith(")"):
            number = computed(_NAME.sub(self._number, self._text(part.text[1:-1], line)))
            return self._unknown(line, shown) if number is None else str(number)
        match = _VARIABLE.fullmatch(part.text) if part.kind == "variable" else None
        if match is None:
            return self._unknown(line, shown)
        name, whole, rest = match[1], match[2], match[3] or ""
        if name in "@*":
            return ()
        value = self.variables.get(name)
        empty = value is None or (rest.startswith(":") and not value)
        operator = rest.removeprefix(":")[:1]
        if operator == "+":
            return "" if empty else self._text(rest.removeprefix(":")[1:], line)
        if operator and empty:
            return self._text(rest.removeprefix(":")[1:], line)
        if value is None:
            return self._unknown(line, f"${name}" if not rest and not whole else shown)
        if isinstance(value, tuple) and not whole:
            return value[0] if value else ""
        return value

    def _number(self, name: re.Match[str]) -> str:
        """Return the value of a variable that arithmetic names without a dollar."""
        value = self.variables.get(name[0])
        return value if isinstance(value, str) else name[0]

    def _text(self, text: str, line: int) -> str:
        words = Lexer(text, self.source, line).all()
        return " ".join(piece for word in words for piece in self._fields(word, split=False))

    def _unknown(self, line: int, shown: str) -> str:
        self.unknowns.append((line, shown))
        return f"\0{len(self.unknowns) - 1}\0"


def _held(script: ShellScript) -> JobCommand | None:
    """Return the options that variables hold, as a command without a program; None if they hold no job's options.

    A part of a script is written so, which others read, and a command that a scheduler gets as a text. Raises JobError
    if two variables give an option different values.
    """
    words, launcher = list[Token](), list[Token]()
    given: dict[str, tuple[str, list[str]]] = {}
    for name, value in script.variables.items():
        texts = list(value) if isinstance(value, tuple) else value.split()
        tokens = [script.token(text, 0) for text in texts]
        first = next((k for k, t in enumerate(tokens) if t.text.startswith("--")), None)
        program = first is not None and any(_PROGRAM.fullmatch(t.text) for t in tokens[:first])
        if first is None or (first and not program):
            continue
        if _TORCHRUN.match(tokens[first].text):
            launcher += tokens[first:]
            continue
        words += tokens[first:]
        for option, values in _by_option(tokens[first:]).items():
            other, before = given.setdefault(option, (name, values))
            if before != values:
                raise JobError(
                    f"{script.source}: no command starts the job, and the variables {other} and {name} have {option} of "
                    f"different values; give the options as a text"
                )
    return JobCommand(0, "", launcher, words) if any(w.text in _MARKS for w in words) else None


def _by_option(tokens: Sequence[Token]) -> dict[str, list[str]]:
    """Return the words behind each option; the last one counts."""
    values: dict[str, list[str]] = {}
    for token in tokens:
        if token.text.startswith("--"):
            option = values[token.text] = []
        else:
            option.append(token.text)
    return values


def _plain(part: WordPart) -> bool:
    return part.kind == "text" and not part.quoted


def _starts(words: Sequence[Word], at: int) -> bool:
    """Return whether a command may begin here."""
    return at == 0 or words[at - 1].operator or words[at - 1].text in _STARTS


def _end_of(words: Sequence[Word], at: int) -> int | None:
    """Return the place of the word that ends the block which begins here."""
    depth: list[str] = []
    for here in range(at, len(words)):
        word = words[here]
        if word.operator or not (here == at or _starts(words, here)):
            continue
        if depth and word.text == depth[-1]:
            depth.pop()
            if not depth:
                return here
        elif word.text in _ENDS:
            depth.append(_ENDS[word.text])
    return None


def _at_depth(words: Sequence[Word], at: int, end: int, names: tuple[str, ...]) -> list[int]:
    """Return the places of these words outside of inner blocks."""
    places, here = [], at
    while here < end:
        word = words[here]
        if not word.operator and _starts(words, here):
            if word.text in _ENDS:
                inner = _end_of(words, here)
                here = here if inner is None else inner
            elif word.text in names:
                places.append(here)
        here += 1
    return places
