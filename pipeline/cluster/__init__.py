"""Kubernetes manifests of a job, for KubeRay."""
