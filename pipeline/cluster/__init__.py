"""Run jobs on a cluster: through Ray's job server, or as Kubernetes manifests for KubeRay."""
