"""python vllm_bench_client.py URL MODEL DIRECTORY

Runs both clients that vLLM's wheel has behind `vllm bench serve`: the Python module, and the Rust program that
VLLM_USE_RUST_BENCH=1 chooses. The `vllm` command itself imports vLLM's server and all that the server needs.
"""

import json
import subprocess
import sys
from pathlib import Path

import vllm
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

url, model, directory = sys.argv[1:]
for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    arguments = [
        "--backend", backend, "--base-url", url.removesuffix("/v1"), "--endpoint", path, "--model", model,
        "--tokenizer", directory, "--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8",
        "--num-prompts", "4", "--ignore-eos", "--disable-tqdm", "--save-result", "--result-filename",
    ]  # fmt: skip
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args([*arguments, f"python-{backend}.json"]))
    rust = [Path(vllm.__file__).with_name("vllm-rs"), "bench", "serve", *arguments, f"rust-{backend}.json"]
    subprocess.run(rust, check=True)
    for client in ("python", "rust"):
        report = json.loads(Path(f"{client}-{backend}.json").read_text())
        counts = [report[count] for count in ("completed", "failed", "total_output_tokens")]
        assert counts == [4, 0, 4 * 8], f"{client}, {backend}: {counts}"
