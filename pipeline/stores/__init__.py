"""Storage of inputs and outputs: local disks and object stores, with retries and messages without secrets."""
