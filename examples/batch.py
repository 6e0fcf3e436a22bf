"""Runs a list of prompts on an engine in this process, without a server, each prompt with its own settings.

    python examples/batch.py [MODEL]    # a directory, a name on the Hugging Face hub, or nothing for the demo model

For files of requests, and jobs that can be stopped and go on, there is `quire batch`.
"""

import sys

from quire import LLM, Output, PromptsFailed, Sampling, Stopping

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo"
PROMPTS = ["ROMEO:", "JULIET:", "First Citizen:\nWe are", "To be, or"]


def main() -> None:
    sampling = [Sampling(temperature=0.8, seed=number) for number in range(len(PROMPTS))]
    stopping = Stopping(max_tokens=40, stop=("\n\n",))
    with LLM(MODEL, kv_cache_memory=64 * 2**20) as llm:
        # All prompts run together; results come in their order, and none depends on the other prompts.
        for completion in llm.generate(PROMPTS, sampling, stopping, Output(top_logprobs=1)):
            likeliest = sum(position[0].rank == 1 for position in completion.logprobs)
            print(f"{completion.prompt}{completion.text}")
            print(f"[{completion.finish}; {likeliest} of {len(completion.token_ids)} tokens were the likeliest]\n")
        try:
            llm.generate([[1, 2, 3], [10**9]])
        except PromptsFailed as error:  # all prompts are checked before any is run
            print(f"prompts {sorted(error.failures)} are wrong: {error}")


if __name__ == "__main__":
    main()
