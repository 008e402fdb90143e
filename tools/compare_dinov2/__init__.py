"""Compares our vision tower with ONNX Runtime on trained weights: DINOv2-small, in the ONNX file of a package."""
