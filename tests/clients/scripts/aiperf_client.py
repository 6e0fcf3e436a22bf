"""python aiperf_client.py URL MODEL DIRECTORY"""

import json
import os
import subprocess
import sys
from pathlib import Path

url, model, directory = sys.argv[1:]
command = [
    "aiperf", "profile", "--model", model, "--url", url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming",
    "--tokenizer", directory, "--request-count", "4", "--concurrency", "2", "--synthetic-input-tokens-mean", "16",
    "--output-tokens-mean", "8", "--ui", "none", "--artifact-dir", "out",
]  # fmt: skip
online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
# aiperf reads a tokenizer from a folder only where it may ask the hub; for a folder it does not ask.
done = subprocess.run(command, env=online, capture_output=True, text=True)
assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
(report,) = Path("out").rglob("profile_export_aiperf.json")
assert json.loads(report.read_text())["request_count"]["avg"] == 4
