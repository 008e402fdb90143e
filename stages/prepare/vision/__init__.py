"""Reads vision towers of models for texts and images: config.json, preprocessor_config.json and the tensors."""
