"""Trajectories a second that ``sparring serve intake`` takes durably over HTTP, how long a batch waits, and its memory.

A server in a process of its own; clients on keep-alive connections post batches of single-turn trajectories (prompt 200,
reply 48 tokens, log-probs) as JSON; an answer means that the disk has it (SQLite, synchronous=FULL). ``ratio`` is our
rate over the 5,000 a second that are asked for. Beside it: what the same disk does with one commit a trajectory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from common import write

GOAL_RATE, GOAL_P99 = 5000.0, 0.050
PROMPT, REPLY = 200, 48


def body_template() -> tuple[bytes, list[bytes]]:
    """A body in pieces, between which the keys go."""
    call = {
        "version": "v1.150", "prompt_ids": [7919 * n % 49152 for n in range(PROMPT)],
        "reply_ids": [104729 * n % 49152 for n in range(REPLY)], "log_probs": [-(n % 17) / 7.0 for n in range(REPLY)],
    }  # fmt: skip
    one = json.dumps({"key": "@", "agent": "a", "calls": [call], "reward": 0.5}, separators=(",", ":"))
    return one.encode(), one.encode().split(b"@")


def client(port: int, numbers: range, batch: int, latencies: list[float], lock: threading.Lock) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    _, (head, tail) = body_template()
    headers = {"Content-Type": "application/json"}
    mine = []
    for first in range(numbers.start, numbers.stop, batch):
        items = b",".join(head + b"k%d" % n + tail for n in range(first, min(first + batch, numbers.stop)))
        body = b'{"trajectories":[' + items + b"]}"
        begin = time.perf_counter()
        connection.request("POST", "/v1/trajectories", body, headers)
        response = connection.getresponse()
        answer = response.read()
        mine.append(time.perf_counter() - begin)
        if response.status != 200 or b'"accepted"' not in answer:
            raise SystemExit(f"{response.status}: {answer[:300]!r}")
    with lock:
        latencies += mine


def one_commit_each(directory: Path, seconds: float) -> float:
    """Trajectories a second with a transaction for each, on the same disk."""
    connection = sqlite3.connect(directory / "single.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE t (key TEXT UNIQUE, content BLOB)")
    content, count, begin = body_template()[0], 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        connection.execute("INSERT INTO t VALUES (?, ?)", (str(count), content))
        count += 1
    return count / (time.perf_counter() - begin)


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    log = directory / "log.sqlite"
    server = subprocess.Popen(
        [sys.executable, "-m", "sparring", "serve", "intake", str(log), "--port", "0", "--most-waiting", "100000000"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    port = int(server.stdout.readline().split("http://127.0.0.1:")[1].split()[0])
    memory, process = [], psutil.Process(server.pid)
    latencies: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            memory.append((time.perf_counter(), process.memory_info().rss))

    try:
        warm: list[float] = []
        client(port, range(10**9, 10**9 + 20 * options.batch), options.batch, warm, threading.Lock())
        share, lock = options.count // options.clients, threading.Lock()
        threads = [
            threading.Thread(
                target=client, args=(port, range(n * share, (n + 1) * share), options.batch, latencies, lock)
            )
            for n in range(options.clients)
        ]
        watcher = threading.Thread(target=watch)
        watcher.start()
        cpu, begin = process.cpu_times(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        used = process.cpu_times()
        done.set()
        watcher.join()
    finally:
        done.set()
        server.terminate()
        server.wait()
    count = share * options.clients
    connection = sqlite3.connect(log)
    kept = connection.execute("SELECT count(*) FROM items").fetchone()[0]
    connection.close()
    if kept != count + 20 * options.batch:
        raise SystemExit(f"{kept} trajectories in the log, {count + 20 * options.batch} were accepted")
    first = statistics.median(each for _, each in memory[: max(len(memory) // 10, 1)])
    last = statistics.median(each for _, each in memory[-max(len(memory) // 10, 1) :])
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "rate": round(count / seconds, 1), "seconds": round(seconds, 2), "p50_seconds": round(cuts[49], 4),
        "p99_seconds": round(cuts[98], 4), "worst_seconds": round(max(latencies), 4),
        "server_cpu_seconds": round(used.user + used.system - cpu.user - cpu.system, 2),
        "rss_first_tenth": int(first), "rss_last_tenth": int(last), "rss_peak": max(each for _, each in memory),
        "file_bytes": log.stat().st_size,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where the log is written: the disk that is measured")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-intake-", dir=options.directory))
    try:
        ours = measure(options, directory)
        single = one_commit_each(directory, 3.0)
    finally:
        shutil.rmtree(directory)
    write(
        {
            "name": "intake", "ratio": round(ours["rate"] / GOAL_RATE, 3), "ours": ours,
            "theirs": {"goal_rate": GOAL_RATE, "goal_p99_seconds": GOAL_P99, "one_commit_each_rate": round(single, 1)},
            "n": options.count, "reached": ours["rate"] >= GOAL_RATE and ours["p99_seconds"] < GOAL_P99,
            "settings": {"batch": options.batch, "clients": options.clients, "prompt": PROMPT, "reply": REPLY},
            "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version,
                         **{name: version(name) for name in ("starlette", "uvicorn", "msgspec")}},
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
