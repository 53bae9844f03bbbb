"""The wheel runs without the checkout it was built from."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, built from the sdist as a package index gets it."""
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], cwd=ROOT)
    (sdist,) = folder.glob("finetune-*.tar.gz")
    run([sys.executable, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", str(folder), str(sdist)], cwd=folder)
    (wheel,) = folder.glob("finetune-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_config_recipe_and_embedded_file(installed: Path) -> None:
    expected = {
        f"finetune/_assets/{path.relative_to(ROOT)}"
        for folder in ("conf", "recipes")
        for path in (ROOT / folder).rglob("*.yaml")
    }
    expected |= {str(path.relative_to(ROOT)) for path in files(ROOT / "finetune")}
    assert any("/conf/" in name for name in expected)
    shipped = {str(path.relative_to(installed)) for path in files(installed)}
    assert expected - shipped == set()


def test_a_recipe_composes_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    script = (
        "import finetune.config.compose as compose\n"
        "config = compose.compose(['recipe=qwen8b_lora'])\n"
        "print(compose.__file__)\n"
        "print(config)\n"
    )
    # PYTHONPATH comes before the editable install of the checkout.
    done = run([sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)})
    where, config = done.stdout.split("\n", 1)
    assert Path(where).is_relative_to(installed)
    assert "Qwen3-8B" in config


def test_a_shipped_data_set_is_found_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = (
        "from finetune.paths import embedded; print(embedded('behaviour.jsonl').read_text().count(chr(10)))"
    )
    done = run([sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)})
    assert int(done.stdout) > 100


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def run(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
