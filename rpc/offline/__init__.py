"""The engine without a server: `LLM(model).generate(prompts)` in this process, for scripts and notebooks."""

from rpc.offline.llm import LLM
from rpc.offline.results import Completion, Generated, PromptsFailed

__all__ = ["LLM", "Completion", "Generated", "PromptsFailed"]
