"""The engine without a server: `LLM(model).generate(prompts)` in this process, for scripts and notebooks.

Requests take the same path as on a server, through `rpc.frontend`, but no network: nothing here knows gRPC.
"""

from rpc.offline.llm import LLM
from rpc.offline.results import Completion, Generated, PromptsFailed

__all__ = ["LLM", "Completion", "Generated", "PromptsFailed"]
