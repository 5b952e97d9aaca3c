"""Jobs that a cluster drives: through Ray's job server, or as Kubernetes manifests for KubeRay."""
