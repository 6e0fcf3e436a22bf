"""An executor on a thread of its own, so that the next step is planned while one runs."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from scheduler.step import Executor, StepPlan, StepResult


class Overlapped:
    """`Executor` around another one, whose steps run in order on one thread. torch lets go of the interpreter lock
    while it computes, which is when the scheduler plans.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-step")
        self._results: deque[Future[StepResult]] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._results.append(self._thread.submit(self._run, plan))

    def collect(self) -> StepResult:
        return self._results.popleft().result()

    def close(self) -> None:
        """Waits for the step that runs and ends the thread."""
        self._thread.shutdown()

    def _run(self, plan: StepPlan) -> StepResult:
        self._inner.launch(plan)
        return self._inner.collect()
