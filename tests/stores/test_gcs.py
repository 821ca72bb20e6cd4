"""A smoke test of `gs://`, no more: the emulator knows no conditions, so commits are not tried."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

import ckpt
from ckpt.stores.store import open_store
from tests.stores.server import Server


def test_a_checkpoint_goes_there_and_back(gcs_server: Server, tmp_path: Path) -> None:
    url, options = gcs_server.url(f"{tmp_path.name}/step 1"), gcs_server.options
    state = {"weight": torch.arange(500_000.0).reshape(1000, 500), "step": 3}
    ckpt.save(url, state, storage_options=options)
    assert ckpt.verify(url, storage_options=options).sound
    target = {"weight": torch.zeros(1000, 500), "step": 0}
    ckpt.load(url, target, storage_options=options)
    assert torch.equal(target["weight"], state["weight"])
    assert target["step"] == 3
    with ckpt.open(url, storage_options=options) as checkpoint:
        assert torch.equal(checkpoint["weight"][10:20], state["weight"][10:20])
    ckpt.delete(url, storage_options=options)
    with open_store(url, options) as store:
        assert store.names() == []


def test_a_bucket_that_becomes_empty_stays() -> None:
    pytest.importorskip("gcsfs")
    asked: list[str] = []

    class EmptyBucket(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.command)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"items": []}).encode())

        def do_DELETE(self) -> None:
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyBucket) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "token": "anon"}
        with open_store("gs://bucket", options) as store:
            assert store.names() == []
            store.remove_if_empty()
        server.shutdown()
        thread.join()
    assert "DELETE" not in asked
