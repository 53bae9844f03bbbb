"""An S3 of our own for tests: moto behind a door that can be shut, and that knows one key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import fsspec
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

KEY, SECRET = "AKIATESTFINETUNE0001", "a-secret-that-must-stay-at-home"
DENIED = (
    b'<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code>'
    b"<Message>The AWS Access Key Id you provided does not exist in our records.</Message></Error>"
)

Start = Callable[..., Any]


class ObjectStore:
    """One server; what it holds outlives `close`, as a store's content outlives an outage."""

    def __init__(self) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.port = 0
        self.server: BaseWSGIServer | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def open(self) -> None:
        self.server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self.server.port
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """From now on connections are refused."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def files(self) -> Any:
        """Its content through fsspec, without a cache."""
        options = {"endpoint_url": f"http://127.0.0.1:{self.port}"}
        return fsspec.filesystem(
            "s3",
            key=KEY,
            secret=SECRET,
            client_kwargs=options,
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def contents(self, path: str) -> dict[str, bytes]:
        """Every file below a path, named from there."""
        files = self.files()
        return {name.removeprefix(f"{path}/"): files.cat_file(name) for name in files.find(path)}

    def _answer(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        signed = environ.get("HTTP_AUTHORIZATION", "")
        if f"Credential={KEY}/" not in signed:
            start(
                "403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(DENIED)))]
            )
            return [DENIED]
        answer: Iterable[bytes] = self.moto(environ, start)
        return answer


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A running store."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = ObjectStore()
    store.open()
    try:
        yield store
    finally:
        store.close()
