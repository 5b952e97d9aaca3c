"""Where outputs and inputs lie: a local disk or an object store, with retries, and messages that show no secret."""
