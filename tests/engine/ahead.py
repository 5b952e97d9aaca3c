"""Runs a loaded engine as on a GPU."""

from pipeline.engine.engine import Engine


def run_ahead(engine: Engine, is_ahead: bool = True) -> None:
    """Run the engine's steps one step ahead of the tokens, or not. Nothing may be running."""
    engine.runner.is_asynchronous = is_ahead
    engine._make_loop(engine.runner, engine.spec_decoder)
