"""python guidellm_client.py URL MODEL DIRECTORY"""

import json
import subprocess
import sys
from pathlib import Path

url, model, directory = sys.argv[1:]
command = [
    "guidellm", "benchmark", "run", "--target", url.removesuffix("/v1"), "--model", model, "--processor", directory,
    "--data", "prompt_tokens=16,output_tokens=8", "--profile", "synchronous", "--max-requests", "4",
    "--output-dir", ".", "--outputs", "json",
]  # fmt: skip
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
(report,) = Path().glob("*.json")
totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (4, 0), totals
