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
    words = ("launch.num_processes=2", "distributed=zero2", "checkpoint.remote=store", "run_name=new")
    code, checks = doctor("recipe=tiny_lora", *words, at=tmp_path)
    assert code == 0, [check for check in checks.values() if check["status"] == "fail"]
    assert checks["versions"]["status"] == "pass"
    assert "zero2 on 2 processes" in checks["plan"]["detail"]
    assert "nothing has to be fetched" in checks["hub"]["detail"]
    assert "GB/s" in checks["exchange"]["detail"]
    assert checks["remote"]["detail"] == f"{tmp_path / 'store'} is reached and can be written"
    assert checks["run name"]["detail"] == f"{tmp_path / 'runs' / 'new'} is free"
    assert checks["model"]["status"] == "pass"
    assert "the first 100 rows can be converted and encoded" in checks["data"]["detail"]
    assert "GiB" not in " ".join(check["detail"] for name, check in checks.items() if "exchange" not in name)
    assert list(tmp_path.iterdir()) == []  # neither a store nor anything else


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
            before="ulimit -n 128",
            PATH=str(tools),
            PYTHONPATH=f"{other.parent}:{search}",
        )
    assert code == 3
    wrong = {name: check["detail"] for name, check in checks.items() if check["status"] == "fail"}
    assert set(wrong) == {"port", "recipe", "versions"}
    assert str(port) in wrong["port"]
    assert "compiles an operation with g++, which is not here" in wrong["recipe"]
    assert "128" in checks["open files"]["detail"]
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
    assert checks["clock by hub"]["status"] == "warn"
    assert "behind the hub's" in checks["clock by hub"]["detail"]


class ProxyThatRefuses(BaseHTTPRequestHandler):
    """Lets nobody through who has not said who he is."""

    def do_GET(self) -> None:
        self.send_response(407)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Nothing on the terminal."""


def test_a_proxy_that_refuses_is_no_answer_of_the_hub(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ProxyThatRefuses) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        reach = {"http_proxy": f"http://127.0.0.1:{proxy.server_port}", "no_proxy": "", "NO_PROXY": ""}
        hub = {"HF_ENDPOINT": "http://hub.invalid", "HF_HUB_OFFLINE": "0", **reach}
        code, checks = doctor("recipe=qwen8b_full", at=tmp_path, **hub)
        proxy.shutdown()
    assert code == 3
    told = (
        "http://hub.invalid cannot be reached through the proxy 127.0.0.1: 407 Proxy Authentication Required"
    )
    assert checks["hub"]["status"] == "fail"
    assert checks["hub"]["detail"].startswith(told)
    assert "clock by hub" not in checks


def test_a_model_is_here_when_its_weights_are(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    cache = {"HF_HOME": str(tmp_path / "cache")}
    commit = tmp_path / "cache" / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / ("a" * 40)
    commit.mkdir(parents=True)
    (commit / "config.json").write_text("{}")
    main = commit.parents[1] / "refs" / "main"
    main.parent.mkdir()
    main.write_text("a" * 40)
    words = ("recipe=qwen8b_full", f"data.train=[{{path: {rows}}}]", "data.eval_fraction=0")
    _, checks = doctor(*words, at=tmp_path, **cache)
    assert checks["hub"]["detail"] == "HF_HUB_OFFLINE is set, and these are not here: Qwen/Qwen3-8B"
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (commit / "model.safetensors.index.json").write_text(json.dumps(index))
    (commit / "one.safetensors").touch()
    assert doctor(*words, at=tmp_path, **cache)[1]["hub"]["status"] == "fail"
    (commit / "two.safetensors").touch()
    _, checks = doctor(*words, at=tmp_path, **cache)
    assert checks["hub"]["detail"] == "HF_HUB_OFFLINE is set; nothing has to be fetched"


def test_rows_of_the_hub_are_missing_unless_its_cache_has_them(tmp_path: Path) -> None:
    cache = {"HF_HOME": str(tmp_path / "cache")}
    put_into_cache("me___fetched", at=tmp_path, **cache)
    rows = (
        "data.train=[{path: 'hf://datasets/me/mine@main/rows.jsonl'}, {path: me/other}, {path: me/fetched}]"
    )
    _, checks = doctor("recipe=tiny_lora", rows, at=tmp_path, **cache)
    assert checks["hub"]["status"] == "fail"
    assert checks["hub"]["detail"].endswith("these are not here: datasets/me/mine, datasets/me/other")


def put_into_cache(name: str, at: Path, **env: str) -> None:
    """A data set of one row, where `datasets` keeps those that it has fetched."""
    script = (
        "import datasets, pathlib, shutil\n"
        "rows = datasets.load_dataset('json', data_files='one.jsonl', split='train')\n"
        "made = pathlib.Path(rows.cache_files[0]['filename']).parent\n"
        f"kept = pathlib.Path(datasets.config.HF_DATASETS_CACHE, {name!r}, 'default', '0.0.0', 'b' * 40)\n"
        "shutil.copytree(made, kept)\n"
        f"(kept / 'json-train.arrow').rename(kept / '{name.rpartition('_')[2]}-train.arrow')\n"
    )
    (at / "one.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=at,
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_wrong_words_end_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "finetune", "doctor", "recipe=tiny_lora", "trainer.lerning_rate=1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Did you mean trainer.learning_rate?" in done.stderr
    assert done.stdout == ""


def test_a_store_whose_volume_is_not_mounted_fails_and_is_not_made(tmp_path: Path) -> None:
    lost = tmp_path / "mnt" / "typo"
    code, checks = doctor("recipe=tiny_lora", f"checkpoint.remote={lost}", at=tmp_path)
    assert code == 3
    assert checks["remote"]["status"] == "fail"
    assert f"there is no folder {lost.parent}: is the volume mounted?" in checks["remote"]["detail"]
    assert "Mount the volume" in checks["remote"]["fix"]
    assert list(tmp_path.iterdir()) == []
