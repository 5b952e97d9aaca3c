"""Text from data, file names and foreign libraries, made safe to show.

A terminal obeys control characters: they could clear the screen, set its title or hide what was said. Bidirectional
overrides show text in another order than it has. So whatever is shown to people is spelled out at the edge where it
leaves the program; what is written as data stays what it is.
"""

import re

# Any character that may have to be spelled out; `str.isprintable` decides.
_SUSPECT = re.compile(r"[^ -~]")


def printable(text: str) -> str:
    """On one line: control characters, line breaks, tabs and other characters that show nothing of themselves are
    spelled out (`\\x1b`, `\\n`, `\\u202e`)."""
    return _SUSPECT.sub(_spelled, text)


def printable_lines(text: str) -> str:
    """As `printable`, for a text of our own over several lines: its line breaks and tabs stay."""
    return _SUSPECT.sub(lambda match: match[0] if match[0] in "\n\t" else _spelled(match), text)


def printable_json(text: str) -> str:
    """JSON without line breaks that means the same, and shows no such characters: they are JSON's own escapes."""
    return _SUSPECT.sub(lambda match: match[0] if match[0].isprintable() else _json_escape(match[0]), text)


def eta(left_s: float) -> str:
    """A time as coarse as a guess should be: `40 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    if left_s < 90:
        return f"{max(0, round(left_s))} s"
    minutes = round(left_s / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _spelled(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else match[0].encode("unicode_escape").decode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
