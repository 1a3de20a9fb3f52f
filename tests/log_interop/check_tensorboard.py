"""TensorBoard reads the event files of a run, also of one that was killed and resumed while TensorBoard followed it.
`make test-logs` runs this.

    python check_tensorboard.py FURIOUS
"""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

binary = sys.argv[1]
NAMES = {"train/loss": "loss", "train/lr": "lr", "train/gradient_norm": "gradient_norm",
         "train/tokens_per_second": "tokens_per_second", "train/mfu": "mfu", "train/memory": "memory",
         "train/total_tokens": "total_tokens", "train/total_flops": "total_flops", "test/loss": "test_loss"}


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def expect_same(reader, run):
    """Every number of the log is there once, with its step and time."""
    log = log_of(run)
    assert set(reader.Tags()["scalars"]) == set(NAMES), reader.Tags()
    for tag, name in NAMES.items():
        points = reader.Scalars(tag)
        expected = [line for line in log if name in line]
        assert [point.step for point in points] == [line["step"] for line in expected], tag
        for point, line in zip(points, expected):
            assert abs(point.value - line[name]) <= 1e-6 * abs(line[name]), (tag, point, line)
            assert point.wall_time == line["time"], (tag, point, line)


with tempfile.TemporaryDirectory() as folder:
    run = pathlib.Path(folder) / "run"
    command = [binary, "train", "--data", "synthetic:recall", "--out", str(run), "--steps", "120", "--save-every", "20",
               "--eval-every", "10", "--log", "tensorboard", "--device", "cpu", "--hidden", "16", "--intermediate", "16",
               "--heads", "2", "--layers", "1", "--batch", "2", "--length", "32"]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while training.poll() is None and not ((run / "log.jsonl").exists() and len(log_of(run)) >= 50):
        time.sleep(0.01)
    training.send_signal(signal.SIGKILL)
    assert training.wait() == -signal.SIGKILL, "it was done before it was killed"

    live = EventAccumulator(str(run), size_guidance={"scalars": 0})
    live.Reload()
    assert len(live.Scalars("train/loss")) >= 50
    subprocess.run([binary, "train", "--resume", "--out", str(run)], check=True, stdout=subprocess.DEVNULL)
    live.Reload()
    expect_same(live, run)
    fresh = EventAccumulator(str(run), size_guidance={"scalars": 0})
    fresh.Reload()
    expect_same(fresh, run)
    assert len(log_of(run)) == 120
print("TensorBoard reads the event files")
