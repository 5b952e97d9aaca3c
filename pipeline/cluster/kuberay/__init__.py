"""A job as Kubernetes manifests, for KubeRay: pure functions from a job file to dictionaries."""
