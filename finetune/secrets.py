"""Which secrets this process was given, what a secret looks like, and how it is kept out of what is written.

It imports nothing of the package: `masked_file` runs this very file as a small process of its own, through
which all output of another process goes on its way to a file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TextIO
from urllib.parse import quote

MASK = "***"
LOGIN = "the login of the hub"
SHORTEST = 8
"""Characters of the shortest value that is taken for a secret: `1`, `true` and `auto` are none."""

TELLING = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|(^|_)KEY|(^|_)JWT|(^|_|DB)PASS"
    r"|\w(?<!OLD)PWD|CONN(ECTION)?_?STR(ING)?)S?(_|\d|$)"
    r"(?!.*(PATH|FILE|DIR|PREFIX|NAME|TYPE|HOST|REGION)$)"
)
"""Names of environment variables whose value is a secret; `SSH_KEY_PATH` says where one is, and `PWD` where
a shell is."""
SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-(?=[\w-]*\d)[\w-]{20,}"
    r"|A[KS]IA[A-Z0-9]{16}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{35}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
    # the password of an address; a secret of S3 may hold a slash, and `$NAME` is looked up by a shell
    r"|(?<=://)[^\s:@/]*:(?!\$)[^\s@/]+(?=@)|(?<=s3://)[^\s:@/]+:(?!\$)[^\s@]+(?=@)"
    # what signs an address, and the key or password in a connection string
    r"|(?<==)(?i:(?:(?<=AccountKey=)|(?<=AccessKey=)|(?<=Signature=)|(?<=Security-Token=)|(?<=[?&;]sig=))"
    r"(?=[^\s&;\"']*\d)[\w+/=%.~-]{16,}|(?:(?<=;password=)|(?<=;pwd=))(?!\$)[^\s;\"']+)"
)
"""Text that is a token, wherever it stands."""
TOLD = re.compile(
    r"(key|token|secret|password|passwd|signature|bearer|basic)[\"']?(\s*[=:]\s*|\s+)[\"']?"
    r"(?![/.~])(?=[^\s\"'$]*\d)[A-Za-z0-9+/_.~=-]{20,}|(wandb|key|token)\b.{0,30}\b[0-9a-f]{40}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    re.IGNORECASE,
)
"""Text that is a token because of the word before it: said of a config's values alone."""


def given() -> dict[str, str]:
    """The secrets of this environment by name, and the hub's login."""
    found = {LOGIN: _login(_login_file())}
    for name, value in os.environ.items():
        if TELLING.search(name.upper()):
            if not os.path.exists(os.path.expanduser(value)):
                found[name] = value
        elif "://" in value:  # a proxy, a database: the address may hold a password
            password = re.search(r"://[^\s:@/]*:([^\s@/]+)@", value)
            found[name] = password[1] if password else ""
    return {name: value for name, value in found.items() if len(value) >= SHORTEST}


def masked(text: str) -> str:
    """The text without the secrets of this environment, plain or encoded, and without what looks like one."""
    pattern = _pattern(tuple(given().values()))
    text = pattern.sub(MASK, text) if pattern is not None else text
    return SHAPES.sub(MASK, text)  # after it: a shape may be but the first part of a value that is known


def secret_in(value: object) -> str:
    """Why a config's value may not be written down, in words; empty when it may."""
    if isinstance(value, list | tuple):
        return next(filter(None, map(secret_in, value)), "")
    if not isinstance(value, str):
        return ""
    for name, secret in given().items():
        if secret in value:
            return f"it holds {name}" if name == LOGIN else f"it holds the value of ${name}"
    looks = SHAPES.search(value) or TOLD.search(value)
    return "it holds what looks like a token or a password" if looks else ""


class Unwritable(OSError):
    """What was printed has not arrived: of all failures of a command the one that its output cannot tell."""


class MaskedStream:
    """A text stream in front of another one: each piece is masked before it goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _told_apart():
            self._stream.write(masked(text))
        return len(text)

    def flush(self) -> None:
        with _told_apart():
            self._stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _told_apart() -> Iterator[None]:
    """From failures of other files; of a reader that has gone it is known what to do."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(error.errno, error.strerror) from error


def masked_file(path: os.PathLike[str], *, terminal: bool = False) -> subprocess.Popen[bytes]:
    """A process that appends what comes to its stdin to a file, masked, and with `terminal` to stdout too.

    It ends when nobody can write to it any more: no signal ends it, and it outlives a crash and a closed
    terminal.
    """
    words = [sys.executable, "-P", "-S", __file__, os.fspath(path), *(["terminal"] if terminal else [])]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    return subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=None if terminal else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def _login_file() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or f"{home}/token")


@lru_cache(maxsize=4)
def _login(file: str) -> str:
    with suppress(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as stream:
        return stream.read().strip()
    return ""


@lru_cache(maxsize=4)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str] | None:
    forms = {form for secret in secrets for form in _forms(secret) if len(form) >= SHORTEST}
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    return re.compile("|".join(map(re.escape, longest_first))) if forms else None


def _forms(secret: str) -> Iterator[str]:
    """How a secret may stand in a text: as it is, each of its lines, quoted, escaped, in base64, in hex."""
    content = secret.encode("utf-8", errors="surrogateescape")
    yield from (secret, *secret.splitlines(), json.dumps(secret)[1:-1], repr(secret)[1:-1])
    yield from (quote(content), quote(content, safe=""), content.hex(), content.hex().upper())
    for offset in range(3):  # it may begin anywhere in what is encoded: the letters that are its own alone
        for encode in (b64encode, urlsafe_b64encode):
            letters = encode(b"\0" * offset + content).decode("ascii")
            yield letters[-(-offset * 8 // 6) : (offset + len(content)) * 8 // 6]


LONGEST_LINE, OVERLAP = 2**20, 2**14


def _pass_on(path: str, terminal: bool) -> None:
    """Whole lines only, so that no secret is seen in halves; a line without an end goes on in pieces."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    clear = b"\r\x1b[K" if os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb" else b""  # a bar
    targets = {file: b"", **({1: clear} if terminal else {})}
    waiting = b""
    while block := os.read(0, 2**16):
        waiting += block
        end = max(waiting.rfind(b"\n"), waiting.rfind(b"\r")) + 1
        if end:
            _write(targets, _masked_bytes(waiting[:end]))
            waiting = waiting[end:]
        elif len(waiting) > LONGEST_LINE:
            clean = _masked_bytes(waiting)
            _write(targets, clean[:-OVERLAP])
            waiting = clean[-OVERLAP:]
    _write(targets, _masked_bytes(waiting))


def _masked_bytes(text: bytes) -> bytes:
    return masked(text.decode("utf-8", errors="surrogateescape")).encode("utf-8", errors="surrogateescape")


def _write(targets: dict[int, bytes], text: bytes) -> None:
    """To each target with what stands before it there. A full disk or a closed terminal ends nothing: whoever
    prints must never find the pipe closed.
    """
    for target, before in targets.items():
        rest = before + text
        with suppress(OSError):
            while rest:
                rest = rest[os.write(target, rest) :]


if __name__ == "__main__":
    _pass_on(sys.argv[1], "terminal" in sys.argv[2:])
