"""Finds stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, in time linear in the text.

    The first to *end* wins, and of those that end together the longest, so the result does not
    depend on how the text was cut.

    Args:
        stop: The strings, none of them empty.
        include_in_output: Leaves the stop string in the text.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self._matchers = [_Matcher(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._first_characters = {text[0] for text in stop}
        self._include = include_in_output
        self._held = ""
        self._hit: str | None = None

    def copy(self) -> StopStrings:
        """The same, to go on from separately."""
        twin = StopStrings.__new__(StopStrings)
        twin._matchers = [matcher.copy() for matcher in self._matchers]
        twin._first_characters, twin._include = self._first_characters, self._include
        twin._held, twin._hit = self._held, self._hit
        return twin

    def push(self, text: str) -> tuple[str, str | None]:
        """The text now certain not to be part of a stop string, and the stop string found, if any.

        After a hit, nothing more is let through.
        """
        if self._hit is not None:
            return "", self._hit
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        whole = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            for matcher in self._matchers:
                if matcher.step(character):
                    return self._cut(whole[:index], matcher.pattern)
        held = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held], None

    def finish(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _cut(self, upto: str, pattern: str) -> tuple[str, str]:
        self._hit, self._held = pattern, ""
        return (upto if self._include else upto[: len(upto) - len(pattern)]), pattern


class _Matcher:
    """Knuth, Morris and Pratt: how much of one pattern the text so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = _fallbacks(pattern)

    def copy(self) -> _Matcher:
        """The same, to go on from separately."""
        twin = _Matcher.__new__(_Matcher)
        twin.pattern, twin.matched, twin._fallback = self.pattern, self.matched, self._fallback
        return twin

    def step(self, character: str) -> bool:
        """Takes one character; whether the pattern is now complete."""
        matched = self.matched
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched - 1]
        if self.pattern[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(self.pattern)


def _fallbacks(pattern: str) -> list[int]:
    """For each prefix of ``pattern``, the length of its longest border."""
    fallback = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = fallback[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        fallback[index] = length
    return fallback
