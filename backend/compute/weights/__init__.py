"""The formats of stored weights: safetensors files, and matrices in FP8, MXFP4, NF4 and int8.

This package imports no model: a model names the tensors that it reads.
"""
