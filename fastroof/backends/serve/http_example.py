"""Ask a server over HTTP with nothing but the standard library, and compare with the plan."""

from __future__ import annotations

import http.client
import json
from typing import Any

import fastroof
from fastroof.backends.serve.http_server import HttpServer

__all__ = ["main"]


def ask(connection: http.client.HTTPConnection, message: dict[str, Any]) -> dict[str, Any]:
    """Send a message, and return its reply."""
    connection.request("POST", "/message", json.dumps(message), {"Content-Type": "application/json"})
    reply: dict[str, Any] = json.load(connection.getresponse())
    return reply


def main() -> None:
    """Serve a plan, ask it on one connection, and stop."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    with HttpServer({"small": plan}) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        served = ask(connection, {"describe": True})["plans"]
        print("served:", ", ".join(f"{each['name']} ({each['model']} on {each['gpu']})" for each in served))
        reply = ask(connection, {"batch_size": [1, 64], "kv_len": 4096, "errors": True})
        for time_us, error in zip(reply["latency_us"], reply["relative_error"], strict=True):
            print(f"a decode step: {time_us:.1f} us, one standard error {error:.1%}")
        assert reply["latency_us"] == plan.decode_us([1, 64], 4096).tolist()
        wrong = ask(connection, {"batch_size": 0, "kv_len": 4096})
        print(f"{wrong['error']}: {wrong['message']}")
        connection.close()


if __name__ == "__main__":
    main()
