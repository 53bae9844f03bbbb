"""The whole checklist: this machine for this run, and each thing that is wrong with it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.front_door import environment


def doctor(*words: str, at: Path, before: str = "", **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and checks by name; `before`: shell commands that come first."""
    command = [sys.executable, "-m", "finetune", "doctor", *words, "--json"]
    shell = ["bash", "-c", f'{before}\nexec "$@"', "bash", *command]
    offline = {"HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(
        shell, cwd=at, env=environment(**offline), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is (done.returncode == 0)
    assert all(check["fix"] for check in told["checks"] if check["status"] == "fail")
    return done.returncode, {check["name"]: check for check in told["checks"]}


@pytest.mark.slow
def test_a_machine_without_cards_is_all_right_for_a_small_model(tmp_path: Path) -> None:
    code, checks = doctor("recipe=tiny_lora", "launch.num_processes=2", "distributed=zero2", at=tmp_path)
    assert code == 0, [check for check in checks.values() if check["status"] == "fail"]
    assert checks["versions"]["status"] == "pass"
    assert "zero2 on 2 processes" in checks["plan"]["detail"]
    assert "nothing has to be fetched" in checks["hub"]["detail"]
    assert "GB/s" in checks["exchange"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    """A port that is taken, no compiler, few open files, other versions: nothing is started then."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "git"):
        (tools / name).symlink_to(shutil.which(name) or name)
    other = tmp_path / "packages" / "transformers-4.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    search = f"{environment()['PYTHONPATH']}"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, checks = doctor(
            *("recipe=tiny_lora", "distributed=zero2", "launch.num_processes=2"),
            f"launch.main_process_port={port}",
            at=tmp_path,
            before="ulimit -n 256",
            PATH=str(tools),
            PYTHONPATH=f"{other.parent}:{search}",
        )
    assert code == 3
    wrong = {name: check["detail"] for name, check in checks.items() if check["status"] == "fail"}
    assert set(wrong) == {"port", "recipe", "open files", "versions"}
    assert str(port) in wrong["port"]
    assert "compiles an operation with g++, which is not here" in wrong["recipe"]
    assert "256" in wrong["open files"]
    assert "transformers 4.0.0 (tested: 5.24" in wrong["versions"]
    assert "exchange" not in checks


def test_a_run_that_this_machine_cannot_do_fails_with_trains_own_words(tmp_path: Path) -> None:
    code, checks = doctor("recipe=qwen8b_full", at=tmp_path)
    assert code == 3
    assert "no GPU is here" in checks["recipe"]["detail"]
    assert "Qwen/Qwen3-8B" in checks["hub"]["detail"]
    assert checks["hub"]["status"] == "fail"


class HubWithAGate(BaseHTTPRequestHandler):
    """Answers as the hub does of a model that this login may not read; its clock is an hour ahead."""

    def do_GET(self) -> None:
        gated = self.path.startswith("/api/models/Qwen/Qwen3-8B/auth-check")
        self.send_response_only(403 if gated else 200)
        self.send_header("Date", formatdate(time.time() + 3600, usegmt=True))
        if gated:
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *words: object) -> None:
        """Nothing on the terminal."""


def test_what_the_hub_holds_back_and_a_wrong_clock_are_told(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), HubWithAGate) as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        reach = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0"}
        code, checks = doctor("recipe=qwen8b_full", at=tmp_path, **reach)
        hub.shutdown()
    assert code == 3
    assert "Qwen/Qwen3-8B is gated" in checks["model access"]["detail"]
    assert "nobody is logged in" in checks["model access"]["detail"]
    assert checks["data access"]["status"] == "pass"
    assert checks["hub"]["status"] == "pass"
    assert checks["time"]["status"] == "warn"
    assert "behind the hub's" in checks["time"]["detail"]


def test_wrong_words_end_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "finetune", "doctor", "recipe=tiny_lora", "trainer.lerning_rate=1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Did you mean trainer.learning_rate?" in done.stderr
