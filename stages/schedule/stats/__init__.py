"""The scheduler's histograms, and the traffic that `pipeline record traffic` notes."""
