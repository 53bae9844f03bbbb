"""README, CONTRIBUTING and docs/ are true: commands run, outputs are seen, links lead somewhere, keys exist.

A fenced block says in its first line what it is: `sh` holds commands, `console` commands behind `$` with what
they print, `text` neither. A file name behind the language: the page's commands find the block as that file.
"""

from __future__ import annotations

import ast
import re
import shlex
import signal
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import finetune
from finetune.cli import main
from finetune.config.devices import Devices
from finetune.config.keys import find_key
from finetune.config.recipes import config_groups
from finetune.config.schema import Strategy
from finetune.scale.grid import HOLDS
from finetune.words import FLAGS, FLAGS_OF, NOT_BUILT, VERBS, split_words

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"sh", "console", "text", "python", "yaml", "json", "mermaid"}
GROUPS = (
    "model",
    "adapter",
    "data",
    "trainer",
    "distributed",
    "launch",
    "checkpoint",
    "hooks",
    "tracking",
    "hardware",
)
NO_CARD = Devices(cpu_cores=2)
NEEDS_A_CARD = ("launch.device=", "launch.num_processes=")
"""Where a problem begins that only says: this machine has no card, or too few."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    file: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page, and what the page says that it prints."""

    page: Path
    line: int
    words: tuple[str, ...]
    shown: tuple[str, ...] = ()


def blocks(page: Path) -> Iterator[Block]:
    opened: tuple[int, list[str]] | None = None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number, line.removeprefix("```").split(maxsplit=1)
            continue
        start, said = opened
        assert said, (
            f"{page.name}:{start} does not say what the block is: one of {', '.join(sorted(LANGUAGES))}"
        )
        yield Block(page, start, said[0], "".join(said[1:]), tuple(lines[start : number - 1]))
        opened = None
    assert opened is None, f"{page.name}: a block is not closed"


def commands(block: Block) -> Iterator[Command]:
    if block.language == "sh":
        for number, line in enumerate(block.lines, start=block.line + 1):
            if words := shlex.split(line, comments=True):
                yield Command(block.page, number, tuple(words))
    elif block.language == "console":
        starts = [place for place, line in enumerate(block.lines) if line.startswith("$ ")]
        assert starts[:1] == [0], f"{block.page.name}:{block.line} does not begin with a command"
        for start, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
            words = shlex.split(block.lines[start].removeprefix("$ "), comments=True)
            yield Command(block.page, block.line + 1 + start, tuple(words), block.lines[start + 1 : end])


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [command for block in BLOCKS for command in commands(block)]


def place(at: Block | Command | Path) -> str:
    return at.name if isinstance(at, Path) else f"{at.page.name}:{at.line}"


@dataclass(frozen=True, slots=True)
class Desk:
    """A folder in which a page's commands are typed, on a machine without cards whose stores all answer."""

    capture: pytest.CaptureFixture[str]
    folder: Path

    def type(self, *words: str) -> tuple[int, str]:
        """Run `finetune WORDS` in this process: the exit code, and what was printed."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        self.capture.readouterr()
        try:
            code = main(list(words))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        printed = self.capture.readouterr()
        return code, f"{printed.out}\n{printed.err}".replace(f"{self.folder}/", "").replace(f"{ROOT}/", "")


@pytest.fixture
def desk(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Desk:
    page = request.node.callspec.params["at"].page
    for block in BLOCKS:
        if block.page == page and block.file:
            file = tmp_path / block.file
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n".join(block.lines) + "\n", encoding="utf-8")
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune" / "embedded").symlink_to(ROOT / "finetune" / "embedded")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for module in ("finetune.training.start", "finetune.hardware.machine", "finetune.inference.subject"):
        monkeypatch.setattr(f"{module}.probe_devices", lambda: NO_CARD)
    monkeypatch.setattr("finetune.hardware.machine.usable_cards", tuple)
    for check in ("refuse_silent_store", "refuse_taken_name"):  # they ask S3, and there is none
        monkeypatch.setattr(f"finetune.training.start.{check}", lambda *words: None)
    return Desk(capsys, tmp_path)


@pytest.mark.parametrize("at", COMMANDS, ids=place)
def test_a_command_does_what_its_page_says(at: Command, desk: Desk) -> None:
    words = list(at.words)
    match words:
        case ["make", target, *options]:
            assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            for option in options:
                name, _, value = option.partition("=")
                assert re.search(rf"^{name} \?=", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
                assert all((ROOT / path).exists() for path in value.split() if path.startswith("tests/"))
        case ["python" | "python3", "-m", "finetune", *rest] | ["finetune", *rest]:
            check_finetune(at, rest, desk)
        case ["accelerate", "launch", *_] | ["torchrun", *_]:
            at_m = words.index("-m")
            assert words[at_m + 1] == "finetune"
            check_train(at, words[at_m + 2 :], desk)
        case _:
            pytest.fail(f"{place(at)}: nobody knows how to check `{shlex.join(words)}`")


def check_finetune(at: Command, rest: list[str], desk: Desk) -> None:
    """By its verb: run where that is cheap, else checked as far as the machine allows."""
    words = split_words(rest)
    overrides = list(words.overrides)
    if words.flags & {"--help", "--version"}:
        code, said = desk.type(*rest)
        assert code == 0
        assert_seen(at, said)
    elif words.verb == "plan":
        code, said = desk.type(*rest)
        assert code in (0, 3), said
        assert_seen(at, said)
    elif words.verb == "prepare":
        code, said = desk.type(*rest)
        assert code == 0, said
        assert_seen(at, said)
    elif words.verb == "doctor" and "--quick" in words.flags:
        code, said = desk.type(*rest)
        assert code in (0, 3), said
    elif words.verb == "rehearse" and "--all" in words.flags:
        known = config_groups()
        for group, _, names in (word.partition("=") for word in overrides):
            assert group in ("model", "adapter", "distributed")
            assert set(names.strip("[]").split(",")) <= set(known[group])
    elif words.verb == "scale":
        assert words.values.get("--hold", HOLDS[0]) in HOLDS
        check_train(at, [re.sub(r"=\[.*?([^,]+)\]$", r"=\1", word) for word in overrides], desk)
    elif words.runs:
        check_no_more_is_wrong_than_the_missing_run(words.runs, rest, desk)
    elif words.verb in ("train", "doctor", "rehearse"):
        check_train(at, [*overrides, *(flag for flag in words.flags if flag == "--dry-run")], desk)
    else:
        pytest.fail(f"{place(at)}: nobody knows how to check `finetune {words.verb}` without a RUN")


def check_train(at: Command, rest: list[str], desk: Desk) -> None:
    """A dry run passes, does not fit, or lacks cards and nothing else; a refusal that is shown is seen."""
    code, said = desk.type(*rest, *([] if "--dry-run" in rest else ["--dry-run"]))
    if at.shown and re.match(r"\d+ problems? in ", at.shown[0]):
        assert code == 2
        assert_seen(at, said)
    elif code == 2:
        assert [where for where in problems(said) if not where.startswith(NEEDS_A_CARD)] == [], said
    else:
        assert code in (0, 3), said


def check_no_more_is_wrong_than_the_missing_run(runs: tuple[str, ...], rest: list[str], desk: Desk) -> None:
    """The run of a page is not here, and nothing else is wrong: flags, keys and values are told together."""
    code, said = desk.type(*rest)
    assert code == 2, said
    missing = (*(f"{run}: there is no" for run in runs), "model.name_or_path is missing")
    other = [where for where in problems(said) if not where.startswith(missing)]
    assert [where for where in other if "lm-eval, which is not installed" not in where] == [], said
    assert runs[0] in said


def problems(said: str) -> list[str]:
    """The first line of each problem of a refusal."""
    return [line.strip() for line in said.splitlines() if re.match(r"  \S", line)]


def assert_seen(at: Command, said: str) -> None:
    """Every line that a page shows is printed, in that order; `...` stands for lines left out."""
    printed = iter([line.rstrip() for line in said.splitlines()])
    for number, line in enumerate(at.shown, start=at.line + 1):
        if line.strip() not in ("", "..."):
            assert line.rstrip() in printed, f"{at.page.name}:{number} is not printed: {line}\n\n{said}"


@pytest.mark.parametrize("at", [b for b in BLOCKS if b.language == "python"], ids=place)
def test_python_in_a_page_compiles_and_calls_what_there_is(at: Block, desk: Desk) -> None:
    for node in ast.walk(ast.parse("\n".join(at.lines))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "finetune"
        ):
            assert node.attr in finetune.__all__
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of_finetune = isinstance(node.func.value, ast.Name) and node.func.value.id == "finetune"
        if not of_finetune:
            assert hasattr(finetune.Run, node.func.attr) or hasattr(finetune.Comparison, node.func.attr)
        elif node.func.attr in ("train", "prepare", "plan"):
            words = [ast.literal_eval(argument) for argument in node.args]
            code, said = desk.type(*([node.func.attr] if node.func.attr == "plan" else ["--dry-run"]), *words)
            assert code in (0, 3), said


@pytest.mark.parametrize("at", BLOCKS, ids=place)
def test_a_block_says_what_it_is_and_hides_no_command(at: Block) -> None:
    assert at.language in LANGUAGES
    if at.language == "text":
        assert [
            line for line in at.lines if line.startswith(("$ ", "python -m ", "make ", "torchrun "))
        ] == []


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_links_lead_to_a_page_and_a_heading_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{page.name} links to {target}"
        assert other.is_relative_to(ROOT)
        assert not anchor or anchor in anchors(other), (
            f"{page.name} links to {target}: {sorted(anchors(other))}"
        )


@pytest.mark.parametrize("page", PAGES, ids=place)
def test_files_and_keys_that_a_page_names_exist(page: Path) -> None:
    for word in re.findall(r"`([^`\s]+)`", prose(page)):
        path = re.fullmatch(r"(?:finetune|conf|tests|tools|benchmarks|notebooks|docs)/[a-z0-9_./]*", word)
        assert path is None or (ROOT / word).exists(), f"{page.name} names {word}"
        key = re.match(rf"(?:{'|'.join(GROUPS)})\.[a-z0-9_.]*[a-z0-9]", word)
        if key and not word.endswith(".json"):
            assert find_key(tuple(key.group().split("."))), f"{page.name} names {word}"


def test_every_page_is_reached_from_the_readme_and_none_shows_where_it_was_written() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f"({page.relative_to(ROOT)})" in readme
    for page in PAGES:
        assert not re.search(r"(?<![\w.:/~])/(home|mnt|root|tmp|work)/", page.read_text(encoding="utf-8"))


def test_the_readme_lists_exactly_the_verbs_flags_and_strategies_that_there_are() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands_part = text.partition("\n## Commands\n")[2].partition("\n## ")[0]
    verbs = re.findall(
        r"^\| `([a-z]+)[^`]*` (?:\(the default\) )?\| [a-z]", commands_part, flags=re.MULTILINE
    )
    assert verbs[: len(VERBS)] == [verb for verb in order_of(commands_part) if verb in VERBS]
    assert set(verbs[: len(VERBS)]) == set(VERBS)
    said = re.search(r"^(.*) (?:is|are) not built yet", commands_part, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", said.group(1)) if said else []) == set(NOT_BUILT)
    flags = {*FLAGS, *(flag for own in FLAGS_OF.values() for flag in own)}
    assert set(re.findall(r"--[a-z][a-z-]*", commands_part)) == flags
    strategies = text.partition("\n## Choosing a strategy\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", strategies, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {strategy.value for strategy in Strategy} - {"auto"}


def order_of(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"^\| `([a-z]+)", text, flags=re.MULTILINE)))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in a link."""
    heads = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_extras_that_a_page_installs_are_declared_and_what_the_readme_links_to_is_in_the_sdist() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    extras = {extra for found in re.findall(r"finetune\[([\w,]+)\]", text) for extra in found.split(",")}
    assert extras
    assert extras <= set(declared["project"]["optional-dependencies"])
    include = declared["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"/docs", "/README.md", "/CONTRIBUTING.md"} <= set(include)
