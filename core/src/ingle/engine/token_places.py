"""In which token each character of a text begins. No torch here."""

from __future__ import annotations


class TokenPlaces:
    """Follows the bytes of tokens and the characters they become.

    A character may be spread over tokens, and a decoder may drop or add some (a leading space,
    U+FFFD): each is looked for in the bytes that no character has used yet.
    """

    def __init__(self) -> None:
        self._bytes = b""
        self._tokens: tuple[int, ...] = ()  # of each byte
        self._latest = 0

    def copy(self) -> TokenPlaces:
        """The same, to go on from separately."""
        twin = TokenPlaces()
        twin._bytes, twin._tokens, twin._latest = self._bytes, self._tokens, self._latest
        return twin

    @property
    def pending(self) -> int | None:
        """The first token with bytes that are no character yet."""
        return self._tokens[0] if self._tokens else None

    def push(self, token: int, spelled: bytes) -> None:
        """Adds the bytes of a token, given by its number."""
        self._latest = token
        self._bytes += spelled
        self._tokens += (token,) * len(spelled)

    def begin(self, character: str) -> int:
        """The number of the token in which the text's next character begins."""
        encoded = character.encode("utf-8", "replace")
        at = self._bytes.find(encoded)
        if at < 0:
            if character != "\N{REPLACEMENT CHARACTER}" or not self._tokens:
                return self._latest  # not spelled by any token
            at, encoded = 0, self._bytes[:1]
        token = self._tokens[at]
        end = at + len(encoded)
        self._bytes, self._tokens = self._bytes[end:], self._tokens[end:]
        return token
