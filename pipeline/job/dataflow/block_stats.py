"""Keeps Ray Data from remembering every block in the driver.

Its operators keep statistics of each block that they have put out, for a summary at the end that we do not show: about
3 kB for each unit (Ray 2.60), so 6 GB at 2 million units. Here they are thrown away while the graph runs.
"""

from ray.data import DataContext


def forget_blocks(context: DataContext) -> None:
    """Have graphs under this context forget them. Nothing is changed where this Ray has no such callbacks."""
    try:
        from ray.data._internal.execution.execution_callback import ExecutionCallback
    except ImportError:
        return

    class ForgetBlocks(ExecutionCallback):
        def on_execution_step(self, executor: object) -> None:
            for operator in getattr(executor, "_topology", None) or ():
                kept = getattr(operator, "_output_blocks_stats", None)
                if isinstance(kept, list):
                    kept.clear()

    if hasattr(context, "custom_execution_callback_classes"):
        context.custom_execution_callback_classes = [*context.custom_execution_callback_classes, ForgetBlocks]
