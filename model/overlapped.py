"""An executor on a thread of its own, so that the next step is planned while one runs."""

import queue
import threading

from scheduler.step import Executor, StepPlan, StepResult


class Overlapped:
    """`Executor` that runs another one's steps in order on one thread.

    torch releases the interpreter lock while it computes; the scheduler plans meanwhile. The thread is a daemon: a step
    that hangs must not keep the process from ending.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="quire-step", daemon=True).start()

    def launch(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def collect(self) -> StepResult:
        """Waits for the oldest step that was not collected, and returns its result. Raises the step's error."""
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Ends the thread after the steps that were launched; does not wait for it."""
        self._plans.put(None)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._inner.launch(plan)
                self._results.put(self._inner.collect())
            except Exception as error:  # it is the caller's: `collect` raises it there
                self._results.put(error)
        self._inner.close()
