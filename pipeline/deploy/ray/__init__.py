"""Replicas and ingress as a Ray Serve application; needs the extra `ray`."""
