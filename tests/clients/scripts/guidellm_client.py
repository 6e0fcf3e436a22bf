"""python guidellm_client.py URL MODEL DIRECTORY"""

import json
import subprocess
import sys
from pathlib import Path

url, model, directory = sys.argv[1:]
command = [
    "guidellm", "run", "--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model={model}",
    "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
    "--tokenizer", f"kind=huggingface_auto,model={directory}",
    "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8", "--output", "kind=json,path=report.json",
]  # fmt: skip
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
(report,) = Path().glob("*.json")
totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (4, 0), totals
