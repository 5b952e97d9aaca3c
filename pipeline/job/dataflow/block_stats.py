"""Keep Ray Data from storing statistics of every block in the driver.

Its operators keep statistics of each output block for a summary that we do not show: about 3 kB per unit (Ray 2.60), so
6 GB for 2 million units. They are discarded while the graph runs.
"""

from ray.data import DataContext


def forget_blocks(context: DataContext) -> None:
    """Make graphs under this context discard block statistics. Does nothing if this version of Ray has no callbacks."""
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
