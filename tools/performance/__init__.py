"""The tables and plots of `docs/performance.md`, from the files in `docs/performance/results/`.

python -m tools.performance            # write them
python -m tools.performance --check    # exit with 1 when one is stale

It owns how a results file is read (`results.py`), and what the tables (`tables.py`) and plots (`plots.py`) show. It
measures nothing: a results file is the last line of `pipeline bench ... --json`.
"""
